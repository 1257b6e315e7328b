// Roots and reciprocals in kernels of their own, for their machine code.

#include "cuda/optim/compact_row.cuh"

extern "C" {
__global__ void nvidia_root(float* x) { *x = __fsqrt_rn(*x); }
__global__ void our_root(float* x) { *x = zerofp4::cuda::short_root(*x); }
__global__ void nvidia_reciprocal(float* x) { *x = __frcp_rn(*x); }
__global__ void our_reciprocal(float* x) { *x = zerofp4::cuda::short_reciprocal(*x); }
}
