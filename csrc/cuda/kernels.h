#pragma once
// Launchers of the CUDA kernels, one per operation, the same names as csrc/cpu. All are asynchronous on
// `stream`, allocate nothing and throw std::runtime_error when a launch fails. A build without nvcc links
// unavailable.cpp in their place.

#include "common/args/adamw.h"
#include "common/args/cast.h"
#include "common/args/convert.h"
#include "common/args/grouped.h"
#include "common/args/mxfp8.h"
#include "common/args/scale_layout.h"
#include "common/args/transpose.h"

typedef struct CUstream_st*
    cudaStream_t;  // as in cuda_runtime_api.h, which a build without CUDA does not have

namespace zerofp4::cuda {

// Makes a device current for as long as it lives.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device);
    ~DeviceGuard();
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    int previous_ = -1;
};

// `host` is the host's copy of the descriptors: a table of one travels in the kernel's arguments, so that
// operations on a single tensor need no device memory for it.
void cast_begin(const CastTable& table, float error, cudaStream_t stream);
void partial_amax(const CastTable& table, const WeightDescriptor* host, cudaStream_t stream);
void fused_scale(const CastTable& table, const WeightDescriptor* host, cudaStream_t stream);
void partial_cast(const CastTable& table, const WeightDescriptor* host, cudaStream_t stream);
void transpose(const TransposeTable& table, const TransposeDescriptor* host, cudaStream_t stream);

void tensor_amax(const AmaxArgs& args, cudaStream_t stream);
void quantize(const QuantizeArgs& args, cudaStream_t stream);
void grouped_amax(const GroupedAmaxArgs& args, cudaStream_t stream);
void quantize_grouped(const GroupedArgs& args, cudaStream_t stream);
void dequantize(const DequantizeTable& table, DType dtype, const DequantizeDescriptor* host,
                cudaStream_t stream);
void pad_scale(const ScaleLayoutTable& table, const ScaleLayoutDescriptor* host, cudaStream_t stream);
void unpad_scale(const ScaleLayoutTable& table, const ScaleLayoutDescriptor* host, cudaStream_t stream);
void convert(const ConvertArgs& args, cudaStream_t stream);
void quantize_mxfp8(const Mxfp8Args& args, cudaStream_t stream);
void dequantize_mxfp8(const Mxfp8DequantizeTable& table, DType dtype, const Mxfp8DequantizeDescriptor* host,
                      cudaStream_t stream);

// The scalars of `count` tensors from `first` on, which share their options; addresses of gradients travel in
// the kernel's arguments, a few hundred a launch, so that they may change at every step.
void adamw_begin(const AdamWTable& table, const AdamWOptions& options, int64_t first,
                 const uintptr_t* gradients, int64_t count, cudaStream_t stream);
void adamw_update(const AdamWTable& table, cudaStream_t stream);

}  // namespace zerofp4::cuda
