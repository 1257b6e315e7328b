#pragma once
// Quantizing a strip of 16 rows by 128 columns along its rows: blocks of 1x16, 4 lanes each, or tiles of
// 16x16.

#include "cuda/format/convert.cuh"
#include "cuda/format/nearest.cuh"
#include "cuda/quantize/tile_buffers.cuh"
#include "cuda/quantize/tile_matrix.cuh"

namespace zerofp4::cuda {

constexpr int kBlockLanes = kBlock / kLaneColumns;
constexpr int kScaleBytes = 128;  // E4M3 without a sign
static_assert(2 * kScaleBytes == kThreads && kTileStrips % kWarps == 0);

enum class Columns { kNone, kPlain, kHadamard };

// How the scale of a block and the factor of its elements follow from the tensor's amax. For blocks of 1x16,
// of which a strip has 128, factors are in a table.
struct Scales {
    float block_factor;
    const float* encode;  // [kScaleBytes] in shared memory
    bool fits;            // transformed_pairs

    __device__ __forceinline__ uint32_t byte_of(uint32_t amax_bits) const {
        return convert_scale(amax_of_bits(amax_bits) * block_factor);
    }
    __device__ __forceinline__ float factor_of(uint32_t byte) const { return encode[byte]; }
};

// The same for tiles, of which a strip has 8: a division takes less than a table.
struct TileScales {
    TensorScale tensor;

    __device__ __forceinline__ uint32_t byte_of(uint32_t amax_bits) const {
        return convert_scale(amax_of_bits(amax_bits) * tensor.block_factor);
    }
    __device__ __forceinline__ float factor_of(uint32_t byte) const { return block_encode(byte, tensor); }
};

// The largest magnitudes of the lane's elements of rows 2 p and 2 p + 1, as floats or as a pair.
template <typename T>
struct RowPairs;

template <>
struct RowPairs<float> {
    uint32_t upper[kBlock / 2], lower[kBlock / 2];

    __device__ __forceinline__ void set(int p, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
        upper[p] = max(max(magnitudes<float>(a[0]), magnitudes<float>(a[1])),
                       max(magnitudes<float>(a[2]), magnitudes<float>(a[3])));
        lower[p] = max(max(magnitudes<float>(b[0]), magnitudes<float>(b[1])),
                       max(magnitudes<float>(b[2]), magnitudes<float>(b[3])));
    }
    // Keeps one of two neighbouring pairs and gives the other to the lane `mask` away.
    __device__ __forceinline__ void exchange(int p, int from, bool second, int mask) {
        upper[p] = exchanged(upper, from, second, mask);
        lower[p] = exchanged(lower, from, second, mask);
    }
    __device__ __forceinline__ uint32_t bits(int slot) const {
        return slot % 2 ? lower[slot / 2] : upper[slot / 2];
    }

  private:
    static __device__ __forceinline__ uint32_t exchanged(const uint32_t (&pairs)[kBlock / 2], int from,
                                                         bool second, int mask) {
        const uint32_t keep = second ? pairs[from + 1] : pairs[from];
        const uint32_t give = second ? pairs[from] : pairs[from + 1];
        return max(keep, __shfl_xor_sync(kAllLanes, give, mask));
    }
};

template <typename T>
struct RowPairs {
    uint32_t pairs[kBlock / 2];  // their signs mean nothing

