// Quantization: of a matrix, of a stack of them, of groups of rows.

#include "common/args/quantize.h"
#include "cuda/quantize/kernel.cuh"
#include "cuda/quantize/wide_rows.cuh"

namespace zerofp4::cuda {

void quantize_four_over_six(const QuantizeArgs& args, cudaStream_t stream);  // four_over_six.cu

namespace {

void launch_quantize_any(const QuantizeLaunch& given, dim3 blocks, cudaStream_t stream) {
    if (given.given.whole.rng_state) return launch_quantize_stochastic(given, blocks, stream);
    launch_quantize<Nearest>(given, blocks, stream);
}

bool has_own_kernel(const QuantizeArgs& args) { return args.choice.e4m3_max > 0.0f || has_wide_rows(args); }

void quantize_by_own_kernel(const QuantizeArgs& args, cudaStream_t stream) {
    if (args.choice.e4m3_max > 0.0f) return quantize_four_over_six(args, stream);
    quantize_wide_rows(args, stream);
}

}  // namespace

void quantize(const QuantizeArgs& first, int64_t experts, cudaStream_t stream) {
    if (has_own_kernel(first)) {
        for (int64_t e = 0; e < experts; ++e) quantize_by_own_kernel(matrix_of(first, e), stream);
        return;
    }
    const TileGrid grid(first);
    const Matrices matrices = experts == 1 ? Matrices::kOne : Matrices::kStack;
    launch_quantize_any(
        {{first, {}, nullptr, nullptr}, matrices, grid.shift, static_cast<uint32_t>(grid.bands), experts},
        grid.blocks(experts), stream);
}

void quantize_grouped(const GroupedArgs& args, cudaStream_t stream) {
    launch_quantize_any({args, Matrices::kGroups, 0, 0, 0}, group_blocks(args), stream);
}

}  // namespace zerofp4::cuda
