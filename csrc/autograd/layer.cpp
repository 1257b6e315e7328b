// A linear layer of an NVFP4 recipe as an autograd node in C++: exact products of quantized operands in all
// three passes. zerofp4/nn/native.py is its only caller. Whatever is not plain goes to the node in Python,
// LinearFunction in zerofp4/nn/function.py, which computes the same bytes and says what is wrong.

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <mutex>
#include <optional>
#include <vector>

#include "autograd/call_python.h"
#include "autograd/grouped_passes.h"
#include "autograd/layer_passes.h"

namespace zerofp4 {
namespace {

// What configure_layer() was given, for as long as the process lives.
struct {
    PyObject* begin_backward;
    PyObject* gradients;
    PyObject* add_to_main_grads;
} python;

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

// Whether gradients [size of grad's last dimension, cols] can be added to a MainGrad's buffer.
bool takes_sums(const Tensor& buffer, int64_t cols, const Tensor& grad) {
    return buffer.defined() && is_plain(buffer) && buffer.scalar_type() == at::kFloat && buffer.dim() == 2 &&
           buffer.size(0) == grad.size(-1) && buffer.size(1) == cols && buffer.is_contiguous() &&
           buffer.device() == grad.device() && holds(buffer);
}

// A weight that is NVFP4 itself, and its version when forward read its buffers.
struct Primary {
    Tensor weight;
    uint32_t version;
};

PyObject* to_dtype(at::ScalarType dtype) { return reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)); }

// data, scale and amax, or None.
THPObjectPtr to_buffers(const Copy& copy) {
    if (!copy.defined()) return checked(Py_NewRef(Py_None));
    THPObjectPtr data = wrapped(copy.data), scale = wrapped(copy.scale), amax = wrapped(copy.amax);
    return checked(PyTuple_Pack(3, data.get(), scale.get(), amax.get()));
}

