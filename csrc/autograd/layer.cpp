// A linear layer of an NVFP4 recipe as an autograd node in C++: exact products of quantized operands in all
// three passes. zerofp4/nn/native.py is its only caller. Whatever is not plain goes to the node in Python,
// LinearFunction in zerofp4/nn/function.py, which computes the same bytes and says what is wrong.

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randint.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <array>
#include <limits>
#include <mutex>
#include <optional>
#include <vector>

#include "autograd/layer_calls.h"
#include "autograd/plain.h"
#include "common/hadamard.h"
#include "common/scale.h"

namespace zerofp4 {
namespace {

// What configure_layer() was given, for as long as the process lives.
struct {
    PyObject* neutral_amax;
    PyObject* begin_backward;
    PyObject* gradients;
    const LayerFunctions* functions;
} python;

void check(const char* error) { TORCH_CHECK(error == nullptr, error); }

// How the layers of a recipe quantize on a device.
struct Scheme {
    int hadamard;
    int random_signs;
    int stochastic;
    FourOverSix choice;  // of inputs, and of weights that are quantized for a call
    int has_tiles;       // such weights are in blocks of 16x16
    int by_cublaslt;

    uint32_t signs(bool columnwise) const {
        return columnwise && hadamard && !random_signs ? 0 : kRandomSigns;
    }
};

constexpr const char* kSchemeCapsule = "zerofp4._autograd.scheme";

// Where the launches of one pass run. neutral_amax: with which values have no global scale.
struct Launch {
    Target target;
    Tensor neutral_amax;
    bool by_cublaslt;

    Launch(const Tensor& tensor, int64_t stream, Tensor neutral, const Scheme& scheme)
        : target{tensor.is_cpu() ? -1 : tensor.get_device(), stream,
                 tensor.is_cpu() ? at::get_num_threads() : 0},
          neutral_amax(std::move(neutral)),
          by_cublaslt(scheme.by_cublaslt != 0) {}
};

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
    std::array<int64_t, 2> sizes;  // the second is 0 for a vector
    at::ScalarType dtype;
};

// Tensors in one allocation, each at a multiple of 256 bytes of it, as if it had one of its own.
template <size_t N>
std::array<Tensor, N> allocate(const at::TensorOptions& options, const std::array<Piece, N>& pieces) {
    constexpr int64_t kAlignment = 256;
    std::array<int64_t, N> begins;
    int64_t end = 0;
    for (size_t i = 0; i < N; ++i) {
        begins[i] = round_up(end, kAlignment);
        const auto [rows, cols] = pieces[i].sizes;
        end = begins[i] +
              rows * std::max<int64_t>(cols, 1) * static_cast<int64_t>(c10::elementSize(pieces[i].dtype));
    }
    const Tensor whole = at::empty({end}, options.dtype(at::kByte));
    std::array<Tensor, N> made;
    for (size_t i = 0; i < N; ++i) {
        const auto& [sizes, dtype] = pieces[i];
        const int64_t offset = begins[i] / static_cast<int64_t>(c10::elementSize(dtype));
        made[i] = part_of(whole, offset, c10::IntArrayRef(sizes.data(), sizes[1] ? 2 : 1), dtype);
    }
    return made;
}

// Quantization

// A copy of a quantized matrix: data uint8 [rows, cols / 2] and compact scales as they are stored, amax
// float32 [1].
struct Copy {
    Tensor data, scale, amax;
    int64_t block_rows = 1;
    int e4m3_max = 0;

