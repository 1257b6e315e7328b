#pragma once
// A word that many threads raise to the largest amax of all.

#include "cpu/device/parallel.h"

namespace zerofp4::cpu::ZEROFP4_ISA {

// Weights of one group share the word, and so do threads: written only to raise it.
inline void raise_to(float* word, float value) {
    float present;
    __atomic_load(word, &present, __ATOMIC_RELAXED);
    while (value > present &&
           !__atomic_compare_exchange(word, &present, &value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
