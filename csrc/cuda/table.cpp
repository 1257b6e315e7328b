// The table of the CUDA operations.

#include "cuda/kernels.h"

namespace zerofp4::cuda {

#if defined(ZEROFP4_CUDA_VERSION)

int enter_device(int device);
void leave_device(int entered);
void cast_begin(const CastTable&, float error, cudaStream_t);
void partial_amax(const CastTable&, const WeightDescriptor* host, cudaStream_t);
void fused_scale(const CastTable&, const WeightDescriptor* host, cudaStream_t);
void partial_cast(const CastTable&, const WeightDescriptor* host, cudaStream_t);
void transpose(const TransposeTable&, const TransposeDescriptor* host, cudaStream_t);
void gather_pack(const GatherTable&, int32_t state, cudaStream_t);
void gather_unpack(const GatherTable&, cudaStream_t);
void tensor_amax(const AmaxArgs&, cudaStream_t);
void quantize(const QuantizeArgs&, cudaStream_t);
void tensor_amax_stack(const AmaxArgs& first, int64_t experts, cudaStream_t);
void quantize_stack(const QuantizeArgs& first, int64_t experts, cudaStream_t);
void grouped_amax(const GroupedAmaxArgs&, cudaStream_t);
void quantize_grouped(const GroupedArgs&, cudaStream_t);
void grouped_values(const GroupedValuesArgs&, cudaStream_t);
void dequantize(const DequantizeTable&, DType, const DequantizeDescriptor* host, cudaStream_t);
void product_values(const DequantizeTable&, DType, const ProductScale&, const DequantizeDescriptor* host,
                    cudaStream_t);
void pad_scale(const ScaleLayoutTable&, const ScaleLayoutDescriptor* host, cudaStream_t);
void unpad_scale(const ScaleLayoutTable&, const ScaleLayoutDescriptor* host, cudaStream_t);
void quantize_mxfp8(const Mxfp8Args&, cudaStream_t);
void dequantize_mxfp8(const Mxfp8DequantizeTable&, DType, const Mxfp8DequantizeDescriptor* host,
                      cudaStream_t);
void adamw_begin(const AdamWTable&, const AdamWOptions&, int64_t first, const uintptr_t* gradients,
                 int64_t count, cudaStream_t);
void adamw_update(const AdamWTable&, cudaStream_t);
void average(const AverageArgs&, cudaStream_t);
void find_nonfinite(const NonfiniteArgs&, cudaStream_t);
void add_squares(const SquaresArgs&, cudaStream_t);
void barrier(const BarrierArgs&, cudaStream_t);
int64_t load_cublaslt(const char* name);
std::unique_ptr<Product> find_product(const ProductProblem&);

const Kernels* kernels() {
    static constexpr Kernels kTable = {
        &enter_device,   &leave_device,      &cast_begin,     &partial_amax,  &fused_scale,
        &partial_cast,   &transpose,         &gather_pack,    &gather_unpack, &tensor_amax,
        &quantize,       &tensor_amax_stack, &quantize_stack, &grouped_amax,  &quantize_grouped,
        &grouped_values, &dequantize,        &product_values, &pad_scale,     &unpad_scale,
        &quantize_mxfp8, &dequantize_mxfp8,  &adamw_begin,    &adamw_update,  &average,
        &find_nonfinite, &add_squares,       &barrier,        &load_cublaslt, &find_product};
    return &kTable;
}

#else

const Kernels* kernels() { return nullptr; }

#endif

}  // namespace zerofp4::cuda
