// zerofp4::linear and zerofp4::grouped_linear, and zerofp4::linear_gradients and those of groups: the
// operators of layers that code by torch.compile calls, dispatched in C++. Schemas, fakes and formulas of
// autograd are in zerofp4/nn/operators.py and grouped_operators.py, and so are the implementations in Python,
// to which arguments go that are not plain: they compute the same bytes, and say what is wrong.

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <optional>
#include <utility>
#include <vector>

#include "autograd/call_python.h"
#include "autograd/functions.h"
#include "autograd/grouped_passes.h"
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
    PyObject* grouped_linear;
    PyObject* grouped_linear_gradients;
    PyObject* quantizers_of;
    PyObject* cached_rows;
    PyObject* cached_groups;
} implementations;

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

// The rows of a primary weight, or of a stack of them, whose buffers begin at `first`. Nothing where products
// read the columns.
std::optional<Copy> primary_rows(const OptionalTensors& primary, size_t first, int64_t e4m3_max) {
    const auto buffer = [&](Buffer index) { return primary.get(first + index).value_or(Tensor()); };
    Copy rows{buffer(kRowwiseData), buffer(kRowwiseScale), buffer(kAmax)};
    for (const Tensor& matrix : {rows.data, rows.scale})
        if (!matrix.defined() || matrix.dim() < 2) return std::nullopt;
    rows.block_rows = rows.scale.size(-2) == rows.data.size(-2) ? 1 : kBlock;
    rows.e4m3_max = static_cast<int>(e4m3_max);
    if (rows.block_rows == 1 && buffer(kColumnwiseData).defined()) return std::nullopt;
    return rows;
}

