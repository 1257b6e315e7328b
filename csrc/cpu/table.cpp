// The table of functions of one instruction set.

#include "cpu/kernels.h"

#define ZEROFP4_STRING(x) #x
#define ZEROFP4_NAME(x) ZEROFP4_STRING(x)

namespace zerofp4::cpu::ZEROFP4_ISA {

void partial_amax(const CastTable&, int threads);
void fused_scale(const CastTable&, int threads);
void partial_cast(const CastTable&, int threads);
void transpose(const TransposeTable&, int threads);
void quantize_rows(const QuantizeRowsArgs&, int threads);
void dequantize(const DequantizeArgs&, int threads);
void pad_scale(const ScaleLayoutArgs&, int threads);
void unpad_scale(const ScaleLayoutArgs&, int threads);
void convert(const ConvertArgs&, int threads);
void adamw_update(const AdamWTable&, int threads);

extern const Kernels kTable;
const Kernels kTable = {ZEROFP4_NAME(ZEROFP4_ISA),
                        &partial_amax,
                        &fused_scale,
                        &partial_cast,
                        &transpose,
                        &quantize_rows,
                        &dequantize,
                        &pad_scale,
                        &unpad_scale,
                        &convert,
                        &adamw_update};

}  // namespace zerofp4::cpu::ZEROFP4_ISA
