// Quantization of groups with stochastic rounding.

#include "cuda/format/stochastic.cuh"
#include "cuda/quantize/grouped.cuh"

namespace zerofp4::cuda {

void quantize_grouped_stochastic(const GroupedArgs& args, cudaStream_t stream) {
    quantize_grouped_by<Stochastic>(args, stream);
}

}  // namespace zerofp4::cuda
