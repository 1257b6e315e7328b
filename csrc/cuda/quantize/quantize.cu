// Quantization, rounding to nearest; what needs more than that is compiled elsewhere.

#include "common/args/quantize.h"
#include "cuda/quantize/kernel.cuh"

namespace zerofp4::cuda {

void quantize_stochastic(const QuantizeArgs& args, cudaStream_t stream);     // stochastic.cu
void quantize_four_over_six(const QuantizeArgs& args, cudaStream_t stream);  // four_over_six.cu

void quantize(const QuantizeArgs& args, cudaStream_t stream) {
    if (args.choice.e4m3_max > 0.0f) return quantize_four_over_six(args, stream);
    if (args.rng_state) return quantize_stochastic(args, stream);
    quantize_by<Nearest>(args, stream);
}

}  // namespace zerofp4::cuda
