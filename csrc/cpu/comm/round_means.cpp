// round_means: means of a host, rounded at random to bfloat16.

#include "common/args/round_means.h"

#include "cpu/device/parallel.h"
#include "cpu/device/philox.h"
#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int kBlocks = 32;                       // of Philox, drawn at once
constexpr int kChunk = kBlocks * kRoundedAtOnce;  // elements
constexpr int64_t kGrain = 64;                    // of so many chunks

// Not inlined: GCC would forget that the arrays do not overlap.
__attribute__((noinline)) void round_chunk(const float* __restrict values, const uint16_t* __restrict random,
                                           int64_t count, BFloat16* __restrict output) {
    for (int64_t i = 0; i < count; ++i) output[i].bits = float_to_bfloat16_stochastic(values[i], random[i]);
}

void round_piece(const RoundMeansArgs& args, const RoundedPiece& piece, int64_t begin, int64_t end) {
    for (int64_t at = begin * kChunk; at < least(end * kChunk, piece.numel); at += kChunk) {
        alignas(kVectorBytes) uint16_t random[kChunk];
        draw_blocks<kBlocks>(reinterpret_cast<uint8_t*>(random), [&](int b) {
            const int64_t block = (piece.first + at) / kRoundedAtOnce + b;
            return wire_bytes(args, piece.number, count_from(static_cast<uint64_t>(block)));
        });
        const int64_t place = piece.begin + at;
        round_chunk(args.values + place, random, least(kChunk, piece.numel - at), args.output + place);
    }
}

}  // namespace

void round_means(const RoundMeansArgs& args, int threads) {
    int64_t end = 0;
    for (int64_t i = 0; i <= args.count; ++i) {
        const int64_t begin = i < args.count ? args.pieces[i].begin : args.numel;
        std::memset(args.output + end, 0, static_cast<size_t>(begin - end) * sizeof(BFloat16));
        if (i == args.count) break;
        const RoundedPiece& piece = args.pieces[i];
        parallel_shares(ceil_div(piece.numel, int64_t{kChunk}), threads, kGrain,
                        [&](int64_t first, int64_t last) { round_piece(args, piece, first, last); });
        end = begin + piece.numel;
    }
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
