// zerofp4::linear and zerofp4::linear_gradients: a layer of a recipe, eager and compiled, with its formula of
// autograd. zerofp4/nn/operators.py has the schemas, and the implementations in Python, to which goes what
// C++ does not multiply, or is not plain: they compute the same bytes, and say what is wrong.
//
// layer() is the same call without the dispatcher, which takes the host longer than the layer does.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "autograd/call_python.h"
#include "autograd/layer_passes.h"

namespace zerofp4 {
namespace {

using OptionalTensor = std::optional<Tensor>;
using OptionalTensors = c10::List<std::optional<Tensor>>;

// What configure_layer() was given, for as long as the process lives.
struct {
    PyObject* linear;  // the implementations in Python
    PyObject* linear_gradients;
    PyObject* quantizers_of;
    PyObject* cached_rows;
} layer_functions;

// The weight

// The arguments of both operators that say what the weight is: the buffers of one that was quantized before,
// or else a tensor, to be quantized unless a cache has it.
struct WeightArguments {
    const OptionalTensor& weight;
    const OptionalTensors& primary;
    int64_t e4m3_max;
    c10::string_view recipe;
    const OptionalTensor& cache;
};

// A buffer by its index in BUFFERS.
enum Buffer : size_t { kRowwiseData = 0, kRowwiseScale = 1, kColumnwiseData = 4, kAmax = 8, kBuffers = 10 };

Tensor buffer_of(const WeightArguments& given, Buffer index) {
    return given.primary.size() == kBuffers ? given.primary.get(index).value_or(Tensor()) : Tensor();
}

// The rows of a weight, or of a stack of them, by its buffers; undefined where products read the columns.
Copy primary_rows(const WeightArguments& given) {
    Copy rows{buffer_of(given, kRowwiseData), buffer_of(given, kRowwiseScale), buffer_of(given, kAmax)};
    for (const Tensor& matrix : {rows.data, rows.scale})
        if (!matrix.defined() || matrix.dim() < 2) return {};
    rows.block_rows = rows.scale.size(-2) == rows.data.size(-2) ? 1 : kBlock;
    rows.e4m3_max = static_cast<int>(given.e4m3_max);
    return rows.block_rows == 1 && buffer_of(given, kColumnwiseData).defined() ? Copy() : rows;
}

// From (data, scale, amax, block_rows, e4m3_max), or None. Needs the GIL.
Copy rows_of(PyObject* found) {
    if (found == Py_None) return {};
    PyObject *data, *scale, *amax;
    long long block_rows;
    int e4m3_max;
    if (!PyArg_ParseTuple(found, "OOOLi", &data, &scale, &amax, &block_rows, &e4m3_max)) throw_python_error();
    return {unwrapped(data), unwrapped(scale), unwrapped(amax), block_rows, e4m3_max};
}

// [rows, cols], of a stack of so many, or of one matrix if that is 0.
struct Shape {
    int64_t rows, cols, experts;
};

// matrix: a weight, or the codes of one. Nothing for what is no weight of these splits.
std::optional<Shape> shape_of(const Tensor& matrix, const Tensor& splits) {
    const bool is_stack = splits.defined();
    if (!matrix.defined() || matrix.dim() != (is_stack ? 3 : 2) ||
        (is_stack && (splits.dim() != 1 || splits.size(0) != matrix.size(0))))
        return std::nullopt;
    return Shape{matrix.size(-2), matrix.size(-1), is_stack ? matrix.size(0) : 0};
}

// Whether rows are those of a weight of a layer. Groups are multiplied with weights in blocks of 16x16.
bool are_rows(const Copy& codes, const Shape& shape, const c10::Device& device) {
    return are_codes(codes, shape.rows, shape.cols, device, shape.experts) &&
           (shape.experts == 0 || codes.block_rows == kBlock);
}

// Whether C++ multiplies x with such a weight. rows: undefined where that is quantized in the pass.
bool takes(const Tensor& x, const Tensor& splits, const Tensor& weight, const Tensor& bias, const Copy& rows,
           const Shape& shape, const Scheme& scheme) {
    return fits_layer(x, splits, shape.rows, shape.cols, bias, scheme) &&
           (rows.defined() ? are_rows(rows, shape, x.device()) : is_quantizable(weight, scheme, x.device()));
}

// What C++ runs

// The Quantizers of a recipe on the tensor's device. Needs the GIL.
THPObjectPtr quantizers_of(c10::string_view recipe, const Tensor& tensor) {
    THPObjectPtr device = checked(THPDevice_New(tensor.device()));
    return call_python(layer_functions.quantizers_of, recipe, device.get());
}

// Nothing where C++ does not multiply.
const Scheme* scheme_of(PyObject* quantizers) {
    THPObjectPtr capsule = checked(PyObject_GetAttrString(quantizers, "scheme"));
    if (capsule.get() == Py_None) return nullptr;
    void* scheme = PyCapsule_GetPointer(capsule, kSchemeCapsule);
    if (scheme == nullptr) throw_python_error();
    return static_cast<const Scheme*>(scheme);
}

struct Pass {
    Scheme scheme;
    Launch launch;
    Copy weight;  // its rows; undefined where it is quantized in the pass
};

// The rows of a weight that is not quantized in the pass. Needs the GIL.
Copy find_rows(PyObject* quantizers, const WeightArguments& given) {
    if (!given.primary.empty()) return primary_rows(given);
    if (!given.weight || !given.cache) return {};
    return rows_of(call_python(layer_functions.cached_rows, quantizers, *given.weight, *given.cache).get());
}

// Nothing where Python is to run the pass.
std::optional<Pass> begin_linear(const Tensor& x, const Tensor& splits, const Tensor& bias,
                                 const WeightArguments& given) {
    const Tensor weight = given.weight.value_or(Tensor());
    auto shape = shape_of(weight.defined() ? weight : buffer_of(given, kRowwiseData), splits);
    if (!shape || c10::InferenceMode::is_enabled()) return std::nullopt;
    if (!weight.defined()) shape->cols *= 2;
    Gil gil;
    THPObjectPtr quantizers = quantizers_of(given.recipe, x);
    const Scheme* scheme = scheme_of(quantizers);
    if (scheme == nullptr) return std::nullopt;
    Copy rows = find_rows(quantizers, given);
    const bool is_missing = !rows.defined() && (given.cache || !given.primary.empty());
    if (is_missing || !takes(x, splits, weight, bias, rows, *shape, *scheme)) return std::nullopt;
    return Pass{*scheme, begin_launch(x, *scheme, true), std::move(rows)};
}

void append(std::vector<Tensor>& tensors, const Copy& copy) {
    tensors.insert(tensors.end(), {copy.data, copy.scale, copy.amax});
}

std::vector<Tensor> unpacked(PyObject* list) {
    std::vector<Tensor> tensors;
    for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) tensors.push_back(unwrapped(PyList_GetItem(list, i)));
    return tensors;
}

// zerofp4::linear
std::vector<Tensor> run_linear(const Tensor& x, at::TensorList x_copies, const OptionalTensor& splits,
                               const OptionalTensor& bias, const OptionalTensor& weight,
                               const OptionalTensors& primary, at::ScalarType dtype, int64_t e4m3_max,
                               c10::string_view recipe, const OptionalTensor& cache,
                               const OptionalTensor& main_grad, bool x_needs, bool weight_needs) {
    const Tensor own_splits = splits.value_or(Tensor()), own_bias = bias.value_or(Tensor());
    std::optional<Pass> pass;
    if (x_copies.empty())
        pass = begin_linear(x, own_splits, own_bias, {weight, primary, e4m3_max, recipe, cache});
    if (!pass) {
        Gil gil;
        return unpacked(call_python(layer_functions.linear, x, x_copies, splits, bias, weight, primary, dtype,
                                    e4m3_max, recipe, cache, main_grad, x_needs, weight_needs));
    }
    const auto& [scheme, launch, rows] = *pass;
    const Operands made =
        quantize_operands(x, own_splits, weight.value_or(Tensor()), rows, weight_needs, scheme, launch);
    std::vector<Tensor> results{multiply_operands(x, made, own_bias, launch)};
    if (splits) results.insert(results.end(), {made.groups.offsets, made.groups.error});
    if (weight_needs) append(results, made.x.columnwise);
    if (x_needs && !rows.defined()) append(results, made.weight);
    return results;
}

// Of three buffers, or undefined.
Copy copy_of(at::TensorList buffers, int64_t block_rows, int e4m3_max) {
    if (buffers.size() != 3) return {};
    return {buffers[0], buffers[1], buffers[2], block_rows, e4m3_max};
}

Groups groups_of(at::TensorList buffers, const Tensor& grad, int64_t cols) {
    if (buffers.size() != 3) return {};
    return {buffers[0], buffers[1], buffers[2], grad.size(0), cols};
}

// Whether gradients [size of grad's last dimension, cols], or a stack of them, can be added to a buffer.
bool takes_sums(const Tensor& buffer, const Groups& groups, int64_t cols, const Tensor& grad) {
    c10::SmallVector<int64_t, 3> sizes{grad.size(-1), cols};
    if (groups.defined()) sizes.insert(sizes.begin(), groups.count());
    return buffer.scalar_type() == at::kFloat && is_of(buffer, sizes, grad.device());
}

// Nothing where C++ does not compute them. rows, columns: undefined if not needed.
std::optional<Gradients> try_gradients(const Tensor& grad, const Groups& groups, const Copy& columns,
                                       const Copy& rows, int64_t cols, const GradientOptions& options,
                                       const Scheme& scheme) {
    if (!fits_gradients(grad, groups, columns, rows, cols, scheme) ||
        (options.adds && !takes_sums(options.out, groups, cols, grad)))
        return std::nullopt;
    const Launch launch = [&] {
        Gil gil;
        return begin_launch(grad, scheme);
    }();
    return make_gradients(grad, groups, columns, rows, options, scheme, launch);
}

using GradientTuple = std::tuple<Tensor, Tensor, Tensor>;

// zerofp4::linear_gradients
GradientTuple run_gradients(const Tensor& grad, at::TensorList groups, at::TensorList x, int64_t cols,
                            at::TensorList own, const OptionalTensor& weight, const OptionalTensors& primary,
                            at::ScalarType dtype, int64_t e4m3_max, c10::string_view recipe,
                            const OptionalTensor& cache, const OptionalTensor& out, bool adds,
                            at::ScalarType x_dtype, bool x_needs, bool bias_needs) {
    const auto run = [&]() -> std::optional<Gradients> {
        if (!is_plain(grad) || dtype_code(x_dtype) < 0 || dtype_code(dtype) < 0 || (out && !adds) ||
            c10::InferenceMode::is_enabled())
            return std::nullopt;
        const Groups of_x = groups_of(groups, grad, cols);
        const Shape shape{grad.size(-1), cols, of_x.defined() ? of_x.count() : 0};
        Scheme scheme;
        Copy rows;
        {
            Gil gil;
            THPObjectPtr quantizers = quantizers_of(recipe, grad);
            const Scheme* found = scheme_of(quantizers);
            if (found == nullptr || !(own.empty() || found->has_tiles)) return std::nullopt;
            scheme = *found;
            rows = copy_of(own, kBlock, e4m3_max_of(scheme.choice));
            if (x_needs && own.empty())
                rows = find_rows(quantizers, {weight, primary, e4m3_max, recipe, cache});
        }
        const Copy columns = copy_of(x, 1, e4m3_max_of(scheme.choice));
        if (!(columns.defined() || x.empty()) || (x_needs && !are_rows(rows, shape, grad.device())))
            return std::nullopt;
        const GradientOptions options{x_dtype, dtype, out.value_or(Tensor()), adds, bias_needs};
        return try_gradients(grad, of_x, columns, rows, cols, options, scheme);
    };
    std::optional<Gradients> made = run();
    if (!made) {
        Gil gil;
        THPObjectPtr found =
            call_python(layer_functions.linear_gradients, grad, groups, x, cols, own, weight, primary, dtype,
                        e4m3_max, recipe, cache, out, adds, x_dtype, x_needs, bias_needs);
        PyObject *of_input, *of_weight, *of_bias;
        if (!PyArg_ParseTuple(found, "OOO", &of_input, &of_weight, &of_bias)) throw_python_error();
        return {unwrapped(of_input), unwrapped(of_weight), unwrapped(of_bias)};
    }
    for (Tensor* each : {&made->x, &made->weight, &made->bias})
        if (!each->defined()) *each = at::empty({0}, grad.options());
    return {made->x, made->weight, made->bias};
}

// The formula

uint32_t version_of(const Tensor& tensor) {
    return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

struct LayerBackward : OwnNode {
    using Saved = c10::SmallVector<SavedVariable, 3>;

    Saved x, own;   // copies of x and of the weight, as zerofp4::linear returns them
    Groups groups;  // of x, in a layer of those
    uint32_t splits_version = 0;
    Tensor weight;            // where the gradient of x reads its buffers or its cache, or main_grad is its
    OptionalTensors primary;  // as the operator was given them
    uint32_t weight_version = 0;
    OptionalTensor cache, main_grad;
    std::string recipe;
    at::ScalarType x_dtype, weight_dtype;
    std::optional<at::ScalarType> bias_dtype;  // where one needs a gradient
    int64_t cols;
    bool x_needs, weight_needs;
    // Of a call of layer(): `own` is the rows of the weight, whoever has them. is_current says whether a
    // cache still has what it had.
    std::optional<Scheme> scheme;
    int64_t block_rows = kBlock;
    int e4m3_max = static_cast<int>(kE4M3Max);
    std::optional<c10::SafePyObject> is_current;
    bool released = false;

    std::string name() const override { return "LayerBackward"; }

    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex);
        for (Saved* saved : {&x, &own})
            for (SavedVariable& each : *saved) each.reset_data();
        groups = {};
        weight.reset();
        primary = OptionalTensors();
        main_grad.reset();
        released = true;
    }

