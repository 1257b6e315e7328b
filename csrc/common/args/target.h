#pragma once
// Where an operation runs.

#include <cstdint>

namespace zerofp4 {

struct Target {
    int device;      // CUDA device index, or -1 for the CPU
    int64_t stream;  // CUDA stream as an integer
    int threads;     // OpenMP threads on the CPU

    bool is_cpu() const { return device < 0; }
};

}  // namespace zerofp4
