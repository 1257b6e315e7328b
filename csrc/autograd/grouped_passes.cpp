#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/segment_reduce.h>

#include <limits>
#include <utility>
#include <vector>

#include "autograd/layer_passes.h"
#include "common/scale.h"

namespace zerofp4::grouped {
namespace {

// Of rows and columns of weights: grouped_mm wants multiples of 16 bytes of bfloat16.
constexpr int64_t kSizeMultiple = 8;
// Of codes of groups whose values are read.
constexpr uintptr_t kDataAlignment = 8;

// Values

// What is multiplied: rows of all groups, or columns, and where each group ends in that.
struct GroupValues {
    Tensor values, ends;
};

// other_amax: of what each group will be multiplied with; undefined for values without global scales.
GroupValues values_of(const Groups& groups, const Copy& copy, bool columnwise, const Tensor& other_amax,
                      int other_e4m3_max, const Launch& launch) {
    GroupedValuesArgs args{};
    args.tokens = groups.tokens;
    args.cols = groups.cols;
    args.data_rows = most_data_rows(groups.sizes());
    args.count = static_cast<int32_t>(groups.count());
    args.columnwise = columnwise;
    const int64_t offsets_of_one = groups.count() + 1;
    args.offsets = groups.offsets.const_data_ptr<int64_t>();
    args.data_offsets = args.offsets + offsets_of_one;
    args.error = groups.error.const_data_ptr<int32_t>();
    auto [values, ends] = allocate<2>(
        copy.data.options(), {{{{args.rows(), args.width()}, at::kBFloat16}, {{groups.count()}, at::kInt}}});
    args.data = copy.data.const_data_ptr<uint8_t>();
    args.scale = static_cast<const uint8_t*>(copy.scale.const_data_ptr());
    if (other_amax.defined()) {
        args.amax = copy.amax.const_data_ptr<float>();
        args.other_amax = other_amax.const_data_ptr<float>();
    }
    args.other_factor = decode_factor(static_cast<float>(other_e4m3_max));
    args.output = static_cast<BFloat16*>(values.mutable_data_ptr());
    args.ends = ends.mutable_data_ptr<int32_t>();
    check(kernels().group_values(launch.target, args));
    return {std::move(values), std::move(ends)};
}

// [groups, N, K] of a stack, without global scales.
Tensor values_of(const Copy& stack, const Launch& launch) {
    const int64_t count = stack.data.size(0);
    const Tensor values =
        at::empty({count, stack.rows(), stack.cols()}, stack.data.options().dtype(at::kBFloat16));
    const StackCall call{count,
                         stack.data.const_data_ptr(),
                         stack.scale.const_data_ptr(),
                         values.mutable_data_ptr(),
                         stack.rows(),
                         stack.cols(),
                         stack.block_rows};
    check(kernels().stacked_values(launch.target, static_cast<DType>(dtype_code(at::kBFloat16)), call,
                                   launch.neutral_amax.const_data_ptr()));
    return values;
}

// Rows of groups with the transposes of their weights, or with those as they are.
Tensor multiply(const Groups& groups, const Copy& rows, const Copy& weight, bool transposed,
                const Launch& launch) {
    const auto [values, ends] = values_of(groups, rows, false, weight.amax, weight.e4m3_max, launch);
    const Tensor others = values_of(weight, launch);
    return at::_grouped_mm(values, transposed ? others.transpose(1, 2) : others, ends);
}

// int64 [tokens]: the group of each row; the last one where splits are not valid.
Tensor groups_of_rows(const Groups& groups) {
    const Tensor& offsets = groups.offsets;
    const Tensor own = at::arange(groups.tokens, offsets.options());
    const Tensor inner = part_of(offsets, offsets.storage_offset() + 1, {groups.count() - 1}, at::kLong);
    return at::searchsorted(inner, own, false, true);
}

// Conditions

// On a CPU, where Python says what is wrong with them. On a GPU nobody looks, and they give NaN.
bool are_splits(const Groups& groups) {
    if (!groups.splits.is_cpu()) return true;
    const GroupSplits sizes = groups.sizes();
    int64_t sum = 0;
    for (int32_t g = 0; g < sizes.count; ++g) {
        if (sizes.rows_of(g) < 0) return false;
        sum += sizes.rows_of(g);
    }
    return sum == groups.tokens;
}

// Whether groups can be quantized of a matrix, and how large they are lies where that lies.
bool are_rows(const Tensor& matrix, const Tensor& splits) {
    if (!is_plain(matrix) || matrix.dim() != 2 || matrix.scalar_type() != at::kBFloat16 || !holds(matrix))
        return false;
    if ((splits.scalar_type() != at::kInt && splits.scalar_type() != at::kLong) || splits.dim() != 1 ||
        !is_of(splits, splits.sizes(), matrix.device()))
        return false;
    const Groups groups{splits, {}, {}, matrix.size(0), matrix.size(1)};
    return most_scale_rows(groups.sizes()) <= std::numeric_limits<int32_t>::max();
}

// Whether this is the columnwise copy of a matrix in groups.
bool are_columns(const Copy& x, const Groups& groups, const c10::Device& device) {
    const auto& [data, scale, amax, block_rows, e4m3_max] = x;
    const int64_t rows = most_data_rows(groups.sizes());
    return data.scalar_type() == at::kByte && amax.scalar_type() == at::kFloat &&
           (scale.scalar_type() == at::kFloat8_e4m3fn || scale.scalar_type() == at::kByte) &&
           is_of(data, {groups.cols * (rows / 2)}, device) &&
           is_of(scale, {groups.cols * (rows / kBlock)}, device) && is_of(amax, {groups.count()}, device) &&
           reinterpret_cast<uintptr_t>(data.const_data_ptr()) % kDataAlignment == 0;
}

// Whether grouped_mm takes matrices of this size.
bool are_sizes(int64_t rows, int64_t cols) { return rows % kSizeMultiple == 0 && cols % kSizeMultiple == 0; }

}  // namespace

bool fits_layer(const Tensor& x, const Tensor& splits, int64_t rows, int64_t cols, const Tensor& bias) {
    if (!are_rows(x, splits) || !are_sizes(rows, cols)) return false;
    const Groups groups{splits, {}, {}, x.size(0), cols};
    return are_splits(groups) && (!bias.defined() || bias.sizes() == c10::IntArrayRef{groups.count(), rows});
}

bool fits_gradients(const Tensor& grad, const Groups& groups, const Copy& x, const Copy& weight) {
    const auto device = grad.device();
    const int64_t count = groups.count();
    return are_rows(grad, groups.splits) && are_sizes(grad.size(1), groups.cols) &&
           groups.offsets.scalar_type() == at::kLong && groups.error.scalar_type() == at::kInt &&
           is_of(groups.offsets, {3, count + 1}, device) && is_of(groups.error, {1}, device) &&
           (!x.defined() || are_columns(x, groups, device)) &&
           (!weight.defined() || are_codes(weight, grad.size(1), groups.cols, device, count));
}

Tensor multiply_operands(const Operands& operands, const Tensor& bias, const Launch& launch) {
    const Tensor y = multiply(operands.groups, operands.x.rowwise, operands.weight, true, launch);
    if (bias.defined()) y.add_(bias.index_select(0, groups_of_rows(operands.groups)));
    return y;
}

Gradients make_gradients(const Tensor& grad, const Groups& groups, const Copy& x, const Copy& weight,
                         const GradientOptions& options, const Scheme& scheme, const Launch& launch) {
    Gradients made;
    if (x.defined() || weight.defined()) {
        const Tensor rng_state = draw_rng_state(grad, {groups.count(), 2}, scheme);
        const QuantizedGroups q =
            quantize_groups(grad, groups.splits, weight.defined(), x.defined(), rng_state, scheme, launch);
        if (weight.defined()) made.x = multiply(q.groups, q.copies.rowwise, weight, false, launch);
        if (x.defined()) {
            const int e4m3_max = static_cast<int>(kE4M3Max);
            const auto left = values_of(q.groups, q.copies.columnwise, true, x.amax, e4m3_max, launch);
            const auto right = values_of(groups, x, true, Tensor(), e4m3_max, launch);
            const Tensor stack = at::_grouped_mm(left.values, right.values.t(), left.ends);
            if (options.adds) {
                options.out.add_(stack);
            } else {
                made.weight = stack.to(options.weight_dtype);
            }
        }
    }
    if (options.bias_needs) {
        const Tensor& offsets = groups.offsets;
        const Tensor first = part_of(offsets, offsets.storage_offset(), {offsets.size(1)}, at::kLong);
        // unsafe: offsets are on the device, and no check of theirs may wait for it
        made.bias = at::segment_reduce(grad.to(at::kFloat), "sum", {}, {}, first, 0, true, 0);
    }
    return made;
}

}  // namespace zerofp4::grouped
