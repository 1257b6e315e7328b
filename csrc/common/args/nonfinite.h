#pragma once
// Which of a list of tensors holds a NaN or Inf.

#include "common/dtype.h"

namespace zerofp4 {

constexpr int kNonfiniteTensors = 128;  // that travel in the arguments of a kernel, which have room for 4 KB

// found[0] is raised to the word of every tensor that holds a NaN or Inf.
struct NonfiniteArgs {
    const void* tensors[kNonfiniteTensors];
    int64_t numels[kNonfiniteTensors];
    int32_t words[kNonfiniteTensors];
    int32_t block_begin[kNonfiniteTensors];  // CUDA: the first thread block of each
    int32_t count;
    DType dtype;  // of all of them
    int32_t* found;
};

}  // namespace zerofp4
