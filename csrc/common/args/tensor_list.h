#pragma once
// A list of tensors that are read in one launch.

#include "common/dtype.h"

namespace zerofp4 {

constexpr int kListTensors = 128;  // that travel in the arguments of a kernel, which have room for 4 KB

struct TensorList {
    const void* tensors[kListTensors];
    int64_t numels[kListTensors];
    int32_t block_begin[kListTensors];  // CUDA: the first thread block of each
    int32_t count;
    DType dtype;  // of all of them
};

}  // namespace zerofp4
