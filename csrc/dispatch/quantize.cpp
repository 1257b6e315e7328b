#include "dispatch/quantize.h"

namespace zerofp4 {

void tensor_amax(const Target& target, const AmaxArgs& args, int64_t experts) {
    dispatch(
        target,
        [&](const cpu::Kernels& k, int threads) {
            for (int64_t e = 0; e < experts; ++e) k.tensor_amax(matrix_of(args, e), threads);
        },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.tensor_amax(args, experts, stream); });
}

void quantize(const Target& target, const QuantizeArgs& args, int64_t experts) {
    dispatch(
        target,
        [&](const cpu::Kernels& k, int threads) {
            for (int64_t e = 0; e < experts; ++e) k.quantize(matrix_of(args, e), threads);
        },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.quantize(args, experts, stream); });
}

void grouped_amax(const Target& target, const GroupedAmaxArgs& args) {
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.grouped_amax(args, threads); },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.grouped_amax(args, stream); });
}

void quantize_grouped(const Target& target, const GroupedArgs& args) {
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.quantize_grouped(args, threads); },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.quantize_grouped(args, stream); });
}

void grouped_values(const Target& target, const GroupedValuesArgs& args) {
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.grouped_values(args, threads); },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.grouped_values(args, stream); });
}

}  // namespace zerofp4
