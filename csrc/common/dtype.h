#pragma once
// The dtypes of masters, weights and activations, and rounding a float to one of them.

#include "common/bits.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace zerofp4 {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

ZEROFP4_HD constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Storage of one element. bfloat16 and float16 are held as raw bits on both sides.
struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

// Calls body(T{}), where T stores an element of that dtype. The body may be one for the GPU only or for the
// host only, which the compiler is not to mind.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class Body>
ZEROFP4_HD void with_dtype(DType dtype, const Body& body) {
    switch (dtype) {
        case DType::kFloat32:
            return body(float{});
        case DType::kBFloat16:
            return body(BFloat16{});
        case DType::kFloat16:
            return body(Float16{});
    }
}

ZEROFP4_HD float load_float(float x) { return x; }
ZEROFP4_HD float load_float(BFloat16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }
ZEROFP4_HD float load_float(Float16 x) {
#if ZEROFP4_DEVICE_CODE
    return __half2float(__ushort_as_half(x.bits));
#else
    // Exponent and mantissa moved to float's places, then rescaled by 2^112: exact for normals and
    // subnormals.
    const uint32_t magnitude = x.bits & 0x7fffu;
    const float finite = from_bits(magnitude << 13) * from_bits(239u << 23);
    const uint32_t special = 0x7f800000u | magnitude << 13;
    const uint32_t bits = magnitude >= 0x7c00u ? special : to_bits(finite);
    return from_bits(bits | static_cast<uint32_t>(x.bits & 0x8000u) << 16);
#endif
}

// Rounding to a dtype and back, nearest even, NaN staying NaN: what a weight of that dtype would hold.
template <class T>
ZEROFP4_HD float round_to(float x);

template <>
ZEROFP4_HD float round_to<float>(float x) {
    return x;
}

template <>
ZEROFP4_HD float round_to<BFloat16>(float x) {
#if ZEROFP4_DEVICE_CODE
    return __bfloat162float(__float2bfloat16_rn(x));
#else
    const uint32_t bits = to_bits(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return from_bits((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : rounded);
#endif
}

template <>
ZEROFP4_HD float round_to<Float16>(float x) {
#if ZEROFP4_DEVICE_CODE
    return __half2float(__float2half_rn(x));
#else
    const uint32_t bits = to_bits(x);
    const float a = from_bits(bits & 0x7fffffffu);
    // Adding 2^(e + 13) leaves ten mantissa bits (2^-24 is the smallest step); from 65520 on the result is
    // inf.
    const uint32_t e = to_bits(a) & 0x7f800000u;
    const uint32_t clamped = e<(113u << 23) ? (113u << 23) : e>(143u << 23) ? (143u << 23) : e;
    const float m = from_bits(clamped + (13u << 23));
    const float finite = (a + m) - m;
    const float rounded = a >= 65520.0f ? kInf : finite;
    return from_bits((a == a ? to_bits(rounded) : 0x7fc00000u) | (bits & 0x80000000u));
#endif
}

ZEROFP4_HD float round_to(DType to, float x) {
    if (to == DType::kBFloat16) return round_to<BFloat16>(x);
    if (to == DType::kFloat16) return round_to<Float16>(x);
    return x;
}

// The stored bits of a float that round_to<T> has already made representable.
ZEROFP4_HD BFloat16 to_bfloat16(float x) {
    return {static_cast<uint16_t>(to_bits(round_to<BFloat16>(x)) >> 16)};
}
ZEROFP4_HD Float16 to_float16(float x) {
#if ZEROFP4_DEVICE_CODE
    return {__half_as_ushort(__float2half_rn(x))};
#else
    const float r = round_to<Float16>(x);
    const uint32_t bits = to_bits(r);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t finite = to_bits(from_bits(magnitude) * from_bits(15u << 23)) >> 13;  // times 2^-112
    const uint32_t half = magnitude > 0x7f800000u ? 0x7e00u : magnitude == 0x7f800000u ? 0x7c00u : finite;
    return {static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u))};
#endif
}

// Rounds once, to the dtype of `to`.
ZEROFP4_HD void store_float(float x, float& to) { to = x; }
ZEROFP4_HD void store_float(float x, BFloat16& to) { to = to_bfloat16(x); }
ZEROFP4_HD void store_float(float x, Float16& to) { to = to_float16(x); }

}  // namespace zerofp4