uint32_t version_of(const Tensor& tensor) {
    return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

// Of a linear layer, and of one of groups of rows, which has a weight and a bias of each or a stack of those.
struct LayerBackward : Node {
    SavedCopy x;
    c10::SmallVector<SavedCopy, 1> weights;
    Codes cached;  // in their place where values are kept: more than a call's buffers, and not saved
    c10::SmallVector<Primary, 1> primaries;
    Groups groups;  // of x, in a layer of those
    uint32_t splits_version = 0;
    Scheme scheme;
    Held context;
    at::ScalarType x_dtype, weight_dtype;
    std::optional<at::ScalarType> bias_dtype;  // where one needs a gradient
    size_t weight_count, bias_count;           // among the inputs, behind x
    bool is_stack;                             // whether one weight is all of them, and so its gradient
    bool released = false;
    std::mutex mutex;  // two threads may go back through one graph

    std::string name() const override { return "LayerBackward"; }

    void save(const Copy& of_x, Codes of_weights) {
        if (of_x.defined()) x.save(of_x);
        if (of_weights.kept.defined()) {
            cached = std::move(of_weights);
            return;
        }
        for (const Copy& copy : of_weights.copies) {
            weights.emplace_back();
            weights.back().save(copy);
        }
    }

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
        TORCH_CHECK(false,
                    "compiled autograd cannot trace the node in C++ of a layer in NVFP4: set "
                    "ZEROFP4_AUTOGRAD=0, which takes the one in Python");
    }

    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex);
        x.reset();
        for (SavedCopy& weight : weights) weight.reset();
        cached = {};
        primaries.clear();
        groups = {};
        released = true;
    }

    variable_list apply(variable_list&& grads) override {
        std::lock_guard<std::mutex> lock(mutex);
        TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
        const Tensor grad = grads[0].defined() ? std::move(grads[0]) : input_metadata(0).zeros_like();
        const Copy saved_x = x.unpack(getptr());
        Codes saved_weights = cached;
        for (const SavedCopy& weight : weights) saved_weights.copies.push_back(weight.unpack(getptr()));
        for (const Primary& primary : primaries)
            TORCH_CHECK(!saved_weights.defined() || primary.weight._version() == primary.version,
                        "the weight of a layer was written to between its forward and its backward pass: "
                        "call backward first");
        TORCH_CHECK(!groups.defined() || version_of(groups.splits) == splits_version,
                    "m_splits was written to between the forward and the backward pass of a layer: call "
                    "backward first, or give each call a tensor of its own");
        bool is_fast = is_default_state(false) && !at::GradMode::is_enabled() && is_plain(grad) &&
                       dtype_code(grad.scalar_type()) >= 0 && holds(grad) && is_readable(saved_x) &&
                       !has_tangent(grad);
        for (const Copy& copy : saved_weights.copies) is_fast = is_fast && is_readable(copy);
        if (!is_fast) return python_gradients(grad, saved_x, saved_weights);
        return groups.defined() ? gradients_of_groups(grad, saved_x, saved_weights)
                                : gradients(grad, saved_x, saved_weights);
    }

    // What Python knows of a backward pass: the stream, the neutral amax, and for the weight's gradient
    // memory to write to, or the MainGrad whose memory it is added to; of groups those of all weights.
    struct Begun {
        int64_t stream;
        Tensor neutral_amax, out;
        Held main_grad;
    };

    Begun begin(const Tensor& grad, bool x_saved, bool weight_saved) {
        Gil gil;
        THPObjectPtr node = checked(torch::autograd::functionToPyObject(getptr()));
        // The gradients of groups have no memory to be written to.
        PyObject* dtype = x_saved && !groups.defined() ? to_dtype(weight_dtype) : Py_None;
        THPObjectPtr found =
            checked(PyObject_CallFunctionObjArgs(python.begin_backward, node.get(), context.get(), dtype,
                                                 weight_saved ? Py_True : Py_False, nullptr));
        PyObject *neutral_amax, *out, *main_grad;
        if (!PyArg_ParseTuple(found, "OOO", &neutral_amax, &out, &main_grad)) throw_python_error();
        if (groups.defined()) main_grad = PyTuple_GetItem(context.get(), 1);
        if (main_grad == nullptr) throw_python_error();
        const int64_t stream = grad.is_cuda() ? current_stream(grad.device().index()) : 0;
        return {stream, unwrapped(neutral_amax), unwrapped(out),
                main_grad == Py_None ? Held() : Held(main_grad)};
    }

    // Of x, weight and bias.
    variable_list gradients(const Tensor& grad, const Copy& saved_x, const Codes& saved_weight) {
        const bool x_needs = saved_weight.defined();
        const Begun begun = begin(grad, saved_x.defined(), x_needs);
        if (begun.main_grad.get() != nullptr && !takes_sums(begun.out, saved_x.rows(), grad))
            return python_gradients(grad, saved_x, saved_weight);  // which says what is wrong
        variable_list result(3);
        if (saved_x.defined() || x_needs) {
            const Launch launch(grad, begun.stream, begun.neutral_amax, scheme);
            const Quantized q = quantize_gradient(grad, x_needs, saved_x.defined(), scheme, launch);
            if (x_needs) result[0] = gradient_of_x(grad, q.rowwise, saved_weight, x_dtype, launch);
            if (saved_x.defined()) result[1] = of_weight(q.columnwise, saved_x, begun, launch);
        }
        if (bias_dtype) result[2] = as_rows(grad).sum(0).to(*bias_dtype);
        return result;
    }

    Tensor of_weight(const Copy& q_grad, const Copy& saved_x, const Begun& begun, const Launch& launch) {
        if (begun.main_grad.get() == nullptr)
            return gradient_of_weight(q_grad, saved_x, weight_dtype, begun.out, launch);
        add_gradient_of_weight(q_grad, saved_x, begun.out, launch);
        Gil gil;
        THPObjectPtr gradient = checked(PyObject_CallMethod(begun.main_grad.get(), "gradient", nullptr));
        return unwrapped(gradient);
    }

    // Of x, all weights and all biases.
    variable_list gradients_of_groups(const Tensor& grad, const Copy& saved_x, const Codes& saved_weights) {
        const bool x_needs = saved_weights.defined();
        const Begun begun = begin(grad, saved_x.defined(), x_needs);
        variable_list result(1 + weight_count + bias_count);
        if (saved_x.defined() || x_needs) {
            const Launch launch(grad, begun.stream, begun.neutral_amax, scheme);
            const QuantizedGroups q =
                quantize_grouped_gradient(grad, groups.splits, x_needs, saved_x.defined(), scheme, launch);
            if (x_needs) result[0] = gradient_of_grouped_x(q, saved_weights, launch);
            if (saved_x.defined())
                spread_weights(gradient_of_grouped_weights(q, saved_x, groups, launch), begun, result);
        }
        if (bias_dtype)
            spread(gradient_of_grouped_biases(grad, groups.offsets), *bias_dtype, bias_count,
                   &result[1 + weight_count]);
        return result;
    }

    void spread_weights(const Tensor& stack, const Begun& begun, variable_list& result) {
        if (begun.main_grad.get() == nullptr) return spread(stack, weight_dtype, weight_count, &result[1]);
        variable_list gradients(weight_count);
        spread(stack, stack.scalar_type(), weight_count, gradients.data());
        Gil gil;
        unpack_gradients(
            call_python(python.add_to_main_grads, begun.main_grad.get(), gradients, weight_dtype), 1, result);
    }

    // A stack to its matrices, where each is an input of its own.
    void spread(const Tensor& stack, at::ScalarType dtype, size_t count, Tensor* result) {
        const Tensor whole = stack.to(dtype);
        if (is_stack) {
            *result = whole;
            return;
        }
        int64_t offset = whole.storage_offset();
        for (size_t e = 0; e < count; ++e, offset += whole.stride(0))
            result[e] = part_of(whole, offset, whole.sizes().slice(1), dtype);
    }

    static void unpack_gradients(PyObject* found, size_t first, variable_list& result) {
        const Py_ssize_t count = PySequence_Size(found);
        if (count < 0) throw_python_error();
        for (Py_ssize_t i = 0; i < count; ++i) {
            THPObjectPtr gradient = checked(PySequence_GetItem(found, i));
            result.at(first + static_cast<size_t>(i)) = unwrapped(gradient);
        }
    }

    variable_list python_gradients(const Tensor& grad, const Copy& saved_x, const Codes& saved_weights) {
        Gil gil;
        THPObjectPtr node = checked(torch::autograd::functionToPyObject(getptr()));
        THPObjectPtr own_x = to_buffers(saved_x), own_weights = checked(PyList_New(0));
        for (const Copy& copy : saved_weights.copies)
            if (PyList_Append(own_weights, to_buffers(copy)) < 0) throw_python_error();
        const int64_t e4m3_max = saved_weights.defined() ? saved_weights.copies[0].e4m3_max : 0;
        THPObjectPtr own_groups = checked(Py_NewRef(Py_None));
        if (groups.defined()) {
            THPObjectPtr splits = wrapped(groups.splits), offsets = wrapped(groups.offsets);
            THPObjectPtr error = wrapped(groups.error), cols = to_python(groups.cols);
            own_groups = checked(PyTuple_Pack(5, splits.get(), offsets.get(), error.get(), cols.get(),
                                              is_stack ? Py_True : Py_False));
        }
        PyObject* bias = bias_dtype ? to_dtype(*bias_dtype) : Py_None;
        variable_list result(1 + weight_count + bias_count);
        unpack_gradients(call_python(python.gradients, node.get(), context.get(), grad, own_groups.get(),
                                     own_x.get(), own_weights.get(), e4m3_max, x_dtype, weight_dtype, bias),
                         0, result);
        return result;
    }
};

