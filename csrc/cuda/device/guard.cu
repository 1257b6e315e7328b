// Selecting the device of a launch.

#include <cuda_runtime_api.h>

#include <stdexcept>

#include "cuda/kernels.h"

namespace zerofp4::cuda {
namespace {

void check(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

}  // namespace

DeviceGuard::DeviceGuard(int device) {
    int current = 0;
    check(cudaGetDevice(&current));
    if (current == device) return;
    check(cudaSetDevice(device));
    previous_ = current;
}

DeviceGuard::~DeviceGuard() {
    if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace zerofp4::cuda
