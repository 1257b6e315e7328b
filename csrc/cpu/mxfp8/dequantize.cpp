// dequantize_mxfp8, on rows of 128 elements.

#include "cpu/kernels.h"
#include "cpu/mxfp8/tile.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

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

void dequantize_mxfp8(const Mxfp8DequantizeTable& table, DType dtype, int threads) {
    parallel_items(table.items, table.count, &Mxfp8DequantizeDescriptor::unit_begin, table.units, threads,
                   kTileGrain * kTileRows,
                   [dtype](const Mxfp8DequantizeDescriptor& item, int64_t begin, int64_t end) {
                       with_dtype(dtype, [&](auto t) { dequantize_rows<decltype(t)>(item, begin, end); });
                   });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
