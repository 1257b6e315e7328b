// Selecting the device of a launch.

#include "cuda/device/launch.cuh"

namespace zerofp4::cuda {

int enter_device(int device) {
    int current = 0;
    check(cudaGetDevice(&current), "cudaGetDevice");
    if (current == device) return -1;
    check(cudaSetDevice(device), "cudaSetDevice");
    return current;
}

void leave_device(int previous) {
    if (previous >= 0) cudaSetDevice(previous);
}

}  // namespace zerofp4::cuda