LayerBackward& layer_of(const NodePointer& node) { return *static_cast<LayerBackward*>(&*node); }

// The node of a layer, if anything needs a gradient. is_primary: whether the weights are NVFP4 themselves.
NodePointer begin_node(const Tensor& x, at::TensorList weights, at::TensorList biases, bool is_primary,
                       const Scheme& scheme, Held context) {
    if (!at::GradMode::is_enabled() || !torch::autograd::compute_requires_grad(x, weights, biases)) return {};
    NodePointer node = new_node<LayerBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(x, weights, biases));
    LayerBackward& made = layer_of(node);
    if (is_primary)
        for (const Tensor& weight : weights)
            made.primaries.push_back({weight, static_cast<uint32_t>(weight._version())});
    made.scheme = scheme;
    made.context = std::move(context);
    made.x_dtype = x.scalar_type();
    made.weight_dtype = weights[0].scalar_type();
    if (any_requires_grad(biases)) made.bias_dtype = biases[0].scalar_type();
    made.weight_count = weights.size();
    made.bias_count = biases.size();
    made.is_stack = weights[0].dim() == 3;
    return node;
}

// codes: of the weight, none where it is quantized here. bias may be undefined.
Tensor forward(const Tensor& x, const Tensor& weight, const Tensor& bias, Codes codes, const Scheme& scheme,
               const Launch& launch, bool is_primary, Held context) {
    const NodePointer node = begin_node(x, weight, bias, is_primary, scheme, std::move(context));
    const bool saves_x = node && weight.requires_grad(), saves_weight = node && x.requires_grad();
    const Operands operands = quantize_operands(x, weight, std::move(codes), saves_x, scheme, launch);
    // Before the product, which a checkpoint leaves out that needs no more than what is saved.
    if (node) layer_of(node).save(operands.x.columnwise, saves_weight ? operands.weight : Codes());
    const Tensor y = multiply_operands(x, operands, bias, launch);
    if (node) torch::autograd::set_history(y, node);
    return y;
}