    bool defined() const { return data.defined(); }
    int64_t rows() const { return data.size(0); }
    int64_t cols() const { return 2 * data.size(1); }
};

struct Quantized {
    Copy rowwise, columnwise;
};

Copy new_copy(const Tensor& x, int64_t rows, int64_t cols, const FourOverSix& choice,
              int64_t block_rows = 1) {
    auto [data, scale, amax] =
        allocate<3>(x.options(), {{{{rows, cols / 2}, at::kByte},
                                   {{ceil_div(rows, block_rows), ceil_div(cols, kBlock)}, at::kFloat8_e4m3fn},
                                   {{1, 0}, at::kFloat}}});
    const int e4m3_max = choice.e4m3_max ? static_cast<int>(choice.e4m3_max) : static_cast<int>(kE4M3Max);
    return {std::move(data), std::move(scale), std::move(amax), block_rows, e4m3_max};
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
    args.signs = scheme.signs(columnwise);
    args.rng_state = rng_state.defined() ? rng_state.const_data_ptr<int64_t>() : nullptr;
    Quantized made;
    if (rowwise) {
        made.rowwise = new_copy(x, rows, cols, choice);
        write_rowwise(args, made.rowwise);
    }
    if (columnwise) {
        made.columnwise = new_copy(x, cols, args.hadamard ? round_up(rows, kBlock) : rows, choice);
        args.columnwise_data = made.columnwise.data.mutable_data_ptr<uint8_t>();
        args.columnwise_scale[kCompact] = static_cast<uint8_t*>(made.columnwise.scale.mutable_data_ptr());
        if (rowwise && !args.hadamard) made.rowwise.amax = made.columnwise.amax;
    }
    float *amax = nullptr, *hadamard_amax = nullptr;
    if (args.hadamard) hadamard_amax = made.columnwise.amax.mutable_data_ptr<float>();
    if (rowwise) amax = made.rowwise.amax.mutable_data_ptr<float>();
    if (!rowwise && !args.hadamard) amax = made.columnwise.amax.mutable_data_ptr<float>();
    check(python.functions->quantize(launch.target, args, amax, hadamard_amax));
    return made;
}

// A weight [N, K], contiguous, in blocks of 16x16: its rows.
Copy quantize_weight(const Tensor& weight, const Scheme& scheme, const Launch& launch) {
    Copy made = new_copy(weight, weight.size(0), weight.size(1), scheme.choice, kBlock);
    QuantizeArgs args = arguments_of(weight, kBlock, scheme.choice);
    write_rowwise(args, made);
    check(python.functions->quantize(launch.target, args, made.amax.mutable_data_ptr<float>(), nullptr));
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
    check(python.functions->product_values(launch.target, static_cast<DType>(dtype_code(dtype)),
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
    check(python.functions->find_product(launch.target.device, problem, product));
    if (product == nullptr) return false;
    const int64_t needed = product->workspace();
    const Tensor workspace = needed ? at::empty({needed}, out.options().dtype(at::kByte)) : Tensor();
    const ProductAddresses addresses{values.a.const_data_ptr(),
                                     values.b.const_data_ptr(),
                                     values.alpha.const_data_ptr<float>(),
                                     bias.defined() ? bias.const_data_ptr() : nullptr,
                                     out.mutable_data_ptr(),
                                     needed ? workspace.mutable_data_ptr() : nullptr};
    check(python.functions->run_product(launch.target, *product, addresses));
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

// The same, unrounded, added to float32 `out`.
void accumulate(const Factor& a, const Factor& b, const Tensor& out, const Launch& launch) {
    const Values values = values_of(a, b, factor_dtype(a.copy, at::kFloat), launch);
    if (launch.by_cublaslt && run_cublaslt(a, b, values, Tensor(), out, true, launch)) return;
    out.add_(product_of_torch(a, b, values, Tensor()));
}

// The node

// Whether the storage reaches to the last element of a tensor, whose elements lie where a GPU can load them.
bool holds(const Tensor& tensor) {
    const size_t end = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                        static_cast<size_t>(tensor.storage_offset()));
    if (tensor.numel() == 0 || tensor.storage().nbytes() < end) return false;
    return tensor.is_cpu() || reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % tensor.itemsize() == 0;
}

// A reference to an object of Python that any thread may drop.
class Held {
  public:
    Held() = default;
    explicit Held(PyObject* object) : object_(Py_NewRef(object)) {}
    Held(Held&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Held& operator=(Held&& other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Held() {
        if (object_ == nullptr || !Py_IsInitialized()) return;
        Gil gil;
        Py_DECREF(object_);
    }
    PyObject* get() const { return object_; }

  private:
    PyObject* object_ = nullptr;
};

// A copy that autograd keeps.
struct SavedCopy {
    SavedVariable data, scale, amax;
    int64_t block_rows;
    int e4m3_max;

    void save(const Copy& copy) {
        data = SavedVariable(copy.data, false);
        scale = SavedVariable(copy.scale, false);
        amax = SavedVariable(copy.amax, false);
        block_rows = copy.block_rows;
        e4m3_max = copy.e4m3_max;
    }
    Copy unpack(const NodePointer& node) const {
        return {data.unpack(node), scale.unpack(node), amax.unpack(node), block_rows, e4m3_max};
    }
    void reset() {
        data.reset_data();
        scale.reset_data();
        amax.reset_data();
    }
};

bool is_readable(const Copy& copy) {
    if (!copy.defined()) return true;
    for (const Tensor& tensor : {copy.data, copy.scale, copy.amax})
        if (!is_plain(tensor) || !holds(tensor)) return false;
    return true;
}

// Whether gradients [size of grad's last dimension, cols] can be added to a MainGrad's buffer.
bool takes_sums(const Tensor& buffer, int64_t cols, const Tensor& grad) {
    return buffer.defined() && is_plain(buffer) && buffer.scalar_type() == at::kFloat && buffer.dim() == 2 &&
           buffer.size(0) == grad.size(-1) && buffer.size(1) == cols && buffer.is_contiguous() &&
           buffer.device() == grad.device() && holds(buffer);
}

struct LayerBackward : Node {
    SavedCopy x, weight;
    Copy cached;     // in place of `weight` where values are kept: more than a call's buffers, and not saved
    Tensor kept;     // values of those
    Tensor primary;  // the weight, where that is NVFP4 itself
    uint32_t version;  // of it, when forward read its buffers
    Scheme scheme;
    Held context;
    at::ScalarType x_dtype, weight_dtype;
    std::optional<at::ScalarType> bias_dtype;
    bool released = false;
    std::mutex mutex;  // two threads may go back through one graph

    std::string name() const override { return "LayerBackward"; }

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
        TORCH_CHECK(false,
                    "compiled autograd cannot trace the node in C++ of a layer in NVFP4: set "
                    "ZEROFP4_AUTOGRAD=0, which takes the one in Python");
    }

    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex);
        x.reset();
        weight.reset();
        cached = {};
        kept = primary = Tensor();
        released = true;
    }

    variable_list apply(variable_list&& grads) override {
        std::lock_guard<std::mutex> lock(mutex);
        TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
        const Tensor grad = grads[0].defined() ? std::move(grads[0]) : input_metadata(0).zeros_like();
        const Copy saved_x = x.unpack(getptr());
        const Copy saved_weight = cached.defined() ? cached : weight.unpack(getptr());
        TORCH_CHECK(!saved_weight.defined() || !primary.defined() || primary._version() == version,
                    "the weight of a layer was written to between its forward and its backward pass: call "
                    "backward first");
        const bool is_fast = is_default_state(false) && !at::GradMode::is_enabled() && is_plain(grad) &&
                             dtype_code(grad.scalar_type()) >= 0 && holds(grad) && is_readable(saved_x) &&
                             is_readable(saved_weight) && !has_tangent(grad);
        return is_fast ? gradients(grad, saved_x, saved_weight)
                       : python_gradients(grad, saved_x, saved_weight);
    }

    // What Python knows of a backward pass: the stream, the neutral amax, and for the weight's gradient
    // memory to write to, or the MainGrad whose memory it is added to.
    struct Begun {
        int64_t stream;
        Tensor neutral_amax, out;
        Held main_grad;
    };

    Begun begin(const Tensor& grad, bool x_saved, bool weight_saved) {
        Gil gil;
        THPObjectPtr node = checked(torch::autograd::functionToPyObject(getptr()));
        auto* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(weight_dtype));
        THPObjectPtr found = checked(PyObject_CallFunctionObjArgs(
            python.begin_backward, node.get(), context.get(), x_saved ? dtype : Py_None,
            weight_saved ? Py_True : Py_False, nullptr));
        PyObject *neutral_amax, *out, *main_grad;
        if (!PyArg_ParseTuple(found, "OOO", &neutral_amax, &out, &main_grad)) throw_python_error();
        const int64_t stream = grad.is_cuda() ? current_stream(grad.device().index()) : 0;
        return {stream, unwrapped(neutral_amax), unwrapped(out),
                main_grad == Py_None ? Held() : Held(main_grad)};
    }

    // Of x, weight and bias.
    variable_list gradients(const Tensor& grad, const Copy& saved_x, const Copy& saved_weight) {
        const Begun begun = begin(grad, saved_x.defined(), saved_weight.defined());
        if (begun.main_grad.get() != nullptr && !takes_sums(begun.out, saved_x.rows(), grad))
            return python_gradients(grad, saved_x, saved_weight);  // which says what is wrong
        variable_list result(3);
        if (saved_x.defined() || saved_weight.defined()) {
            const Launch launch(grad, begun.stream, begun.neutral_amax, scheme);
            const Tensor rng_state = scheme.stochastic ? draw_rng_state(grad) : Tensor();
            const Quantized q = quantize(matrix_of(grad), saved_weight.defined(), saved_x.defined(),
                                         FourOverSix{}, rng_state, scheme, launch);
            if (saved_weight.defined()) result[0] = of_x(grad, q.rowwise, saved_weight, launch);
            if (saved_x.defined()) result[1] = of_weight(q.columnwise, saved_x, begun, launch);
        }
        if (bias_dtype) result[2] = as_rows(grad).sum(0).to(*bias_dtype);
        return result;
    }

    Tensor of_x(const Tensor& grad, const Copy& q_grad, const Copy& saved_weight, const Launch& launch) {
        const Factor codes{saved_weight, true, kept};
        return rows_like(multiply({q_grad}, codes, x_dtype, Tensor(), Tensor(), launch), grad);
    }

    Tensor of_weight(const Copy& q_grad, const Copy& saved_x, const Begun& begun, const Launch& launch) {
        if (begun.main_grad.get() == nullptr)
            return multiply({q_grad}, {saved_x}, weight_dtype, Tensor(), begun.out, launch);
        accumulate({q_grad}, {saved_x}, begun.out, launch);
        Gil gil;
        THPObjectPtr gradient = checked(PyObject_CallMethod(begun.main_grad.get(), "gradient", nullptr));
        return unwrapped(gradient);
    }

    variable_list python_gradients(const Tensor& grad, const Copy& saved_x, const Copy& saved_weight) {
        Gil gil;
        const auto dtype_of = [](at::ScalarType dtype) {
            return reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype));
        };
        const auto buffers_of = [](const Copy& copy) {
            if (!copy.defined()) return checked(Py_NewRef(Py_None));
            THPObjectPtr data = wrapped(copy.data), scale = wrapped(copy.scale), amax = wrapped(copy.amax);
            return checked(PyTuple_Pack(3, data.get(), scale.get(), amax.get()));
        };
        THPObjectPtr node = checked(torch::autograd::functionToPyObject(getptr()));
        THPObjectPtr own_grad = wrapped(grad);
        THPObjectPtr own_x = buffers_of(saved_x), own_weight = buffers_of(saved_weight);
        THPObjectPtr e4m3_max = checked(PyLong_FromLong(saved_weight.e4m3_max));
        PyObject* bias = bias_dtype ? dtype_of(*bias_dtype) : Py_None;
        THPObjectPtr found = checked(PyObject_CallFunctionObjArgs(
            python.gradients, node.get(), context.get(), own_grad.get(), own_x.get(), own_weight.get(),
            e4m3_max.get(), dtype_of(x_dtype), dtype_of(weight_dtype), bias, nullptr));
        PyObject *of_x, *of_weight, *of_bias;
        if (!PyArg_ParseTuple(found, "OOO", &of_x, &of_weight, &of_bias)) throw_python_error();
        return {unwrapped(of_x), unwrapped(of_weight), unwrapped(of_bias)};
    }
};

