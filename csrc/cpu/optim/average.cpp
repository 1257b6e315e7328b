// average: the mean of pieces that lie side by side, added in their order, and the sums of its squares.

#include "common/args/average.h"

#include "cpu/device/parallel.h"
#include "cpu/kernels.h"
#include "cpu/optim/squares.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

// Not inlined: GCC would forget that the arrays do not overlap.
template <class T, bool kFirst>
__attribute__((noinline)) void add(const T* __restrict piece, int64_t count, float* __restrict sums) {
    for (int64_t i = 0; i < count; ++i)
        sums[i] = kFirst ? load_float(piece[i]) : sums[i] + load_float(piece[i]);
}

void divide(float* sums, int64_t count, float by) {
    for (int64_t i = 0; i < count; ++i) sums[i] /= by;
}

template <class T>
void average_sums(const AverageArgs& args, int64_t begin, int64_t end) {
    uint64_t words[kSquareWords] = {};
    for (int64_t at = begin * kSums; at < least(end * kSums, args.numel); at += kSums) {
        const int64_t count = least(kSums, args.numel - at);
        float* sums = args.output + at;
        add<T, true>(piece_of<T>(args, 0) + at, count, sums);
        for (int64_t r = 1; r < args.count; ++r) add<T, false>(piece_of<T>(args, r) + at, count, sums);
        divide(sums, count, static_cast<float>(args.count));
        if (args.squares != nullptr) add_chunks(sums, count, words);
    }
    if (args.squares != nullptr) add_to_all(words, args.squares);
}

}  // namespace

void average(const AverageArgs& args, int threads) {
    parallel_shares(ceil_div(args.numel, kSums), threads, kGrain, [&](int64_t begin, int64_t end) {
        with_dtype(args.dtype, [&](auto t) { average_sums<decltype(t)>(args, begin, end); });
    });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
