#pragma once
// One spelling of "callable from both sides", so that every formula is written once for CPU and CUDA.

#include <cstdint>

#if defined(__CUDACC__)
#define ZEROFP4_HD __host__ __device__ __forceinline__
#else
#define ZEROFP4_HD inline __attribute__((always_inline))
#endif

#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
#define ZEROFP4_DEVICE_CODE 1
#else
#define ZEROFP4_DEVICE_CODE 0
#endif

// Before a loop of at most 16 turns whose variables are to be registers.
#if ZEROFP4_DEVICE_CODE
#define ZEROFP4_UNROLL _Pragma("unroll")
#elif defined(__clang__)
#define ZEROFP4_UNROLL _Pragma("clang loop unroll(full)")
#else
#define ZEROFP4_UNROLL _Pragma("GCC unroll 16")
#endif

// Before a loop that nvcc would unroll and should not.
#if ZEROFP4_DEVICE_CODE
#define ZEROFP4_KEEP_LOOP _Pragma("unroll 1")
#else
#define ZEROFP4_KEEP_LOOP
#endif