// codes: of the weight, undefined where it is quantized here. kept: values of those, or undefined.
Tensor forward(const Tensor& x, const Tensor& weight, const Tensor& bias, Copy codes, const Tensor& kept,
               const Scheme& scheme, const Launch& launch, bool is_primary, Held context) {
    NodePointer node;
    const uint32_t version = weight._version();
    if (at::GradMode::is_enabled() && torch::autograd::compute_requires_grad(x, weight, bias)) {
        node = new_node<LayerBackward>();
        node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
    }
    const bool saves_x = node && weight.requires_grad(), saves_weight = node && x.requires_grad();
    Quantized q;
    Tensor y;
    {
        at::AutoDispatchBelowADInplaceOrView below;
        c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
        if (!codes.defined()) codes = quantize_weight(weight.contiguous(), scheme, launch);
        q = quantize(matrix_of(x), true, saves_x, scheme.choice, Tensor(), scheme, launch);
        const Factor of_weight{codes, false, kept};
        y = rows_like(multiply({q.rowwise}, of_weight, x.scalar_type(), bias, Tensor(), launch), x);
    }
    if (node) {
        auto* saved = static_cast<LayerBackward*>(&*node);
        if (saves_x) saved->x.save(q.columnwise);
        if (saves_weight && !kept.defined()) saved->weight.save(codes);
        if (saves_weight && kept.defined()) saved->cached = codes, saved->kept = kept;
        if (is_primary) {
            saved->primary = weight;
            saved->version = version;
        }
        saved->scheme = scheme;
        saved->x_dtype = x.scalar_type();
        saved->weight_dtype = weight.scalar_type();
        if (bias.defined() && bias.requires_grad()) saved->bias_dtype = bias.scalar_type();
        saved->context = std::move(context);
        torch::autograd::set_history(y, node);
    }
    return y;
}

