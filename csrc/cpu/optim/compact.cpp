// compact_update: AdamW on compact state, and the tile amaxes of the masters as they are then.

#include "common/compact.h"

#include "cpu/kernels.h"
#include "cpu/optim/gradients.h"
#include "cpu/strip/patch.h"
#include "cpu/strip/tile_amax.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr CodeValues kCodeValues = make_code_values();

// The elements of a group, as floats.
struct GroupValues {
    float master[kStateGroup];
    float gradient[kStateGroup];
    float exp_avg[kStateGroup];
    float root[kStateGroup];  // of exp_avg_sq
    int64_t count;
};

void load_masters(const AdamWDescriptor& tensor, int64_t index, int64_t count, float* __restrict masters) {
    if (tensor.compact.high == nullptr) {
        std::memcpy(masters, tensor.master + index, static_cast<size_t>(count) * sizeof(float));
        return;
    }
    const BFloat16* __restrict high = tensor.compact.high + index;
    if (tensor.compact.low == nullptr) {  // where there is no state yet
        for (int64_t i = 0; i < count; ++i) masters[i] = load_float(high[i]);
        return;
    }
    const uint8_t* __restrict low = tensor.compact.low + index;
    for (int64_t i = 0; i < count; ++i) masters[i] = join_master(high[i], low[i]);
}

// Leaves what is stored in `masters`. `block`: the random bytes of the first of them.
void store_masters(const AdamWDescriptor& tensor, uint32_t step, uint64_t block, int64_t index, int64_t count,
                   float* __restrict masters) {
    if (tensor.compact.high == nullptr) {
        std::memcpy(tensor.master + index, masters, static_cast<size_t>(count) * sizeof(float));
        return;
    }
    uint8_t random[kStateGroup];
    for (int64_t i = 0; i < count; i += kRandomColumns) {
        const RandomBytes bytes = master_bytes(tensor.compact.number, step, block++);
        for (int k = 0; k < kRandomColumns; ++k)
            random[i + k] = static_cast<uint8_t>(bytes.words[k / 4] >> (8 * (k % 4)));
    }
    BFloat16* __restrict high = tensor.compact.high + index;
    uint8_t* __restrict low = tensor.compact.low + index;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = round_master(masters[i], random[i]);
        high[i] = high_of_master(bits), low[i] = low_of_master(bits);
        masters[i] = from_bits(bits);
    }
}

void decode_moments(const CompactState& state, int64_t index, const StateScales& scales, GroupValues& x) {
    const int8_t* exp_avg = state.exp_avg + index;
    const uint8_t* exp_avg_sq = state.exp_avg_sq + index;
    for (int64_t i = 0; i < x.count; ++i) {
        x.exp_avg[i] = scales.exp_avg * kCodeValues.moments[static_cast<uint8_t>(exp_avg[i])];
        x.root[i] = scales.exp_avg_sq * kCodeValues.roots[exp_avg_sq[i]];
    }
}

__attribute__((noinline)) void update_values(const AdamWStep step, GroupValues& x) {
    for (int64_t i = 0; i < x.count; ++i) {
        float m = x.exp_avg[i], v = x.root[i] * x.root[i];
        adamw_moments(step, x.gradient[i], m, v);
        const float root = square_root(v), w = root > kMostRoot ? kMostRoot : root;
        const float update = m * (1.0f / (w * step.inv_sqrt + step.eps));
        x.master[i] = x.master[i] * step.decay - step.step_size * update;
        x.exp_avg[i] = m, x.root[i] = w;
    }
}

// The largest magnitude; Inf if one is not finite.
float largest(const float* values, int64_t count) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; ++i) most = larger(most, magnitude_bits(values[i]));
    return amax_of_bits(most);
}

// The values over their scale times `factor`; zeros where the scale is 0 or Inf.
void divide(float* values, int64_t count, float factor, float scale) {
    const bool finite = scale < kInf;
    const float inverse = scale > 0.0f && finite ? 1.0f / (scale * factor) : 0.0f;
    for (int64_t i = 0; i < count; ++i) values[i] = finite ? values[i] * factor * inverse : 0.0f;
}

