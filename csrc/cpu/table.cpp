// The table of functions of one instruction set.

#include "cpu/kernels.h"

#define ZEROFP4_STRING(x) #x
#define ZEROFP4_NAME(x) ZEROFP4_STRING(x)

namespace zerofp4::cpu::ZEROFP4_ISA {

void partial_amax(const CastTable&, int threads);
void fused_scale(const CastTable&, int threads);
void partial_cast(const CastTable&, int threads);
void transpose(const TransposeTable&, int threads);
void gather_pack(const GatherTable&, int32_t state, int threads);
void gather_unpack(const GatherTable&, int threads);
void tensor_amax(const AmaxArgs&, int threads);
void quantize(const QuantizeArgs&, int threads);
void grouped_amax(const GroupedAmaxArgs&, int threads);
void quantize_grouped(const GroupedArgs&, int threads);
void grouped_values(const GroupedValuesArgs&, int threads);
void dequantize(const DequantizeTable&, DType, int threads);
void pad_scale(const ScaleLayoutTable&, int threads);
void unpad_scale(const ScaleLayoutTable&, int threads);
void quantize_mxfp8(const Mxfp8Args&, int threads);
void dequantize_mxfp8(const Mxfp8DequantizeTable&, DType, int threads);
void adamw_update(const AdamWTable&, int threads);
void average(const AverageArgs&, int threads);
void find_nonfinite(const NonfiniteArgs&, int threads);
void add_squares(const SquaresArgs&, int threads);

extern const Kernels kTable;
const Kernels kTable = {ZEROFP4_NAME(ZEROFP4_ISA),
                        &partial_amax,
                        &fused_scale,
                        &partial_cast,
                        &transpose,
                        &gather_pack,
                        &gather_unpack,
                        &tensor_amax,
                        &quantize,
                        &grouped_amax,
                        &quantize_grouped,
                        &grouped_values,
                        &dequantize,
                        &pad_scale,
                        &unpad_scale,
                        &quantize_mxfp8,
                        &dequantize_mxfp8,
                        &adamw_update,
                        &average,
                        &find_nonfinite,
                        &add_squares};

}  // namespace zerofp4::cpu::ZEROFP4_ISA