    std::vector<Tensor> unpack(const Saved& saved) {
        std::vector<Tensor> tensors;
        for (const SavedVariable& each : saved) tensors.push_back(each.unpack(getptr()));
        return tensors;
    }

    bool reads_weight() const { return x_needs && weight.defined() && (scheme || own.empty()); }

    // Raises unless everything is as the forward pass read it.
    void check_current() const {
        constexpr const char* kWritten =
            "the weight of a layer was written to between its forward and its backward pass: call backward "
            "first";
        TORCH_CHECK(!reads_weight() || version_of(weight) == weight_version, kWritten);
        TORCH_CHECK(!groups.defined() || version_of(groups.splits) == splits_version,
                    "m_splits was written to between the forward and the backward pass of a layer: call "
                    "backward first, or give each call a tensor of its own");
        if (!is_current || !x_needs) return;
        Gil gil;
        TORCH_CHECK(call_python(is_current->ptr(getPyInterpreter())).get() == Py_True, kWritten);
    }

    variable_list apply(variable_list&& grads) override {
        std::lock_guard<std::mutex> lock(mutex);
        TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
        const Tensor grad = grads[0].defined() ? std::move(grads[0]) : input_metadata(0).zeros_like();
        const auto of_x = unpack(x), of_weight = unpack(own);
        check_current();
        const bool is_usual = is_default_state(false) && !at::GradMode::is_enabled();
        OptionalTensor out = main_grad;
        if (is_usual && weight_needs && !main_grad && !groups.defined()) {
            Gil gil;
            const Tensor place = gradient_place(getptr(), weight_dtype);
            if (place.defined()) out = place;
        }
        std::optional<Gradients> made;
        if (is_usual && scheme && !has_tangent(grad)) {  // without the dispatcher
            const GradientOptions options{x_dtype, weight_dtype, out.value_or(Tensor()),
                                          main_grad && weight_needs, bias_dtype.has_value()};
            made = try_gradients(grad, groups, copy_of(of_x, 1, e4m3_max_of(scheme->choice)),
                                 copy_of(of_weight, block_rows, e4m3_max), cols, options, *scheme);
        }
        if (!made) made = call_operator(grad, of_x, of_weight, out);
        variable_list result{made->x, weight_needs ? made->weight : Tensor(),
                             bias_dtype ? made->bias.to(*bias_dtype) : Tensor()};
        if (main_grad) {
            result[1] = weight_needs ? after_sum() : Tensor();
        } else if (out && result[1].numel() == 0) {
            result[1] = *out;
        }
        return at::GradMode::is_enabled() && grad.requires_grad() ? without_derivative(grad, result) : result;
    }

