// partial_amax: tile amaxes and the amax of the owned part of every weight.
//
// Rounding to a dtype keeps the order of magnitudes, and so do the bits of every dtype with NaN above Inf.
// The maximum is therefore taken over the raw bits as integers, and only the maximum of a tile is rounded.

#include "cpu/kernels.h"
#include "cpu/strip/patch.h"
#include "cpu/strip/tile_amax.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

using zerofp4::magnitude_bits;
ZEROFP4_HD uint16_t magnitude_bits(BFloat16 x) { return x.bits & 0x7fffu; }
ZEROFP4_HD uint16_t magnitude_bits(Float16 x) { return x.bits & 0x7fffu; }

ZEROFP4_HD float value_of(uint32_t bits, float) { return from_bits(bits); }
ZEROFP4_HD float value_of(uint16_t bits, BFloat16) { return load_float(BFloat16{bits}); }
ZEROFP4_HD float value_of(uint16_t bits, Float16) { return load_float(Float16{bits}); }

template <class T>
ZEROFP4_HD float tile_amax(const T* x, int64_t stride) {
    using Bits = decltype(magnitude_bits(T{}));
    Bits most[kBlock] = {};
    for (int r = 0; r < kBlock; ++r, x += stride) {
        for (int c = 0; c < kBlock; ++c) {
            const Bits bits = magnitude_bits(element_at(x, c));
            most[c] = bits > most[c] ? bits : most[c];
        }
    }
    Bits result = 0;
    for (int c = 0; c < kBlock; ++c) result = most[c] > result ? most[c] : result;
    return value_of(result, T{});
}

template <class T>
float patch_amax(const CastTable& table, const WeightDescriptor& weight, const Patch& patch) {
    T buffer[kBlock][kStripColumns];
    const PatchView<T> view = view_master(weight, patch, buffer);
    return publish_tiles(table.reduced, weight, patch,
                         [&](int64_t t) { return tile_amax(view.data + t * kBlock, view.stride); });
}

// Of the blocks that other ranks have a part of, that of the owned elements.
template <class T>
void publish_cut_blocks(const CastTable& table, const WeightDescriptor& weight) {
    for (int i = 0; i < 2; ++i) {
        if (weight.cut_offsets[i] < 0) continue;
        const RowBlock block = boundary_block(weight, i);
        const int64_t first = block.begin > weight.start ? block.begin - weight.start : 0;
        const int64_t last = least(block.end - weight.start, weight.numel);
        uint32_t bits = 0;
        for (int64_t k = first; k < last; ++k) {
            const T element = element_at(static_cast<const T*>(weight.master), k);
            bits = larger(bits, magnitude_bits(load_float(element)));
        }
        table.reduced[weight.cut_offsets[i]] = rounded_magnitude(from_bits(bits), weight.weight_dtype);
    }
}

template <class T>
void amax_of_units(const CastTable& table, const WeightDescriptor& weight, int64_t begin, int64_t end) {
    float amax = 0.0f;
    for (int64_t unit = begin; unit < end; ++unit) {
        const float found = patch_amax<T>(table, weight, patch_of_unit(weight, unit));
        amax = found > amax ? found : amax;
    }
    raise_words(table.reduced, weight, amax);
    if (begin == 0) publish_cut_blocks<T>(table, weight);
}

}  // namespace

void partial_amax(const CastTable& table, int threads) {
    parallel_items(table.weights, table.count, &WeightDescriptor::strip_begin, table.strip_units, threads,
                   kPatchGrain, [&](const WeightDescriptor& weight, int64_t begin, int64_t end) {
                       with_dtype(weight.master_dtype,
                                  [&](auto t) { amax_of_units<decltype(t)>(table, weight, begin, end); });
                   });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
