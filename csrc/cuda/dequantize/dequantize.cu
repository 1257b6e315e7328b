// Packed codes and their scales to values. A lane stores 16 bytes at a time, a warp whole lines.

#include "common/args/dequantize.h"
#include "common/scale.h"
#include "cuda/dequantize/rows.cuh"
#include "cuda/device/lists.cuh"
#include "cuda/device/tuning.cuh"
#include "cuda/format/nibbles.cuh"

namespace zerofp4::cuda {
namespace {

template <bool kColumnwise>
constexpr int kBlocks = kColumnwise ? kTuning.dequantize_blocks : kTuning.dequantize_rows_blocks;
constexpr int kPieceRows = 4;
static_assert(kUnitWarps == kWarps && kWarpRows % kPieceRows == 0);

// Where a piece of the matrix begins: pieces lie side by side along its rows, a warp has one.
struct Piece {
    uint32_t row;
    uint32_t col;
};

__device__ __forceinline__ Piece piece_of(const DequantizeDescriptor& item, uint32_t rows, uint32_t cols) {
    const uint32_t index = (blockIdx.x - static_cast<uint32_t>(item.unit_begin)) * kWarps + warp_index();
    const uint32_t across = (static_cast<uint32_t>(item.cols) + cols - 1) / cols;
    const uint32_t down = index / across;
    return {down * rows, (index - down * across) * cols};
}

// Rowwise: a warp has kRows rows of 512 bytes of output, each lane 16 bytes in all of them.

// All rows exist, and of each lane's columns all or none; those without do what the last one does.
template <typename T, int kRows>
__device__ __forceinline__ void dequantize_whole_rows(const DequantizeDescriptor& item, uint32_t row,
                                                      uint32_t col) {
    const uint32_t cols = static_cast<uint32_t>(item.cols);
    col = min(col, cols - kVector<T>);
    const uint64_t first = static_cast<uint64_t>(row) * cols + col;
    decode_rows<T, kRows>(
        {in_global(item.data) + first / 2, in_global(item.scale) + item.scale_offset(row, col / kBlock),
         in_global(static_cast<uint8_t*>(item.output)) + first * sizeof(T), cols / 2, item.scale_step(),
         static_cast<uint64_t>(cols) * sizeof(T), *in_global(item.amax), item.factor()});
}

template <typename T, int kRows>
__device__ __forceinline__ void dequantize_cut_rows(const DequantizeDescriptor& item, int64_t row,
                                                    int64_t col) {
    const int count = clamp_count(item.cols - col, kVector<T>);
    if (count == 0) return;
    const float amax = *in_global(item.amax);
    for (int64_t i = row; i < min(row + kRows, item.rows); ++i) {
        const uint32_t byte = in_global(item.scale)[item.scale_offset(i, col / kBlock)];
        const uint32_t codes = load4(in_global(item.data) + (i * item.cols + col) / 2, count / 2);
        uint32_t words[4];
        const float factor = block_decode_by(byte, amax, item.factor());
        decode_vector<T>(codes, [&](int) { return factor; }, words);
        uint8_t* output = in_global(static_cast<uint8_t*>(item.output)) + (i * item.cols + col) * sizeof(T);
        store16(output, words, count * static_cast<int>(sizeof(T)));
    }
}

template <typename T, int kRows>
__device__ __forceinline__ void dequantize_rowwise(const DequantizeDescriptor& item) {
    const Piece at = piece_of(item, kRows, kWarpBytes / sizeof(T));
    const uint32_t col = at.col + lane_index() * kVector<T>;
    if (at.row >= item.rows) return;
    if (item.aligned && at.row + kRows <= item.rows) {
        dequantize_whole_rows<T, kRows>(item, at.row, col);
    } else {
        dequantize_cut_rows<T, kRows>(item, at.row, col);
    }
}

// Columnwise: a warp has 64 rows and columns. Of the stored matrix, whose rows are columns here, each lane
// loads 8 columns by 16 rows. They are the columns of one vector of output, or of two that lie kVectorStep
// apart, so that eight lanes store whole lines.

constexpr int kPatchRows = 16;
constexpr int kPatchColumns = 8;

template <typename T>
constexpr int kLaneVectors = kPatchColumns / kVector<T>;

template <typename T>
constexpr uint32_t kVectorStep = 8 * kVector<T>;

// The first column of a vector of the lane. A lane without columns takes the last ones.
template <typename T, bool kAligned>
__device__ __forceinline__ uint32_t vector_col(const DequantizeDescriptor& item, uint32_t col, int v) {
    col += v * kVectorStep<T>;
    return kAligned ? min(col, static_cast<uint32_t>(item.cols) - kVector<T>) : col;
}

// The lane's codes, a column's in two words.
template <typename T, bool kAligned>
__device__ __forceinline__ void load_columns(const DequantizeDescriptor& item, uint32_t row, uint32_t col,
                                             uint32_t (&codes)[2][kPatchColumns]) {
    const uint32_t pitch = static_cast<uint32_t>(item.rows) / 2;
    const int bytes = clamp_count(item.rows - row, kPatchRows) / 2;
#pragma unroll
    for (int k = 0; k < kPatchColumns; ++k) {
        const uint32_t at = vector_col<T, kAligned>(item, col, k / kVector<T>) + k % kVector<T>;
        const uint8_t* data = in_global(item.data) + static_cast<uint64_t>(at) * pitch + row / 2;
        if constexpr (kAligned) {
            const uint2 both = __ldcs(reinterpret_cast<const uint2*>(data));
            codes[0][k] = both.x;
            codes[1][k] = both.y;
        } else {
            const int count = at < item.cols ? bytes : 0;
            codes[0][k] = load4(data, count);
            codes[1][k] = load4(data + 4, count - 4);
        }
    }
}

template <typename T, bool kAligned>
__device__ __forceinline__ void load_factors(const DequantizeDescriptor& item, uint32_t row, uint32_t col,
                                             float (&factors)[kLaneVectors<T>][kVector<T>]) {
    const float amax = *in_global(item.amax);
    const uint32_t step = item.scale_step();
#pragma unroll
    for (int v = 0; v < kLaneVectors<T>; ++v) {
        const uint32_t first = vector_col<T, kAligned>(item, col, v);
        const uint8_t* scale = in_global(item.scale) + item.scale_offset(first, row / kBlock);
#pragma unroll
        for (int k = 0; k < kVector<T>; ++k) {
            const bool inside = kAligned || first + k < item.cols;
            const uint32_t byte = inside ? scale[static_cast<uint64_t>(step) * k] : 0u;
            factors[v][k] = block_decode_by(byte, amax, item.factor());
        }
    }
}

// kAligned: of the lane's rows, and of the columns of a vector, all or none exist.
template <typename T, bool kAligned>
__device__ __forceinline__ void dequantize_columns(const DequantizeDescriptor& item, uint32_t row,
                                                   uint32_t col) {
    uint32_t codes[2][kPatchColumns];
    load_columns<T, kAligned>(item, row, col, codes);
    float factors[kLaneVectors<T>][kVector<T>];
    load_factors<T, kAligned>(item, row, col, factors);
    const uint64_t pitch = static_cast<uint64_t>(item.cols) * sizeof(T);
    uint8_t* output = in_global(static_cast<uint8_t*>(item.output)) + row * pitch;
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r, output += pitch) {
        if (r % 8 == 0) transpose_nibbles(codes[r / 8]);
#pragma unroll
        for (int v = 0; v < kLaneVectors<T>; ++v) {
            uint32_t words[4];
            decode_vector<T>(
                codes[r / 8][r % 8] >> (4 * kVector<T> * v), [&](int k) { return factors[v][k]; }, words);
            const uint32_t first = vector_col<T, kAligned>(item, col, v);
            uint8_t* to = output + static_cast<uint64_t>(first) * sizeof(T);
            if constexpr (kAligned) {
                *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
            } else if (row + r < item.rows) {
                store16(to, words, clamp_count(item.cols - first, kVector<T>) * static_cast<int>(sizeof(T)));
            }
        }
    }
}

template <typename T>
__device__ __forceinline__ void dequantize_columnwise(const DequantizeDescriptor& item) {
    const Piece at = piece_of(item, kWarpSquare, kWarpSquare);
    const uint32_t row = at.row + lane_index() / 8 * kPatchRows;
    const uint32_t col = at.col + lane_index() % 8 * kVector<T>;
    if (row >= item.rows) return;
    if (item.aligned) {
        dequantize_columns<T, true>(item, row, col);
    } else {
        dequantize_columns<T, false>(item, row, col);
    }
}

template <typename T, bool kColumnwise>
__global__ void __launch_bounds__(kThreads, kBlocks<kColumnwise>)
    dequantize_kernel(const __grid_constant__ DequantizeDescriptor item) {
    wait_for_previous_kernel();
    if constexpr (kColumnwise) {
        dequantize_columnwise<T>(item);
    } else {
        dequantize_rowwise<T, kPieceRows>(item);
    }
}

template <typename T>
__device__ __forceinline__ void dequantize_item(const DequantizeDescriptor& item) {
    if (item.columnwise) {
        dequantize_columnwise<T>(item);
    } else {
        dequantize_rowwise<T, kWarpRows>(item);
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kTuning.dequantize_blocks)
    dequantize_list_kernel(const __grid_constant__ ItemTable<DequantizeDescriptor> table,
                           const __grid_constant__ ItemArguments<DequantizeDescriptor> arguments) {
    wait_for_previous_kernel();
    dequantize_item<T>(item_of_block(table, arguments));
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kTuning.dequantize_blocks)
    product_values_kernel(const __grid_constant__ ItemTable<DequantizeDescriptor> table,
                          const __grid_constant__ ItemArguments<DequantizeDescriptor> arguments,
                          const __grid_constant__ ProductScale scale) {
    wait_for_previous_kernel();
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale.alpha = scale.value();
    if (blockIdx.x >= table.units) return;  // nobody wants values
    dequantize_item<T>(item_of_block(table, arguments));
}

template <typename T>
void dequantize_as(const DequantizeTable& table, const DequantizeDescriptor* host, cudaStream_t stream) {
    if (table.count == 1 && !host[0].columnwise) {
        constexpr int64_t kPieces = kWarpRows / kPieceRows;  // of a piece that table.units counts
        return launch("dequantize", dequantize_kernel<T, false>, table.units * kPieces, stream, host[0]);
    }
    launch_list("dequantize", dequantize_kernel<T, true>, dequantize_list_kernel<T>, table, host, stream);
}

}  // namespace

void dequantize(const DequantizeTable& table, DType dtype, const DequantizeDescriptor* host,
                cudaStream_t stream) {
    with_dtype(dtype, [&](auto t) { dequantize_as<decltype(t)>(table, host, stream); });
}

void product_values(const DequantizeTable& table, DType dtype, const ProductScale& scale,
                    const DequantizeDescriptor* host, cudaStream_t stream) {
    const ItemArguments<DequantizeDescriptor> arguments = argument_items(table, host);
    with_dtype(dtype, [&](auto t) {
        launch("product_values", product_values_kernel<decltype(t)>, std::max<int64_t>(table.units, 1),
               stream, table, arguments, scale);
    });
}

}  // namespace zerofp4::cuda
