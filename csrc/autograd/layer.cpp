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

#include "autograd/layer_passes.h"

namespace zerofp4 {
namespace {

// What configure_layer() was given, for as long as the process lives.
struct {
    PyObject* begin_backward;
    PyObject* gradients;
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
            const Quantized q =
                quantize_gradient(grad, saved_weight.defined(), saved_x.defined(), scheme, launch);
            if (saved_weight.defined())
                result[0] = gradient_of_x(grad, q.rowwise, saved_weight, kept, x_dtype, launch);
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
    Forward made = forward_pass(x, weight, bias, std::move(codes), kept, saves_x, scheme, launch);
    if (node) {
        auto* saved = static_cast<LayerBackward*>(&*node);
        if (saves_x) saved->x.save(made.x);
        if (saves_weight && !kept.defined()) saved->weight.save(made.weight);
        if (saves_weight && kept.defined()) saved->cached = made.weight, saved->kept = kept;
        if (is_primary) {
            saved->primary = weight;
            saved->version = version;
        }
        saved->scheme = scheme;
        saved->x_dtype = x.scalar_type();
        saved->weight_dtype = weight.scalar_type();
        if (bias.defined() && bias.requires_grad()) saved->bias_dtype = bias.scalar_type();
        saved->context = std::move(context);
        torch::autograd::set_history(made.y, node);
    }
    return std::move(made.y);
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
    const Tensor bias = unwrapped(given[2]), kept = unwrapped(given[6]);
    Copy codes{unwrapped(given[3]), unwrapped(given[4]), unwrapped(given[5])};
    codes.block_rows = PyLong_AsLong(given[7]);
    codes.e4m3_max = static_cast<int>(PyLong_AsLong(given[8]));
    if (PyErr_Occurred()) return nullptr;
    const auto* scheme = static_cast<const Scheme*>(PyCapsule_GetPointer(given[9], kSchemeCapsule));
    if (scheme == nullptr) return nullptr;
    const bool is_fast = is_plain(x) && !weight.is_inference() && weight.dim() == 2 &&
                         dtype_code(x.scalar_type()) >= 0 && dtype_code(weight.scalar_type()) >= 0 &&
                         fits_layer(x, weight.size(0), weight.size(1), bias, *scheme) &&
                         (codes.defined() ? are_codes(codes, weight.size(0), weight.size(1), x.device())
                                          : is_quantizable(weight, *scheme, x.device())) &&
                         (!kept.defined() || are_values(kept, codes, x.scalar_type()));
    if (!is_fast) Py_RETURN_NONE;
    const Launch launch = begin_launch(x, *scheme);
    const bool is_primary = Py_TYPE(given[1]) == weight_type();
    Held context(given[10]);
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
    PyObject *neutral_amax, *capsule;
    if (!PyArg_ParseTuple(given, "OOOO", &neutral_amax, &python.begin_backward, &python.gradients, &capsule))
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