bool is_weight(PyObject* object) { return is_exact(object) || Py_TYPE(object) == weight_type(); }

// Whether the layer's sizes are those of a plain call.
bool fits_layer(const Tensor& x, const Tensor& weight, const Tensor& bias, const Scheme& scheme) {
    const int64_t rows = weight.size(0), cols = weight.size(1);
    if (x.dim() == 0 || x.size(-1) != cols || rows % 2 != 0 || cols % 2 != 0 || !holds(x)) return false;
    if (!scheme.hadamard && x.numel() / cols % 2 != 0) return false;  // has no columnwise copy
    if (!bias.defined()) return true;
    return is_plain(bias) && bias.dim() == 1 && bias.size(0) == rows && holds(bias) &&
           bias.device() == x.device() && dtype_code(bias.scalar_type()) >= 0;
}

// Whether these are the codes of a weight [N, K] on the device.
bool are_codes(const Copy& codes, const Tensor& weight, const c10::Device& device) {
    return codes.data.dim() == 2 && codes.rows() == weight.size(0) && codes.cols() == weight.size(1) &&
           codes.data.device() == device && is_readable(codes);
}

// Whether a weight can be quantized on the device.
bool is_quantizable(const Tensor& weight, const Scheme& scheme, const c10::Device& device) {
    return scheme.has_tiles && is_plain(weight) && weight.device() == device && holds(weight);
}

