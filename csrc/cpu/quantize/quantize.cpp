// quantize: a matrix with given amaxes to codes and scales, rowwise and columnwise, or to the values that its
// codes stand for.
//
// Works on tiles of 128 x 128 elements, 16 rows at a time, so that x is read once for both copies and the
// columnwise codes and all scales leave as whole cache lines. A patch of 16 x 128 has 128 blocks of 16
// elements along either side: its rows' one after the other, or its columns.

#include "cpu/format/codes.h"
#include "cpu/format/scale_square.h"
#include "cpu/kernels.h"
#include "cpu/quantize/parts.h"
#include "cpu/quantize/random.h"
#include "cpu/strip/block_scales.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int kTileStrips = kTile / kBlock;

// What the strips of a tile leave for its end.
struct Tile {
    uint8_t codes[kTile / 2][kTile];  // of the columns: [pair of rows][column]
    // 1x16 blocks: of row r and column block c, [r][c]; of column c and row block r, [c][r]. Tiles of 16 x
    // 16: rows of tiles in place of rows, and their transpose.
    uint8_t rowwise_scale[kTile][kScaleTiles];
    uint8_t columnwise_scale[kTile][kScaleTiles];
};

struct Job {
    const QuantizeArgs& args;
    Scaling rowwise;
    Scaling columnwise;
    bool tiles;
    int64_t stored_rows;  // elements of a row of the columnwise codes
    int64_t input_rows;   // those from here on are zeros
};

ZEROFP4_HD void encode_columns(const Values& values, const float (&encode)[kTile], const uint8_t* random,
                               uint8_t (*codes)[kTile]) {
    for (int p = 0; p < kBlock / 2; ++p) {
        const float *upper = values + 2 * p * kTile, *lower = upper + kTile;
        if (random == nullptr) {
            for (int c = 0; c < kTile; ++c) {
                const uint32_t even = float_to_e2m1(upper[c] * encode[c]);
                const uint32_t odd = float_to_e2m1(lower[c] * encode[c]);
                codes[p][c] = static_cast<uint8_t>(even | odd << 4);
            }
        } else {
            const uint8_t* bytes = random + 2 * p * kTile;
            for (int c = 0; c < kTile; ++c) {
                const uint32_t even = float_to_e2m1_stochastic(upper[c] * encode[c], bytes[c]);
                const uint32_t odd = float_to_e2m1_stochastic(lower[c] * encode[c], bytes[kTile + c]);
                codes[p][c] = static_cast<uint8_t>(even | odd << 4);
            }
        }
    }
}

// Calls use(code) with a function from the element of a row to its code.
template <class Use>
ZEROFP4_HD void with_row_codes(const float* x, const float (&encode)[kTile], const uint8_t* random,
                               const Use& use) {
    if (random == nullptr) {
        use([&](int i) { return float_to_e2m1(x[i] * encode[i]); });
    } else {
        use([&](int i) { return float_to_e2m1_stochastic(x[i] * encode[i], random[i]); });
    }
}

void write_codes(const Job& job, const Patch& patch, const Values& values, const BlockScales& blocks,
                 const uint8_t* random) {
    for (int64_t r = 0; r < patch.rows; ++r) {
        float encode[kTile];
        spread(blocks.encode + r * kPatchTiles, encode);
        uint8_t* out = job.args.rowwise_data + ((patch.row + r) * job.args.cols + patch.col) / 2;
        uint8_t codes[kPatchBytes];
        uint8_t* to = patch.cols == kTile ? out : codes;
        with_row_codes(values + r * kTile, encode, random ? random + r * kTile : nullptr,
                       [&](const auto& code) { pack_row(code, to); });
        if (to != out) copy_short<kPatchBytes>(out, codes, patch.cols / 2);
    }
}

template <class T>
void write_values(const Job& job, const Patch& patch, const Values& values, const BlockScales& blocks,
                  const uint8_t* random) {
    for (int64_t r = 0; r < patch.rows; ++r) {
        float block[kPatchTiles], encode[kTile], decode[kTile];
        for (int t = 0; t < kPatchTiles; ++t) {
            const uint8_t byte = blocks.byte[r * kPatchTiles + t];
            block[t] = block_decode(byte, job.rowwise.amax, job.rowwise.e4m3_max);
        }
        spread(block, decode);
        spread(blocks.encode + r * kPatchTiles, encode);
        T* out = static_cast<T*>(job.args.values) + (patch.row + r) * job.args.cols + patch.col;
        T result[kTile];
        T* to = patch.cols == kTile ? out : result;
        with_row_codes(values + r * kTile, encode, random ? random + r * kTile : nullptr,
                       [&](const auto& code) {
                           for (int i = 0; i < kTile; ++i)
                               store_float(e2m1_to_float(code(i)) * decode[i], to[i]);
                       });
        if (to != out) std::memcpy(out, result, static_cast<size_t>(patch.cols) * sizeof(T));
    }
}

