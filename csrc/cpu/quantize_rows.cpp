// quantize_rows: blocks of 1 x 16 along the rows of x and, columnwise, along the rows of its transpose.
//
// Works on tiles of 128 x 128 elements, 16 rows at a time, so that x is read once for both copies and the
// columnwise codes leave as whole cache lines.

#include "common/scale.h"
#include "cpu/bytes.h"
#include "cpu/codes.h"
#include "cpu/kernels.h"
#include "cpu/patch.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int kTile = kStripColumns;  // rows and columns of a tile
constexpr int kTileBlocks = kTile / kBlock;
constexpr int64_t kTileGrain = 2;  // tiles (32k elements) that are worth a thread

using Values = float[kBlock * kTile];  // a patch, row-major

// Columnwise results of a tile before they are turned round.
struct Columnwise {
    uint8_t codes[kTile / 2][kTile];    // [pair of rows][column]
    uint8_t scale[kTile][kTileBlocks];  // [column][block of 16 rows]
};

// The patch as floats, zero where it is cut off.
template <class T>
void load_values(const QuantizeRowsArgs& args, const Patch& patch, Values& values) {
    const T* in = static_cast<const T*>(args.input) + patch.row * args.cols + patch.col;
    if (patch.rows < kBlock || patch.cols < kTile) std::memset(values, 0, sizeof values);
    for (int64_t r = 0; r < patch.rows; ++r, in += args.cols) {
        if (patch.cols == kTile) {
            for (int c = 0; c < kTile; ++c) values[r * kTile + c] = load_float(in[c]);
        } else {
            for (int64_t c = 0; c < patch.cols; ++c) values[r * kTile + c] = load_float(in[c]);
        }
    }
}

ZEROFP4_HD uint32_t larger_magnitude(uint32_t amax, float x) {
    const uint32_t bits = to_bits(x) & 0x7fffffffu;
    return bits > amax ? bits : amax;
}

// Amax bits to scale byte and factor; NaN, which sorts above inf, counts as inf.
template <int kCount>
ZEROFP4_HD void block_scales(const uint32_t (&amax)[kCount], TensorScale tensor, uint8_t (&scale)[kCount],
                             float (&encode)[kCount]) {
    uint32_t byte[kCount];
    for (int i = 0; i < kCount; ++i) {
        const float magnitude = from_bits(amax[i]);
        byte[i] = block_scale(magnitude <= kFloatMax ? magnitude : kInf, tensor);
        encode[i] = block_encode(byte[i], tensor);
    }
    for (int i = 0; i < kCount; ++i) scale[i] = static_cast<uint8_t>(byte[i]);
}

void quantize_rowwise(const QuantizeRowsArgs& args, const Patch& patch, const Values& values,
                      const TensorScale& tensor) {
    uint32_t amax[kBlock * kTileBlocks];
    for (int b = 0; b < kBlock * kTileBlocks; ++b) {
        const float* block = values + b * kBlock;
        amax[b] = 0;
        for (int i = 0; i < kBlock; ++i) amax[b] = larger_magnitude(amax[b], block[i]);
    }
    uint8_t scale[kBlock * kTileBlocks];
    float factor[kBlock * kTileBlocks];
    block_scales(amax, tensor, scale, factor);

    const int64_t scales_per_row = ceil_div(args.cols, kBlock);
    for (int64_t r = 0; r < patch.rows; ++r) {
        const int64_t row = patch.row + r;
        float encode[kTile];
        uint8_t codes[kPatchBytes];
        spread(factor + r * kTileBlocks, encode);
        encode_row<DType::kFloat32>(values + r * kTile, encode, codes);
        copy_bytes<kPatchBytes>(args.rowwise_data + (row * args.cols + patch.col) / 2, codes, patch.cols / 2);
        copy_bytes<kTileBlocks>(args.rowwise_scale + row * scales_per_row + patch.col / kBlock,
                                scale + r * kTileBlocks, ceil_div(patch.cols, kBlock));
    }
}

// Codes and scales of 128 blocks of 16 rows, block number `block` of the tile.
void quantize_columnwise(const Values& values, const TensorScale& tensor, int64_t block, Columnwise& result) {
    uint32_t amax[kTile] = {};
    for (int r = 0; r < kBlock; ++r) {
        for (int c = 0; c < kTile; ++c) amax[c] = larger_magnitude(amax[c], values[r * kTile + c]);
    }
    uint8_t scale[kTile];
    float encode[kTile];
    block_scales(amax, tensor, scale, encode);
    for (int c = 0; c < kTile; ++c) result.scale[c][block] = scale[c];
    for (int p = 0; p < kBlock / 2; ++p) {
        const float* upper = values + 2 * p * kTile;
        uint8_t* codes = result.codes[block * kBlock / 2 + p];
        for (int c = 0; c < kTile; ++c) {
            const uint32_t even = float_to_e2m1(upper[c] * encode[c]);
            const uint32_t odd = float_to_e2m1(upper[kTile + c] * encode[c]);
            codes[c] = static_cast<uint8_t>(even | odd << 4);
        }
    }
}

void store_columnwise(const QuantizeRowsArgs& args, int64_t row, int64_t col, const Columnwise& result) {
    const int64_t rows = least(kTile, args.rows - row), cols = least(kTile, args.cols - col);
    const int64_t scales_per_column = ceil_div(args.rows, kBlock);
    for (int64_t begin = 0; begin < cols; begin += 16) {
        uint8_t codes[16][kTile / 2];
        transpose_64x16(&result.codes[0][begin], kTile, codes);
        for (int64_t i = 0; i < least(16, cols - begin); ++i) {
            const int64_t column = col + begin + i;
            copy_bytes<kTile / 2>(args.columnwise_data + (column * args.rows + row) / 2, codes[i], rows / 2);
            copy_bytes<kTileBlocks>(args.columnwise_scale + column * scales_per_column + row / kBlock,
                                    result.scale[begin + i], ceil_div(rows, kBlock));
        }
    }
}

template <class T>
void quantize_tile(const QuantizeRowsArgs& args, int64_t row, int64_t col, const TensorScale& tensor) {
    Columnwise result;
    for (int64_t block = 0; block < kTileBlocks && row + block * kBlock < args.rows; ++block) {
        const Patch patch = patch_at(row / kBlock + block, col / kTile, args.rows, args.cols);
        Values values;
        load_values<T>(args, patch, values);
        if (args.rowwise_data) quantize_rowwise(args, patch, values, tensor);
        if (args.columnwise_data) quantize_columnwise(values, tensor, block, result);
    }
    if (args.columnwise_data) store_columnwise(args, row, col, result);
}

}  // namespace

void quantize_rows(const QuantizeRowsArgs& args, int threads) {
    const TensorScale tensor = tensor_scale(*args.amax);
    const int64_t tiles_per_row = ceil_div(args.cols, kTile);
    const int64_t tiles = ceil_div(args.rows, kTile) * tiles_per_row;
    parallel_shares(tiles, threads, kTileGrain, [&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t row = tile / tiles_per_row * kTile, col = tile % tiles_per_row * kTile;
            switch (args.dtype) {
                case DType::kFloat32:
                    quantize_tile<float>(args, row, col, tensor);
                    break;
                case DType::kBFloat16:
                    quantize_tile<BFloat16>(args, row, col, tensor);
                    break;
                case DType::kFloat16:
                    quantize_tile<Float16>(args, row, col, tensor);
                    break;
            }
        }
    });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
