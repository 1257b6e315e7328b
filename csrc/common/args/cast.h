#pragma once
// The multi-tensor plan as data: one descriptor per weight, and what every kernel of a step is given. Built
// by csrc/dispatch on the host; a CUDA plan keeps the descriptors in device memory.

#include "common/dtype.h"
#include "common/four_over_six.h"
#include "common/layout.h"

namespace zerofp4 {

// The reduced vector starts with words on which the ranks must agree; a MAX all-reduce combines them. They
// are bfloat16 values, which a vector of bfloat16 amaxes travels as.
constexpr int kErrorWord = 0;  // +inf when a rank found an error: no rank writes
constexpr int kHashWord = 1;   // the bytes h of the plan's hash, lowest first
constexpr int kHashBytes = 3;
constexpr int kMinusHashWord = 4;  // -h: after the reduction h == -(-h) only if all ranks run the same plan
constexpr int kHeaderWords = 8;

constexpr int kWarpSquares = 32;  // squares of a unit of scale on CUDA; on the CPU it is one

// On CUDA a thread block of a cast takes this many consecutive units, a multiple of its 8 warps, so that none
// is idle. Host code says in which item of a table every so many units begin.
constexpr int kBlockStrips = 32;
constexpr int kBlockScales = 8;

// The gathers' have the number of a rank above them.
enum Status : int32_t {
    kOk = 0,
    kPeerError = 1,
    kPlanMismatch = 2,
    kGatherRefused = 3,      // that rank found an error
    kGatherWithoutStep = 4,  // the step before the gather did not take place
};
constexpr int kStatusRankShift = 8;

// The flat elements [start, start + numel) of a weight [rows, cols] that this rank owns, where their amaxes
// go in the reduced vector, and how they are cut into strips.
struct ShardGeometry {
    int64_t start;
    int64_t numel;
    int64_t rows;
    int64_t cols;        // even
    DType weight_dtype;  // masters are rounded to it before anything else
    int32_t padding;     // 0, as everywhere: descriptors are compared byte by byte
    // Of tile (0, 0)'s amax, row-major [ceil(rows/16), ceil(cols/16)]; negative when no tile amax is wanted.
    int64_t tile_offset;
    int64_t amax_offset;  // of the amax of this weight's group; negative where no amax is wanted
    // Of the weight's own amax, where scales are known to the rank alone that owns a block; else negative.
    int64_t own_offset;
    // Work: units [strip_begin, next weight's strip_begin) of amax and cast, row-major over strips x chunks.
    int64_t strip_begin;
    int64_t first_strip;  // strip (tile row) of the first owned element
    int64_t first_chunk;  // 128-column chunk of unit 0; nonzero only for a shard inside one row
    int64_t chunks;       // chunks per strip
};

struct WeightDescriptor : ShardGeometry {
    const void* master;  // the owned elements; null when there are none
    DType master_dtype;
    int32_t block_rows;  // of a scaling block: 16, or 1
    // Four over six, as FourOverSix has it; 0 where it is not wanted.
    int32_t e4m3_max;
    int32_t squared_error;
    // Where own_offset is given, of the amaxes of the 1x16 blocks in which the shard begins and ends;
    // negative where the shard has all of that block.
    int64_t cut_offsets[2];
    uint8_t* codes;  // the byte that holds element `start`, that is byte start / 2 of the packed weight
    float* amax;     // float[1], or null
    float* columnwise_amax;                    // float[1], or null
    uint8_t* rowwise_scale[kScaleLayouts];     // by ScaleLayout, null where there is no buffer
    uint8_t* columnwise_scale[kScaleLayouts];  // of the transpose
    int64_t scale_begin;                       // first unit of the scale stage
};

// How the cast finds the scales of a weight: tiles from the reduced amaxes; 1x16 blocks, and blocks and tiles
// of four over six, from their elements.
enum CastKind : int32_t { kTiles = 0, kRows = 1, kChosenTiles = 2, kChosenRows = 3, kCastKinds = 4 };

ZEROFP4_HD CastKind kind_of(const WeightDescriptor& weight) {
    const bool rows = weight.block_rows == 1;
    return weight.e4m3_max > 0 ? rows ? kChosenRows : kChosenTiles : rows ? kRows : kTiles;
}

// A shard has whole blocks or tiles of a weight that is quantized so.
ZEROFP4_HD FourOverSix choice_of(const WeightDescriptor& weight) {
    return {static_cast<float>(weight.e4m3_max), weight.squared_error};
}

ZEROFP4_HD TensorScale tensor_scale_of(const WeightDescriptor& weight, float amax) {
    return tensor_scale(amax, weight.e4m3_max > 0 ? static_cast<float>(weight.e4m3_max) : kE4M3Max);
}

// Everything a stage needs, passed by value.
struct CastTable {
    const WeightDescriptor* weights;  // `count` of them, on the device that runs the stage
    int64_t count;
    int64_t strip_units;
    int64_t cast_begin, cast_end;  // of these the cast takes; on a GPU cast_begin is a thread block's first
    int64_t scale_units;
    bool has_kind[kCastKinds];   // whether there are such weights
    const int32_t* strip_items;  // CUDA: by thread block, the weight that its first strip belongs to
    const int32_t* scale_items;  // the same for the scale stage
    float* reduced;              // header words, group amaxes, tile amaxes
    int64_t reduced_numel;
    float hash;
    float* found_inf;  // float[1], or null
    int32_t* status;   // int32[1] that the host can read (pinned for CUDA), or null
};

ZEROFP4_HD float hash_byte(float hash, int i) {
    return static_cast<float>((static_cast<uint32_t>(hash) >> (8 * i)) & 0xFF);
}

// What a rank begins with in word i of the header.
ZEROFP4_HD float header_word(int i, float error, float hash) {
    if (i == kErrorWord) return error;
    if (i < kMinusHashWord) return hash_byte(hash, i - kHashWord);
    return i < kMinusHashWord + kHashBytes ? -hash_byte(hash, i - kMinusHashWord) : 0.0f;
}

// kOk when no rank reported an error and all run the plan with this hash.
ZEROFP4_HD int32_t header_status(const float* reduced, float hash) {
    if (reduced[kErrorWord] > 0.0f) return kPeerError;
    for (int i = 0; i < kHashBytes; ++i) {
        const float byte = hash_byte(hash, i);
        if (reduced[kHashWord + i] != byte || reduced[kMinusHashWord + i] != -byte) return kPlanMismatch;
    }
    return kOk;
}

ZEROFP4_HD int32_t header_status(const CastTable& table) { return header_status(table.reduced, table.hash); }

ZEROFP4_HD float group_amax(const CastTable& table, const WeightDescriptor& weight) {
    return table.reduced[weight.amax_offset];
}

// True for the weights of a group with a NaN or an Inf in a master: they keep what they have, and found_inf
// is set.
ZEROFP4_HD bool is_skipped(float group_amax) { return group_amax == kInf; }

// The part of a row that a shard owns: columns [begin, end), empty when begin >= end.
struct ColumnRange {
    int64_t begin;
    int64_t end;
};

ZEROFP4_HD ColumnRange owned_columns(const ShardGeometry& weight, int64_t row) {
    const int64_t begin = weight.start - row * weight.cols;
    const int64_t end = begin + weight.numel;
    return {begin > 0 ? begin : 0, end < weight.cols ? end : weight.cols};
}

// A 1x16 block: flat elements [begin, end) of the weight.
struct RowBlock {
    int64_t begin;
    int64_t end;
};

// The one with the element (row, col).
ZEROFP4_HD RowBlock row_block(const ShardGeometry& weight, int64_t row, int64_t col) {
    const int64_t first = col / kBlock * kBlock, last = first + kBlock;
    return {row * weight.cols + first, row * weight.cols + (last < weight.cols ? last : weight.cols)};
}

// Those in which a shard that is not empty begins (i = 0) and ends (i = 1).
ZEROFP4_HD RowBlock boundary_block(const ShardGeometry& weight, int i) {
    const int64_t element = i == 0 ? weight.start : weight.start + weight.numel - 1;
    return row_block(weight, element / weight.cols, element % weight.cols);
}

}  // namespace zerofp4
