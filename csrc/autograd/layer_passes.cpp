#include "autograd/layer_passes.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randint.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "common/hadamard.h"
#include "common/scale.h"

namespace zerofp4 {
namespace {

// What configure_passes() was given.
struct {
    PyObject* neutral_amax;
    const LayerFunctions* functions;
} given;

void check(const char* error) { TORCH_CHECK(error == nullptr, error); }

// Memory

// Contiguous elements in the storage of another tensor, without history, and without torch's dispatcher,
// which for a view takes the host half as long as a launch.
Tensor part_of(const Tensor& whole, int64_t offset, c10::IntArrayRef sizes, at::ScalarType dtype) {
    auto part = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(whole.storage()),
                                                     whole.key_set(), c10::scalarTypeToTypeMeta(dtype));
    part->set_storage_offset(offset);
    part->set_sizes_contiguous(sizes);
    return Tensor(std::move(part));
}

// The rows of all dimensions but the last, contiguous.
Tensor matrix_of(const Tensor& tensor) {
    Tensor whole = tensor.contiguous();
    if (whole.dim() == 2) return whole;
    const int64_t cols = whole.size(-1);
    return part_of(whole, whole.storage_offset(), {whole.numel() / cols, cols}, whole.scalar_type());
}

// Rows, contiguous, in the leading dimensions of a tensor.
Tensor rows_like(const Tensor& rows, const Tensor& tensor) {
    if (tensor.dim() == 2) return rows;
    auto sizes = tensor.sizes().vec();
    sizes.back() = rows.size(1);
    return part_of(rows, rows.storage_offset(), sizes, rows.scalar_type());
}

struct Piece {
    std::array<int64_t, 2> lengths;  // the second is 0 for a vector
    at::ScalarType dtype;