    __device__ __forceinline__ void set(int p, const uint32_t (&a)[2], const uint32_t (&b)[2]) {
        const uint32_t upper = larger_magnitudes<T>(a[0], a[1]), lower = larger_magnitudes<T>(b[0], b[1]);
        pairs[p] = larger_magnitudes<T>(__byte_perm(upper, lower, 0x5410), __byte_perm(upper, lower, 0x7632));
    }
    __device__ __forceinline__ void exchange(int p, int from, bool second, int mask) {
        const uint32_t keep = second ? pairs[from + 1] : pairs[from];
        const uint32_t give = second ? pairs[from] : pairs[from + 1];
        pairs[p] = larger_magnitudes<T>(keep, __shfl_xor_sync(kAllLanes, give, mask));
    }
    __device__ __forceinline__ uint32_t bits(int slot) const {
        return widened<T>((slot % 2 ? pairs[slot / 2] >> 16 : pairs[slot / 2]) & 0x7fffu);
    }
};

// Blocks along the rows: lane q of the 4 of a block gets the amaxes of the rows 8 j + 2 q and 8 j + 2 q + 1
// and finds their scales and factors. Returns whether all blocks of the strip are regular ones.
template <typename T, class Rounding>
__device__ __forceinline__ bool scale_rows(const StripWords<T>& words, const Scales& scales,
                                           uint8_t (*bytes)[kTileScaleColumns], float (&factors)[4]) {
    const int q = lane_index() % kBlockLanes;
    RowPairs<T> pairs;
#pragma unroll
    for (int p = 0; p < kBlock / 2; ++p) pairs.set(p, words[2 * p], words[2 * p + 1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs.exchange(i, 2 * i, q & 1, 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) pairs.exchange(i, 2 * i, q & 2, 2);
    bool regular = true;
#pragma unroll
    for (int slot = 0; slot < 4; ++slot) {
        const uint32_t byte = scales.byte_of(pairs.bits(slot));
        bytes[8 * (slot / 2) + 2 * q + slot % 2][lane_index() / kBlockLanes] = static_cast<uint8_t>(byte);
        factors[slot] = scales.factor_of(byte);
        regular = regular && Rounding::is_regular(pairs.bits(slot), factors[slot]);
    }
    return __all_sync(kAllLanes, regular);
}

// The factor of a row, which one of the block's lanes has.
__device__ __forceinline__ float factor_of(const float (&factors)[4], int r) {
    return __shfl_sync(kAllLanes, factors[r / 8 * 2 + r % 2], r % 8 / 2, kBlockLanes);
}

// The largest magnitude of a tile of 16 x 16, for its 4 lanes.
template <typename T>
__device__ __forceinline__ uint32_t tile_bits(const StripWords<T>& words) {
    uint32_t most = strip_bits<T>(words);
#pragma unroll
    for (int mask = 1; mask < kBlockLanes; mask *= 2)
        most = max(most, __shfl_xor_sync(kAllLanes, most, mask));
    return most;
}

// Where the lane's elements of a strip go as values that their codes stand for, of type T.
template <typename T>
struct ValueRows {
    T* first;
    int64_t pitch;
    int rows;
    int count;  // of elements of a row
    float amax;

    __device__ __forceinline__ ValueRows(const TileMatrix& matrix, const StripPlace& at)
        : first(static_cast<T*>(matrix.values()) + at.row * matrix.whole.cols + at.col),
          pitch(matrix.whole.cols),
          rows(clamp_count(matrix.rows() - at.row, kBlock)),
          count(clamp_count(matrix.whole.cols - at.col, kLaneColumns)),
          amax(*matrix.amax()) {}

    // Those of row r, given its codes and the byte of their scale.
    __device__ __forceinline__ void write(int r, uint32_t four, uint32_t byte) const {
        auto* p = reinterpret_cast<uint8_t*>(first + r * pitch);
        const int bytes = r < rows ? count * static_cast<int>(sizeof(T)) : 0;
        const float decode = block_decode(byte, amax);
        float x[kLaneColumns];
#pragma unroll
        for (int k = 0; k < kLaneColumns; ++k) x[k] = e2m1_to_float(four >> (4 * k) & 15u) * decode;
        if constexpr (kPerWord<T> == 1) {
            store16(p, {to_bits(x[0]), to_bits(x[1]), to_bits(x[2]), to_bits(x[3])}, bytes);
        } else {
            store8(p, {pack_word<T>({x[0], x[1]}), pack_word<T>({x[2], x[3]})}, bytes);
        }
    }
};

// Calls body with them, in the input's dtype. Kernels of floats read halves, too.
template <typename T, class Body>
__device__ __forceinline__ void with_value_rows(const TileMatrix& matrix, const StripPlace& at,
                                                const Body& body) {
    if constexpr (std::is_same_v<T, float>) {
        if (matrix.whole.dtype == DType::kFloat16) return body(ValueRows<Float16>(matrix, at));
    }
    body(ValueRows<T>(matrix, at));
}

// The codes of 16 rows, four a row, as those of 4 columns.
__device__ __forceinline__ void transpose_codes(const uint32_t (&fours)[kBlock], uint32_t (&columns)[4][2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        // Rows 2 i and 2 i + 1 of this half, then the bytes of all even and of all odd rows.
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pairs[i] = __byte_perm(fours[8 * h + 2 * i], fours[8 * h + 2 * i + 1], 0x5410);
        const uint32_t even01 = __byte_perm(pairs[0], pairs[1], 0x5140);
        const uint32_t even23 = __byte_perm(pairs[2], pairs[3], 0x5140);
        const uint32_t odd01 = __byte_perm(pairs[0], pairs[1], 0x7362);
        const uint32_t odd23 = __byte_perm(pairs[2], pairs[3], 0x7362);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const uint32_t even = __byte_perm(even01, even23, b ? 0x7632 : 0x5410);
            const uint32_t odd = __byte_perm(odd01, odd23, b ? 0x7632 : 0x5410);
            columns[2 * b][h] = (even & 0x0f0f0f0fu) | (odd << 4 & 0xf0f0f0f0u);
            columns[2 * b + 1][h] = (even >> 4 & 0x0f0f0f0fu) | (odd & 0xf0f0f0f0u);
        }
    }
}

template <bool kTiles>
using RowwiseScales = std::conditional_t<kTiles, TileScales, Scales>;

// The columnwise codes of a strip of tiles, from those of its rows.
__device__ __forceinline__ void keep_columns(const uint32_t (&fours)[kBlock], int strip,
                                             TileBuffers<true>& tile) {
    uint32_t columns[kLaneColumns][2];
    transpose_codes(fours, columns);
#pragma unroll
    for (int k = 0; k < kLaneColumns; ++k)
        tile.set_column(lane_index() * kLaneColumns + k, strip, columns[k]);
}

// Copies to memory, which a loop can index by row: so those of other strips stay in registers.
template <typename T, int kFactors>
__device__ __forceinline__ void copy_strip(const StripWords<T>& words, const float (&factors)[4],
                                           StripWords<T>& own_words, float (&own_factors)[4]) {
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
#pragma unroll
        for (int i = 0; i < kLaneColumns / kPerWord<T>; ++i) own_words[r][i] = words[r][i];
    }
#pragma unroll
    for (int i = 0; i < kFactors; ++i) own_factors[i] = factors[i];
}

// Where the lane's codes of a strip go, two bytes a row, and how much of it exists.
struct CodeRows {
    uint8_t* data;  // null: nowhere
    int64_t pitch;
    int rows;
    int count;  // of elements of a row