void encode_moments(const CompactState& state, int64_t index, StateScales& scales, GroupValues& x) {
    scales = {largest(x.exp_avg, x.count), largest(x.root, x.count)};
    divide(x.exp_avg, x.count, scale_factor(scales.exp_avg), scales.exp_avg);
    divide(x.root, x.count, 1.0f, scales.exp_avg_sq);
    int8_t* __restrict exp_avg = state.exp_avg + index;
    uint8_t* __restrict exp_avg_sq = state.exp_avg_sq + index;
    for (int64_t i = 0; i < x.count; ++i) {
        exp_avg[i] = static_cast<int8_t>(moment_code(x.exp_avg[i]));
        exp_avg_sq[i] = static_cast<uint8_t>(root_code(x.root[i]));
    }
}

// Part of a row's group, from column `col` on; leaves its masters in x.
template <class G>
void update_group(const AdamWTable& table, const AdamWDescriptor& tensor, const AdamWStep& step, int64_t row,
                  int64_t col, GroupValues& x) {
    const CompactState& state = tensor.compact;
    const int64_t index = row * tensor.cols + col - tensor.start;
    load_gradients<G>(table.pieces, tensor, step, index, x.count, x.gradient);
    load_masters(tensor, index, x.count, x.master);
    const int64_t group = row * ceil_div(tensor.cols, kStateGroup) + col / kStateGroup - state.first_group;
    decode_moments(state, index, state.scales[group], x);
    update_values(step, x);
    encode_moments(state, index, state.scales[group], x);
    const int64_t block = row * ceil_div(tensor.cols, kRandomColumns) + col / kRandomColumns;
    store_masters(tensor, step.count, state.first_block + static_cast<uint64_t>(block), index, x.count,
                  x.master);
}

// G is the type of a gradient's elements; without kUpdate masters are only read.
template <class G, bool kUpdate>
void update_units(const AdamWTable& table, const AdamWDescriptor& tensor, int64_t begin, int64_t end) {
    const AdamWStep step = table.steps[&tensor - table.tensors];
    float amax = 0.0f;
    for (int64_t unit = begin; unit < end; ++unit) {
        const Patch patch = patch_of_unit(tensor, unit);
        ColumnBits most = {};
        for (int64_t row = patch.row; row < patch.row + patch.rows; ++row) {
            const ColumnRange owned = owned_in_patch(tensor, patch, row);
            for (int64_t col = owned.begin; col < owned.end;) {
                GroupValues x;
                x.count = least(kStateGroup - col % kStateGroup, owned.end - col);
                if constexpr (kUpdate) {
                    update_group<G>(table, tensor, step, row, patch.col + col, x);
                } else {
                    load_masters(tensor, row * tensor.cols + patch.col + col - tensor.start, x.count,
                                 x.master);
                }
                for (int64_t i = 0; i < x.count; ++i)
                    most[col + i] = larger(most[col + i], magnitude_bits(x.master[i]));
                col += x.count;
            }
        }
        if (!wants_amaxes(tensor)) continue;
        const float found =
            publish_tiles(table.reduced, tensor, patch, [&](int64_t t) { return tile_magnitude(most, t); });
        amax = found > amax ? found : amax;
    }
    if (wants_amaxes(tensor)) raise_words(table.reduced, tensor, amax);
}

}  // namespace

void compact_update(const AdamWTable& table, int threads) {
    parallel_items(table.tensors, table.count, &AdamWDescriptor::strip_begin, table.strip_units, threads,
                   kPatchGrain, [&](const AdamWDescriptor& tensor, int64_t begin, int64_t end) {
                       if (table.steps[&tensor - table.tensors].gradient == nullptr) {
                           if (wants_amaxes(tensor)) update_units<float, false>(table, tensor, begin, end);
                       } else if (tensor.gradient_dtype == DType::kBFloat16) {
                           update_units<BFloat16, true>(table, tensor, begin, end);
                       } else {
                           update_units<float, true>(table, tensor, begin, end);
                       }
                   });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