    c10::IntArrayRef sizes() const { return {lengths.data(), lengths[1] ? size_t{2} : 1}; }
};

// Tensors in one allocation, each at a multiple of 256 bytes of it, as if it had one of its own.
template <size_t N>
std::array<Tensor, N> allocate(const at::TensorOptions& options, const std::array<Piece, N>& pieces) {
    constexpr int64_t kAlignment = 256;
    std::array<int64_t, N> begins;
    int64_t end = 0;
    for (size_t i = 0; i < N; ++i) {
        begins[i] = round_up(end, kAlignment);
        const auto [rows, cols] = pieces[i].lengths;
        end = begins[i] +
              rows * std::max<int64_t>(cols, 1) * static_cast<int64_t>(c10::elementSize(pieces[i].dtype));
    }
    const Tensor whole = at::empty({end}, options.dtype(at::kByte));
    std::array<Tensor, N> made;
    for (size_t i = 0; i < N; ++i) {
        const at::ScalarType dtype = pieces[i].dtype;
        const int64_t offset = begins[i] / static_cast<int64_t>(c10::elementSize(dtype));
        made[i] = part_of(whole, offset, pieces[i].sizes(), dtype);
    }
    return made;
}

template <size_t N>
std::array<Tensor, N> allocate_apart(const at::TensorOptions& options, const std::array<Piece, N>& pieces) {
    std::array<Tensor, N> made;
    for (size_t i = 0; i < N; ++i) made[i] = at::empty(pieces[i].sizes(), options.dtype(pieces[i].dtype));
    return made;
}

// Quantization

Copy new_copy(const Tensor& x, int64_t rows, int64_t cols, const FourOverSix& choice, int64_t block_rows,
              bool apart) {
    const std::array<Piece, 3> pieces{
        {{{rows, cols / 2}, at::kByte},
         {{ceil_div(rows, block_rows), ceil_div(cols, kBlock)}, at::kFloat8_e4m3fn},
         {{1, 0}, at::kFloat}}};
    auto [data, scale, amax] = apart ? allocate_apart(x.options(), pieces) : allocate(x.options(), pieces);
    return {std::move(data), std::move(scale), std::move(amax), block_rows, e4m3_max_of(choice)};
}

QuantizeArgs arguments_of(const Tensor& x, int64_t block_rows, const FourOverSix& choice) {
    QuantizeArgs args{};
    args.input = x.const_data_ptr();
    args.dtype = static_cast<DType>(dtype_code(x.scalar_type()));
    args.rows = x.size(0);
    args.cols = x.size(1);
    args.block_rows = static_cast<int32_t>(block_rows);
    args.signs = kRandomSigns;
    args.choice = choice;
    return args;
}

void write_rowwise(QuantizeArgs& args, const Copy& copy) {
    args.rowwise_data = copy.data.mutable_data_ptr<uint8_t>();
    args.rowwise_scale[kCompact] = static_cast<uint8_t*>(copy.scale.mutable_data_ptr());
}

// x [M, K], contiguous, in blocks of 1x16.
Quantized quantize(const Tensor& x, bool rowwise, bool columnwise, const FourOverSix& choice,
                   const Tensor& rng_state, const Scheme& scheme, const Launch& launch) {
    const int64_t rows = x.size(0), cols = x.size(1);
    QuantizeArgs args = arguments_of(x, 1, choice);
    args.hadamard = columnwise && scheme.hadamard;
    args.signs = columnwise && scheme.hadamard && !scheme.random_signs ? 0 : kRandomSigns;
    args.rng_state = rng_state.defined() ? rng_state.const_data_ptr<int64_t>() : nullptr;
    Quantized made;
    if (rowwise) {
        made.rowwise = new_copy(x, rows, cols, choice, 1, false);  // which no pass keeps
        write_rowwise(args, made.rowwise);
    }
    if (columnwise) {
        const int64_t whole = args.hadamard ? round_up(rows, kBlock) : rows;
        made.columnwise = new_copy(x, cols, whole, choice, 1, launch.apart);
        args.columnwise_data = made.columnwise.data.mutable_data_ptr<uint8_t>();
        args.columnwise_scale[kCompact] = static_cast<uint8_t*>(made.columnwise.scale.mutable_data_ptr());
        if (rowwise && !args.hadamard) made.rowwise.amax = made.columnwise.amax;
    }
    float *amax = nullptr, *hadamard_amax = nullptr;
    if (args.hadamard) hadamard_amax = made.columnwise.amax.mutable_data_ptr<float>();
    if (rowwise) amax = made.rowwise.amax.mutable_data_ptr<float>();
    if (!rowwise && !args.hadamard) amax = made.columnwise.amax.mutable_data_ptr<float>();
    check(given.functions->quantize(launch.target, args, amax, hadamard_amax));
    return made;
}

// A weight [N, K], contiguous, in blocks of 16x16: its rows.
Copy quantize_weight(const Tensor& weight, const Scheme& scheme, const Launch& launch) {
    Copy made = new_copy(weight, weight.size(0), weight.size(1), scheme.choice, kBlock, launch.apart);
    QuantizeArgs args = arguments_of(weight, kBlock, scheme.choice);
    write_rowwise(args, made);
    check(given.functions->quantize(launch.target, args, made.amax.mutable_data_ptr<float>(), nullptr));
    return made;
}

// Seed and offset, drawn as ops.draw_rng_state draws them.
Tensor draw_rng_state(const Tensor& like) {
    return at::randint(std::numeric_limits<int64_t>::max(), {2}, like.options().dtype(at::kLong));
}

// Products

// What is multiplied: values [rows, contraction], or the transpose of those. kept: the values, where they are
// there already.
struct Factor {
    const Copy& copy;
    bool transposed = false;
    Tensor kept = {};

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
        return Piece{{factor.kept.defined() ? 0 : factor.copy.rows(), factor.copy.cols()}, dtype};
    };
    auto [left, right, alpha] =
        allocate<3>(a.copy.data.options(), {piece(a), piece(b), {{1, 0}, at::kFloat}});
    const auto operand = [](const Factor& factor, const Tensor& values) {
        const Copy& copy = factor.copy;
        return ProductOperand{copy.data.const_data_ptr(),
                              copy.scale.const_data_ptr(),
                              copy.amax.const_data_ptr(),
                              factor.kept.defined() ? nullptr : values.mutable_data_ptr(),
                              copy.rows(),
                              copy.cols(),
                              copy.block_rows,
                              copy.e4m3_max};
    };
    check(given.functions->product_values(launch.target, static_cast<DType>(dtype_code(dtype)),
                                          operand(a, left), operand(b, right),
                                          launch.neutral_amax.const_data_ptr(), alpha.mutable_data_ptr()));
    return {a.kept.defined() ? a.kept : std::move(left), b.kept.defined() ? b.kept : std::move(right),
            std::move(alpha)};
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
    problem.inputs = static_cast<DType>(dtype_code(values.a.scalar_type()));
    problem.output = static_cast<DType>(dtype_code(out.scalar_type()));
    problem.a_transposed = a.is_transposed();
    problem.b_transposed = b.is_transposed();
    problem.accumulate = accumulate;
    problem.a_alignment = alignment_of(values.a);
    problem.b_alignment = alignment_of(values.b);
    problem.bias_alignment = bias.defined() ? alignment_of(bias) : 0;
    problem.output_alignment = alignment_of(out);
    std::shared_ptr<cuda::Product> product;
    check(given.functions->find_product(launch.target.device, problem, product));
    if (product == nullptr) return false;
    const int64_t needed = product->workspace();
    const Tensor workspace = needed ? at::empty({needed}, out.options().dtype(at::kByte)) : Tensor();
    const ProductAddresses addresses{values.a.const_data_ptr(),
                                     values.b.const_data_ptr(),
                                     values.alpha.const_data_ptr<float>(),
                                     bias.defined() ? bias.const_data_ptr() : nullptr,
                                     out.mutable_data_ptr(),
                                     needed ? workspace.mutable_data_ptr() : nullptr};
    check(given.functions->run_product(launch.target, *product, addresses));
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

bool is_of(const Tensor& tensor, c10::IntArrayRef sizes, const c10::Device& device) {
    return is_plain(tensor) && tensor.sizes() == sizes && tensor.is_contiguous() &&
           tensor.device() == device && holds(tensor);
}

}  // namespace

