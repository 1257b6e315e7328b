// Stands in for the CUDA side in a build without nvcc. Python refuses CUDA tensors before it gets here.

#include <stdexcept>

#include "cuda/kernels.h"

namespace zerofp4::cuda {
namespace {

[[noreturn]] void fail() { throw std::runtime_error("zerofp4 was built without CUDA"); }

}  // namespace

DeviceGuard::DeviceGuard(int) { fail(); }
DeviceGuard::~DeviceGuard() = default;

void cast_begin(const CastTable&, float, cudaStream_t) { fail(); }
void partial_amax(const CastTable&, const WeightDescriptor*, cudaStream_t) { fail(); }
void fused_scale(const CastTable&, const WeightDescriptor*, cudaStream_t) { fail(); }
void partial_cast(const CastTable&, const WeightDescriptor*, cudaStream_t) { fail(); }
void transpose(const TransposeTable&, const TransposeDescriptor*, cudaStream_t) { fail(); }
void tensor_amax(const AmaxArgs&, cudaStream_t) { fail(); }
void quantize(const QuantizeArgs&, cudaStream_t) { fail(); }
void grouped_amax(const GroupedAmaxArgs&, cudaStream_t) { fail(); }
void quantize_grouped(const GroupedArgs&, cudaStream_t) { fail(); }
void dequantize(const DequantizeTable&, DType, const DequantizeDescriptor*, cudaStream_t) { fail(); }
void pad_scale(const ScaleLayoutTable&, const ScaleLayoutDescriptor*, cudaStream_t) { fail(); }
void unpad_scale(const ScaleLayoutTable&, const ScaleLayoutDescriptor*, cudaStream_t) { fail(); }
void convert(const ConvertArgs&, cudaStream_t) { fail(); }
void quantize_mxfp8(const Mxfp8Args&, cudaStream_t) { fail(); }
void dequantize_mxfp8(const Mxfp8DequantizeTable&, DType, const Mxfp8DequantizeDescriptor*, cudaStream_t) {
    fail();
}
void adamw_begin(const AdamWTable&, const AdamWOptions&, int64_t, const uintptr_t*, int64_t, cudaStream_t) {
    fail();
}
void adamw_update(const AdamWTable&, cudaStream_t) { fail(); }

}  // namespace zerofp4::cuda
