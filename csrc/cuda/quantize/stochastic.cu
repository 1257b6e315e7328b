// Quantization with stochastic rounding.

#include "cuda/format/stochastic.cuh"
#include "cuda/quantize/kernel.cuh"

namespace zerofp4::cuda {

void launch_quantize_stochastic(const QuantizeLaunch& given, dim3 blocks, cudaStream_t stream) {
    launch_quantize<Stochastic>(given, blocks, stream);
}

}  // namespace zerofp4::cuda
