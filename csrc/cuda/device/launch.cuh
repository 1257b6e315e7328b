#pragma once
// How kernels are launched: blocks of kThreads unless a kernel asks for others, grids that fit the device,
// errors as exceptions.

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/bits.h"

namespace zerofp4::cuda {

constexpr int kLanes = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;
constexpr unsigned kAllLanes = 0xffffffffu;

inline void check(cudaError_t error, const char* operation) {
    if (error == cudaSuccess) return;
    throw std::runtime_error(std::string(operation) + ": " + cudaGetErrorName(error) + ": " +
                             cudaGetErrorString(error));
}

// A kernel launched here may start while the one before it in the stream still runs (programmatic dependent
// launch, compute capability 9.0 and later): the last blocks of one then overlap with the start of the next.
// Every kernel begins with this, before it touches memory (tests/ops/test_launches.py). Code for an older GPU
// alone cannot wait, and its kernels do not overlap, also where a newer GPU runs its PTX.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize();
#endif
}

// In its place in a kernel that waits for another GPU: the next kernel starts when this one has ended. Were
// it to start sooner, its blocks would hold the multiprocessors while this one waits, and a kernel that the
// other GPU waits for could not run.
__device__ __forceinline__ void wait_for_previous_kernel_and_hold_next() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

constexpr bool kCanWait = std::max({__CUDA_ARCH_LIST__}) >= 900;

inline int device_attribute(cudaDeviceAttr attribute, const char* operation) {
    int device = 0, value = 0;
    check(cudaGetDevice(&device), operation);
    check(cudaDeviceGetAttribute(&value, attribute, device), operation);
    return value;
}

// As many blocks as the work asks for, but no more than fit on the device at once; at least one. For kernels
// that loop over what is left.
inline int64_t resident_blocks(const char* operation, int64_t work_blocks, int per_multiprocessor) {
    const int64_t most = static_cast<int64_t>(per_multiprocessor) *
                         device_attribute(cudaDevAttrMultiProcessorCount, operation);
    return std::max<int64_t>(1, std::min(work_blocks, most));
}

// The first dimension of a grid, which has at most 2^31 - 1 blocks.
inline unsigned grid_size(const char* operation, int64_t blocks) {
    if (blocks > INT32_MAX)
        throw std::runtime_error(std::string(operation) + ": " + std::to_string(blocks) +
                                 " thread blocks are more than a grid can have, 2^31 - 1");
    return static_cast<unsigned>(blocks);
}

// Launches nothing for a grid without blocks: there is no work.
template <int kBlockThreads = kThreads, typename... Params, typename... Args>
void launch(const char* operation, void (*kernel)(Params...), dim3 blocks, cudaStream_t stream,
            const Args&... args) {
    if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0) return;
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = kBlockThreads;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = kCanWait && device_attribute(cudaDevAttrComputeCapabilityMajor, operation) >= 9 ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, Params(args)...), operation);
}

template <int kBlockThreads = kThreads, typename... Params, typename... Args>
void launch(const char* operation, void (*kernel)(Params...), int64_t blocks, cudaStream_t stream,
            const Args&... args) {
    launch<kBlockThreads>(operation, kernel, dim3(grid_size(operation, blocks)), stream, args...);
}

}  // namespace zerofp4::cuda