    __device__ __forceinline__ void write(int r, uint32_t four) const {
        uint8_t* p = data + r * pitch;
        if (r < rows && count > 0) p[0] = static_cast<uint8_t>(four);
        if (r < rows && count > 2) p[1] = static_cast<uint8_t>(four >> 8);
    }
};

__device__ __forceinline__ CodeRows code_rows(const TileMatrix& matrix, const StripPlace& at) {
    const int64_t pitch = matrix.whole.cols / 2;
    const int rows = matrix.whole.rowwise_data ? clamp_count(matrix.rows() - at.row, kBlock) : 0;
    return {matrix.rowwise_data() + at.row * pitch + at.col / 2, pitch, rows,
            clamp_count(matrix.whole.cols - at.col, kLaneColumns)};
}

// A strip that is cut off, not aligned or irregular, once its scales are known: few are, and a rolled loop is
// short.
template <typename T, bool kTiles, Columns kColumns, class Rounding>
__device__ __forceinline__ void quantize_any_strip(const TileMatrix& matrix, const StripWords<T>& words,
                                                   const StripPlace& at, const float (&factors)[4],
                                                   const Rounding& rounding, int strip,
                                                   TileBuffers<kColumns != Columns::kNone>& tile) {
    StripWords<T> own_words;
    float own_factors[4];
    copy_strip<T, kTiles ? 1 : 4>(words, factors, own_words, own_factors);
    const int tile_column = lane_index() / kBlockLanes;
    const CodeRows codes = code_rows(matrix, at);
    uint32_t fours[kBlock];
    __syncwarp();
#pragma unroll 1
    for (int r = 0; r < kBlock; ++r) {
        const float factor = kTiles ? own_factors[0] : factor_of(own_factors, r);
        fours[r] = Rounding::template encode_row<T>(own_words[r], factor, false, rounding.row_bytes(r));
        codes.write(r, fours[r]);
        if (kColumns == Columns::kNone && matrix.whole.values) {
            const uint32_t byte = tile.rowwise_scale[kTiles ? strip : strip * kBlock + r][tile_column];
            with_value_rows<T>(matrix, at, [&](const auto& rows) { rows.write(r, fours[r], byte); });
        }
    }
    if constexpr (kTiles && kColumns == Columns::kPlain) keep_columns(fours, strip, tile);
}

// The same beside columns of 1x16 blocks, not inlined; words and factors are in memory.
template <typename T, class Rounding>
__device__ __noinline__ void quantize_any_rows(const CodeRows codes, const StripWords<T>& words,
                                               const float (&factors)[4], const Rounding& rounding) {
    __syncwarp();
#pragma unroll 1
    for (int r = 0; r < kBlock; ++r) {
        const float factor = factor_of(factors, r);
        codes.write(r, Rounding::template encode_row<T>(words[r], factor, false, rounding.row_bytes(r)));
    }
}

// Blocks along the rows, or tiles; the columnwise codes of tiles too.
template <typename T, bool kTiles, Columns kColumns, class Rounding>
__device__ __forceinline__ void quantize_rows(const TileMatrix& matrix, const StripWords<T>& words,
                                              const StripPlace& at, bool whole,
                                              const RowwiseScales<kTiles>& scales, const Rounding& rounding,
                                              int strip, TileBuffers<kColumns != Columns::kNone>& tile) {
    const int tile_column = lane_index() / kBlockLanes;
    float factors[4];
    bool regular;
    if constexpr (kTiles) {
        const uint32_t most = tile_bits<T>(words), byte = scales.byte_of(most);
        tile.rowwise_scale[strip][tile_column] = static_cast<uint8_t>(byte);
        factors[0] = scales.factor_of(byte);
        regular = __all_sync(kAllLanes, Rounding::is_regular(most, factors[0]));
    } else {
        regular = scale_rows<T, Rounding>(words, scales, &tile.rowwise_scale[strip * kBlock], factors);
    }
    regular = regular || Rounding::template kTakesAny<T>;
    uint8_t* data = matrix.rowwise_data();
    if (!whole || !regular || !is_aligned(data, 2)) {
        // Of a copy on an H200: called, 1D with both copies reaches 67%, transformed 58%; inlined, 59% and
        // 56%. Values reach 45% called and 69% inlined.
        if constexpr (!kTiles && kColumns != Columns::kNone) {
            StripWords<T> own_words;
            float own_factors[4];
            copy_strip<T, 4>(words, factors, own_words, own_factors);
            const Rounding own_rounding = rounding;
            quantize_any_rows<T>(code_rows(matrix, at), own_words, own_factors, own_rounding);
        } else {
            quantize_any_strip<T, kTiles, kColumns>(matrix, words, at, factors, rounding, strip, tile);
        }
        return;
    }
    const int64_t pitch = matrix.whole.cols / 2;
    uint8_t* p = data + at.row * pitch + at.col / 2;
    const auto encoded = [&](int r) {
        const float factor = kTiles ? factors[0] : factor_of(factors, r);
        return Rounding::template encode_row<T>(words[r], factor, true, rounding.row_bytes(r));
    };
    constexpr bool kKeeps = kTiles && kColumns == Columns::kPlain;
    // Values are never wanted beside a columnwise copy: that much less code and registers.
    const bool values = kColumns == Columns::kNone && matrix.whole.values;
    if (!kKeeps && !values) {
#pragma unroll
        for (int r = 0; r < kBlock; ++r, p += pitch)
            *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(encoded(r));
        return;
    }
    if constexpr (kKeeps || kColumns == Columns::kNone) {
        uint32_t fours[kBlock];
#pragma unroll
        for (int r = 0; r < kBlock; ++r) fours[r] = encoded(r);
        if (matrix.whole.rowwise_data) {
#pragma unroll
            for (int r = 0; r < kBlock; ++r, p += pitch)
                *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(fours[r]);
        }
        if (values) {
            with_value_rows<T>(matrix, at, [&](const auto& rows) {
                __syncwarp();
#pragma unroll
                for (int r = 0; r < kBlock; ++r)
                    rows.write(r, fours[r],
                               tile.rowwise_scale[kTiles ? strip : strip * kBlock + r][tile_column]);
            });
        }
        if constexpr (kKeeps) keep_columns(fours, strip, tile);
    }
}

}  // namespace zerofp4::cuda
