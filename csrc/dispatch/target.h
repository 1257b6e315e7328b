#pragma once
// The choice between the CPU and the CUDA side.

#include <stdexcept>

#include "common/args/target.h"
#include "cpu/device/float_mode.h"
#include "cpu/kernels.h"
#include "cuda/kernels.h"

namespace zerofp4 {

// Makes a device current for as long as it lives.
class DeviceGuard {
  public:
    DeviceGuard(const cuda::Kernels& kernels, int device)
        : kernels_(kernels), entered_(kernels.enter_device(device)) {}
    ~DeviceGuard() { kernels_.leave_device(entered_); }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    const cuda::Kernels& kernels_;
    int entered_;
};

// Calls on_cpu(kernels, threads) or, with the target's device current, on_cuda(kernels, stream).
template <class OnCpu, class OnCuda>
void dispatch(const Target& target, OnCpu on_cpu, OnCuda on_cuda) {
    if (target.is_cpu()) {
        const cpu::FloatMode mode;
        on_cpu(cpu::kernels(), target.threads);
        return;
    }
    const cuda::Kernels* kernels = cuda::kernels();
    if (kernels == nullptr) throw std::runtime_error("zerofp4 was built without CUDA");
    const DeviceGuard guard(*kernels, target.device);
    on_cuda(*kernels, reinterpret_cast<cudaStream_t>(target.stream));
}

}  // namespace zerofp4
