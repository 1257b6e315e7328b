// The short forms of four over six against the formulas, on the CPU: what a lane of the CUDA kernels does
// with a block, or half a warp with a tile, out of the same functions. The kernels' reciprocals and E4M3
// conversions are those of the formulas; the conversions have tests of their own, and a reciprocal has one
// right rounding.

#include "common/four_over_six.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "common/dtype.h"

using namespace zerofp4;

namespace {

constexpr float kMaxima[] = {448.0f, 256.0f};

struct Tensor {
    float amax;
    TensorScale scale;
    FourOverSix choice;

    Tensor(float amax, const FourOverSix& choice)
        : amax(amax), scale(tensor_scale(amax, choice.e4m3_max)), choice(choice) {}
};

struct Chosen {
    uint32_t scale;
    BlockCodes codes[kBlock];  // of a tile's rows, or of a block the first

    bool operator==(const Chosen& other) const {
        return scale == other.scale && std::memcmp(codes, other.codes, sizeof codes) == 0;
    }
};

using Rows = float[kBlock][kBlock];

uint32_t amax_bits(const Rows& x, int rows) {
    uint32_t bits = 0;
    for (int r = 0; r < rows; ++r) {
        for (const float value : x[r]) bits = std::max(bits, magnitude_bits(value));
    }
    return bits;
}

float sum_of(float (&errors)[kBlock], int rows) {
    for (int half = rows / 2; half > 0; half /= 2) {
        for (int r = 0; r < half; ++r) errors[r] += errors[r + half];
    }
    return errors[0];
}

Chosen choose_any(const Rows& x, int rows, const Tensor& tensor) {
    const ScaleCandidates scales = scale_candidates(amax_of_bits(amax_bits(x, rows)), tensor.scale);
    Chosen six{scales.six, {}}, four{scales.four, {}};
    float errors_six[kBlock], errors_four[kBlock];
    for (int r = 0; r < rows; ++r) {
        for (auto [chosen, errors] : {std::pair(&six, errors_six), std::pair(&four, errors_four)})
            errors[r] = encode_any_block(x[r], chosen->scale, tensor.amax, tensor.scale, tensor.choice,
                                         chosen->codes[r]);
    }
    return sum_of(errors_four, rows) < sum_of(errors_six, rows) ? four : six;
}

// False where the kernels take the long way.
bool choose_short(const Rows& x, int rows, const Tensor& tensor, Chosen& chosen) {
    const uint32_t bits = amax_bits(x, rows);
    const float base = short_base(amax_of_bits(bits), tensor.scale);
    Chosen of[2] = {{magnitude_to_e4m3(base), {}}, {magnitude_to_e4m3(base * 1.5f), {}}};
    if (!has_short_errors(tensor.amax) || !(from_bits(bits) * block_encode(of[0].scale, tensor.scale) < 7.0f))
        return false;
    float errors[2][kBlock];
    for (int i = 0; i < 2; ++i) {
        const float scale = e4m3_to_float(of[i].scale), factor = encode_of(scale, tensor.scale);
        const float divisor = kE2M1Max * tensor.choice.e4m3_max;
        const DecodedPair pair =
            short_decoded_pair(scale, tensor.amax, divisor, decode_factor(tensor.choice.e4m3_max));
        const auto decoded = [&pair](uint32_t n) { return decoded_value(e2m1_to_float(n & 7u), pair); };
        for (int r = 0; r < rows; ++r) {
            BlockCodes& codes = of[i].codes[r];
            errors[i][r] = tensor.choice.squared_error
                               ? encode_short_block<true>(x[r], factor, decoded, codes)
                               : encode_short_block<false>(x[r], factor, decoded, codes);
            for (int k = 0; k < kBlock; ++k) codes[k / 8] |= to_bits(x[r][k]) >> 31 << (4 * (k % 8) + 3);
        }
    }
    chosen = of[sum_of(errors[1], rows) < sum_of(errors[0], rows) ? 1 : 0];
    return true;
}

bool same(float a, float b) { return to_bits(a) == to_bits(b) || (a != a && b != b); }

// Values of one kind: any bits, or normal ones about a magnitude, rounded to bfloat16 or not.
class Draw {
  public:
    explicit Draw(uint64_t seed) : random_(seed) {}

    uint32_t below(uint32_t n) { return static_cast<uint32_t>(random_() >> 32) % n; }
    uint32_t bits() { return static_cast<uint32_t>(random_()); }
    float normal() { return normal_(random_); }

