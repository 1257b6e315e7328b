#pragma once
// The sums of the squares of a list of tensors.

#include "common/args/tensor_list.h"

namespace zerofp4 {

// Those of each 128 neighbours of a tensor, from its first element on, are added to squares, [kSquareCopies]
// [kSquareWords].
struct SquaresArgs {
    TensorList list;
    uint64_t* squares;
};

}  // namespace zerofp4