    Gradients call_operator(const Tensor& grad, at::TensorList of_x, at::TensorList of_weight,
                            const OptionalTensor& out) {
        static const auto itself = c10::Dispatcher::singleton()
                                       .findSchemaOrThrow("zerofp4::linear_gradients", "")
                                       .typed<decltype(run_gradients)>();
        OptionalTensors buffers = primary;
        if (scheme && !of_weight.empty()) {
            for (size_t i = 0; i < kBuffers; ++i) buffers.push_back(std::nullopt);
            buffers.set(kRowwiseData, of_weight[0]);
            buffers.set(kRowwiseScale, of_weight[1]);
            buffers.set(kAmax, of_weight[2]);
        }
        std::vector<Tensor> of_groups;
        if (groups.defined()) of_groups = {groups.splits, groups.offsets, groups.error};
        const bool is_given = !scheme && x_needs && of_weight.empty();
        const at::NoGradGuard no_grad;
        auto [of_input, of_parameter, of_bias] =
            itself.call(grad, of_groups, of_x, cols, scheme ? at::TensorList() : of_weight,
                        is_given ? OptionalTensor(weight) : std::nullopt, buffers, weight_dtype, e4m3_max,
                        recipe, is_given ? cache : std::nullopt, weight_needs ? out : std::nullopt,
                        main_grad.has_value() && weight_needs, x_dtype, x_needs, bias_dtype.has_value());
        return {x_needs ? of_input : Tensor(), of_parameter, of_bias};
    }

