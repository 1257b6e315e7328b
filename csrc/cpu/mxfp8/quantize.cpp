// quantize_mxfp8, on tiles of 32 rows by 128 columns.

#include "cpu/kernels.h"
#include "cpu/mxfp8/tile.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

using Values = float[kTileRows][kTileCols];

// Zero where the tile is cut off.
template <class T>
void load_tile(const Mxfp8Args& args, const Tile& tile, Values& values) {
    const T* in = static_cast<const T*>(args.input) + tile.row * args.cols + tile.col;
    if (tile.rows < kTileRows || tile.cols < kTileCols) std::memset(values, 0, sizeof values);
    for (int64_t r = 0; r < tile.rows; ++r, in += args.cols) {
        if (tile.cols == kTileCols) {
            for (int c = 0; c < kTileCols; ++c) values[r][c] = load_float(element_at(in, c));
        } else {
            for (int64_t c = 0; c < tile.cols; ++c) values[r][c] = load_float(element_at(in, c));
        }
    }
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
        for (int i = 0; i < kMxfp8Block; ++i) amax[b] = larger(amax[b], magnitude_bits(block[i]));
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
        for (int c = 0; c < kTileCols; ++c) amax[c] = larger(amax[c], magnitude_bits(values[r][c]));
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

}  // namespace

void quantize_mxfp8(const Mxfp8Args& args, int threads) {
    if (is_skipped(args.skip)) return;
    const int64_t across = ceil_div(walked(args, args.cols), kTileCols);
    const int64_t tiles = ceil_div(walked(args, args.rows), kTileRows) * across;
    parallel_shares(tiles, threads, kTileGrain, [&](int64_t begin, int64_t end) {
        with_dtype(args.dtype, [&](auto t) { quantize_tiles<decltype(t)>(args, across, begin, end); });
    });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
