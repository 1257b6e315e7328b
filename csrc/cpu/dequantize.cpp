// dequantize: packed codes and compact scales to values.

#include "common/scale.h"
#include "cpu/bytes.h"
#include "cpu/codes.h"
#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int kRowBlocks = kStripColumns / kBlock;
constexpr int64_t kRowGrain = 256;  // pieces of 128 elements that are worth a thread

ZEROFP4_HD void store(float value, float& out) { out = value; }
ZEROFP4_HD void store(float value, BFloat16& out) { out = to_bfloat16(value); }
ZEROFP4_HD void store(float value, Float16& out) { out = to_float16(value); }

// 16 bytes to 32 codes.
ZEROFP4_HD void unpack32(const uint8_t* in, uint32_t (&code)[32]) {
    for (int i = 0; i < 16; ++i) {
        const uint64_t byte = in[i];  // as 64 bits: an even code, and an odd one 32 bits up
        const uint64_t pair = (byte | byte << 28) & 0x0000000f0000000fu;
        std::memcpy(&code[2 * i], &pair, sizeof pair);
    }
}

// 128 elements.
template <class T>
ZEROFP4_HD void decode_row(const uint8_t* codes, const float (&decode)[kStripColumns], T* out) {
    for (int begin = 0; begin < kStripColumns; begin += 32) {
        uint32_t code[32];
        unpack32(codes + begin / 2, code);
        for (int i = 0; i < 32; ++i) store(e2m1_to_float(code[i]) * decode[begin + i], out[begin + i]);
    }
}

template <class T>
void decode_pieces(const DequantizeArgs& args, int64_t begin, int64_t end) {
    const float amax = *args.amax;
    const int64_t pieces = ceil_div(args.cols, kStripColumns), scales_per_row = ceil_div(args.cols, kBlock);
    for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t row = piece / pieces, col = piece % pieces * kStripColumns;
        const int64_t count = least(kStripColumns, args.cols - col);
        const uint8_t* codes = args.data + (row * args.cols + col) / 2;
        const uint8_t* scale = args.scale + row / args.block_rows * scales_per_row + col / kBlock;
        T* out = static_cast<T*>(args.output) + row * args.cols + col;

        uint8_t scales[kRowBlocks] = {};
        copy_bytes<kRowBlocks>(scales, scale, ceil_div(count, kBlock));
        float block[kRowBlocks], decode[kStripColumns];
        for (int b = 0; b < kRowBlocks; ++b) block[b] = block_decode(scales[b], amax);
        spread(block, decode);
        if (count == kStripColumns) {
            decode_row(codes, decode, out);
            continue;
        }
        uint8_t packed[kPatchBytes] = {};
        T values[kStripColumns];
        std::memcpy(packed, codes, static_cast<size_t>(count / 2));
        decode_row(packed, decode, values);
        std::memcpy(out, values, static_cast<size_t>(count) * sizeof(T));
    }
}

}  // namespace

void dequantize(const DequantizeArgs& args, int threads) {
    const int64_t pieces = args.rows * ceil_div(args.cols, kStripColumns);
    parallel_shares(pieces, threads, kRowGrain, [&](int64_t begin, int64_t end) {
        switch (args.dtype) {
            case DType::kFloat32:
                return decode_pieces<float>(args, begin, end);
            case DType::kBFloat16:
                return decode_pieces<BFloat16>(args, begin, end);
            case DType::kFloat16:
                return decode_pieces<Float16>(args, begin, end);
        }
    });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