    // What autograd gets after the gradient was added to main_grad: nothing, or, where the framework asks for
    // it by a flag of the parameter, zeros without memory, for the sake of hooks.
    Tensor after_sum() {
        constexpr const char* kFlag = "grad_added_to_main_grad";
        Gil gil;
        THPObjectPtr parameter = wrapped(weight);
        if (!PyObject_HasAttrString(parameter, kFlag)) return Tensor();
        if (PyObject_SetAttrString(parameter, kFlag, Py_True) < 0) throw_python_error();
        return at::zeros({}, weight.options()).expand(weight.sizes());
    }

    static variable_list without_derivative(const Tensor& grad, variable_list result) {
        const auto error = new_node<torch::autograd::Error>(
            std::string("a layer of a recipe can be differentiated once: trying to differentiate twice"),
            torch::autograd::collect_next_edges(grad));
        for (Tensor& each : result) {
            if (!each.defined()) continue;
            each = each.detach();
            torch::autograd::set_history(each, error);
        }
        return result;
    }
};

LayerBackward& layer_of(const NodePointer& node) { return *static_cast<LayerBackward*>(&*node); }

// The node of a layer, if anything needs a gradient.
NodePointer begin_node(const Tensor& x, const Tensor& weight, const Tensor& bias,
                       const OptionalTensor& main_grad, c10::string_view recipe) {
    if (!at::GradMode::is_enabled() || !torch::autograd::compute_requires_grad(x, weight, bias)) return {};
    NodePointer node = new_node<LayerBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
    LayerBackward& made = layer_of(node);
    made.recipe = std::string(recipe);
    made.main_grad = main_grad;
    made.x_dtype = x.scalar_type();
    made.weight_dtype = weight.scalar_type();
    if (bias.defined() && bias.requires_grad()) made.bias_dtype = bias.scalar_type();
    made.cols = x.size(-1);
    made.x_needs = x.requires_grad();
    made.weight_needs = weight.requires_grad();
    return node;
}

