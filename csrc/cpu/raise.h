#pragma once
// Amaxes as words of the reduced vector.

#include "common/dtype.h"
#include "cpu/parallel.h"

namespace zerofp4::cpu::ZEROFP4_ISA {

// Magnitude in the weight's dtype; what is not finite is inf.
ZEROFP4_HD float rounded_magnitude(float x, DType weight_dtype) {
    if (weight_dtype == DType::kBFloat16) x = round_to<DType::kBFloat16>(x);
    if (weight_dtype == DType::kFloat16) x = round_to<DType::kFloat16>(x);
    return x <= kFloatMax ? x : kInf;
}

// Weights of one group share the word, and so do threads: written only to raise it.
inline void raise_to(float* word, float value) {
    float present;
    __atomic_load(word, &present, __ATOMIC_RELAXED);
    while (value > present &&
           !__atomic_compare_exchange(word, &present, &value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
