// adamw_update: masters and moments from gradients, and the amaxes of the masters as they are then.

#include "common/adamw.h"

#include "cpu/kernels.h"
#include "cpu/optim/gradients.h"
#include "cpu/strip/patch.h"
#include "cpu/strip/tile_amax.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

// `count` elements next to each other; `most` has their columns. Not inlined: GCC would forget that the
// arrays do not overlap.
template <class G, bool kAmax>
__attribute__((noinline)) void update_elements(const AdamWStep step, float factor,
                                               const G* __restrict gradient, float* __restrict master,
                                               float* __restrict exp_avg, float* __restrict exp_avg_sq,
                                               int64_t count, uint32_t* __restrict most) {
    for (int64_t i = 0; i < count; ++i) {
        float p = master[i], m = exp_avg[i], v = exp_avg_sq[i];
        adamw_element(step, load_float(gradient[i]) * factor, p, m, v);
        master[i] = p, exp_avg[i] = m, exp_avg_sq[i] = v;
        if constexpr (kAmax) most[i] = larger(most[i], magnitude_bits(p));
    }
}

void read_elements(const float* __restrict master, int64_t count, uint32_t* __restrict most) {
    for (int64_t i = 0; i < count; ++i) most[i] = larger(most[i], magnitude_bits(master[i]));
}

// G is the type of a gradient's elements; with kRead there is none.
template <class G, bool kRead, bool kAmax>
void update_units(const AdamWTable& table, const AdamWDescriptor& tensor, int64_t begin, int64_t end) {
    const AdamWStep step = table.steps[&tensor - table.tensors];
    const G* gradient = static_cast<const G*>(step.gradient);
    float amax = 0.0f;
    for (int64_t unit = begin; unit < end; ++unit) {
        const Patch patch = patch_of_unit(tensor, unit);
        ColumnBits most = {};
        for (int64_t row = patch.row; row < patch.row + patch.rows; ++row) {
            const ColumnRange owned = owned_in_patch(tensor, patch, row);
            const int64_t count = owned.end - owned.begin;
            if (count <= 0) continue;
            const int64_t index = row * tensor.cols + patch.col + owned.begin - tensor.start;
            prefetch_next(tensor.master + index);
            if constexpr (!kRead) {
                prefetch_next(gradient + index);
                prefetch_next(tensor.exp_avg + index), prefetch_next(tensor.exp_avg_sq + index);
            }
            if constexpr (kRead) {
                read_elements(tensor.master + index, count, most + owned.begin);
            } else if (table.pieces.count > 0) {
                float means[kStripColumns];
                load_gradients<G>(table.pieces, tensor, step, index, count, means);
                update_elements<float, kAmax>(step, 1.0f, means, tensor.master + index,
                                              tensor.exp_avg + index, tensor.exp_avg_sq + index, count,
                                              most + owned.begin);
            } else {
                update_elements<G, kAmax>(step, step.factor, gradient + index, tensor.master + index,
                                          tensor.exp_avg + index, tensor.exp_avg_sq + index, count,
                                          most + owned.begin);
            }
        }
        if constexpr (kAmax) {
            const float found = publish_tiles(table.reduced, tensor, patch,
                                              [&](int64_t t) { return tile_magnitude(most, t); });
            amax = found > amax ? found : amax;
        }
    }
    if constexpr (kAmax) raise_words(table.reduced, tensor, amax);
}

template <class G>
void update_with(const AdamWTable& table, const AdamWDescriptor& tensor, int64_t begin, int64_t end) {
    if (wants_amaxes(tensor)) return update_units<G, false, true>(table, tensor, begin, end);
    return update_units<G, false, false>(table, tensor, begin, end);
}

}  // namespace

void adamw_update(const AdamWTable& table, int threads) {
    parallel_items(table.tensors, table.count, &AdamWDescriptor::strip_begin, table.strip_units, threads,
                   kPatchGrain, [&](const AdamWDescriptor& tensor, int64_t begin, int64_t end) {
                       if (table.steps[&tensor - table.tensors].gradient == nullptr) {
                           if (!wants_amaxes(tensor)) return;
                           return update_units<float, true, true>(table, tensor, begin, end);
                       }
                       if (tensor.gradient_dtype == DType::kBFloat16)
                           return update_with<BFloat16>(table, tensor, begin, end);
                       return update_with<float>(table, tensor, begin, end);
                   });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