template <class T>
void quantize_rows(const Job& job, const Patch& patch, const Values& values, int64_t strip, Tile& tile) {
    const QuantizeArgs& args = job.args;
    BlockScales blocks;
    row_scales(values, job.tiles, job.rowwise, blocks);
    RandomPatch bytes;
    if (args.rng_state) random_rows(args.rng_state, patch, args.cols, bytes);
    const uint8_t* random = args.rng_state ? bytes : nullptr;
    if (args.rowwise_data) write_codes(job, patch, values, blocks, random);
    if (args.values) write_values<T>(job, patch, values, blocks, random);
    if (!job.tiles) {
        std::memcpy(tile.rowwise_scale[strip * kBlock], blocks.byte, sizeof blocks.byte);
        return;
    }
    std::memcpy(tile.rowwise_scale[strip], blocks.byte, kPatchTiles);
    if (args.columnwise_data) {
        float encode[kTile];
        spread(blocks.encode, encode);
        encode_columns(values, encode, random, &tile.codes[strip * kBlock / 2]);
        for (int t = 0; t < kPatchTiles; ++t) tile.columnwise_scale[t][strip] = blocks.byte[t];
    }
}

void quantize_columns(const Job& job, const Patch& patch, Values& values, int64_t strip, Tile& tile) {
    const QuantizeArgs& args = job.args;
    if (args.hadamard) transform_columns(args.dtype, args.signs, values);
    BlockScales blocks;
    column_scales(values, job.columnwise, blocks);
    RandomPatch bytes;
    if (args.rng_state) random_columns(args.rng_state, patch, job.stored_rows, bytes);
    encode_columns(values, blocks.encode, args.rng_state ? bytes : nullptr, &tile.codes[strip * kBlock / 2]);
    for (int c = 0; c < kTile; ++c) tile.columnwise_scale[c][strip] = blocks.byte[c];
}

void store_columnwise(const Job& job, int64_t row, int64_t col, const Tile& tile) {
    const int64_t rows = least(kTile, job.stored_rows - row), cols = least(kTile, job.args.cols - col);
    for (int64_t begin = 0; begin < cols; begin += 16) {
        uint8_t codes[16][kTile / 2];
        transpose_64x16(&tile.codes[0][begin], kTile, codes);
        for (int64_t i = 0; i < least(16, cols - begin); ++i) {
            const int64_t first = (col + begin + i) * job.stored_rows + row;
            copy_bytes<kTile / 2>(job.args.columnwise_data + first / 2, codes[i], rows / 2);
        }
    }
}

template <class T>
void quantize_tile(const Job& job, int64_t row, int64_t col) {
    const QuantizeArgs& args = job.args;
    const T* input = static_cast<const T*>(args.input);
    Tile tile;
    for (int64_t strip = 0; strip < kTileStrips && row + strip * kBlock < args.rows; ++strip) {
        const Patch patch = patch_at(row / kBlock + strip, col / kTile, args.rows, args.cols);
        Patch read = patch;
        read.rows = least(patch.rows, job.input_rows - patch.row);
        Values values;
        load_values(input, args.cols, read, values);
        const bool last = strip + 1 == kTileStrips;  // then on to the next tile
        prefetch_values(
            input + (last ? row * args.cols + col + kTile : (patch.row + kBlock) * args.cols + col),
            args.cols);
        if (job.tiles || args.rowwise_data || args.values) quantize_rows<T>(job, patch, values, strip, tile);
        if (!job.tiles && args.columnwise_data) quantize_columns(job, patch, values, strip, tile);
    }
    const int shift = job.tiles ? 4 : 0;
    const int64_t row_blocks = ceil_div(args.rows, kBlock), col_blocks = ceil_div(args.cols, kBlock);
    write_layouts({tile.rowwise_scale, shift, row, args.rows, col / kBlock, col_blocks}, args.rowwise_scale);
    write_layouts({tile.columnwise_scale, shift, col, args.cols, row / kBlock, row_blocks},
                  args.columnwise_scale);
    if (args.columnwise_data) store_columnwise(job, row, col, tile);
}

}  // namespace

void quantize_tiles(const QuantizeArgs& args, int64_t input_rows, int64_t begin, int64_t end) {
    const float* columnwise_amax = args.columnwise_amax ? args.columnwise_amax : args.amax;
    const Job job{args,
                  make_scaling(*args.amax, args.choice),
                  make_scaling(*columnwise_amax, args.choice),
                  args.block_rows == kBlock,
                  args.hadamard ? round_up(args.rows, kBlock) : args.rows,
                  input_rows};
    const int64_t tiles_per_row = ceil_div(args.cols, kTile);
    for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / tiles_per_row * kTile, col = i % tiles_per_row * kTile;
        with_dtype(args.dtype, [&](auto t) { quantize_tile<decltype(t)>(job, row, col); });
    }
}

void quantize(const QuantizeArgs& args, int threads) {
    if (is_skipped(args.skip)) return;
    store_amaxes(args);
    parallel_shares(tiles_of(args.rows, args.cols), threads, kTileGrain,
                    [&](int64_t begin, int64_t end) { quantize_tiles(args, args.rows, begin, end); });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
