// compact_update: AdamW on compact state, and the tile amaxes of the masters as they are then.

#include "common/compact.h"

#include "cpu/device/philox.h"
#include "cpu/kernels.h"
#include "cpu/optim/gradients.h"
#include "cpu/strip/patch.h"
#include "cpu/strip/tile_amax.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr FloatTable kMoments(make_code_values().moments), kRoots(make_code_values().roots);
constexpr int kRowGroups = kStripColumns / kStateGroup;

// A row of a patch, from its first owned group on. Where it is cut off, the rest is computed like any other
// elements, so that all loops have fixed bounds, and not stored.
template <class T>
struct Row {
    alignas(64) T of[kStripColumns];
};

struct RowValues {
    Row<float> master, gradient, exp_avg, root;  // the root of exp_avg_sq
    StateScales scales[kRowGroups];
};

// A row where it is stored, or a copy of one that is cut off after `count` elements.
template <class T>
ZEROFP4_HD const T* view_row(const T* stored, int64_t count, Row<T>& copy) {
    if (count == kStripColumns) return stored;
    copy = {};
    std::memcpy(copy.of, stored, static_cast<size_t>(count) * sizeof(T));
    return copy.of;
}

// Stores what write(row) leaves in a row, or its first `count` elements.
template <class T, class Write>
ZEROFP4_HD void store_row(T* stored, int64_t count, const Write& write) {
    if (count == kStripColumns) return write(stored);
    Row<T> row;
    write(row.of);
    std::memcpy(stored, row.of, static_cast<size_t>(count) * sizeof(T));
}

// The loops are not inlined: GCC would forget that their arrays do not overlap.

__attribute__((noinline)) void join_masters(const BFloat16* __restrict high, const uint8_t* __restrict low,
                                            float* __restrict master) {
    for (int i = 0; i < kStripColumns; ++i) master[i] = join_master(high[i], low[i]);
}

void load_masters(const AdamWDescriptor& tensor, int64_t index, int64_t count, Row<float>& master) {
    if (tensor.compact.high == nullptr) {
        std::memcpy(master.of, tensor.master + index, static_cast<size_t>(count) * sizeof(float));
        return;
    }
    Row<BFloat16> high;
    Row<uint8_t> low = {};
    const uint8_t* stored = tensor.compact.low;  // null where there is no state yet
    join_masters(view_row(tensor.compact.high + index, count, high),
                 stored == nullptr ? low.of : view_row(stored + index, count, low), master.of);
}

__attribute__((noinline)) void round_masters(const uint8_t* __restrict random, float* __restrict master) {
    uint32_t byte[kStripColumns];
    for (int i = 0; i < kStripColumns; ++i) byte[i] = random[i];
    for (int i = 0; i < kStripColumns; ++i) master[i] = from_bits(round_master(master[i], byte[i]));
}
__attribute__((noinline)) void take_high(const float* __restrict master, BFloat16* __restrict high) {
    for (int i = 0; i < kStripColumns; ++i) high[i] = high_of_master(to_bits(master[i]));
}
__attribute__((noinline)) void take_low(const float* __restrict master, uint8_t* __restrict low) {
    for (int i = 0; i < kStripColumns; ++i) low[i] = low_of_master(to_bits(master[i]));
}

// Leaves what is stored in `master`. `random`: a byte for each.
void store_masters(const AdamWDescriptor& tensor, int64_t index, int64_t count, const uint8_t* random,
                   Row<float>& master) {
    if (tensor.compact.high == nullptr) {
        std::memcpy(tensor.master + index, master.of, static_cast<size_t>(count) * sizeof(float));
        return;
    }
    Row<uint8_t> copy;
    round_masters(view_row(random, count, copy), master.of);
    store_row(tensor.compact.high + index, count, [&](BFloat16* high) { take_high(master.of, high); });
    store_row(tensor.compact.low + index, count, [&](uint8_t* low) { take_low(master.of, low); });
}

// A few elements at a time: some are looked up while others are divided.
__attribute__((noinline)) void update_values(const AdamWStep step, const uint8_t* exp_avg_codes,
                                             const uint8_t* root_codes, RowValues& x) {
    constexpr int kCount = FloatTable::kAtOnce;
    for (int begin = 0; begin < kStripColumns; begin += kCount) {
        const StateScales scales = x.scales[begin / kStateGroup];
        alignas(kVectorBytes) float moment[kCount], moment_root[kCount];
        kMoments.look_up(exp_avg_codes + begin, moment);
        kRoots.look_up(root_codes + begin, moment_root);
        float *master = x.master.of + begin, *exp_avg = x.exp_avg.of + begin, *root = x.root.of + begin;
        const float* gradient = x.gradient.of + begin;
        for (int i = 0; i < kCount; ++i) {
            float m = scales.exp_avg * moment[i], w = scales.exp_avg_sq * moment_root[i], v = w * w;
            adamw_moments(step, gradient[i], m, v);
            w = square_root(v);
            w = w > kMostRoot ? kMostRoot : w;
            const float update = m * (1.0f / (w * step.inv_sqrt + step.eps));
            master[i] = master[i] * step.decay - step.step_size * update;
            exp_avg[i] = m, root[i] = w;
        }
    }
}

// The largest magnitude of a group; Inf if one is not finite.
ZEROFP4_HD float largest(const float* values) {
    uint32_t most = 0;
    for (int i = 0; i < kStateGroup; ++i) most = larger(most, magnitude_bits(values[i]));
    return amax_of_bits(most);
}

