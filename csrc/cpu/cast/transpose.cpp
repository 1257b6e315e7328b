// transpose: packed codes [rows, cols / 2] to [cols, rows / 2], in tiles of 128 x 128 codes.
//
// Two rows meet in every output byte, so their nibbles are exchanged first. What remains transposes bytes.

#include "cpu/device/bytes.h"
#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int kHalf = kTransposeTile / 2;
constexpr int64_t kTileGrain = 8;  // tiles (8 KB each) that are worth a thread

// One byte per pair of rows and column, for the 64 even and the 64 odd columns of a tile.
struct Exchanged {
    uint8_t even[kHalf][kHalf];  // [pair of rows][pair of columns]
    uint8_t odd[kHalf][kHalf];
};

void exchange_nibbles(const uint8_t* upper, const uint8_t* lower, uint8_t (&even)[kHalf],
                      uint8_t (&odd)[kHalf]) {
    for (int i = 0; i < kHalf; ++i) {
        even[i] = static_cast<uint8_t>((upper[i] & 0x0f) | lower[i] << 4);
        odd[i] = static_cast<uint8_t>(upper[i] >> 4 | (lower[i] & 0xf0));
    }
}

// Reads `rows` x 2 * `bytes` codes; the rest of the tile is zero.
void load_tile(const uint8_t* in, int64_t stride, int64_t rows, int64_t bytes, Exchanged& tile) {
    if (rows == kTransposeTile && bytes == kHalf) {
        for (int p = 0; p < kHalf; ++p, in += 2 * stride)
            exchange_nibbles(in, in + stride, tile.even[p], tile.odd[p]);
        return;
    }
    std::memset(&tile, 0, sizeof tile);
    for (int64_t p = 0; p < rows / 2; ++p, in += 2 * stride) {
        uint8_t upper[kHalf] = {}, lower[kHalf] = {};
        std::memcpy(upper, in, static_cast<size_t>(bytes));
        std::memcpy(lower, in + stride, static_cast<size_t>(bytes));
        exchange_nibbles(upper, lower, tile.even[p], tile.odd[p]);
    }
}

// Writes 2 * `columns` rows of `bytes` bytes.
void store_tile(const Exchanged& tile, int64_t columns, int64_t bytes, uint8_t* out, int64_t stride) {
    for (int64_t begin = 0; begin < columns; begin += 16) {
        uint8_t even[16][kHalf], odd[16][kHalf];
        transpose_64x16(&tile.even[0][begin], kHalf, even);
        transpose_64x16(&tile.odd[0][begin], kHalf, odd);
        for (int64_t i = 0; i < least(16, columns - begin); ++i) {
            uint8_t* row = out + 2 * (begin + i) * stride;
            copy_bytes<kHalf>(row, even[i], bytes);
            copy_bytes<kHalf>(row + stride, odd[i], bytes);
        }
    }
}

void transpose_tiles(const TransposeDescriptor& item, int64_t begin, int64_t end) {
    const int64_t tiles_per_row = ceil_div(item.cols, kTransposeTile);
    for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t row = tile / tiles_per_row * kTransposeTile,
                      col = tile % tiles_per_row * kTransposeTile;
        const int64_t rows = least(kTransposeTile, item.rows - row),
                      cols = least(kTransposeTile, item.cols - col);
        Exchanged exchanged;
        load_tile(item.input + (row * item.cols + col) / 2, item.cols / 2, rows, cols / 2, exchanged);
        store_tile(exchanged, cols / 2, rows / 2, item.output + (col * item.rows + row) / 2, item.rows / 2);
    }
}

}  // namespace

void transpose(const TransposeTable& table, int threads) {
    parallel_items(table.items, table.count, &TransposeDescriptor::tile_begin, table.tiles, threads,
                   kTileGrain, [](const TransposeDescriptor& item, int64_t begin, int64_t end) {
                       transpose_tiles(item, begin, end);
                   });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
