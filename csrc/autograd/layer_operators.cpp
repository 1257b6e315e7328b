// zerofp4::linear and zerofp4::linear_gradients: the operators of a layer that code by torch.compile calls,
// dispatched in C++. Schemas, fakes and formulas of autograd are in zerofp4/nn/operators.py, and so are the
// implementations in Python, to which arguments go that are not plain: they compute the same bytes, and say
// what is wrong.

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <optional>
#include <utility>
#include <vector>

#include "autograd/call_python.h"
#include "autograd/functions.h"
#include "autograd/layer_passes.h"
#include "common/bits.h"
#include "common/scale.h"

namespace zerofp4 {
namespace {

using OptionalTensors = c10::List<std::optional<Tensor>>;

// What implement_layer() was given, for as long as the process lives.
struct {
    PyObject* linear;  // the implementations in Python
    PyObject* linear_gradients;
    PyObject* quantizers_of;
    PyObject* cached_rows;
} python;

constexpr int64_t kNoCache = -1;

// The arguments of both operators that say what the weight is.
struct WeightArguments {
    const std::optional<Tensor>& weight;
    const OptionalTensors& primary;
    int64_t e4m3_max;
    c10::string_view recipe;
    int64_t cache;
};

// A buffer of a primary weight by its index in BUFFERS; undefined where it does not exist.
enum Buffer : size_t { kRowwiseData = 0, kRowwiseScale = 1, kColumnwiseData = 4, kAmax = 8, kBuffers = 10 };

Tensor buffer_of(const WeightArguments& given, Buffer index) {
    return given.primary.size() == kBuffers ? given.primary.get(index).value_or(Tensor()) : Tensor();
}

// The Quantizers of a recipe on the tensor's device. Needs the GIL.
THPObjectPtr quantizers_of(c10::string_view recipe, const Tensor& tensor) {
    THPObjectPtr device = checked(THPDevice_New(tensor.device()));
    return call_python(python.quantizers_of, recipe, device.get());
}

// Nothing where C++ does not multiply.
std::optional<Scheme> scheme_of(PyObject* quantizers) {
    THPObjectPtr capsule = checked(PyObject_GetAttrString(quantizers, "scheme"));
    if (capsule.get() == Py_None) return std::nullopt;
    const void* scheme = PyCapsule_GetPointer(capsule, kSchemeCapsule);
    if (scheme == nullptr) throw_python_error();
    return *static_cast<const Scheme*>(scheme);
}

struct Shape {
    int64_t rows, cols;
};

// Of the weight; of what is none, that of no weight.
Shape shape_of(const WeightArguments& given) {
    const Tensor matrix = given.weight ? *given.weight : buffer_of(given, kRowwiseData);
    if (!matrix.defined() || matrix.dim() != 2) return {0, 0};
    return {matrix.size(0), given.weight ? matrix.size(1) : 2 * matrix.size(1)};
}

// The rows of a weight. codes: undefined where the call quantizes them. kept: values of those, or undefined.
struct Rows {
    Copy codes;
    Tensor kept;
};

// Nothing where products read the columns.
std::optional<Rows> primary_rows(const WeightArguments& given) {
    Rows rows{{buffer_of(given, kRowwiseData), buffer_of(given, kRowwiseScale), buffer_of(given, kAmax)}, {}};
    Copy& codes = rows.codes;
    for (const Tensor& matrix : {codes.data, codes.scale})
        if (!matrix.defined() || matrix.dim() != 2) return std::nullopt;
    codes.block_rows = codes.scale.size(0) == codes.data.size(0) ? 1 : kBlock;
    codes.e4m3_max = static_cast<int>(given.e4m3_max);
    if (codes.block_rows == 1 && buffer_of(given, kColumnwiseData).defined()) return std::nullopt;
    return rows;
}

std::optional<Rows> cached_rows(PyObject* quantizers, const WeightArguments& given, bool is_first,
                                at::ScalarType x_dtype) {
    THPObjectPtr found =
        call_python(python.cached_rows, quantizers, *given.weight, given.cache, is_first, x_dtype);
    if (found.get() == Py_None) return std::nullopt;
    PyObject *data, *scale, *amax, *kept;
    long long block_rows;
    int e4m3_max;
    if (!PyArg_ParseTuple(found, "OOOOLi", &data, &scale, &amax, &kept, &block_rows, &e4m3_max))
        throw_python_error();
    return Rows{{unwrapped(data), unwrapped(scale), unwrapped(amax), block_rows, e4m3_max}, unwrapped(kept)};
}

// Those of a weight of this shape; nothing where Python is to multiply. Needs the GIL.
std::optional<Rows> find_rows(PyObject* quantizers, const WeightArguments& given, const Shape& shape,
                              bool is_first, at::ScalarType x_dtype, const c10::Device& device) {
    if (given.weight && given.cache == kNoCache) return Rows{};
    auto rows = given.weight ? cached_rows(quantizers, given, is_first, x_dtype) : primary_rows(given);
    if (!rows || !are_codes(rows->codes, shape.rows, shape.cols, device)) return std::nullopt;
    if (rows->kept.defined() && !are_values(rows->kept, rows->codes, x_dtype)) return std::nullopt;
    return rows;
}

// Whether kernels can read the elements.
bool is_matrix(const Tensor& tensor) {
    return tensor.defined() && is_plain(tensor) && tensor.dim() == 2 &&
           dtype_code(tensor.scalar_type()) >= 0 && holds(tensor) && !c10::InferenceMode::is_enabled();
}

std::vector<Tensor> unpacked(PyObject* list) {
    std::vector<Tensor> tensors;
    for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) tensors.push_back(unwrapped(PyList_GetItem(list, i)));
    return tensors;
}

void append(std::vector<Tensor>& tensors, Copy copy) {
    tensors.push_back(std::move(copy.data));
    tensors.push_back(std::move(copy.scale));
    tensors.push_back(std::move(copy.amax));
}

// zerofp4::linear

struct Pass {
    Scheme scheme;
    Launch launch;
    Rows weight;
    Copy x;  // in the backward pass
};

// Nothing where Python is to run the pass.
std::optional<Pass> begin_linear(const Tensor& x, const Tensor& bias, const WeightArguments& given,
                                 bool is_first) {
    if (!is_matrix(x)) return std::nullopt;
    Gil gil;
    THPObjectPtr quantizers = quantizers_of(given.recipe, x);
    const auto scheme = scheme_of(quantizers);
    const Shape shape = shape_of(given);
    if (!scheme || !fits_layer(x, shape.rows, shape.cols, bias, *scheme)) return std::nullopt;
    if (given.weight &&
        (dtype_code(given.weight->scalar_type()) < 0 || !is_quantizable(*given.weight, *scheme, x.device())))
        return std::nullopt;
    auto rows = find_rows(quantizers, given, shape, is_first, x.scalar_type(), x.device());
    if (!rows) return std::nullopt;
    return Pass{*scheme, begin_launch(x, *scheme, true), std::move(*rows), {}};
}

std::vector<Tensor> run_linear(const Tensor& x, const std::optional<Tensor>& bias,
                               const std::optional<Tensor>& weight, const OptionalTensors& primary,
                               at::ScalarType dtype, int64_t e4m3_max, c10::string_view recipe, int64_t cache,
                               bool is_first, bool x_needs, bool weight_needs) {
    const Tensor own_bias = bias.value_or(Tensor());
    const auto pass = begin_linear(x, own_bias, {weight, primary, e4m3_max, recipe, cache}, is_first);
    if (!pass) {
        Gil gil;
        return unpacked(call_python(python.linear, x, bias, weight, primary, dtype, e4m3_max, recipe, cache,
                                    is_first, x_needs, weight_needs));
    }
    Forward made = forward_pass(x, weight.value_or(Tensor()), own_bias, pass->weight.codes, pass->weight.kept,
                                weight_needs, pass->scheme, pass->launch);
    std::vector<Tensor> results{std::move(made.y)};
    if (weight_needs) append(results, std::move(made.x));
    if (x_needs && !pass->weight.codes.defined()) append(results, std::move(made.weight));
    return results;
}

bool any_requires_grad(const OptionalTensors& tensors) {
    for (const std::optional<Tensor> tensor : tensors)
        if (tensor && tensor->requires_grad()) return true;
    return false;
}

// What autograd does with zerofp4::linear. torch's kernel for that is Python, also where no gradient is
// needed, as in compiled code: it is called only where one is.
std::vector<Tensor> differentiate_linear(c10::DispatchKeySet keys, const Tensor& x,
                                         const std::optional<Tensor>& bias,
                                         const std::optional<Tensor>& weight, const OptionalTensors& primary,
                                         at::ScalarType dtype, int64_t e4m3_max, c10::string_view recipe,
                                         int64_t cache, bool is_first, bool x_needs, bool weight_needs) {
    static const auto linear =
        c10::Dispatcher::singleton().findSchemaOrThrow("zerofp4::linear", "").typed<decltype(run_linear)>();
    const auto redispatch = [&](c10::DispatchKeySet to) {
        return linear.redispatch(to, x, bias, weight, primary, dtype, e4m3_max, recipe, cache, is_first,
                                 x_needs, weight_needs);
    };
    const auto below_autograd = keys & c10::after_autograd_keyset;
    if (at::GradMode::is_enabled() &&
        (torch::autograd::compute_requires_grad(x, bias, weight) || any_requires_grad(primary)))
        // This key still has torch's kernel, as all of autograd have but those of a CPU and of CUDA.
        return redispatch(below_autograd | c10::DispatchKeySet(c10::DispatchKey::AutogradOther));
    at::AutoDispatchBelowAutograd below;
    return redispatch(below_autograd);
}

// zerofp4::linear_gradients

// What linear() has returned of an operand.
Copy returned(at::TensorList buffers, int64_t block_rows, const Scheme& scheme) {
    if (buffers.size() != 3) return {};
    return {buffers[0], buffers[1], buffers[2], block_rows, e4m3_max_of(scheme.choice)};
}

std::optional<Pass> begin_gradients(const Tensor& grad, at::TensorList x, int64_t cols, at::TensorList own,
                                    const WeightArguments& given, at::ScalarType x_dtype, bool x_needs) {
    if (!is_matrix(grad) || dtype_code(x_dtype) < 0) return std::nullopt;
    Gil gil;
    THPObjectPtr quantizers = quantizers_of(given.recipe, grad);
    const auto scheme = scheme_of(quantizers);
    if (!scheme || (x.empty() && !x_needs)) return std::nullopt;
    const Shape shape{grad.size(1), cols};
    const auto device = grad.device();
    const int64_t tokens = scheme->hadamard ? round_up(grad.size(0), kBlock) : grad.size(0);
    Copy of_x = returned(x, 1, *scheme);
    if (!x.empty() && !are_codes(of_x, cols, tokens, device)) return std::nullopt;
    std::optional<Rows> rows = Rows{};
    if (x_needs && !own.empty()) {
        rows->codes = returned(own, kBlock, *scheme);
        if (!scheme->has_tiles || !are_codes(rows->codes, shape.rows, shape.cols, device))
            return std::nullopt;
    } else if (x_needs) {
        rows = find_rows(quantizers, given, shape, false, x_dtype, device);
        if (!rows || !rows->codes.defined()) return std::nullopt;
    }
    return Pass{*scheme, begin_launch(grad, *scheme), std::move(*rows), std::move(of_x)};
}

std::vector<Tensor> run_gradients(const Tensor& grad, at::TensorList x, int64_t cols, at::TensorList own,
                                  const std::optional<Tensor>& weight, const OptionalTensors& primary,
                                  at::ScalarType dtype, int64_t e4m3_max, c10::string_view recipe,
                                  int64_t cache, at::ScalarType x_dtype, bool x_needs) {
    const WeightArguments given{weight, primary, e4m3_max, recipe, cache};
    const auto pass =
        dtype_code(dtype) < 0 ? std::nullopt : begin_gradients(grad, x, cols, own, given, x_dtype, x_needs);
    if (!pass) {
        Gil gil;
        return unpacked(call_python(python.linear_gradients, grad, x, cols, own, weight, primary, dtype,
                                    e4m3_max, recipe, cache, x_dtype, x_needs));
    }
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto& [scheme, launch, rows, of_x] = *pass;
    const Quantized q = quantize_gradient(grad, x_needs, of_x.defined(), scheme, launch);
    std::vector<Tensor> results;
    if (x_needs) results.push_back(gradient_of_x(grad, q.rowwise, rows.codes, rows.kept, x_dtype, launch));
    if (of_x.defined()) results.push_back(gradient_of_weight(q.columnwise, of_x, dtype, Tensor(), launch));
    return results;
}

}  // namespace

