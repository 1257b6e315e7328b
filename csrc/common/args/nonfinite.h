#pragma once
// Which of a list of tensors holds a NaN or Inf.

#include "common/args/tensor_list.h"

namespace zerofp4 {

// found[0] is raised to the word of every tensor that holds a NaN or Inf.
struct NonfiniteArgs {
    TensorList list;
    int32_t words[kListTensors];
    int32_t* found;
    const int64_t* when;  // [2]: nothing is looked at where both are 0; null: everything is
};

static_assert(sizeof(NonfiniteArgs) <= 4096);

}  // namespace zerofp4
