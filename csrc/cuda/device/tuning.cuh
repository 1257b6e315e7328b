#pragma once
// Numbers of kernels that were chosen by measuring, by architecture: all that a new GPU may want changed.

namespace zerofp4::cuda {

// Thread blocks that a multiprocessor has registers for. With blocks of 256 threads a thread has 128
// registers at most with 2 blocks, 80 with 3, 64 with 4 and 32 with 8.
struct Tuning {
    int cast_amax_blocks = 3;
    int cast_blocks = 3;
    int scale_blocks = 2;
    int transpose_blocks = 3;

    int quantize_blocks = 3;
    int quantize_floats_blocks = 2;
    int quantize_wide_rows_blocks = 4;
    int four_over_six_blocks = 4;

    int dequantize_blocks = 4;
    // Of a single matrix, which is bound by memory: pieces of fewer rows, and more warps at once.
    int dequantize_rows_blocks = 8;
    int group_values_blocks = 4;

    int quantize_mxfp8_rows_blocks = 4;
    int quantize_mxfp8_columns_blocks = 3;  // also beside rows
    int dequantize_mxfp8_blocks = 8;

    int adamw_blocks = 4;
    // Of 128 threads, and with 132 KB of shared memory: with less there are fewer.
    int compact_adamw_blocks = 4;
    int gather_blocks = 4;
};

// All were chosen on Hopper. arch: as __CUDA_ARCH__
constexpr Tuning tuning_of(int arch) {
    Tuning tuning;
    if (arch < 900) tuning.four_over_six_blocks = 3;  // more would spill
    return tuning;
}

// Of the architecture that is compiled for. The host reads none.
#if defined(__CUDA_ARCH__)
constexpr Tuning kTuning = tuning_of(__CUDA_ARCH__);
#else
constexpr Tuning kTuning{};
#endif

}  // namespace zerofp4::cuda
