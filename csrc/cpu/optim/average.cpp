// average: the mean of pieces that lie side by side, added in their order, and the sums of its squares.

#include "common/args/average.h"

#include "common/squares.h"
#include "cpu/device/parallel.h"
#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int64_t kSums = 1024;  // elements whose sums stay in the cache until every piece was added
constexpr int64_t kGrain = 16;   // of so many sums
static_assert(kSums % kSquareChunk == 0);

// Not inlined: GCC would forget that the arrays do not overlap.
template <class T, bool kFirst>
__attribute__((noinline)) void add(const T* __restrict piece, int64_t count, float* __restrict sums) {
    for (int64_t i = 0; i < count; ++i)
        sums[i] = kFirst ? load_float(piece[i]) : sums[i] + load_float(piece[i]);
}

void divide(float* sums, int64_t count, float by) {
    for (int64_t i = 0; i < count; ++i) sums[i] /= by;
}

// Chunks of `count` means, the first of which begins one; what is behind them counts as zeros.
void add_squares(const float* means, int64_t count, uint64_t* words) {
    constexpr int kQuads = kSquareChunk / kSquareQuad;
    for (int64_t chunk = 0; chunk < count; chunk += kSquareChunk) {
        float x[kSquareChunk] = {}, sums[kQuads];
        const int64_t here = least(kSquareChunk, count - chunk);
        for (int64_t i = 0; i < here; ++i) x[i] = means[chunk + i];
        for (int q = 0; q < kQuads; ++q) sums[q] = quad_of_squares(x + q * kSquareQuad);
        for (int left = kQuads / 2; left > 0; left /= 2) {
            for (int q = 0; q < left; ++q) sums[q] = sums[2 * q] + sums[2 * q + 1];
        }
        const SquareWord found = square_word(sums[0]);
        words[found.word] += found.add;
    }
}

template <class T>
void average_sums(const AverageArgs& args, int64_t begin, int64_t end) {
    uint64_t words[kSquareWords] = {};
    float means[kSums];
    for (int64_t at = begin * kSums; at < least(end * kSums, args.numel); at += kSums) {
        const int64_t count = least(kSums, args.numel - at);
        float* sums = args.output == nullptr ? means : args.output + at;
        add<T, true>(piece_of<T>(args, 0) + at, count, sums);
        for (int64_t r = 1; r < args.count; ++r) add<T, false>(piece_of<T>(args, r) + at, count, sums);
        divide(sums, count, static_cast<float>(args.count));
        if (args.squares != nullptr) add_squares(sums, count, words);
    }
    for (int w = 0; args.squares != nullptr && w < kSquareWords; ++w) {
        if (words[w] == 0) continue;
#pragma omp atomic
        args.squares[w] += words[w];
    }
}

}  // namespace

void average(const AverageArgs& args, int threads) {
    parallel_shares(ceil_div(args.numel, kSums), threads, kGrain, [&](int64_t begin, int64_t end) {
        with_dtype(args.dtype, [&](auto t) { average_sums<decltype(t)>(args, begin, end); });
    });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
