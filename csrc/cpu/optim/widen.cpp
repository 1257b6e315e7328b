// widen: the values of a list of tensors as float32.

#include "common/args/widen.h"

#include "cpu/device/parallel.h"
#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int64_t kChunk = 4096;  // elements
constexpr int64_t kGrain = 16;    // of so many chunks

// Not inlined: GCC would forget that the arrays do not overlap.
template <class T>
__attribute__((noinline)) void widen_chunk(const T* __restrict values, int64_t count,
                                           float* __restrict output) {
    for (int64_t i = 0; i < count; ++i) output[i] = load_float(values[i]);
}

template <class T>
void widen_as(const WidenArgs& args, int threads) {
    for (int t = 0; t < args.list.count; ++t) {
        const T* tensor = static_cast<const T*>(args.list.tensors[t]);
        const int64_t numel = args.list.numels[t];
        parallel_shares(ceil_div(numel, kChunk), threads, kGrain, [&](int64_t begin, int64_t end) {
            const int64_t first = begin * kChunk;
            widen_chunk(tensor + first, least(end * kChunk, numel) - first, args.outputs[t] + first);
        });
    }
}

}  // namespace

void widen(const WidenArgs& args, int threads) {
    with_dtype(args.list.dtype, [&](auto t) { widen_as<decltype(t)>(args, threads); });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
