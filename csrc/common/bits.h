#pragma once
// Reinterpretation between float and its bits, and small integer helpers.

#include <cstring>

#include "common/macros.h"

namespace zerofp4 {

ZEROFP4_HD uint32_t to_bits(float x) {
#if ZEROFP4_DEVICE_CODE
    return __float_as_uint(x);
#else
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

ZEROFP4_HD float from_bits(uint32_t bits) {
#if ZEROFP4_DEVICE_CODE
    return __uint_as_float(bits);
#else
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

constexpr float kInf = __builtin_huge_valf();
constexpr float kFloatMax = 3.40282346638528859812e+38f;

ZEROFP4_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
ZEROFP4_HD constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace zerofp4