void configure_passes(PyObject* neutral_amax, const LayerFunctions* functions) {
    given = {neutral_amax, functions};
}

Launch::Launch(const Tensor& tensor, int64_t stream, Tensor neutral, const Scheme& scheme, bool apart)
    : target{tensor.is_cpu() ? -1 : tensor.get_device(), stream, tensor.is_cpu() ? at::get_num_threads() : 0},
      neutral_amax(std::move(neutral)),
      by_cublaslt(scheme.by_cublaslt != 0),
      apart(apart) {}

Launch begin_launch(const Tensor& tensor, const Scheme& scheme, bool apart) {
    THPObjectPtr device = checked(THPDevice_New(tensor.device()));
    THPObjectPtr neutral_amax = checked(PyObject_CallOneArg(given.neutral_amax, device));
    const int64_t stream = tensor.is_cuda() ? current_stream(tensor.device().index()) : 0;
    return {tensor, stream, unwrapped(neutral_amax), scheme, apart};
}

int e4m3_max_of(const FourOverSix& choice) {
    return static_cast<int>(choice.e4m3_max ? choice.e4m3_max : kE4M3Max);
}

// Conditions

bool holds(const Tensor& tensor) {
    const size_t end = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                        static_cast<size_t>(tensor.storage_offset()));
    if (tensor.numel() == 0 || tensor.storage().nbytes() < end) return false;
    return tensor.is_cpu() || reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % tensor.itemsize() == 0;
}

bool is_readable(const Copy& copy) {
    if (!copy.defined()) return true;
    for (const Tensor& tensor : {copy.data, copy.scale, copy.amax})
        if (!is_plain(tensor) || !holds(tensor)) return false;
    return true;
}