// The same of groups of rows.
Tensor forward(const Tensor& x, const Tensor& splits, at::TensorList weights, at::TensorList biases,
               Codes codes, const Scheme& scheme, const Launch& launch, bool is_primary, Held context) {
    const NodePointer node = begin_node(x, weights, biases, is_primary, scheme, std::move(context));
    const bool saves_x = node && any_requires_grad(weights), saves_weights = node && x.requires_grad();
    const GroupedOperands operands =
        quantize_grouped_operands(x, splits, weights, std::move(codes), saves_x, scheme, launch);
    if (node) {
        LayerBackward& made = layer_of(node);
        made.save(operands.x.copies.columnwise, saves_weights ? operands.weights : Codes());
        made.groups = operands.x.groups;
        made.splits_version = version_of(made.groups.splits);
    }
    const Tensor y = multiply_grouped_operands(operands, biases, launch);
    if (node) torch::autograd::set_history(y, node);
    return y;
}

bool is_weight(PyObject* object) { return is_exact(object) || Py_TYPE(object) == weight_type(); }

}  // namespace

// layer(x, weight, bias, data, scale, amax, values, block_rows, e4m3_max, scheme, context): y; None for what
// the Python node has to do. data, scale, amax: of the rowwise copy of the weight; data is None where the
// weight is quantized for this call. values: those of the copy, or None. bias may be None. context: what
// begin_backward() and gradients() are handed.
PyObject* layer(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 11, "layer() takes 11 arguments, got ", count);
    if (!is_default_state(true) || !is_exact(given[0]) || !is_weight(given[1])) Py_RETURN_NONE;
    for (int i : {2, 3, 4, 5, 6})
        if (given[i] != Py_None && !is_exact(given[i])) Py_RETURN_NONE;
    const Tensor& x = THPVariable_Unpack(given[0]);
    const Tensor& weight = THPVariable_Unpack(given[1]);
    const Tensor bias = unwrapped(given[2]);
    Copy copy{unwrapped(given[3]), unwrapped(given[4]), unwrapped(given[5])};
    copy.block_rows = PyLong_AsLong(given[7]);
    copy.e4m3_max = static_cast<int>(PyLong_AsLong(given[8]));
    if (PyErr_Occurred()) return nullptr;
    const auto* scheme = static_cast<const Scheme*>(PyCapsule_GetPointer(given[9], kSchemeCapsule));
    if (scheme == nullptr) return nullptr;
    Codes codes;
    if (copy.defined()) codes = {{std::move(copy)}, unwrapped(given[6])};
    const bool is_fast =
        is_plain(x) && !weight.is_inference() && weight.dim() == 2 && dtype_code(x.scalar_type()) >= 0 &&
        dtype_code(weight.scalar_type()) >= 0 &&
        fits_layer(x, weight.size(0), weight.size(1), bias, *scheme) &&
        (codes.defined() ? are_codes(codes, weight.size(0), weight.size(1), x.device(), x.scalar_type())
                         : is_quantizable(weight, *scheme, x.device()));
    if (!is_fast) Py_RETURN_NONE;
    const Launch launch = begin_launch(x, *scheme);
    const bool is_primary = Py_TYPE(given[1]) == weight_type();
    Held context(given[10]);
    Tensor y;
    {
        NoGil released;
        if (!has_tangent(x) && !has_tangent(weight) && !has_tangent(bias))
            y = forward(x, weight, bias, std::move(codes), *scheme, launch, is_primary, std::move(context));
    }
    if (!y.defined()) Py_RETURN_NONE;
    return THPVariable_Wrap(std::move(y));
    END_HANDLE_TH_ERRORS
}