// implement_layer(linear, linear_gradients, quantizers_of, cached_rows): dispatch the operators of a layer
// here. The first two are their implementations in Python. quantizers_of(recipe, device) is what a recipe
// quantizes with, by its key, and has a scheme or None. cached_rows(quantizers, weight, cache, is_first,
// x_dtype) is (data, scale, amax, values or None, block_rows, e4m3_max) of the rows that a cache keeps of a
// weight, or None.
PyObject* implement_layer(PyObject*, PyObject* given) {
    HANDLE_TH_ERRORS
    if (!PyArg_ParseTuple(given, "OOOO", &python.linear, &python.linear_gradients, &python.quantizers_of,
                          &python.cached_rows))
        return nullptr;
    Py_INCREF(given);  // and all that it holds
    // Not a static of the file: nothing of torch is touched before its version was compared.
    static auto* library =
        new torch::Library(torch::Library::FRAGMENT, "zerofp4", std::nullopt, __FILE__, __LINE__);
    for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
        library->impl("linear", torch::dispatch(key, TORCH_FN(run_linear)));
        library->impl("linear_gradients", torch::dispatch(key, TORCH_FN(run_gradients)));
    }
    for (const auto key : {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA})
        library->impl("linear", torch::dispatch(key, TORCH_FN(differentiate_linear)));
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

}  // namespace zerofp4
