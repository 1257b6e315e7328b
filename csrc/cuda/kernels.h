#pragma once
// The CUDA operations, one file each, the same names as csrc/cpu, as a table of functions. Each queues its
// kernels on `stream`, allocates nothing and throws std::runtime_error when a launch fails.

#include "common/args/adamw.h"
#include "common/args/average.h"
#include "common/args/cast.h"
#include "common/args/decide.h"
#include "common/args/dequantize.h"
#include "common/args/gather.h"
#include "common/args/grouped_values.h"
#include "common/args/means.h"
#include "common/args/mxfp8.h"
#include "common/args/nonfinite.h"
#include "common/args/peers.h"
#include "common/args/scale_layout.h"
#include "common/args/squares.h"
#include "common/args/transpose.h"
#include "common/args/widen.h"
#include "cuda/gemm/product.h"

// As in cuda_runtime_api.h, which a build without CUDA does not have.
typedef struct CUstream_st* cudaStream_t;

namespace zerofp4::cuda {

// `host` is the host's copy of the descriptors: a table of one travels in the kernel's arguments, so that
// operations on a single tensor need no device memory for it.
struct Kernels {
    // Makes a device current; returns what leave_device is given to go back, -1 where it was current before.
    int (*enter_device)(int device);
    void (*leave_device)(int entered);

    void (*cast_begin)(const CastTable&, float error, cudaStream_t stream);
    void (*partial_amax)(const CastTable&, const WeightDescriptor* host, cudaStream_t stream);
    void (*fused_scale)(const CastTable&, const WeightDescriptor* host, cudaStream_t stream);
    void (*partial_cast)(const CastTable&, const WeightDescriptor* host, cudaStream_t stream);
    void (*spread_scales)(const CastTable&, const WeightDescriptor* host, cudaStream_t stream);
    void (*transpose)(const TransposeTable&, const TransposeDescriptor* host, cudaStream_t stream);
    void (*gather_pack)(const GatherTable&, int32_t state, cudaStream_t stream);
    void (*gather_unpack)(const GatherTable&, cudaStream_t stream);
    // Of `experts` matrices (matrix_of), which may be one.
    void (*tensor_amax)(const AmaxArgs& first, int64_t experts, cudaStream_t stream);
    void (*quantize)(const QuantizeArgs& first, int64_t experts, cudaStream_t stream);
    void (*grouped_amax)(const GroupedAmaxArgs&, cudaStream_t stream);
    void (*quantize_grouped)(const GroupedArgs&, cudaStream_t stream);
    void (*grouped_values)(const GroupedValuesArgs&, cudaStream_t stream);
    void (*dequantize)(const DequantizeTable&, DType, const DequantizeDescriptor* host, cudaStream_t stream);
    // The same, and the alpha of a product.
    void (*product_values)(const DequantizeTable&, DType, const ProductScale&,
                           const DequantizeDescriptor* host, cudaStream_t stream);
    void (*pad_scale)(const ScaleLayoutTable&, const ScaleLayoutDescriptor* host, cudaStream_t stream);
    void (*unpad_scale)(const ScaleLayoutTable&, const ScaleLayoutDescriptor* host, cudaStream_t stream);
    void (*quantize_mxfp8)(const Mxfp8Args&, cudaStream_t stream);
    void (*dequantize_mxfp8)(const Mxfp8DequantizeTable&, DType, const Mxfp8DequantizeDescriptor* host,
                             cudaStream_t stream);
    // The scalars of `count` tensors from `first` on, which share their options; addresses of gradients
    // travel in the kernel's arguments, a few hundred a launch, so that they may change at every step.
    void (*adamw_begin)(const AdamWTable&, const AdamWOptions&, int64_t first, const uintptr_t* gradients,
                        int64_t count, cudaStream_t stream);
    void (*adamw_update)(const AdamWTable&, cudaStream_t stream);
    void (*compact_update)(const AdamWTable&, cudaStream_t stream);
    void (*average)(const AverageArgs&, cudaStream_t stream);
    void (*round_means)(const RoundMeansArgs&, cudaStream_t stream);
    void (*average_means)(const AverageMeansArgs&, cudaStream_t stream);
    void (*find_nonfinite)(const NonfiniteArgs&, cudaStream_t stream);
    void (*add_squares)(const SquaresArgs&, cudaStream_t stream);
    void (*decide)(const DecideArgs&, cudaStream_t stream);
    void (*widen)(const WidenArgs&, cudaStream_t stream);
    void (*barrier)(const BarrierArgs&, cudaStream_t stream);

    // Finds cuBLASLt, under its file name, in the process; returns its version. Throws std::runtime_error
    // where it is not there.
    int64_t (*load_cublaslt)(const char* name);
    // For the current device; null where cuBLASLt has no algorithm.
    std::unique_ptr<Product> (*find_product)(const ProductProblem&);
};

// Null in a build without nvcc.
const Kernels* kernels();

}  // namespace zerofp4::cuda