namespace {

// Of a list; nothing where one is of another class.
std::optional<std::vector<Tensor>> tensors_of(PyObject* list, bool (*is_known)(PyObject*)) {
    std::vector<Tensor> tensors;
    for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
        PyObject* object = PyList_GetItem(list, i);
        if (!is_known(object)) return std::nullopt;
        tensors.push_back(THPVariable_Unpack(object));
    }
    return tensors;
}

bool any_has_tangent(at::TensorList tensors) {
    for (const Tensor& tensor : tensors)
        if (has_tangent(tensor)) return true;
    return false;
}

}  // namespace

// groups(x, splits, weights, biases, copies, values, e4m3_max, scheme, context): y of groups of rows, None as
// of layer(). weights, biases: lists of all, or of one stack of all; no biases where there are none. copies:
// (data, scale, amax) of their rows in blocks of 16x16, of each or of a stack; None where they are quantized
// for this call. values: those of the copies, or None. splits lie on x's device.
PyObject* groups(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 9, "groups() takes 9 arguments, got ", count);
    if (!is_default_state(true) || !is_exact(given[0]) || !is_exact(given[1])) Py_RETURN_NONE;
    const auto weights = tensors_of(given[2], &is_weight), biases = tensors_of(given[3], &is_exact);
    const int e4m3_max = static_cast<int>(PyLong_AsLong(given[6]));
    if (PyErr_Occurred()) return nullptr;
    auto codes = codes_of(given[4], given[5], e4m3_max);
    if (!weights || weights->empty() || !biases || !codes) Py_RETURN_NONE;
    const auto* scheme = static_cast<const Scheme*>(PyCapsule_GetPointer(given[7], kSchemeCapsule));
    if (scheme == nullptr) return nullptr;
    const Tensor &x = THPVariable_Unpack(given[0]), &splits = THPVariable_Unpack(given[1]);
    if (!fits_groups(x, splits, *weights, *biases, *codes, *scheme)) Py_RETURN_NONE;
    const Launch launch = begin_launch(x, *scheme);
    const bool is_primary = Py_TYPE(PyList_GetItem(given[2], 0)) == weight_type();
    Held context(given[8]);
    Tensor y;
    {
        NoGil released;
        if (!has_tangent(x) && !any_has_tangent(*weights) && !any_has_tangent(*biases))
            y = forward(x, splits, *weights, *biases, *std::move(codes), *scheme, launch, is_primary,
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

// configure_layer(neutral_amax, begin_backward, gradients, add_to_main_grads, functions)
PyObject* configure_layer(PyObject*, PyObject* given) {
    HANDLE_TH_ERRORS
    PyObject *neutral_amax, *capsule;
    if (!PyArg_ParseTuple(given, "OOOOO", &neutral_amax, &python.begin_backward, &python.gradients,
                          &python.add_to_main_grads, &capsule))
        return nullptr;
    void* functions = PyCapsule_GetPointer(capsule, kLayerCapsule);
    if (functions == nullptr) return nullptr;
    configure_passes(neutral_amax, static_cast<const LayerFunctions*>(functions));
    Py_INCREF(given);  // and all that it holds
    torch::autograd::_initFunctionPyTypeObject(node_type, "LayerBackward", kProperties, nullptr);
    torch::autograd::registerCppFunction(typeid(LayerBackward), &node_type);
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

}  // namespace zerofp4
