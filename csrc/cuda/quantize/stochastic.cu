// Quantization with stochastic rounding.

#include "cuda/format/stochastic.cuh"
#include "cuda/quantize/kernel.cuh"

namespace zerofp4::cuda {

void quantize_stochastic(const QuantizeArgs& args, cudaStream_t stream) {
    quantize_by<Stochastic>(args, stream);
}

}  // namespace zerofp4::cuda
