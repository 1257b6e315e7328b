// find_nonfinite: which of a list of tensors holds a NaN or Inf.

#include "common/args/nonfinite.h"

#include "cpu/device/parallel.h"
#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int64_t kChunk = 4096;  // elements that are looked at before what was found is
constexpr int64_t kGrain = 16;    // of so many elements

template <class T>
__attribute__((noinline)) bool is_nonfinite(const T* tensor, int64_t count) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; ++i) most = larger(most, magnitude_bits(load_float(tensor[i])));
    return most >= kInfBits;
}

template <class T>
void find_nonfinite_as(const NonfiniteArgs& args, int threads) {
    if (args.when != nullptr && args.when[0] == 0 && args.when[1] == 0) return;
    for (int t = 0; t < args.list.count; ++t) {
        const T* tensor = static_cast<const T*>(args.list.tensors[t]);
        const int64_t numel = args.list.numels[t];
        int found = 0;
        parallel_shares(ceil_div(numel, kChunk), threads, kGrain, [&](int64_t begin, int64_t end) {
            for (int64_t chunk = begin; chunk < end; ++chunk) {
                const int64_t first = chunk * kChunk;
                if (!is_nonfinite(tensor + first, least(kChunk, numel - first))) continue;
#pragma omp atomic write
                found = 1;
                return;
            }
        });
        if (found && args.words[t] > *args.found) *args.found = args.words[t];
    }
}

}  // namespace

void find_nonfinite(const NonfiniteArgs& args, int threads) {
    with_dtype(args.list.dtype, [&](auto t) { find_nonfinite_as<decltype(t)>(args, threads); });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
