#pragma once
// One spelling of "callable from both sides", so that every formula is written once for CPU and CUDA.

#include <cstdint>

// On the host, always inline: the linker might take a function from a variant of another instruction set.
#define ZEROFP4_HOST inline __attribute__((always_inline))

#if defined(__CUDACC__)
#define ZEROFP4_HD __host__ __device__ __forceinline__
#else
#define ZEROFP4_HD ZEROFP4_HOST
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
