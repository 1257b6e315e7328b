// 1D quantization with a given amax: blocks of 16 along the rows, and along the rows of the transpose.

#include "common/scale.h"
#include "cuda/convert.cuh"
#include "cuda/units.cuh"
#include "cuda/vector.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kRowwiseBlocksPerSm = 6;
constexpr int kColumnwiseBlocksPerSm = 2;
constexpr int kColumnwiseRows = 64;  // a warp's strip: 4 lanes of 16 rows by 8 lanes of 4 columns
constexpr int kColumnwiseCols = 32;
constexpr int kLaneCols = 4;

// Encodes one block held in registers: 16 codes as two words, low nibble first. Returns the scale byte.
__device__ __forceinline__ uint32_t encode_block(const float (&x)[kBlock], const TensorScale& tensor,
                                                 uint32_t (&codes)[2]) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) bits = max(bits, magnitude_bits(x[i]));
    const uint32_t scale = block_scale(amax_of_bits(bits), tensor);
    const float encode = block_encode(scale, tensor);
    codes[0] = codes[1] = 0;
#pragma unroll
    for (int i = 0; i < kBlock; i += 4) {
        const uint32_t four =
            convert_four({x[i] * encode, x[i + 1] * encode, x[i + 2] * encode, x[i + 3] * encode});
        codes[i / 8] |= four << (4 * (i % 8));
    }
    return scale;
}

// A thread per block. Where no block is cut, the matrix is one run of blocks and rows do not matter.
template <typename T>
__global__ void __launch_bounds__(kThreads, kRowwiseBlocksPerSm)
    rowwise_kernel(const __grid_constant__ QuantizeRowsArgs args) {
    wait_for_previous_kernel();
    const T* input = static_cast<const T*>(args.input);
    const TensorScale tensor = tensor_scale(*args.amax);
    const int64_t row_blocks = ceil_div(args.cols, kBlock);
    const int64_t blocks = args.rows * row_blocks;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t block = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; block < blocks;
         block += stride) {
        int64_t offset = block * kBlock;
        int count = kBlock;
        if (args.cols % kBlock != 0) {
            const int64_t row = block / row_blocks;
            const int64_t col = (block - row * row_blocks) * kBlock;
            offset = row * args.cols + col;
            count = clamp_count(args.cols - col, kBlock);
        }
        float x[kBlock];
        load_elements(input + offset, count, x);
        uint32_t codes[2];
        args.rowwise_scale[block] = static_cast<uint8_t>(encode_block(x, tensor, codes));
        store8(args.rowwise_data + offset / 2, codes, count / 2);
    }
}

// A lane has four blocks, one in each of its columns. The four lanes of a column write 32 bytes of an output
// row.
template <typename T>
__global__ void __launch_bounds__(kThreads, kColumnwiseBlocksPerSm)
    columnwise_kernel(const __grid_constant__ QuantizeRowsArgs args) {
    wait_for_previous_kernel();
    const T* input = static_cast<const T*>(args.input);
    const TensorScale tensor = tensor_scale(*args.amax);
    const int64_t row_blocks = ceil_div(args.rows, kBlock);
    const int64_t across = ceil_div(args.cols, kColumnwiseCols);
    const int64_t units = ceil_div(args.rows, kColumnwiseRows) * across;
    for (int64_t unit = grid_warp(); unit < units; unit += grid_warps()) {
        const int64_t down = unit / across;
        const int64_t row = down * kColumnwiseRows + lane_index() / 8 * kBlock;
        const int64_t col = (unit - down * across) * kColumnwiseCols + lane_index() % 8 * kLaneCols;
        const int rows = clamp_count(args.rows - row, kBlock);
        const int cols = clamp_count(args.cols - col, kLaneCols);
        float x[kLaneCols][kBlock];
#pragma unroll
        for (int r = 0; r < kBlock; ++r) {
            float values[kLaneCols];
            load_elements(input + (row + r) * args.cols + col, r < rows ? cols : 0, values);
#pragma unroll
            for (int k = 0; k < kLaneCols; ++k) x[k][r] = values[k];
        }
        if (rows == 0) continue;
#pragma unroll
        for (int k = 0; k < kLaneCols; ++k) {
            if (k >= cols) break;
            uint32_t codes[2];
            const uint32_t scale = encode_block(x[k], tensor, codes);
            args.columnwise_scale[(col + k) * row_blocks + row / kBlock] = static_cast<uint8_t>(scale);
            store8(args.columnwise_data + ((col + k) * args.rows + row) / 2, codes, rows / 2);
        }
    }
}

template <typename T>
void quantize_rows_as(const QuantizeRowsArgs& args, cudaStream_t stream) {
    if (args.rowwise_data) {
        const int64_t blocks = args.rows * ceil_div(args.cols, kBlock);
        launch("quantize_rows", rowwise_kernel<T>,
               resident_blocks("quantize_rows", ceil_div(blocks, kThreads), kRowwiseBlocksPerSm), stream,
               args);
    }
    if (args.columnwise_data) {
        const int64_t units = ceil_div(args.rows, kColumnwiseRows) * ceil_div(args.cols, kColumnwiseCols);
        launch("quantize_rows", columnwise_kernel<T>,
               resident_blocks("quantize_rows", ceil_div(units, kWarps), kColumnwiseBlocksPerSm), stream,
               args);
    }
}

}  // namespace

void quantize_rows(const QuantizeRowsArgs& args, cudaStream_t stream) {
    switch (args.dtype) {
        case DType::kFloat32:
            return quantize_rows_as<float>(args, stream);
        case DType::kBFloat16:
            return quantize_rows_as<BFloat16>(args, stream);
        case DType::kFloat16:
            return quantize_rows_as<Float16>(args, stream);
    }
}

}  // namespace zerofp4::cuda
