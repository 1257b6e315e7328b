// add_squares: the sums of the squares of a list of tensors.

#include "cpu/optim/squares.h"

#include "common/args/squares.h"
#include "cpu/device/parallel.h"
#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

// Not inlined: GCC would forget that the arrays do not overlap.
template <class T>
__attribute__((noinline)) void widen(const T* __restrict values, int64_t count, float* __restrict widened) {
    for (int64_t i = 0; i < count; ++i) widened[i] = load_float(values[i]);
}

template <class T>
void add_squares_as(const SquaresArgs& args, int threads) {
    for (int t = 0; t < args.list.count; ++t) {
        const T* tensor = static_cast<const T*>(args.list.tensors[t]);
        const int64_t numel = args.list.numels[t];
        parallel_shares(ceil_div(numel, kSums), threads, kGrain, [&](int64_t begin, int64_t end) {
            uint64_t words[kSquareWords] = {};
            float widened[kSums];
            for (int64_t at = begin * kSums; at < least(end * kSums, numel); at += kSums) {
                const int64_t count = least(kSums, numel - at);
                widen(tensor + at, count, widened);
                add_chunks(widened, count, words);
            }
            add_to_all(words, args.squares);
        });
    }
}

}  // namespace

void add_squares(const SquaresArgs& args, int threads) {
    with_dtype(args.list.dtype, [&](auto t) { add_squares_as<decltype(t)>(args, threads); });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
