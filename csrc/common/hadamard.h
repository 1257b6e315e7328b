#pragma once
// The random Hadamard transform of 16 values, before they are rounded to bfloat16.

#include "common/bits.h"

namespace zerofp4 {

constexpr uint32_t kRandomSigns = 0xd7e8u;  // bit i set: element i changes its sign

// A step of a radix-2 butterfly.
template <class Float, int kCount>
ZEROFP4_HD void butterfly_step(Float (&x)[kCount], int stride) {
    ZEROFP4_UNROLL
    for (int i = 0; i < kCount; ++i) {
        if (i & stride) continue;
        const Float a = x[i], b = x[i + stride];
        x[i] = a + b;
        x[i + stride] = a - b;
    }
}

template <class Float>
ZEROFP4_HD void change_signs(Float (&x)[16], uint32_t signs) {
    ZEROFP4_UNROLL
    for (int i = 0; i < 16; ++i) x[i] = signs >> i & 1u ? -x[i] : x[i];
}

// Signs and a butterfly with strides 1, 2, 4, 8: 4 times the transform. The inputs are values of bfloat16; on
// the CPU, vectors of them.
template <class Float>
ZEROFP4_HD void butterfly(Float (&x)[16], uint32_t signs) {
    change_signs(x, signs);
    ZEROFP4_UNROLL
    for (int step = 0; step < 4; ++step) butterfly_step(x, 1 << step);
}

// Adding 0 turns -0 into +0.
template <class Float>
ZEROFP4_HD void hadamard(Float (&x)[16], uint32_t signs) {
    butterfly(x, signs);
    ZEROFP4_UNROLL
    for (int i = 0; i < 16; ++i) x[i] = x[i] * 0.25f + 0.0f;
}

}  // namespace zerofp4
