#pragma once
// The mean of what the ranks bring.

#include "common/dtype.h"

namespace zerofp4 {

// output[i] = ((pieces[0][i] + pieces[1][i]) + ...) / count in float32, piece r at pieces + r * numel
// elements, but that of `rank` at own where that is not null.
struct AverageArgs {
    const void* pieces;
    const void* own;
    DType dtype;
    int32_t rank;
    int64_t count;
    int64_t numel;
    float* output;      // null: only the squares are wanted
    uint64_t* squares;  // [kSquareCopies][kSquareWords] that those of the means are added to, or null
};

}  // namespace zerofp4
