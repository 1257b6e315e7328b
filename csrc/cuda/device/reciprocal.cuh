#pragma once
// A reciprocal without the branch of a division.

namespace zerofp4::cuda {

// Correctly rounded for magnitudes from 2^-126 to 2^126, as is rcp.rn.
__device__ __forceinline__ float short_reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}

}  // namespace zerofp4::cuda
