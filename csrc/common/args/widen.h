#pragma once
// The values of a list of tensors as float32.

#include "common/args/tensor_list.h"

namespace zerofp4 {

struct WidenArgs {
    TensorList list;
    float* outputs[kListTensors];  // as many elements as the tensor has
};

static_assert(sizeof(WidenArgs) <= 4096);

}  // namespace zerofp4
