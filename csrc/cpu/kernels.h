#pragma once
// The CPU operations, one file each, the same names as csrc/cuda. Every file is compiled once per instruction
// set (ZEROFP4_ISA names it); select.cpp picks one table of functions at run time.

#include "common/args/adamw.h"
#include "common/args/average.h"
#include "common/args/cast.h"
#include "common/args/decide.h"
#include "common/args/gather.h"
#include "common/args/grouped_values.h"
#include "common/args/means.h"
#include "common/args/mxfp8.h"
#include "common/args/nonfinite.h"
#include "common/args/scale_layout.h"
#include "common/args/squares.h"
#include "common/args/transpose.h"
#include "common/args/widen.h"

namespace zerofp4::cpu {

// Each takes the number of OpenMP threads to use.
struct Kernels {
    const char* isa;
    void (*partial_amax)(const CastTable&, int threads);
    void (*fused_scale)(const CastTable&, int threads);
    void (*partial_cast)(const CastTable&, int threads);
    void (*spread_scales)(const CastTable&, int threads);
    void (*transpose)(const TransposeTable&, int threads);
    void (*gather_pack)(const GatherTable&, int32_t state, int threads);
    void (*gather_unpack)(const GatherTable&, int threads);
    void (*tensor_amax)(const AmaxArgs&, int threads);
    void (*quantize)(const QuantizeArgs&, int threads);
    void (*grouped_amax)(const GroupedAmaxArgs&, int threads);
    void (*quantize_grouped)(const GroupedArgs&, int threads);
    void (*grouped_values)(const GroupedValuesArgs&, int threads);
    void (*dequantize)(const DequantizeTable&, DType, int threads);
    void (*pad_scale)(const ScaleLayoutTable&, int threads);
    void (*unpad_scale)(const ScaleLayoutTable&, int threads);
    void (*quantize_mxfp8)(const Mxfp8Args&, int threads);
    void (*dequantize_mxfp8)(const Mxfp8DequantizeTable&, DType, int threads);
    void (*adamw_update)(const AdamWTable&, int threads);
    void (*compact_update)(const AdamWTable&, int threads);
    void (*average)(const AverageArgs&, int threads);
    void (*round_means)(const RoundMeansArgs&, int threads);
    void (*average_means)(const AverageMeansArgs&, int threads);
    void (*find_nonfinite)(const NonfiniteArgs&, int threads);
    void (*add_squares)(const SquaresArgs&, int threads);
    void (*decide)(const DecideArgs&, int threads);
    void (*widen)(const WidenArgs&, int threads);
};

// The best table that this processor runs, or the one that the environment variable ZEROFP4_CPU_ISA names
// when this is first called. Throws std::runtime_error when there is no such table or the processor does not
// run it.
const Kernels& kernels();

void cast_begin(const CastTable& table, float error);

}  // namespace zerofp4::cpu
