#pragma once
// Means of hosts on their way: rounded once by each host, and averaged by the owner of a slice.

#include "common/dtype.h"
#include "common/hadamard.h"
#include "common/layout.h"
#include "common/means.h"
#include "common/mxfp8.h"

namespace zerofp4 {

enum class MeansFormat : int32_t { kBFloat16 = 0, kMxfp8 = 1, kNvfp4 = 2 };

constexpr int kMeansAtOnce = 256;  // elements that belong to one piece, or to none: parts begin at multiples
constexpr int kStripBlocks = kStripColumns / kBlock;  // in a row of a strip

// Elements [first, first + numel) of a parameter with rows of `cols`, in a flat tensor of slices.
struct MeansPiece {
    int64_t begin;  // in the tensor
    int64_t numel;
    int64_t first;
    int64_t number;  // of the parameter in the optimizer
    int64_t cols;    // MXFP8: a multiple of 32; NVFP4: of 16
    int64_t strip;  // of NVFP4: the number of its first strip. Each has 16 rows, or the parameter's last ones
};

// Slices of `numel` elements, side by side, and a message of each, `bytes` long, a multiple of 16: elements
// of bfloat16; E4M3 elements, then their E8M0 scales; or packed E2M1 codes, then E4M3 scales of 16, then
// float32 amaxes of as many strips as a slice has numbers for.
struct MeansLayout {
    const MeansPiece* pieces;  // ascending
    int64_t count;             // of pieces
    int64_t numel;
    int64_t bytes;
    int64_t strips;
    MeansFormat format;
};

// Rounds the elements of pieces. Other elements of bfloat16 are 0, other bytes stay.
struct RoundMeansArgs : MeansLayout {
    const float* values;  // [slices, numel]
    uint8_t* output;      // [slices, bytes]
    int64_t slices;
    uint32_t step;  // number of the update
    uint32_t host;  // number of the host that sends
};

// output[i] = the messages' values, added in the order of hosts, over their number; 0 outside of pieces.
struct AverageMeansArgs : MeansLayout {
    const uint8_t* received;  // [hosts, bytes], MXFP8 or NVFP4
    float* output;            // [numel]
    int64_t hosts;
    int64_t slice;  // the number of the slice that is received
};

// The last piece whose kFirst is at or before a number, or the first one.
template <auto kFirst>
ZEROFP4_HD const MeansPiece& find_piece(const MeansLayout& layout, int64_t number) {
    int64_t low = 0, high = layout.count;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (layout.pieces[middle].*kFirst <= number ? low : high) = middle;
    }
    return layout.pieces[low];
}

// How many elements of the piece there are from an element of the tensor on; 0 if that is not in the piece.
ZEROFP4_HD int64_t left_of(const MeansPiece& piece, int64_t at) {
    const int64_t left = piece.begin + piece.numel - at;
    return at < piece.begin || left < 0 ? 0 : left;
}

// Bytes of a message before its scales, and before its amaxes.
ZEROFP4_HD int64_t scales_at(const MeansLayout& layout) {
    return layout.format == MeansFormat::kNvfp4 ? layout.numel / 2 : layout.numel;
}
ZEROFP4_HD int64_t amaxes_at(const MeansLayout& layout) { return layout.numel / 2 + layout.numel / kBlock; }

// A strip of a piece, by its number there.
struct MeansStrip {
    int64_t element;  // of the piece, its first
    int rows;
    int blocks;  // in a row
};

ZEROFP4_HD int64_t strips_of(const MeansPiece& piece) {
    return ceil_div(piece.numel / piece.cols, kBlock) * ceil_div(piece.cols, kStripColumns);
}

ZEROFP4_HD bool has_strip(const MeansPiece& piece, int64_t number) {
    return number >= piece.strip && number - piece.strip < strips_of(piece);
}

ZEROFP4_HD MeansStrip strip_at(const MeansPiece& piece, int64_t strip) {
    const int64_t across = ceil_div(piece.cols, kStripColumns);
    const int64_t row = strip / across * kBlock, col = strip % across * kStripColumns;
    const int64_t rows = piece.numel / piece.cols - row, blocks = (piece.cols - col) / kBlock;
    return {row * piece.cols + col, static_cast<int>(rows < kBlock ? rows : kBlock),
            static_cast<int>(blocks < kStripBlocks ? blocks : kStripBlocks)};
}

// The number of the strip that an element of the piece lies in.
ZEROFP4_HD int64_t strip_of(const MeansPiece& piece, int64_t element) {
    const int64_t across = ceil_div(piece.cols, kStripColumns);
    const int64_t row = element / piece.cols, col = element % piece.cols;
    return piece.strip + row / kBlock * across + col / kStripColumns;
}

// The random bytes of a parameter: of its block-th 16, which are 8 elements of bfloat16, or 16 of others.
template <class Block>
ZEROFP4_HD auto wire_bytes(const RoundMeansArgs& args, const MeansPiece& piece, Block block) {
    using Word = decltype(low_word(block));
    return philox(low_word(block), high_word(block), Word(args.step),
                  Word(static_cast<uint32_t>(piece.number)), uint64_t{args.host} + 1);
}

// Back from the transform.
template <class Float>
ZEROFP4_HD void inverse_hadamard(Float (&x)[kBlock]) {
    hadamard(x, 0u);
    change_signs(x, kRandomSigns);
}

}  // namespace zerofp4
