// Packed codes into the staging buffer of a gather and out of it. A thread block copies what one item has of
// 32 KB of output, in the widest vectors for which input and output lie alike.

#include "common/args/gather.h"
#include "cuda/device/tuning.cuh"
#include "cuda/device/units.cuh"
#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kInFlight = kGatherUnit / (kThreads * kGatherVector);  // loads of a thread before its stores
static_assert(kInFlight * kThreads * kGatherVector == kGatherUnit);

// `bytes` are at most a unit.
template <typename Vector>
__device__ __forceinline__ void copy_vectors(const uint8_t* input, uint8_t* output, int bytes) {
    constexpr int kSize = static_cast<int>(sizeof(Vector));
    const int thread = static_cast<int>(threadIdx.x);
    const int head = min(bytes, (kSize - static_cast<int>(bytes_past(output, kSize))) % kSize);
    const int vectors = (bytes - head) / kSize;
    const Vector* from = reinterpret_cast<const Vector*>(input + head);
    Vector* to = reinterpret_cast<Vector*>(output + head);
    for (int first = thread; first < vectors; first += kInFlight * kThreads) {
        Vector values[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            if (first + i * kThreads < vectors) values[i] = __ldcs(from + first + i * kThreads);
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            if (first + i * kThreads < vectors) to[first + i * kThreads] = values[i];
        }
    }
    // What is before the first vector and after the last one: fewer bytes than threads.
    if (thread < bytes - vectors * kSize) {
        const int i = thread < head ? thread : thread + vectors * kSize;
        output[i] = input[i];
    }
}

__device__ __forceinline__ void copy_unit(const GatherItems& all) {
    if (blockIdx.x >= all.units) return;  // the block that is there for the state only
    const GatherDescriptor item = all.items[all.unit_items[blockIdx.x]];
    const int64_t unit = blockIdx.x - item.unit_begin;
    const uint8_t* input = in_global(item.input);
    uint8_t* output = in_global(item.output);
    if (unit == 0 && threadIdx.x == 0 && item.low) output[0] = shared_byte(*in_global(item.low), input[0]);
    const ByteSpan span = copied_span(item, unit);
    const int bytes = static_cast<int>(max(span.end - span.begin, int64_t{0}));
    const uintptr_t apart = reinterpret_cast<uintptr_t>(input) ^ reinterpret_cast<uintptr_t>(output);
    if (apart % sizeof(uint4) == 0) {
        copy_vectors<uint4>(input + span.begin, output + span.begin, bytes);
    } else if (apart % sizeof(uint32_t) == 0) {
        copy_vectors<uint32_t>(input + span.begin, output + span.begin, bytes);
    } else {
        copy_vectors<uint8_t>(input + span.begin, output + span.begin, bytes);
    }
}

__global__ void __launch_bounds__(kThreads, kTuning.gather_blocks)
    gather_pack_kernel(const __grid_constant__ GatherTable table, int32_t known) {
    wait_for_previous_kernel();
    const int32_t state = own_state(table, known);
    if (blockIdx.x == 0 && threadIdx.x == 0) *state_of(table, table.rank) = state;
    if (state == kPresent) copy_unit(table.own);
}

__global__ void __launch_bounds__(kThreads, kTuning.gather_blocks)
    gather_unpack_kernel(const __grid_constant__ GatherTable table) {
    wait_for_previous_kernel();
    bool refused = false;
    for (int rank = static_cast<int>(threadIdx.x); rank < table.ranks; rank += kThreads)
        refused = refused || *state_of(table, rank) != kPresent;
    if (__syncthreads_or(refused)) {
        if (blockIdx.x == 0 && threadIdx.x == 0) report_refusal(table);
        return;
    }
    copy_unit(table.received);
}

// A list without units still has a state.
int64_t blocks_of(const GatherItems& all) { return std::max<int64_t>(all.units, 1); }

}  // namespace

void gather_pack(const GatherTable& table, int32_t known, cudaStream_t stream) {
    launch("gather_pack", gather_pack_kernel, blocks_of(table.own), stream, table, known);
}

void gather_unpack(const GatherTable& table, cudaStream_t stream) {
    launch("gather_unpack", gather_unpack_kernel, blocks_of(table.received), stream, table);
}

}  // namespace zerofp4::cuda
