#pragma once
// The mean of what the ranks bring.

#include "common/args/peers.h"
#include "common/dtype.h"
#include "common/macros.h"

namespace zerofp4 {

// output[i] = ((pieces[0][i] + pieces[1][i]) + ...) / count in float32, piece r at pieces + r * numel
// elements, but that of `rank` at own where that is not null; or piece r at rows.of[r], without `pieces`.
struct AverageArgs {
    const void* pieces;
    const void* own;
    DType dtype;
    int32_t rank;
    int64_t count;
    int64_t numel;
    float* output;
    uint64_t* squares;  // [kSquareCopies][kSquareWords] that those of the means are added to, or null
    PeerRows rows;
};

template <class T>
ZEROFP4_HD const T* piece_of(const AverageArgs& args, int64_t r) {
    if (args.pieces == nullptr) return static_cast<const T*>(args.rows.of[r]);
    const bool is_own = args.own != nullptr && r == args.rank;
    return is_own ? static_cast<const T*>(args.own) : static_cast<const T*>(args.pieces) + r * args.numel;
}

}  // namespace zerofp4
