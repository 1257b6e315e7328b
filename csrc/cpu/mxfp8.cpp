// MXFP8: quantize_mxfp8 on tiles of 32 rows by 128 columns, dequantize_mxfp8 on rows of 128.

#include "common/mxfp8.h"

#include "cpu/bytes.h"
#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int kTileRows = kMxfp8Block;
constexpr int kTileCols = 128;
static_assert(kTileCols == kMxfp8PieceColumns);
constexpr int kRowBlocks = kTileCols / kMxfp8Block;
constexpr int64_t kTileGrain = 8;  // tiles (32k elements) that are worth a thread

struct Tile {
    int64_t row, col;    // of its first element
    int64_t rows, cols;  // what lies inside the matrix; not positive for one that is padding only
};

ZEROFP4_HD Tile tile_at(int64_t tile, int64_t across, int64_t rows, int64_t cols) {
    const int64_t row = tile / across * kTileRows, col = tile % across * kTileCols;
    return {row, col, least(kTileRows, rows - row), least(kTileCols, cols - col)};
}

using Values = float[kTileRows][kTileCols];

// Zero where the tile is cut off.
template <class T>
void load_tile(const Mxfp8Args& args, const Tile& tile, Values& values) {
    const T* in = static_cast<const T*>(args.input) + tile.row * args.cols + tile.col;
    if (tile.rows < kTileRows || tile.cols < kTileCols) std::memset(values, 0, sizeof values);
    for (int64_t r = 0; r < tile.rows; ++r, in += args.cols) {
        if (tile.cols == kTileCols) {
            for (int c = 0; c < kTileCols; ++c) values[r][c] = load_float(in[c]);
        } else {
            for (int64_t c = 0; c < tile.cols; ++c) values[r][c] = load_float(in[c]);
        }
    }
}

// Magnitudes are compared as bits: NaN sorts above inf.
ZEROFP4_HD uint32_t larger(uint32_t amax, float x) {
    const uint32_t bits = to_bits(x) & 0x7fffffffu;
    return bits > amax ? bits : amax;
}

// Amaxes of blocks to scale bytes and factors.
template <int kCount>
ZEROFP4_HD void scale_blocks(const uint32_t (&amax)[kCount], uint8_t (&scale)[kCount],
                             float (&encode)[kCount]) {
    uint32_t byte[kCount];
    for (int i = 0; i < kCount; ++i) {
        byte[i] = mxfp8_scale(from_bits(amax[i]));
        encode[i] = mxfp8_encode(byte[i]);
    }
    for (int i = 0; i < kCount; ++i) scale[i] = static_cast<uint8_t>(byte[i]);
}

// `count` elements of a row, of at most 128.
ZEROFP4_HD void encode_row(const float (&x)[kTileCols], const float (&encode)[kTileCols], int64_t count,
                           uint8_t* out) {
    uint8_t codes[kTileCols];
    for (int i = 0; i < kTileCols; ++i) codes[i] = static_cast<uint8_t>(float_to_e4m3(x[i] * encode[i]));
    copy_bytes<kTileCols>(out, codes, count);
}

void quantize_rowwise(const Mxfp8Args& args, const Tile& tile, const Values& values) {
    uint32_t amax[kTileRows * kRowBlocks];
    for (int b = 0; b < kTileRows * kRowBlocks; ++b) {
        const float* block = &values[0][0] + b * kMxfp8Block;
        amax[b] = 0;
        for (int i = 0; i < kMxfp8Block; ++i) amax[b] = larger(amax[b], block[i]);
    }
    uint8_t scale[kTileRows * kRowBlocks];
    float factor[kTileRows * kRowBlocks];
    scale_blocks(amax, scale, factor);

    const int64_t scales_per_row = ceil_div(args.cols, kMxfp8Block);
    for (int r = 0; r < kTileRows; ++r) {
        const int64_t row = tile.row + r;
        const uint8_t* scales = scale + r * kRowBlocks;
        if (args.rowwise_swizzled) {  // four neighbouring columns lie together
            std::memcpy(args.rowwise_swizzled + mxfp8_rowwise_offset(row, tile.col, args.cols), scales,
                        kRowBlocks);
        }
        if (r >= tile.rows || tile.cols <= 0) continue;
        copy_bytes<kRowBlocks>(args.rowwise_scale + row * scales_per_row + tile.col / kMxfp8Block, scales,
                               ceil_div(tile.cols, kMxfp8Block));
        float encode[kTileCols];
        for (int b = 0; b < kRowBlocks; ++b) {
            for (int i = 0; i < kMxfp8Block; ++i) encode[b * kMxfp8Block + i] = factor[r * kRowBlocks + b];
        }
        encode_row(values[r], encode, tile.cols, args.rowwise_data + row * args.cols + tile.col);
    }
}