// The values of a group over their scale times `factor`; zeros where the scale is 0 or Inf.
ZEROFP4_HD void divide(float* values, float factor, float scale) {
    const bool finite = scale < kInf;
    const float inverse = scale > 0.0f && finite ? 1.0f / (scale * factor) : 0.0f;
    for (int i = 0; i < kStateGroup; ++i) values[i] = finite ? values[i] * factor * inverse : 0.0f;
}

// Makes the scales, and leaves what is to be encoded.
__attribute__((noinline)) void scale_moments(RowValues& x) {
    for (int g = 0; g < kRowGroups; ++g) {
        float *exp_avg = x.exp_avg.of + g * kStateGroup, *root = x.root.of + g * kStateGroup;
        const StateScales scales = x.scales[g] = {largest(exp_avg), largest(root)};
        divide(exp_avg, scale_factor(scales.exp_avg), scales.exp_avg);
        divide(root, 1.0f, scales.exp_avg_sq);
    }
}
__attribute__((noinline)) void encode_moments(const float* __restrict exp_avg, uint8_t* __restrict codes) {
    for (int i = 0; i < kStripColumns; ++i) codes[i] = static_cast<uint8_t>(moment_code(exp_avg[i]));
}
__attribute__((noinline)) void encode_roots(const float* __restrict root, uint8_t* __restrict codes) {
    for (int i = 0; i < kStripColumns; ++i) codes[i] = static_cast<uint8_t>(root_code(root[i]));
}

// `count` elements of a row, from column `col` on; leaves their masters in x. `random`: of the masters.
template <class G>
void update_row(const AdamWTable& table, const AdamWDescriptor& tensor, const AdamWStep& step, int64_t row,
                int64_t col, int64_t count, const uint8_t* random, RowValues& x) {
    const CompactState& state = tensor.compact;
    const int64_t index = row * tensor.cols + col - tensor.start;
    const int64_t group = row * ceil_div(tensor.cols, kStateGroup) + col / kStateGroup - state.first_group;
    const size_t scale_bytes = static_cast<size_t>(ceil_div(count, kStateGroup)) * sizeof(StateScales);
    uint8_t* exp_avg = reinterpret_cast<uint8_t*>(state.exp_avg) + index;
    uint8_t* exp_avg_sq = state.exp_avg_sq + index;

    load_masters(tensor, index, count, x.master);
    load_gradients<G>(table.pieces, tensor, step, index, count, x.gradient.of);
    std::memcpy(x.scales, state.scales + group, scale_bytes);
    Row<uint8_t> first, second;
    update_values(step, view_row(exp_avg, count, first), view_row(exp_avg_sq, count, second), x);
    for (int64_t i = count; i < kStripColumns; ++i) x.exp_avg.of[i] = x.root.of[i] = 0.0f;
    scale_moments(x);
    std::memcpy(state.scales + group, x.scales, scale_bytes);
    store_row(exp_avg, count, [&](uint8_t* codes) { encode_moments(x.exp_avg.of, codes); });
    store_row(exp_avg_sq, count, [&](uint8_t* codes) { encode_roots(x.root.of, codes); });
    store_masters(tensor, index, count, random, x.master);
}

// The random bytes of the masters of a patch.
using RandomRows = uint8_t[kBlock][kStripColumns];

void draw_rows(const AdamWDescriptor& tensor, const Patch& patch, uint32_t step, RandomRows& random) {
    const int64_t row_blocks = ceil_div(tensor.cols, kRandomColumns);
    for (int64_t r = 0; r < patch.rows; ++r) {
        const int64_t block = (patch.row + r) * row_blocks + patch.col / kRandomColumns;
        const uint64_t first = tensor.compact.first_block + static_cast<uint64_t>(block);
        draw_blocks<kStripColumns / kRandomColumns>(random[r], [&](int b) {
            return master_bytes(tensor.compact.number, step, count_from(first + static_cast<uint64_t>(b)));
        });
    }
}

// G is the type of a gradient's elements; without kUpdate masters are only read.
template <class G, bool kUpdate>
void update_units(const AdamWTable& table, const AdamWDescriptor& tensor, int64_t begin, int64_t end) {
    const AdamWStep step = table.steps[&tensor - table.tensors];
    float amax = 0.0f;
    RowValues x = {};
    for (int64_t unit = begin; unit < end; ++unit) {
        const Patch patch = patch_of_unit(tensor, unit);
        alignas(64) RandomRows random;
        if (kUpdate && tensor.compact.high != nullptr) draw_rows(tensor, patch, step.count, random);
        ColumnBits most = {};
        for (int64_t r = 0; r < patch.rows; ++r) {
            const int64_t row = patch.row + r;
            const ColumnRange owned = owned_in_patch(tensor, patch, row);
            const int64_t count = owned.end - owned.begin, col = patch.col + owned.begin;
            if (count <= 0) continue;
            const int64_t index = row * tensor.cols + col - tensor.start;
            if constexpr (kUpdate) {
                const CompactState& state = tensor.compact;
                prefetch_next(static_cast<const G*>(step.gradient) + index);
                if (tensor.master != nullptr) prefetch_next(tensor.master + index);
                if (state.high != nullptr)
                    prefetch_next(state.high + index), prefetch_next(state.low + index);
                prefetch_next(state.exp_avg + index), prefetch_next(state.exp_avg_sq + index);
                update_row<G>(table, tensor, step, row, col, count, random[r] + owned.begin, x);
            } else {
                load_masters(tensor, index, count, x.master);
            }
            for (int64_t i = 0; i < count; ++i)
                most[owned.begin + i] = larger(most[owned.begin + i], magnitude_bits(x.master.of[i]));
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