    void fill(Rows& x, int rows, float unit) {
        const uint32_t kind = below(8), rare = below(64);
        for (int r = 0; r < rows; ++r) {
            for (float& value : x[r]) {
                value = unit * normal();
                if (kind == 0) value = from_bits(bits());
                if (kind == 1) value = unit * static_cast<float>(below(25)) * 0.25f;  // ties
                if (kind == 2) value *= 0x1p-9f * static_cast<float>(below(16));
                if (rare == 0 && below(16) == 0) value = from_bits(bits() << 23 | (bits() & 1u));
                if (kind % 2 == 1) value = load_float(to_bfloat16(value));
            }
        }
    }

  private:
    std::mt19937_64 random_;
    std::normal_distribution<float> normal_;
};

}  // namespace

// The functions return how many results differ.

// x / divisor for every x of so many powers of two from 2^first on.
extern "C" int64_t compare_quotients(int first, int count, int step) {
    int64_t different = 0;
    for (const float divisor : {6.0f, 6.0f * 448.0f, 6.0f * 256.0f}) {
        for (int i = 0; i < count; ++i) {
            const uint32_t exponent = static_cast<uint32_t>(127 + first + i * step) << 23;
            for (uint32_t mantissa = 0; mantissa < 1u << 23; ++mantissa) {
                const float x = from_bits(exponent | mantissa);
                different += !same(short_quotient(x, divisor, 1.0f / divisor), x / divisor);
            }
        }
    }
    return different;
}

// What all codes decode to under all scales, for every `step`-th amax, by its bits.
extern "C" int64_t compare_decoded(uint32_t first, uint32_t step) {
    int64_t different = 0;
    for (uint64_t bits = first; bits < kInfBits; bits += step) {
        const float amax = from_bits(static_cast<uint32_t>(bits));
        if (!has_short_errors(amax)) continue;
        for (const float e4m3_max : kMaxima) {
            const float divisor = kE2M1Max * e4m3_max;
            for (uint32_t byte = 0; byte < 0x7f; ++byte) {
                const float scale = e4m3_to_float(byte);
                const DecodedPair pair = short_decoded_pair(scale, amax, divisor, decode_factor(e4m3_max));
                for (uint32_t code = 0; code < 8; ++code) {
                    const float value = e2m1_to_float(code), product = (value * scale) * amax;
                    const float wanted = product / divisor;
                    different += !same(decoded_value(value, pair), wanted) ||
                                 !same(short_quotient(product, divisor, decode_factor(e4m3_max)), wanted);
                }
            }
        }
    }
    return different;
}

// The scales of blocks with every `step`-th amax, in tensors with as many amaxes.
extern "C" int64_t compare_candidates(uint64_t seed, int64_t tensors, uint32_t step) {
    Draw draw(seed);
    int64_t different = 0;
    for (int64_t i = 0; i < tensors; ++i) {
        const float amax = from_bits(draw.below(kInfBits));
        if (!has_short_errors(amax)) continue;
        const TensorScale tensor = tensor_scale(amax, kMaxima[i % 2]);
        for (uint64_t bits = draw.below(step); bits < kInfBits; bits += step) {
            const float block_amax = from_bits(static_cast<uint32_t>(bits));
            const ScaleCandidates wanted = scale_candidates(block_amax, tensor);
            const float base = short_base(block_amax, tensor);
            different +=
                magnitude_to_e4m3(base) != wanted.six || magnitude_to_e4m3(base * 1.5f) != wanted.four;
        }
    }
    return different;
}

// Codes and scales of drawn blocks, rows = 1, or tiles, rows = 16. *taken: how many have a short form.
extern "C" int64_t compare_blocks(uint64_t seed, int64_t count, int rows, int64_t* taken) {
    Draw draw(seed);
    int64_t different = 0;
    *taken = 0;
    for (int64_t i = 0; i < count; ++i) {
        Rows x;
        const float unit = std::ldexp(1.0f, draw.below(8) == 0 ? static_cast<int>(draw.below(250)) - 125
                                                               : static_cast<int>(draw.below(16)) - 12);
        draw.fill(x, rows, unit);
        // The block's own amax, a larger one, a given one that saturates scales, or anything.
        float amax = amax_of_bits(amax_bits(x, rows));
        const uint32_t kind = draw.below(16);
        if (kind < 12)
            amax *= std::exp2(static_cast<float>(draw.below(4096)) * 0x1p-8f * (kind < 10 ? 0.5f : 1.2f));
        if (kind == 12) amax *= 0.3f;
        if (kind == 13) amax = from_bits(draw.bits());
        if (kind % 2 == 0) amax = load_float(to_bfloat16(amax));
        const Tensor tensor(amax, {kMaxima[draw.below(2)], static_cast<int32_t>(draw.below(2))});
        Chosen chosen;
        if (!choose_short(x, rows, tensor, chosen)) continue;
        ++*taken;
        different += !(chosen == choose_any(x, rows, tensor));
    }
    return different;
}