// The Quantizers of a recipe on the tensor's device. Needs the GIL.
THPObjectPtr quantizers_of(c10::string_view recipe, const Tensor& tensor) {
    THPObjectPtr device = checked(THPDevice_New(tensor.device()));
    return call_python(implementations.quantizers_of, recipe, device.get());
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

std::optional<Codes> cached_rows(PyObject* quantizers, const WeightArguments& given, bool is_first,
                                 at::ScalarType x_dtype) {
    THPObjectPtr found =
        call_python(implementations.cached_rows, quantizers, *given.weight, given.cache, is_first, x_dtype);
    if (found.get() == Py_None) return std::nullopt;
    PyObject *data, *scale, *amax, *kept;
    long long block_rows;
    int e4m3_max;
    if (!PyArg_ParseTuple(found, "OOOOLi", &data, &scale, &amax, &kept, &block_rows, &e4m3_max))
        throw_python_error();
    return Codes{{{unwrapped(data), unwrapped(scale), unwrapped(amax), block_rows, e4m3_max}},
                 unwrapped(kept)};
}

// Those of a weight of this shape, none where the call quantizes them; nothing where Python is to multiply.
// Needs the GIL.
std::optional<Codes> find_rows(PyObject* quantizers, const WeightArguments& given, const Shape& shape,
                               bool is_first, at::ScalarType x_dtype, const c10::Device& device) {
    if (given.weight && given.cache == kNoCache) return Codes{};
    std::optional<Codes> rows;
    if (given.weight) {
        rows = cached_rows(quantizers, given, is_first, x_dtype);
    } else if (given.primary.size() == kBuffers) {
        const auto own = primary_rows(given.primary, 0, given.e4m3_max);
        if (own) rows = Codes{{*own}, {}};
    }
    if (!rows || !are_codes(*rows, shape.rows, shape.cols, device, x_dtype)) return std::nullopt;
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

void append(std::vector<Tensor>& tensors, const Copy& copy) {
    tensors.insert(tensors.end(), {copy.data, copy.scale, copy.amax});
}

// zerofp4::linear

struct Pass {
    Scheme scheme;
    Launch launch;
    Codes weight;
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
        return unpacked(call_python(implementations.linear, x, bias, weight, primary, dtype, e4m3_max, recipe,
                                    cache, is_first, x_needs, weight_needs));
    }
    const Operands made = quantize_operands(x, weight.value_or(Tensor()), pass->weight, weight_needs,
                                            pass->scheme, pass->launch);
    std::vector<Tensor> results{multiply_operands(x, made, own_bias, pass->launch)};
    if (weight_needs) append(results, made.x.columnwise);
    if (x_needs && !pass->weight.defined()) append(results, made.weight.copies[0]);
    return results;
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
    std::optional<Codes> rows = Codes{};
    if (x_needs && !own.empty()) {
        rows->copies = {returned(own, kBlock, *scheme)};
        if (!scheme->has_tiles || !are_codes(*rows, shape.rows, shape.cols, device, x_dtype))
            return std::nullopt;
    } else if (x_needs) {
        rows = find_rows(quantizers, given, shape, false, x_dtype, device);
        if (!rows || !rows->defined()) return std::nullopt;
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
        return unpacked(call_python(implementations.linear_gradients, grad, x, cols, own, weight, primary,
                                    dtype, e4m3_max, recipe, cache, x_dtype, x_needs));
    }
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto& [scheme, launch, rows, of_x] = *pass;
    const Quantized q = quantize_gradient(grad, x_needs, of_x.defined(), scheme, launch);
    std::vector<Tensor> results;
    if (x_needs) results.push_back(gradient_of_x(grad, q.rowwise, rows, x_dtype, launch));
    if (of_x.defined()) results.push_back(gradient_of_weight(q.columnwise, of_x, dtype, Tensor(), launch));
    return results;
}

// zerofp4::grouped_linear

// The arguments of both operators of groups that say what the weights are.
struct GroupedArguments {
    at::TensorList weights;
    const OptionalTensors& primary;
    c10::IntArrayRef e4m3_max;
    c10::string_view recipe;
    c10::IntArrayRef caches;
};

// Codes, none where the call quantizes them; nothing where Python is to multiply. Needs the GIL.
std::optional<Codes> find_rows(PyObject* quantizers, const GroupedArguments& given, bool is_first) {
    Codes codes;
    if (!given.weights.empty() && given.caches.empty()) return codes;
    if (!given.weights.empty()) {
        THPObjectPtr found =
            call_python(implementations.cached_groups, quantizers, given.weights, given.caches, is_first);
        if (found.get() == Py_None) return std::nullopt;
        PyObject *copies, *values;
        int e4m3_max;
        if (!PyArg_ParseTuple(found, "OOi", &copies, &values, &e4m3_max)) throw_python_error();
        return codes_of(copies, values, e4m3_max);
    }
    if (given.primary.size() != kBuffers * given.e4m3_max.size()) return std::nullopt;
    for (size_t i = 0; i < given.e4m3_max.size(); ++i) {
        const auto rows = primary_rows(given.primary, i * kBuffers, given.e4m3_max[i]);
        if (!rows) return std::nullopt;
        codes.copies.push_back(*rows);
    }
    return codes.defined() ? std::optional(codes) : std::nullopt;
}

// Nothing where Python is to run the pass.
std::optional<Pass> begin_grouped(const Tensor& x, const Tensor& splits, at::TensorList biases,
                                  const GroupedArguments& given, bool is_first) {
    if (!is_matrix(x) || !splits.defined()) return std::nullopt;
    Gil gil;
    THPObjectPtr quantizers = quantizers_of(given.recipe, x);
    const auto scheme = scheme_of(quantizers);
    if (!scheme) return std::nullopt;
    auto rows = find_rows(quantizers, given, is_first);
    if (!rows || !fits_groups(x, splits, given.weights, biases, *rows, *scheme)) return std::nullopt;
    return Pass{*scheme, begin_launch(x, *scheme, true), std::move(*rows), {}};
}

std::vector<Tensor> run_grouped(const Tensor& x, const Tensor& splits, at::TensorList biases,
                                at::TensorList weights, const OptionalTensors& primary,
                                c10::IntArrayRef e4m3_max, at::ScalarType dtype, c10::string_view recipe,
                                c10::IntArrayRef caches, bool is_first, bool x_needs, bool weight_needs) {
    const auto pass =
        begin_grouped(x, splits, biases, {weights, primary, e4m3_max, recipe, caches}, is_first);
    if (!pass) {
        Gil gil;
        return unpacked(call_python(implementations.grouped_linear, x, splits, biases, weights, primary,
                                    e4m3_max, dtype, recipe, caches, is_first, x_needs, weight_needs));
    }
    const GroupedOperands made =
        quantize_grouped_operands(x, splits, weights, pass->weight, weight_needs, pass->scheme, pass->launch);
    const Tensor y = multiply_grouped_operands(made, biases, pass->launch);
    std::vector<Tensor> results{y, made.x.groups.offsets, made.x.groups.error};
    if (weight_needs) append(results, made.x.copies.columnwise);
    if (x_needs && !pass->weight.defined())
        for (const Copy& copy : made.weights.copies) append(results, copy);
    return results;
}

// zerofp4::grouped_linear_gradients

struct GroupedPass {
    Pass pass;
    Groups groups;  // of x
};

std::optional<GroupedPass> begin_grouped_gradients(const Tensor& grad, const Groups& groups, at::TensorList x,
                                                   at::TensorList own, const GroupedArguments& given,
                                                   bool x_needs) {
    if (!is_matrix(grad) || !groups.defined() || (!x.empty() && x.size() != 3)) return std::nullopt;
    Gil gil;
    THPObjectPtr quantizers = quantizers_of(given.recipe, grad);
    const auto scheme = scheme_of(quantizers);
    if (!scheme) return std::nullopt;
    std::optional<Codes> rows = Codes{};
    if (x_needs && own.size() % 3 == 0 && !own.empty()) {
        for (size_t i = 0; i < own.size(); i += 3)
            rows->copies.push_back(returned(own.slice(i, 3), kBlock, *scheme));
    } else if (x_needs) {
        rows = find_rows(quantizers, given, false);
        if (!rows || !rows->defined()) return std::nullopt;
    }
    const Copy of_x = returned(x, 1, *scheme);
    if (!fits_grouped_gradients(grad, groups, of_x, *rows)) return std::nullopt;
    return GroupedPass{{*scheme, begin_launch(grad, *scheme), std::move(*rows), of_x}, groups};
}

std::vector<Tensor> run_grouped_gradients(const Tensor& grad, const Tensor& splits, const Tensor& offsets,
                                          const Tensor& error, at::TensorList x, int64_t cols,
                                          at::TensorList own, at::TensorList weights,
                                          const OptionalTensors& primary, c10::IntArrayRef e4m3_max,
                                          at::ScalarType dtype, c10::string_view recipe,
                                          c10::IntArrayRef caches, bool x_needs, bool bias_needs) {
    const Groups groups{splits, offsets, error, grad.dim() == 2 ? grad.size(0) : 0, cols};
    const GroupedArguments given{weights, primary, e4m3_max, recipe, caches};
    const auto begun = begin_grouped_gradients(grad, groups, x, own, given, x_needs);
    if (!begun) {
        Gil gil;
        return unpacked(call_python(implementations.grouped_linear_gradients, grad, splits, offsets, error, x,
                                    cols, own, weights, primary, e4m3_max, dtype, recipe, caches, x_needs,
                                    bias_needs));
    }
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto& [scheme, launch, rows, of_x] = begun->pass;
    std::vector<Tensor> results;
    if (x_needs || of_x.defined()) {
        const QuantizedGroups q =
            quantize_grouped_gradient(grad, splits, x_needs, of_x.defined(), scheme, launch);
        if (x_needs) results.push_back(gradient_of_grouped_x(q, rows, launch));
        if (of_x.defined()) results.push_back(gradient_of_grouped_weights(q, of_x, groups, launch));
    }
    if (bias_needs) results.push_back(gradient_of_grouped_biases(grad, offsets));
    return results;
}

// Autograd

bool needs_gradient(const Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }
bool needs_gradient(const std::optional<Tensor>& tensor) { return tensor && needs_gradient(*tensor); }
bool needs_gradient(at::TensorList tensors) { return any_requires_grad(tensors); }
bool needs_gradient(const OptionalTensors& tensors) {
    for (const std::optional<Tensor> tensor : tensors)
        if (needs_gradient(tensor)) return true;
    return false;
}
template <class Other>
bool needs_gradient(const Other&) {
    return false;
}

// What autograd does with an operator. torch's kernel for that is Python, also where no gradient is needed,
// as in compiled code: it is called only where one is.
template <const char* kName, class Run>
struct Differentiated;

template <const char* kName, class... Arguments>
struct Differentiated<kName, std::vector<Tensor>(Arguments...)> {
    static std::vector<Tensor> run(c10::DispatchKeySet keys, Arguments... given) {
        static const auto itself = c10::Dispatcher::singleton()
                                       .findSchemaOrThrow(kName, "")
                                       .typed<std::vector<Tensor>(Arguments...)>();
        const auto below_autograd = keys & c10::after_autograd_keyset;
        if (at::GradMode::is_enabled() && (needs_gradient(given) || ...)) {
            // This key still has torch's kernel, as all of autograd have but those of a CPU and of CUDA.
            const c10::DispatchKeySet other(c10::DispatchKey::AutogradOther);
            return itself.redispatch(below_autograd | other, given...);
        }
        at::AutoDispatchBelowAutograd below;
        return itself.redispatch(below_autograd, given...);
    }
};

constexpr char kLinear[] = "zerofp4::linear";
constexpr char kGroupedLinear[] = "zerofp4::grouped_linear";
using DifferentiatedLinear = Differentiated<kLinear, decltype(run_linear)>;
using DifferentiatedGroups = Differentiated<kGroupedLinear, decltype(run_grouped)>;

}  // namespace

