#include "autograd/layer_passes.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <utility>

namespace zerofp4 {
namespace {

// Rows, contiguous, in the leading dimensions of a tensor.
Tensor rows_like(const Tensor& rows, const Tensor& tensor) {
    if (tensor.dim() == 2) return rows;
    auto sizes = tensor.sizes().vec();
    sizes.back() = rows.size(1);
    return part_of(rows, rows.storage_offset(), sizes, rows.scalar_type());
}

// Products

// What is multiplied: values [rows, contraction], or the transpose of those.
struct Factor {
    const Copy& copy;
    bool transposed = false;

    int64_t rows() const { return transposed ? copy.cols() : copy.rows(); }
    int64_t contraction() const { return transposed ? copy.rows() : copy.cols(); }
    // As torch would call it: a matrix of one row or column is both.
    bool is_transposed() const { return transposed && rows() != 1 && contraction() != 1; }
};

struct Values {
    Tensor a, b, alpha;
};

Values values_of(const Factor& a, const Factor& b, at::ScalarType dtype, const Launch& launch) {
    const auto piece = [&](const Factor& factor) {
        return Piece{{factor.copy.rows(), factor.copy.cols()}, dtype};
    };
    auto [left, right, alpha] = allocate<3>(a.copy.data.options(), {piece(a), piece(b), {{1}, at::kFloat}});
    const auto operand = [](const Factor& factor, const Tensor& values) {
        const Copy& copy = factor.copy;
        return CopyCall{copy.data.const_data_ptr(),
                        copy.scale.const_data_ptr(),
                        copy.amax.const_data_ptr(),
                        values.mutable_data_ptr(),
                        copy.rows(),
                        copy.cols(),
                        copy.block_rows,
                        copy.e4m3_max,
                        false};
    };
    check(kernels().product_values(launch.target, static_cast<DType>(dtype_code(dtype)), operand(a, left),
                                   operand(b, right), launch.neutral_amax.const_data_ptr(),
                                   alpha.mutable_data_ptr()));
    return {std::move(left), std::move(right), std::move(alpha)};
}

uint32_t alignment_of(const Tensor& tensor) {
    const auto place = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    return static_cast<uint32_t>(std::min<uintptr_t>(place & -place, 256));
}

// Whether cuBLASLt has an algorithm for it; bias is of the output's dtype, or undefined.
bool run_cublaslt(const Factor& a, const Factor& b, const Values& values, const Tensor& bias,
                  const Tensor& out, bool accumulate, const Launch& launch) {
    ProductProblem problem{};
    problem.rows = out.size(0);
    problem.cols = out.size(1);
    problem.contraction = a.contraction();
    problem.inputs = static_cast<Inputs>(dtype_code(values.a.scalar_type()));
    problem.output = static_cast<DType>(dtype_code(out.scalar_type()));
    problem.a_transposed = a.is_transposed();
    problem.b_transposed = b.is_transposed();
    problem.accumulate = accumulate;
    problem.a_alignment = alignment_of(values.a);
    problem.b_alignment = alignment_of(values.b);
    problem.bias_alignment = bias.defined() ? alignment_of(bias) : 0;
    problem.output_alignment = alignment_of(out);
    std::shared_ptr<cuda::Product> product;
    check(kernels().find_product(launch.target.device, problem, product));
    if (product == nullptr) return false;
    const int64_t needed = product->workspace();
    const Tensor workspace = needed ? at::empty({needed}, out.options().dtype(at::kByte)) : Tensor();
    const ProductAddresses addresses{values.a.const_data_ptr(),
                                     values.b.const_data_ptr(),
                                     nullptr,
                                     nullptr,
                                     values.alpha.const_data_ptr<float>(),
                                     bias.defined() ? bias.const_data_ptr() : nullptr,
                                     out.mutable_data_ptr(),
                                     needed ? workspace.mutable_data_ptr() : nullptr};
    check(kernels().run_product(launch.target, *product, addresses));
    return true;
}

// float32, unrounded.
Tensor product_of_torch(const Factor& a, const Factor& b, const Values& values, const Tensor& bias) {
    const Tensor left = a.transposed ? values.a.t() : values.a;
    const Tensor right = b.transposed ? values.b : values.b.t();
    Tensor out = left.is_cuda() ? at::mm(left, right, at::kFloat) : at::mm(left, right);
    out.mul_(values.alpha);
    return bias.defined() ? out.add_(bias) : out;
}

Tensor rounded(const Tensor& result, at::ScalarType dtype, const Tensor& out) {
    if (!out.defined()) return result.to(dtype);
    return out.is_same(result) ? out : out.copy_(result);
}

// In which values are multiplied: as factor_dtype in zerofp4/gemm/exact.py.
at::ScalarType factor_dtype(const Copy& copy, at::ScalarType out_dtype) {
    if (copy.data.is_cpu()) return at::kFloat;
    return out_dtype == at::kHalf ? at::kHalf : at::kBFloat16;
}

// round(alpha * (a b^T) + bias) in dtype, in `out` if that is defined: as scaled_product in
// zerofp4/ops/product.py.
Tensor multiply(const Factor& a, const Factor& b, at::ScalarType dtype, const Tensor& bias, const Tensor& out,
                const Launch& launch) {
    const Values values = values_of(a, b, factor_dtype(a.copy, dtype), launch);
    if (launch.by_cublaslt) {
        // See there when the epilogue may add the bias and round.
        const bool whole = dtype == at::kFloat || b.rows() * 2 % 16 == 0;
        const bool plain = !bias.defined() || (bias.scalar_type() == dtype && whole);
        const bool direct = (dtype == values.a.scalar_type() || dtype == at::kFloat) && plain;
        const at::ScalarType made_dtype = direct ? dtype : at::kFloat;
        const Tensor made = out.defined() && direct
                                ? out
                                : at::empty({a.rows(), b.rows()}, values.a.options().dtype(made_dtype));
        const Tensor own_bias = bias.defined() ? bias.to(made_dtype).contiguous() : bias;
        if (run_cublaslt(a, b, values, own_bias, made, false, launch)) return rounded(made, dtype, out);
    }
    return rounded(product_of_torch(a, b, values, bias), dtype, out);
}

// The product, unrounded, added to float32 `out`.
void add_product(const Factor& a, const Factor& b, const Tensor& out, const Launch& launch) {
    const Values values = values_of(a, b, factor_dtype(a.copy, at::kFloat), launch);
    if (launch.by_cublaslt && run_cublaslt(a, b, values, Tensor(), out, true, launch)) return;
    out.add_(product_of_torch(a, b, values, Tensor()));
}

}  // namespace

bool fits_layer(const Tensor& x, const Tensor& splits, int64_t rows, int64_t cols, const Tensor& bias,
                const Scheme& scheme) {
    if (!is_plain(x) || dtype_code(x.scalar_type()) < 0 || x.dim() == 0 || x.size(-1) != cols || !holds(x))
        return false;
    if (bias.defined() && (!is_plain(bias) || !holds(bias) || bias.device() != x.device() ||
                           bias.size(-1) != rows || dtype_code(bias.scalar_type()) < 0))
        return false;
    if (splits.defined()) return grouped::fits_layer(x, splits, rows, cols, bias);
    if (!scheme.hadamard && x.numel() / cols % 2 != 0) return false;  // has no columnwise copy
    return rows % 2 == 0 && cols % 2 == 0 && (!bias.defined() || bias.dim() == 1);
}

bool fits_gradients(const Tensor& grad, const Groups& groups, const Copy& x, const Copy& weight, int64_t cols,
                    const Scheme& scheme) {
    if (!is_plain(grad) || dtype_code(grad.scalar_type()) < 0 || !holds(grad)) return false;
    if (groups.defined()) return grouped::fits_gradients(grad, groups, x, weight);
    const int64_t rows = grad.size(-1), tokens = grad.numel() / rows;
    const int64_t columns = scheme.hadamard ? round_up(tokens, kBlock) : tokens;
    return (!x.defined() || are_codes(x, cols, columns, grad.device())) &&
           (!weight.defined() || are_codes(weight, rows, cols, grad.device()));
}

// Passes

Operands quantize_operands(const Tensor& x, const Tensor& splits, const Tensor& weight, Copy rows,
                           bool keeps_x, const Scheme& scheme, const Launch& launch) {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    if (!rows.defined()) rows = quantize_weight(weight, scheme, launch);
    if (!splits.defined())
        return {{}, quantize(x, true, keeps_x, scheme.choice, Tensor(), scheme, launch), std::move(rows)};
    auto [groups, copies] = quantize_groups(x, splits, true, keeps_x, Tensor(), scheme, launch);
    return {std::move(groups), std::move(copies), std::move(rows)};
}

Tensor multiply_operands(const Tensor& x, const Operands& operands, const Tensor& bias,
                         const Launch& launch) {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    if (operands.groups.defined()) return grouped::multiply_operands(operands, bias, launch);
    const Tensor rows =
        multiply({operands.x.rowwise}, {operands.weight}, x.scalar_type(), bias, Tensor(), launch);
    return rows_like(rows, x);
}

Gradients make_gradients(const Tensor& grad, const Groups& groups, const Copy& x, const Copy& weight,
                         const GradientOptions& options, const Scheme& scheme, const Launch& launch) {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    if (groups.defined()) return grouped::make_gradients(grad, groups, x, weight, options, scheme, launch);
    const auto& [x_dtype, weight_dtype, out, adds, bias_needs] = options;
    Gradients made;
    if (x.defined() || weight.defined()) {
        const Tensor rng_state = draw_rng_state(grad, {2}, scheme);
        const Quantized q =
            quantize(grad, weight.defined(), x.defined(), FourOverSix{}, rng_state, scheme, launch);
        if (weight.defined()) {
            const Factor columns{weight, true};
            made.x = rows_like(multiply({q.rowwise}, columns, x_dtype, Tensor(), Tensor(), launch), grad);
        }
        if (x.defined() && adds) {
            add_product({q.columnwise}, {x}, out, launch);
        } else if (x.defined()) {
            made.weight = multiply({q.columnwise}, {x}, weight_dtype, Tensor(), out, launch);
        }
    }
    if (bias_needs) made.bias = as_rows(grad).sum(0);
    return made;
}

}  // namespace zerofp4
