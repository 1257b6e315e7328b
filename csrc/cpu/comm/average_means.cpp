// average_means: the mean of what hosts have sent in few bits.

#include "common/args/means.h"
#include "cpu/device/parallel.h"
#include "cpu/device/vectors.h"
#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int64_t kGrain = 64;  // chunks that are worth a thread

constexpr int kChunkBlocks = kMeansAtOnce / kBlock;
using Chunk = float[kMeansAtOnce];

void decode_mxfp8(const AverageMeansArgs& args, const uint8_t* message, int64_t place, int64_t count,
                  Chunk& values) {
    const uint8_t *codes = message + place, *scales = message + scales_at(args) + place / kMxfp8Block;
    for (int64_t b = 0; b < count / kMxfp8Block; ++b) {
        const float factor = mxfp8_decode(scales[b]);
        for (int64_t i = b * kMxfp8Block; i < (b + 1) * kMxfp8Block; ++i)
            values[i] = signed_e4m3_to_float(codes[i]) * factor;
    }
}

// strip: of each block, its number in the message.
void decode_nvfp4(const AverageMeansArgs& args, const uint8_t* message, const int64_t (&strip)[kChunkBlocks],
                  int64_t place, int64_t count, Chunk& values) {
    const uint8_t *bytes = message + place / 2, *scales = message + scales_at(args) + place / kBlock;
    const float* amaxes = reinterpret_cast<const float*>(message + amaxes_at(args));
    uint8_t codes[kMeansAtOnce];
    for (int64_t i = 0; i < count / 2; ++i) {
        codes[2 * i] = bytes[i] & 15u;
        codes[2 * i + 1] = bytes[i] >> 4;
    }
    for (int64_t b = 0; b < count / kBlock; ++b) {
        const float factor = block_decode(scales[b], amaxes[strip[b]]);
        for (int64_t i = b * kBlock; i < (b + 1) * kBlock; ++i) values[i] = e2m1_to_float(codes[i]) * factor;
    }
}

void average_chunk(const AverageMeansArgs& args, int64_t place) {
    const int64_t at = args.slice * args.numel + place;
    const MeansPiece& piece = find_piece<&MeansPiece::begin>(args, at);
    const int64_t count = least(left_of(piece, at), kMeansAtOnce);
    const bool is_nvfp4 = args.format == MeansFormat::kNvfp4;
    const int64_t transforms = is_nvfp4 ? count / kBlock : 0;
    int64_t strip[kChunkBlocks];
    for (int64_t b = 0; b < transforms; ++b)
        strip[b] = strip_of(piece, at - piece.begin + b * kBlock) - args.slice * args.strips;
    alignas(kVectorBytes) Chunk sums = {}, values = {};
    for (int64_t host = 0; host < args.hosts; ++host) {
        const uint8_t* message = args.received + host * args.bytes;
        if (is_nvfp4) {
            decode_nvfp4(args, message, strip, place, count, values);
        } else {
            decode_mxfp8(args, message, place, count, values);
        }
        for (int i = 0; i < kMeansAtOnce; ++i) sums[i] = host == 0 ? values[i] : sums[i] + values[i];
    }
    const float hosts = static_cast<float>(args.hosts);
    for (int i = 0; i < kMeansAtOnce; ++i) sums[i] /= hosts;
    for (int64_t b = 0; b < transforms; ++b) {
        float block[kBlock];
        std::memcpy(block, sums + b * kBlock, sizeof block);
        inverse_hadamard(block);
        std::memcpy(sums + b * kBlock, block, sizeof block);
    }
    std::memcpy(args.output + place, sums, sizeof sums);
}

}  // namespace

void average_means(const AverageMeansArgs& args, int threads) {
    parallel_shares(args.numel / kMeansAtOnce, threads, kGrain, [&](int64_t begin, int64_t end) {
        for (int64_t chunk = begin; chunk < end; ++chunk) average_chunk(args, chunk * kMeansAtOnce);
    });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
