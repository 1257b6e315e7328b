#pragma once
// Blocks of Philox, as many at a time as a vector has lanes of 64 bits.

#include "common/stochastic.h"
#include "cpu/device/vectors.h"

namespace zerofp4::cpu::ZEROFP4_ISA {

// Numbers of 32 bits in the lower halves of lanes; their upper halves may be anything.
struct Words {
    typedef uint64_t Lanes __attribute__((vector_size(kVectorBytes)));
    static constexpr int kCount = kVectorBytes / static_cast<int>(sizeof(uint64_t));
    Lanes lanes;

    Words() = default;
    ZEROFP4_HD Words(const Lanes& lanes) : lanes(lanes) {}
    ZEROFP4_HD explicit Words(uint32_t word) : lanes(Lanes{} + word) {}
};

ZEROFP4_HD Words operator^(const Words& a, const Words& b) { return a.lanes ^ b.lanes; }

// `first` and the numbers after it.
ZEROFP4_HD Words count_from(uint64_t first) {
    Words::Lanes places;
    for (int i = 0; i < Words::kCount; ++i) places[i] = static_cast<uint64_t>(i);
    return places + first;
}

ZEROFP4_HD Words low_word(const Words& block) { return block; }
ZEROFP4_HD Words high_word(const Words& block) { return block.lanes >> 32; }

ZEROFP4_HD Words multiply(uint32_t a, const Words& b, Words& high) {
    const Words factor(a);
#if defined(__AVX512F__)
    const Words product = (Words::Lanes)_mm512_maskz_mul_epu32(0xff, (__m512i)factor.lanes, (__m512i)b.lanes);
#elif defined(__AVX2__)
    const Words product = (Words::Lanes)_mm256_mul_epu32((__m256i)factor.lanes, (__m256i)b.lanes);
#elif defined(__SSE2__)
    const Words product = (Words::Lanes)_mm_mul_epu32((__m128i)factor.lanes, (__m128i)b.lanes);
#else
    const Words product = factor.lanes * (b.lanes & 0xffffffffu);
#endif
    high = high_word(product);
    return product;
}

// The bytes of blocks, one after another; draw(b) gives the words of Words::kCount blocks from b on.
template <int kBlocks, class Draw>
ZEROFP4_HD void draw_blocks(uint8_t* bytes, const Draw& draw) {
    static_assert(kBlocks % Words::kCount == 0);
    for (int b = 0; b < kBlocks; b += Words::kCount) {
        const RandomWords<Words> drawn = draw(b);
        uint64_t half[2][Words::kCount], block[Words::kCount][2];
        for (int h = 0; h < 2; ++h) {
            const Words::Lanes low = drawn.words[2 * h].lanes & 0xffffffffu;
            const Words::Lanes both = low | drawn.words[2 * h + 1].lanes << 32;
            std::memcpy(half[h], &both, sizeof both);
        }
        for (int i = 0; i < Words::kCount; ++i) block[i][0] = half[0][i], block[i][1] = half[1][i];
        std::memcpy(bytes + 16 * b, block, sizeof block);
    }
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