// Whether these are values of the codes as products of x read them.
bool are_values(const Tensor& kept, const Copy& codes, const Tensor& x) {
    return is_plain(kept) && kept.scalar_type() == factor_dtype(codes, x.scalar_type()) && kept.dim() == 2 &&
           kept.size(0) == codes.rows() && kept.size(1) == codes.cols() && kept.is_contiguous() &&
           kept.device() == x.device() && holds(kept);
}

}  // namespace

// layer(x, weight, bias, data, scale, amax, values, block_rows, e4m3_max, device, scheme, context): y; None
// for what the Python node has to do. data, scale, amax: of the rowwise copy of the weight; data is None
// where the weight is quantized for this call. values: those of the copy, or None. bias may be None. context:
// what begin_backward() and gradients() are handed.
PyObject* layer(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 12, "layer() takes 12 arguments, got ", count);
    if (!is_default_state(true) || !is_exact(given[0]) || !is_weight(given[1])) Py_RETURN_NONE;
    for (int i : {2, 3, 4, 5, 6})
        if (given[i] != Py_None && !is_exact(given[i])) Py_RETURN_NONE;
    const Tensor& x = THPVariable_Unpack(given[0]);
    const Tensor& weight = THPVariable_Unpack(given[1]);
    const Tensor bias = unwrapped(given[2]), kept = unwrapped(given[6]);
    Copy codes{unwrapped(given[3]), unwrapped(given[4]), unwrapped(given[5])};
    codes.block_rows = PyLong_AsLong(given[7]);
    codes.e4m3_max = static_cast<int>(PyLong_AsLong(given[8]));
    if (PyErr_Occurred()) return nullptr;
    const auto* scheme = static_cast<const Scheme*>(PyCapsule_GetPointer(given[10], kSchemeCapsule));
    if (scheme == nullptr) return nullptr;
    if (codes.defined() && (!codes.scale.defined() || !codes.amax.defined())) Py_RETURN_NONE;
    const bool is_fast = is_plain(x) && !weight.is_inference() && weight.dim() == 2 &&
                         dtype_code(x.scalar_type()) >= 0 && dtype_code(weight.scalar_type()) >= 0 &&
                         fits_layer(x, weight, bias, *scheme) &&
                         (codes.defined() ? are_codes(codes, weight, x.device())
                                          : is_quantizable(weight, *scheme, x.device())) &&
                         (!kept.defined() || are_values(kept, codes, x));
    if (!is_fast) Py_RETURN_NONE;
    const int64_t stream = x.is_cuda() ? current_stream(x.device().index()) : 0;
    THPObjectPtr neutral_amax = checked(PyObject_CallOneArg(python.neutral_amax, given[9]));
    const Launch launch(x, stream, unwrapped(neutral_amax), *scheme);
    const bool is_primary = Py_TYPE(given[1]) == weight_type();
    Held context(given[11]);
    Tensor y;
    {
        NoGil released;
        if (!has_tangent(x) && !has_tangent(weight) && !has_tangent(bias))
            y = forward(x, weight, bias, std::move(codes), kept, *scheme, launch, is_primary,
                        std::move(context));
    }
    if (!y.defined()) Py_RETURN_NONE;
    return THPVariable_Wrap(std::move(y));
    END_HANDLE_TH_ERRORS
}