bool are_codes(const Copy& codes, int64_t rows, int64_t cols, const c10::Device& device) {
    const auto& [data, scale, amax, block_rows, e4m3_max] = codes;
    if (!data.defined() || !scale.defined() || !amax.defined()) return false;
    if ((block_rows != 1 && block_rows != kBlock) || (e4m3_max != 448 && e4m3_max != 256) || cols % 2 != 0)
        return false;
    return data.scalar_type() == at::kByte && amax.scalar_type() == at::kFloat &&
           (scale.scalar_type() == at::kFloat8_e4m3fn || scale.scalar_type() == at::kByte) &&
           is_of(data, {rows, cols / 2}, device) && is_of(amax, {1}, device) &&
           is_of(scale, {ceil_div(rows, block_rows), ceil_div(cols, kBlock)}, device);
}

bool are_values(const Tensor& kept, const Copy& codes, at::ScalarType x_dtype) {
    return kept.scalar_type() == factor_dtype(codes, x_dtype) &&
           is_of(kept, {codes.rows(), codes.cols()}, codes.data.device());
}

bool is_quantizable(const Tensor& weight, const Scheme& scheme, const c10::Device& device) {
    return scheme.has_tiles && is_plain(weight) && weight.device() == device && holds(weight);
}

bool fits_layer(const Tensor& x, int64_t rows, int64_t cols, const Tensor& bias, const Scheme& scheme) {
    if (x.dim() == 0 || x.size(-1) != cols || rows % 2 != 0 || cols % 2 != 0 || !holds(x)) return false;
    if (!scheme.hadamard && x.numel() / cols % 2 != 0) return false;  // has no columnwise copy
    if (!bias.defined()) return true;
    return is_plain(bias) && bias.dim() == 1 && bias.size(0) == rows && holds(bias) &&
           bias.device() == x.device() && dtype_code(bias.scalar_type()) >= 0;
}

// Passes

Forward forward_pass(const Tensor& x, const Tensor& weight, const Tensor& bias, Copy codes,
                     const Tensor& kept, bool keeps_x, const Scheme& scheme, const Launch& launch) {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    if (!codes.defined()) codes = quantize_weight(weight.contiguous(), scheme, launch);
    Quantized q = quantize(matrix_of(x), true, keeps_x, scheme.choice, Tensor(), scheme, launch);
    const Tensor rows = multiply({q.rowwise}, {codes, false, kept}, x.scalar_type(), bias, Tensor(), launch);
    return {rows_like(rows, x), std::move(codes), std::move(q.columnwise)};
}

Quantized quantize_gradient(const Tensor& grad, bool rowwise, bool columnwise, const Scheme& scheme,
                            const Launch& launch) {
    const Tensor rng_state = scheme.stochastic ? draw_rng_state(grad) : Tensor();
    return quantize(matrix_of(grad), rowwise, columnwise, FourOverSix{}, rng_state, scheme, launch);
}

Tensor gradient_of_x(const Tensor& grad, const Copy& q_grad, const Copy& weight, const Tensor& kept,
                     at::ScalarType dtype, const Launch& launch) {
    return rows_like(multiply({q_grad}, {weight, true, kept}, dtype, Tensor(), Tensor(), launch), grad);
}

Tensor gradient_of_weight(const Copy& q_grad, const Copy& x, at::ScalarType dtype, const Tensor& out,
                          const Launch& launch) {
    return multiply({q_grad}, {x}, dtype, Tensor(), out, launch);
}

void add_gradient_of_weight(const Copy& q_grad, const Copy& x, const Tensor& out, const Launch& launch) {
    const Factor a{q_grad}, b{x};
    const Values values = values_of(a, b, factor_dtype(q_grad, at::kFloat), launch);
    if (launch.by_cublaslt && run_cublaslt(a, b, values, Tensor(), out, true, launch)) return;
    out.add_(product_of_torch(a, b, values, Tensor()));
}

}  // namespace zerofp4
