// round_means: means of a host, rounded at random for other hosts.

#include "common/args/means.h"
#include "cpu/device/parallel.h"
#include "cpu/device/philox.h"
#include "cpu/format/codes.h"
#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int64_t kGrain = 64;  // chunks, or 8 strips, that are worth a thread

// kBlocks of Philox from the block-th of a parameter on.
template <int kBlocks>
void draw(const RoundMeansArgs& args, const MeansPiece& piece, int64_t block, void* bytes) {
    draw_blocks<kBlocks>(static_cast<uint8_t*>(bytes), [&](int b) {
        return wire_bytes(args, piece, count_from(static_cast<uint64_t>(block + b)));
    });
}

// Not inlined: GCC would forget that the arrays do not overlap.
__attribute__((noinline)) void round_to_bfloat16(const float* __restrict values,
                                                 const uint16_t* __restrict random, int64_t count,
                                                 uint16_t* __restrict output) {
    for (int64_t i = 0; i < count; ++i) output[i] = float_to_bfloat16_stochastic(values[i], random[i]);
}

void round_bfloat16(const RoundMeansArgs& args, const MeansPiece& piece, int64_t at, int64_t count) {
    uint16_t* output = reinterpret_cast<uint16_t*>(args.output) + at;
    if (count < kMeansAtOnce) std::memset(output, 0, kMeansAtOnce * sizeof(uint16_t));
    if (count == 0) return;
    alignas(kVectorBytes) uint16_t random[kMeansAtOnce];
    draw<kMeansAtOnce / 8>(args, piece, (piece.first + at - piece.begin) / 8, random);
    round_to_bfloat16(args.values + at, random, count, output);
}

__attribute__((noinline)) void round_to_e4m3(const float* __restrict values, const uint8_t* __restrict random,
                                             int64_t blocks, uint8_t* __restrict output,
                                             uint8_t* __restrict scales) {
    for (int64_t b = 0; b < blocks; ++b) {
        const float* x = values + b * kMxfp8Block;
        const uint8_t* r = random + b * kMxfp8Block;
        uint32_t amax = 0, codes[kMxfp8Block];
        for (int i = 0; i < kMxfp8Block; ++i) amax = larger(amax, magnitude_bits(x[i]));
        const uint32_t scale = mxfp8_scale(from_bits(amax));
        const float encode = mxfp8_encode(scale);
        for (int i = 0; i < kMxfp8Block; ++i) codes[i] = float_to_e4m3_stochastic(x[i] * encode, r[i]);
        for (int i = 0; i < kMxfp8Block; ++i) output[b * kMxfp8Block + i] = static_cast<uint8_t>(codes[i]);
        scales[b] = static_cast<uint8_t>(scale);
    }
}

void round_mxfp8(const RoundMeansArgs& args, const MeansPiece& piece, int64_t at, int64_t count) {
    if (count == 0) return;
    alignas(kVectorBytes) uint8_t random[kMeansAtOnce];
    draw<kMeansAtOnce / 16>(args, piece, (piece.first + at - piece.begin) / 16, random);
    uint8_t* message = args.output + at / args.numel * args.bytes;
    const int64_t place = at % args.numel;
    round_to_e4m3(args.values + at, random, count / kMxfp8Block, message + place,
                  message + scales_at(args) + place / kMxfp8Block);
}

void round_strip(const RoundMeansArgs& args, int64_t number) {
    const MeansPiece& piece = find_piece<&MeansPiece::strip>(args, number);
    if (!has_strip(piece, number)) return;
    const MeansStrip strip = strip_at(piece, number - piece.strip);
    alignas(kVectorBytes) float x[kBlock][kStripColumns] = {};
    float amax[kBlock][kStripBlocks];
    uint32_t most = 0;
    for (int r = 0; r < strip.rows; ++r) {
        const float* values = args.values + piece.begin + strip.element + r * piece.cols;
        for (int b = 0; b < strip.blocks; ++b) {
            float block[kBlock];
            uint32_t own = 0;
            std::memcpy(block, values + b * kBlock, sizeof block);
            hadamard(block, kRandomSigns);
            for (int i = 0; i < kBlock; ++i) own = larger(own, magnitude_bits(block[i]));
            std::memcpy(x[r] + b * kBlock, block, sizeof block);
            amax[r][b] = amax_of_bits(own);
            most = larger(most, own);
        }
    }
    const float strip_amax = amax_of_bits(most);
    const TensorScale tensor = tensor_scale(strip_amax);
    uint8_t* message = args.output + piece.begin / args.numel * args.bytes;
    for (int r = 0; r < strip.rows; ++r) {
        const int64_t element = strip.element + r * piece.cols;
        const int64_t place = piece.begin % args.numel + element;
        float encode[kStripBlocks] = {}, factor[kStripColumns];
        uint8_t scale[kStripBlocks], random[kStripColumns], codes[kPatchBytes];
        for (int b = 0; b < strip.blocks; ++b) {
            const E4M3Magnitude rounded = covering_scale(amax[r][b], tensor);
            scale[b] = static_cast<uint8_t>(rounded.byte);
            encode[b] = encode_of(rounded.value, tensor);
        }
        spread(encode, factor);
        draw<kStripBlocks>(args, piece, (piece.first + element) / kBlock, random);
        pack_row([&](int i) { return float_to_e2m1_stochastic(x[r][i] * factor[i], random[i]); }, codes);
        copy_bytes<kPatchBytes>(message + place / 2, codes, strip.blocks * kBlock / 2);
        copy_bytes<kStripBlocks>(message + scales_at(args) + place / kBlock, scale, strip.blocks);
    }
    const int64_t own = number % args.strips * static_cast<int64_t>(sizeof(float));
    std::memcpy(message + amaxes_at(args) + own, &strip_amax, sizeof strip_amax);
}

}  // namespace

void round_means(const RoundMeansArgs& args, int threads) {
    if (args.format == MeansFormat::kNvfp4) {
        parallel_shares(args.slices * args.strips, threads, kGrain / 8, [&](int64_t begin, int64_t end) {
            for (int64_t number = begin; number < end; ++number) round_strip(args, number);
        });
        return;
    }
    const auto round = args.format == MeansFormat::kMxfp8 ? round_mxfp8 : round_bfloat16;
    const int64_t chunks = args.slices * args.numel / kMeansAtOnce;
    parallel_shares(chunks, threads, kGrain, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin * kMeansAtOnce; at < end * kMeansAtOnce; at += kMeansAtOnce) {
            const MeansPiece& piece = find_piece<&MeansPiece::begin>(args, at);
            round(args, piece, at, least(left_of(piece, at), kMeansAtOnce));
        }
    });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