void quantize_columnwise(const Mxfp8Args& args, const Tile& tile, const Values& values) {
    uint32_t amax[kTileCols] = {};
    for (int r = 0; r < kTileRows; ++r) {
        for (int c = 0; c < kTileCols; ++c) amax[c] = larger(amax[c], values[r][c]);
    }
    uint8_t scale[kTileCols];
    float encode[kTileCols];
    scale_blocks(amax, scale, encode);
    if (args.columnwise_swizzled) {
        uint8_t* atom = args.columnwise_swizzled + mxfp8_columnwise_offset(tile.row, tile.col, args.rows);
        for (int c = 0; c < kTileCols; ++c) atom[swizzled_offset(c, 0, 1)] = scale[c];
    }
    if (tile.rows <= 0 || tile.cols <= 0) return;
    copy_bytes<kTileCols>(args.columnwise_scale + tile.row / kMxfp8Block * args.cols + tile.col, scale,
                          tile.cols);
    for (int64_t r = 0; r < tile.rows; ++r) {
        encode_row(values[r], encode, tile.cols,
                   args.columnwise_data + (tile.row + r) * args.cols + tile.col);
    }
}

template <class T>
void quantize_tiles(const Mxfp8Args& args, int64_t across, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const Tile tile = tile_at(i, across, args.rows, args.cols);
        Values values;
        load_tile<T>(args, tile, values);
        if (args.rowwise_data) quantize_rowwise(args, tile, values);
        if (args.columnwise_data) quantize_columnwise(args, tile, values);
    }
}

// One factor per element of a tile's row, from the scale bytes of its blocks along the row.
ZEROFP4_HD void decode_rowwise(const Mxfp8DequantizeDescriptor& item, const Tile& tile,
                               float (&decode)[kTileCols]) {
    uint8_t scale[kRowBlocks] = {};
    const int64_t offset = item.swizzled
                               ? mxfp8_rowwise_offset(tile.row, tile.col, item.cols)
                               : tile.row * ceil_div(item.cols, kMxfp8Block) + tile.col / kMxfp8Block;
    copy_bytes<kRowBlocks>(scale, item.scale + offset, ceil_div(tile.cols, kMxfp8Block));
    for (int b = 0; b < kRowBlocks; ++b) {
        const float factor = mxfp8_decode(scale[b]);
        for (int i = 0; i < kMxfp8Block; ++i) decode[b * kMxfp8Block + i] = factor;
    }
}

// The same from the scale bytes of its columns.
ZEROFP4_HD void decode_columnwise(const Mxfp8DequantizeDescriptor& item, const Tile& tile,
                                  float (&decode)[kTileCols]) {
    uint8_t scale[kTileCols] = {};
    if (item.swizzled) {
        const uint8_t* atom = item.scale + mxfp8_columnwise_offset(tile.row, tile.col, item.rows);
        for (int c = 0; c < kTileCols; ++c) scale[c] = atom[swizzled_offset(c, 0, 1)];
    } else {
        copy_bytes<kTileCols>(scale, item.scale + tile.row / kMxfp8Block * item.cols + tile.col, tile.cols);
    }
    for (int c = 0; c < kTileCols; ++c) decode[c] = mxfp8_decode(scale[c]);
}

template <class T>
ZEROFP4_HD void decode_row(const uint8_t* codes, const float (&decode)[kTileCols], T* out) {
    for (int i = 0; i < kTileCols; ++i) store_float(signed_e4m3_to_float(codes[i]) * decode[i], out[i]);
}

// The tiles are one row high here: output that is written in its order costs the fewest page faults.
template <class T>
void dequantize_rows(const Mxfp8DequantizeDescriptor& item, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / item.across, col = i % item.across * kTileCols;
        const Tile tile{row, col, 1, least(kTileCols, item.cols - col)};
        float decode[kTileCols];
        if (item.columnwise) {
            decode_columnwise(item, tile, decode);
        } else {
            decode_rowwise(item, tile, decode);
        }
        const int64_t first = row * item.cols + col;
        const uint8_t* codes = item.data + first;
        T* out = static_cast<T*>(item.output) + first;
        if (tile.cols == kTileCols) {
            decode_row(codes, decode, out);
            continue;
        }
        uint8_t padded[kTileCols] = {};
        T values[kTileCols];
        std::memcpy(padded, codes, static_cast<size_t>(tile.cols));
        decode_row(padded, decode, values);
        std::memcpy(out, values, static_cast<size_t>(tile.cols) * sizeof(T));
    }
}

}  // namespace

void quantize_mxfp8(const Mxfp8Args& args, int threads) {
    if (is_skipped(args.skip)) return;
    const int64_t across = ceil_div(walked(args, args.cols), kTileCols);
    const int64_t tiles = ceil_div(walked(args, args.rows), kTileRows) * across;
    parallel_shares(tiles, threads, kTileGrain, [&](int64_t begin, int64_t end) {
        switch (args.dtype) {
            case DType::kFloat32:
                return quantize_tiles<float>(args, across, begin, end);
            case DType::kBFloat16:
                return quantize_tiles<BFloat16>(args, across, begin, end);
            case DType::kFloat16:
                return quantize_tiles<Float16>(args, across, begin, end);
        }
    });
}

void dequantize_mxfp8(const Mxfp8DequantizeTable& table, DType dtype, int threads) {
    parallel_items(table.items, table.count, &Mxfp8DequantizeDescriptor::unit_begin, table.units, threads,
                   kTileGrain * kTileRows,
                   [dtype](const Mxfp8DequantizeDescriptor& item, int64_t begin, int64_t end) {
                       switch (dtype) {
                           case DType::kFloat32:
                               return dequantize_rows<float>(item, begin, end);
                           case DType::kBFloat16:
                               return dequantize_rows<BFloat16>(item, begin, end);
                           case DType::kFloat16:
                               return dequantize_rows<Float16>(item, begin, end);
                       }
                   });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
