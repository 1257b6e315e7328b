#pragma once
// Sums of squares on the CPU, for the files of this folder.

#include "common/squares.h"
#include "cpu/device/parallel.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int64_t kSums = 1024;  // elements that stay in the cache until their squares were added
constexpr int64_t kGrain = 16;   // of so many times kSums, which a thread takes at least
static_assert(kSums % kSquareChunk == 0);

// Chunks of `count` values, the first of which begins one; what is behind them counts as zeros.
void add_chunks(const float* values, int64_t count, uint64_t* words) {
    constexpr int kQuads = kSquareChunk / kSquareQuad;
    for (int64_t chunk = 0; chunk < count; chunk += kSquareChunk) {
        float x[kSquareChunk] = {}, sums[kQuads];
        const int64_t here = least(kSquareChunk, count - chunk);
        for (int64_t i = 0; i < here; ++i) x[i] = values[chunk + i];
        for (int q = 0; q < kQuads; ++q) sums[q] = quad_of_squares(x + q * kSquareQuad);
        for (int left = kQuads / 2; left > 0; left /= 2) {
            for (int q = 0; q < left; ++q) sums[q] = sums[2 * q] + sums[2 * q + 1];
        }
        const SquareWord found = square_word(sums[0]);
        words[found.word] += found.add;
    }
}

// A thread's words to those of all.
void add_to_all(const uint64_t* words, uint64_t* squares) {
    for (int w = 0; w < kSquareWords; ++w) {
        if (words[w] == 0) continue;
#pragma omp atomic
        squares[w] += words[w];
    }
}

}  // namespace
}  // namespace zerofp4::cpu::ZEROFP4_ISA