void save(LayerBackward::Saved& saved, at::TensorList tensors) {
    for (const Tensor& tensor : tensors) saved.emplace_back(tensor, false);
}

void save(LayerBackward::Saved& saved, const Copy& copy) {
    if (!copy.defined()) return;
    for (const Tensor& tensor : {copy.data, copy.scale, copy.amax}) saved.emplace_back(tensor, false);
}

void keep_weight(LayerBackward& node, const Tensor& weight) {
    node.weight = weight;
    node.weight_version = version_of(weight);
}

// What autograd does with zerofp4::linear.
std::vector<Tensor> differentiated(c10::DispatchKeySet keys, const Tensor& x, at::TensorList x_copies,
                                   const OptionalTensor& splits, const OptionalTensor& bias,
                                   const OptionalTensor& weight, const OptionalTensors& primary,
                                   at::ScalarType dtype, int64_t e4m3_max, c10::string_view recipe,
                                   const OptionalTensor& cache, const OptionalTensor& main_grad, bool x_needs,
                                   bool weight_needs) {
    static const auto itself =
        c10::Dispatcher::singleton().findSchemaOrThrow("zerofp4::linear", "").typed<decltype(run_linear)>();
    const Tensor own_weight = weight.value_or(Tensor()), own_bias = bias.value_or(Tensor());
    for (const Tensor& each : {x, own_weight, own_bias})
        TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent(each), "a layer of a recipe has no forward-mode derivative");
    const NodePointer node = weight ? begin_node(x, own_weight, own_bias, main_grad, recipe) : NodePointer();
    std::vector<Tensor> results;
    {
        at::AutoDispatchBelowAutograd below;
        results =
            itself.redispatch(keys & c10::after_autograd_keyset, x, x_copies, splits, bias, weight, primary,
                              dtype, e4m3_max, recipe, cache, main_grad, x_needs, weight_needs);
    }
    if (!node) return results;
    LayerBackward& made = layer_of(node);
    const at::TensorList kept = at::TensorList(results).slice(splits ? 3 : 1);
    // Copies of x and of a weight have as many buffers as each other; of groups x has three.
    const size_t of_both = splits ? 3 : kept.size() / 2;
    const size_t count = !weight_needs ? 0 : kept.size() > 3 ? of_both : kept.size();
    save(made.x, kept.slice(0, count));
    save(made.own, kept.slice(count));
    made.cache = cache;
    if (splits) {
        made.groups = {*splits, results[1], results[2], x.size(0), x.size(-1)};
        made.splits_version = version_of(*splits);
    }
    if (main_grad || (x_needs && kept.size() == count)) keep_weight(made, own_weight);
    if (x_needs) made.primary = primary;
    torch::autograd::set_history(results[0], node);
    return results;
}