// implement_layer(linear, linear_gradients, grouped_linear, grouped_linear_gradients, quantizers_of,
// cached_rows, cached_groups): dispatch the operators of layers here. The first four are their
// implementations in Python. quantizers_of(recipe, device) is what a recipe quantizes with, by its key, and
// has a scheme or None. cached_rows(quantizers, weight, cache, is_first, x_dtype) is (data, scale, amax,
// values or None, block_rows, e4m3_max) of the rows that a cache keeps of a weight, or None;
// cached_groups(quantizers, weights, caches, is_first) is (copies, values, e4m3_max) of all, as groups()
// takes them, or None.
PyObject* implement_layer(PyObject*, PyObject* given) {
    HANDLE_TH_ERRORS
    if (!PyArg_ParseTuple(given, "OOOOOOO", &implementations.linear, &implementations.linear_gradients,
                          &implementations.grouped_linear, &implementations.grouped_linear_gradients,
                          &implementations.quantizers_of, &implementations.cached_rows,
                          &implementations.cached_groups))
        return nullptr;
    Py_INCREF(given);  // and all that it holds
    // Not a static of the file: nothing of torch is touched before its version was compared.
    static auto* library =
        new torch::Library(torch::Library::FRAGMENT, "zerofp4", std::nullopt, __FILE__, __LINE__);
    for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
        library->impl("linear", torch::dispatch(key, TORCH_FN(run_linear)));
        library->impl("linear_gradients", torch::dispatch(key, TORCH_FN(run_gradients)));
        library->impl("grouped_linear", torch::dispatch(key, TORCH_FN(run_grouped)));
        library->impl("grouped_linear_gradients", torch::dispatch(key, TORCH_FN(run_grouped_gradients)));
    }
    for (const auto key : {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA}) {
        library->impl("linear", torch::dispatch(key, TORCH_FN(DifferentiatedLinear::run)));
        library->impl("grouped_linear", torch::dispatch(key, TORCH_FN(DifferentiatedGroups::run)));
    }
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

}  // namespace zerofp4
