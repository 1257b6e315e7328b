#pragma once
// How kernels are launched: one block size, grids that fit the device, errors as exceptions.

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/kernels.h"

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

// Launches `kernel` on as many blocks as the work asks for, but no more than fit on the device at once:
// kernels loop over what is left. Without work one block runs, which then finds nothing to do.
template <typename... Params, typename... Args>
void launch(const char* operation, void (*kernel)(Params...), int64_t work_blocks, int blocks_per_sm,
            cudaStream_t stream, const Args&... args) {
    int device = 0;
    int multiprocessors = 0;
    check(cudaGetDevice(&device), operation);
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), operation);
    const int64_t resident = static_cast<int64_t>(multiprocessors) * blocks_per_sm;
    const int64_t blocks = std::max<int64_t>(1, std::min(work_blocks, resident));
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args...);
    check(cudaGetLastError(), operation);
}

}  // namespace zerofp4::cuda