// The same without the dispatcher. rows: of the weight, undefined where it is quantized here.
Tensor forward(const Tensor& x, const Tensor& splits, const Tensor& weight, const Tensor& bias, Copy rows,
               const Scheme& scheme, c10::string_view recipe, const OptionalTensor& main_grad,
               bool is_primary, std::optional<c10::SafePyObject> is_current, const Launch& launch) {
    const NodePointer node = begin_node(x, weight, bias, main_grad, recipe);
    const bool keeps_x = node && weight.requires_grad();
    const Operands operands = quantize_operands(x, splits, weight, std::move(rows), keeps_x, scheme, launch);
    // Before the product, which a checkpoint leaves out that needs no more than what is saved.
    if (node) {
        LayerBackward& made = layer_of(node);
        made.scheme = scheme;
        if (is_current) made.is_current.emplace(*std::move(is_current));
        made.block_rows = operands.weight.block_rows;
        made.e4m3_max = operands.weight.e4m3_max;
        if (keeps_x) save(made.x, operands.x.columnwise);
        if (made.x_needs) save(made.own, operands.weight);
        if (is_primary || main_grad) keep_weight(made, weight);
        made.groups = operands.groups;
        if (splits.defined()) made.splits_version = version_of(splits);
    }
    const Tensor y = multiply_operands(x, operands, bias, launch);
    if (node) torch::autograd::set_history(y, node);
    return y;
}

}  // namespace