// scheme(hadamard, random_signs, stochastic_rounding, e4m3_max, squared_error, has_tiles, by_cublaslt): of
// layers on a device; e4m3_max and squared_error are those of four over six, 0 without.
PyObject* scheme(PyObject*, PyObject* given) {
    auto made = std::make_unique<Scheme>();
    int e4m3_max, squared_error;
    if (!PyArg_ParseTuple(given, "pppippp", &made->hadamard, &made->random_signs, &made->stochastic,
                          &e4m3_max, &squared_error, &made->has_tiles, &made->by_cublaslt))
        return nullptr;
    made->choice = {static_cast<float>(e4m3_max), squared_error};
    const auto destroy = [](PyObject* capsule) {
        delete static_cast<Scheme*>(PyCapsule_GetPointer(capsule, kSchemeCapsule));
    };
    PyObject* capsule = PyCapsule_New(made.get(), kSchemeCapsule, destroy);
    if (capsule != nullptr) made.release();
    return capsule;
}

namespace {

// Which torch's macro of a node's properties names.
using torch::autograd::THPCppFunction_input_metadata;
using torch::autograd::THPCppFunction_metadata;
using torch::autograd::THPCppFunction_next_functions;
using torch::autograd::THPCppFunction_requires_grad;

PyGetSetDef kProperties[] = {THP_FUNCTION_DEFAULT_PROPERTIES, {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyTypeObject node_type;

}  // namespace

// configure_layer(neutral_amax, begin_backward, gradients, functions)
PyObject* configure_layer(PyObject*, PyObject* given) {
    HANDLE_TH_ERRORS
    PyObject* capsule;
    if (!PyArg_ParseTuple(given, "OOOO", &python.neutral_amax, &python.begin_backward, &python.gradients,
                          &capsule))
        return nullptr;
    void* functions = PyCapsule_GetPointer(capsule, kLayerCapsule);
    if (functions == nullptr) return nullptr;
    python.functions = static_cast<const LayerFunctions*>(functions);
    Py_INCREF(given);  // and all that it holds
    torch::autograd::_initFunctionPyTypeObject(node_type, "LayerBackward", kProperties, nullptr);
    torch::autograd::registerCppFunction(typeid(LayerBackward), &node_type);
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

}  // namespace zerofp4
