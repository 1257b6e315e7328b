#include "autograd/grouped_passes.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/segment_reduce.h>
#include <ATen/ops/stack.h>

#include <limits>
#include <utility>
#include <vector>

#include "common/scale.h"

namespace zerofp4 {
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

// [groups, N, K], without global scales.
Tensor values_of(const Codes& codes, int64_t count, const Launch& launch) {
    if (codes.kept.defined()) return codes.kept;
    const Copy& first = codes.copies[0];
    const bool is_stack = first.data.dim() == 3;
    std::vector<uintptr_t> data, scale;
    const auto address = [is_stack](const Tensor& buffer, int64_t e) {
        const auto begin = reinterpret_cast<uintptr_t>(buffer.const_data_ptr());
        return begin + (is_stack ? static_cast<uintptr_t>(e * buffer.stride(0)) * buffer.itemsize() : 0);
    };
    for (int64_t e = 0; e < count; ++e) {
        const Copy& copy = codes.copies[is_stack ? 0 : e];
        data.push_back(address(copy.data, e));
        scale.push_back(address(copy.scale, e));
    }
    const Tensor values =
        at::empty({count, first.rows(), first.cols()}, first.data.options().dtype(at::kBFloat16));
    const StackedOperand operand{count,        data.data(),  scale.data(),    values.mutable_data_ptr(),
                                 first.rows(), first.cols(), first.block_rows};
    check(kernels().stacked_values(launch.target, static_cast<DType>(dtype_code(at::kBFloat16)), operand,
                                   launch.neutral_amax.const_data_ptr()));
    return values;
}

// float32 [groups]
Tensor amaxes_of(const Codes& codes) {
    if (codes.copies.size() == 1) return codes.copies[0].amax;
    std::vector<Tensor> each;
    for (const Copy& copy : codes.copies) each.push_back(copy.amax);
    return at::cat(each);
}

// Rows of groups with the transposes of their weights, or with those as they are.
Tensor multiply(const QuantizedGroups& rows, const Codes& weights, bool transposed, const Launch& launch) {
    const auto [values, ends] = values_of(rows.groups, rows.copies.rowwise, false, amaxes_of(weights),
                                          weights.copies[0].e4m3_max, launch);
    const Tensor others = values_of(weights, rows.groups.count(), launch);
    return at::_grouped_mm(values, transposed ? others.transpose(1, 2) : others, ends);
}

// A stack as one copy, and weights of their own too, unless each has to have memory of its own.
Codes quantize_all(at::TensorList weights, const Scheme& scheme, const Launch& launch) {
    Codes codes;
    if (weights[0].dim() == 2 && !launch.apart) {
        codes.copies.push_back(quantize_weights(weights, scheme, launch));
    } else {
        for (const Tensor& weight : weights) codes.copies.push_back(quantize_weight(weight, scheme, launch));
    }
    return codes;
}

// Biases

// int64 [tokens]: the group of each row; the last one where splits are not valid.
Tensor groups_of_rows(const Groups& groups) {
    const Tensor& offsets = groups.offsets;
    const Tensor own = at::arange(groups.tokens, offsets.options());
    const Tensor inner = part_of(offsets, offsets.storage_offset() + 1, {groups.count() - 1}, at::kLong);
    return at::searchsorted(inner, own, false, true);
}

void add_biases(const Tensor& y, at::TensorList biases, const Groups& groups) {
    const Tensor each = biases[0].dim() == 2 ? biases[0] : at::stack(biases);
    y.add_(each.index_select(0, groups_of_rows(groups)));
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

// Whether these are tensors of one shape for each of so many groups, or a stack of those.
bool are_of_groups(at::TensorList tensors, int64_t count, c10::IntArrayRef one) {
    std::vector<int64_t> sizes = one.vec();
    const bool is_stack = tensors.size() == 1 && tensors[0].dim() == static_cast<int64_t>(one.size()) + 1;
    if (is_stack) sizes.insert(sizes.begin(), count);
    for (const Tensor& tensor : tensors) {
        if (tensor.sizes() != sizes || tensor.scalar_type() != tensors[0].scalar_type() ||
            tensor.is_inference() || dtype_code(tensor.scalar_type()) < 0)
            return false;
    }
    return is_stack || static_cast<int64_t>(tensors.size()) == count;
}

bool are_biases(at::TensorList biases, const Groups& groups, int64_t rows, const c10::Device& device) {
    for (const Tensor& bias : biases)
        if (!is_plain(bias) || bias.device() != device || !holds(bias)) return false;
    return biases.empty() || are_of_groups(biases, groups.count(), {rows});
}

bool are_codes(const Codes& codes, const Groups& groups, int64_t rows, const c10::Device& device) {
    const bool is_stack = codes.copies[0].data.dim() == 3;
    const int64_t count = groups.count(), cols = groups.cols;
    if (static_cast<int64_t>(codes.copies.size()) != (is_stack ? 1 : count)) return false;
    for (const Copy& copy : codes.copies) {
        if (!are_codes(copy, rows, cols, device, is_stack ? count : 0) || copy.block_rows != kBlock ||
            copy.e4m3_max != codes.copies[0].e4m3_max)
            return false;
    }
    const Tensor& kept = codes.kept;
    return !kept.defined() ||
           (kept.scalar_type() == at::kBFloat16 && is_of(kept, {count, rows, cols}, device));
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

bool are_quantizable(at::TensorList weights, const Scheme& scheme, const c10::Device& device) {
    for (const Tensor& weight : weights)
        if (!is_quantizable(weight, scheme, device)) return false;
    return true;
}

}  // namespace

bool fits_groups(const Tensor& x, const Tensor& splits, at::TensorList weights, at::TensorList biases,
                 const Codes& codes, const Scheme& scheme) {
    if (!are_rows(x, splits)) return false;
    const Groups groups{splits, {}, {}, x.size(0), x.size(1)};
    if (!are_splits(groups)) return false;
    if (codes.defined() && (!codes.copies[0].defined() || codes.copies[0].data.dim() < 2)) return false;
    if (!codes.defined() && (weights.empty() || weights[0].dim() < 2)) return false;
    const int64_t rows = codes.defined() ? codes.copies[0].rows() : weights[0].size(-2);
    if (rows % kSizeMultiple != 0 || groups.cols % kSizeMultiple != 0) return false;
    if (!weights.empty() && !are_of_groups(weights, groups.count(), {rows, groups.cols})) return false;
    return are_biases(biases, groups, rows, x.device()) &&
           (codes.defined() ? are_codes(codes, groups, rows, x.device())
                            : are_quantizable(weights, scheme, x.device()));
}

bool fits_grouped_gradients(const Tensor& grad, const Groups& groups, const Copy& x, const Codes& weights) {
    if (!are_rows(grad, groups.splits)) return false;
    const auto device = grad.device();
    const int64_t rows = grad.size(1), count = groups.count();
    if (rows % kSizeMultiple != 0 || groups.cols % kSizeMultiple != 0 ||
        groups.offsets.scalar_type() != at::kLong || groups.error.scalar_type() != at::kInt ||
        !is_of(groups.offsets, {3, count + 1}, device) || !is_of(groups.error, {1}, device))
        return false;
    return (!x.defined() || are_columns(x, groups, device)) &&
           (!weights.defined() || are_codes(weights, groups, rows, device));
}

// Passes

GroupedOperands quantize_grouped_operands(const Tensor& x, const Tensor& splits, at::TensorList weights,
                                          Codes codes, bool keeps_x, const Scheme& scheme,
                                          const Launch& launch) {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    if (!codes.defined()) codes = quantize_all(weights, scheme, launch);
    return {quantize_groups(x, splits, true, keeps_x, Tensor(), scheme, launch), std::move(codes)};
}

Tensor multiply_grouped_operands(const GroupedOperands& operands, at::TensorList biases,
                                 const Launch& launch) {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensor y = multiply(operands.x, operands.weights, true, launch);
    if (!biases.empty()) add_biases(y, biases, operands.x.groups);
    return y;
}

QuantizedGroups quantize_grouped_gradient(const Tensor& grad, const Tensor& splits, bool rowwise,
                                          bool columnwise, const Scheme& scheme, const Launch& launch) {
    const Tensor rng_state = draw_rng_state(grad, {splits.size(0), 2}, scheme);
    return quantize_groups(grad, splits, rowwise, columnwise, rng_state, scheme, launch);
}

Tensor gradient_of_grouped_x(const QuantizedGroups& grad, const Codes& weights, const Launch& launch) {
    return multiply(grad, weights, false, launch);
}

Tensor gradient_of_grouped_weights(const QuantizedGroups& grad, const Copy& x, const Groups& groups,
                                   const Launch& launch) {
    const auto [left, ends] =
        values_of(grad.groups, grad.copies.columnwise, true, x.amax, static_cast<int>(kE4M3Max), launch);
    const auto right = values_of(groups, x, true, Tensor(), static_cast<int>(kE4M3Max), launch);
    return at::_grouped_mm(left, right.values.t(), ends);
}

Tensor gradient_of_grouped_biases(const Tensor& grad, const Tensor& offsets) {
    const Tensor first = part_of(offsets, offsets.storage_offset(), {offsets.size(1)}, at::kLong);
    // unsafe: offsets are on the device, and no check of theirs may wait for it
    return at::segment_reduce(grad.to(at::kFloat), "sum", {}, {}, first, 0, true, 0);
}

}  // namespace zerofp4