// layer(x, splits, weight, bias, rows, scheme, recipe, main_grad, is_current): y; None for what the
// operator has to see. splits: of groups of rows, with a stack of weights; else None. rows: (data, scale,
// amax, block_rows, e4m3_max) of the weight, or None where it is quantized for this call. bias, main_grad:
// may be None. is_current: of rows in a cache, whether they are what they were; else None.
PyObject* layer(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 9, "layer() takes 9 arguments, got ", count);
    const bool is_primary = Py_TYPE(given[2]) == weight_type();
    if (!is_default_state(true) || !is_exact(given[0]) || !(is_primary || is_exact(given[2]))) Py_RETURN_NONE;
    for (int i : {1, 3, 7})
        if (given[i] != Py_None && !is_exact(given[i])) Py_RETURN_NONE;
    const Tensor& x = THPVariable_Unpack(given[0]);
    const Tensor& weight = THPVariable_Unpack(given[2]);
    const Tensor splits = unwrapped(given[1]), bias = unwrapped(given[3]);
    Copy rows = rows_of(given[4]);
    const auto* scheme = static_cast<const Scheme*>(PyCapsule_GetPointer(given[5], kSchemeCapsule));
    Py_ssize_t size;
    const char* recipe = scheme ? PyUnicode_AsUTF8AndSize(given[6], &size) : nullptr;
    if (recipe == nullptr) return nullptr;
    const OptionalTensor main_grad =
        given[7] == Py_None ? std::nullopt : OptionalTensor(THPVariable_Unpack(given[7]));
    const auto shape = shape_of(weight, splits);
    if (!shape || weight.is_inference() || dtype_code(weight.scalar_type()) < 0 ||
        !takes(x, splits, weight, bias, rows, *shape, *scheme))
        Py_RETURN_NONE;
    const Launch launch = begin_launch(x, *scheme);
    std::optional<c10::SafePyObject> is_current;
    if (given[8] != Py_None) is_current.emplace(Py_NewRef(given[8]), getPyInterpreter());
    Tensor y;
    {
        NoGil released;
        if (!has_tangent(x) && !has_tangent(weight) && !has_tangent(bias))
            y = forward(x, splits, weight, bias, std::move(rows), *scheme,
                        {recipe, static_cast<size_t>(size)}, main_grad, is_primary, std::move(is_current),
                        launch);
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

// configure_layer(neutral_amax, linear, linear_gradients, quantizers_of, cached_rows): dispatch the operators
// of layers here; linear and linear_gradients are their implementations in Python. quantizers_of(recipe,
// device) is what a recipe quantizes with, by its key, and has a scheme or None. cached_rows(quantizers,
// weight, cache) is what layer() takes as rows of the weight that a cache keeps, or None.
PyObject* configure_layer(PyObject*, PyObject* given) {
    HANDLE_TH_ERRORS
    PyObject* neutral_amax;
    if (!PyArg_ParseTuple(given, "OOOOO", &neutral_amax, &layer_functions.linear,
                          &layer_functions.linear_gradients, &layer_functions.quantizers_of,
                          &layer_functions.cached_rows))
        return nullptr;
    Py_INCREF(given);  // and all that it holds
    set_neutral_amax(neutral_amax);
    register_node<LayerBackward>("LayerBackward");
    // Not a static of the file: nothing of torch is touched before its version was compared.
    static auto* library =
        new torch::Library(torch::Library::FRAGMENT, "zerofp4", std::nullopt, __FILE__, __LINE__);
    for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
        library->impl("linear", torch::dispatch(key, TORCH_FN(run_linear)));
        library->impl("linear_gradients", torch::dispatch(key, TORCH_FN(run_gradients)));
    }
    library->impl("linear", torch::dispatch(c10::DispatchKey::Autograd, TORCH_FN(differentiated)));
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

}  // namespace zerofp4
