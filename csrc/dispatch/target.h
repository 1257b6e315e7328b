#pragma once
// Where an operation runs, and the choice between the CPU and the CUDA side.

#include <cstdint>

#include "cpu/kernels.h"
#include "cuda/kernels.h"

namespace zerofp4 {

struct Target {
    int device;      // CUDA device index, or -1 for the CPU
    int64_t stream;  // CUDA stream as an integer
    int threads;     // OpenMP threads on the CPU

    bool is_cpu() const { return device < 0; }
};

// Calls on_cpu(kernels, threads) or, with the target's device current, on_cuda(stream).
template <class OnCpu, class OnCuda>
void dispatch(const Target& target, OnCpu on_cpu, OnCuda on_cuda) {
    if (target.is_cpu()) {
        on_cpu(cpu::kernels(), target.threads);
        return;
    }
    const cuda::DeviceGuard guard(target.device);
    on_cuda(reinterpret_cast<cudaStream_t>(target.stream));
}

}  // namespace zerofp4
