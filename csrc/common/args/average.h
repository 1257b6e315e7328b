#pragma once
// The mean of what the ranks bring.

#include "common/dtype.h"

namespace zerofp4 {

// output[i] = ((pieces[0][i] + pieces[1][i]) + ...) / count in float32, piece r at pieces + r * numel
// elements.
struct AverageArgs {
    const void* pieces;
    DType dtype;
    int64_t count;
    int64_t numel;
    float* output;
};

}  // namespace zerofp4
