// F.linear with an NVFP4 weight as an autograd node in C++. Whatever is not plain goes to the Python node in
// zerofp4/tensors/products.py, which computes the same bytes.

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <Python.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <mutex>
#include <optional>
#include <string>
#include <type_traits>

#include "autograd/dequantize_call.h"
#include "autograd/functions.h"

namespace zerofp4 {
namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// std::shared_ptr<Node>, or from torch 2.13 on an intrusive pointer.
using NodePointer = decltype(torch::autograd::Edge::function);

// What configure() was given, for as long as the process lives.
struct {
    PyObject* weight_type;
    PyObject* values_source;
    PyObject* gradient_place;
    PyObject* gradients;
    PyObject* check_cuda;
    PyObject* current_stream;
    PyObject* record;  // the names of attributes
    PyObject* keeps_values;
    DequantizeFunction dequantize;
    uint64_t checked_gpus;
} python;

struct Gil {
    PyGILState_STATE state = PyGILState_Ensure();
    ~Gil() { PyGILState_Release(state); }
};

struct NoGil {
    PyThreadState* state = PyEval_SaveThread();
    ~NoGil() { PyEval_RestoreThread(state); }
};

// Needs the GIL, which may be gone when the error is caught.
[[noreturn]] void throw_python_error() {
    python_error error;
    error.persist();
    throw error;
}

THPObjectPtr checked(PyObject* result) {
    if (result == nullptr) throw_python_error();
    return THPObjectPtr(result);
}

// Conditions

// No inference mode, no dispatch mode, no transform of torch.func, no tracing; autocast only where it may be
// on.
bool is_default_state(bool autocast) {
    const auto state = c10::impl::tls_local_dispatch_key_set();
    // A node runs without names in a torch that still has named tensors, which plain ones do not notice.
    if (state.included_ != c10::default_included_set ||
        !((state.excluded_ - c10::default_excluded_set) & kPlain).empty())
        return false;
    // The keys that are excluded by default are those of autocast.
    return autocast || (state.excluded_ | c10::default_excluded_set) == state.excluded_;
}

// A dense tensor on a CPU or a GPU, with no other behavior.
bool is_plain(const Tensor& tensor) {
    return (tensor.key_set() | kPlain) == kPlain && !tensor.is_inference();
}

// Whether forward AD differentiates by the tensor. Not to be asked with the GIL: it takes a lock of the
// tensor that another thread may hold while it waits for the GIL, as when it makes the node of a leaf.
bool has_tangent(const Tensor& tensor) { return tensor.defined() && tensor._fw_grad(0).defined(); }

bool is_exact(PyObject* object) { return THPVariable_CheckExact(object); }

// As in common/dtype.h; -1 for what kernels do not write.
int dtype_code(at::ScalarType dtype) {
    switch (dtype) {
        case at::kFloat:
            return 0;
        case at::kBFloat16:
            return 1;
        case at::kHalf:
            return 2;
        default:
            return -1;
    }
}

// Values of a weight

struct Source {
    Tensor data, scale, amax;
    int64_t block_rows;
    int e4m3_max;
    bool columnwise;
    bool keeps_values;  // of a forward pass, for the backward pass
    int64_t stream;
};

// Whether a contiguous tensor has memory, and all that its sizes ask for.
bool has_memory(const Tensor& tensor) {
    const auto end = static_cast<size_t>(tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
    return tensor.numel() > 0 && tensor.storage().nbytes() >= end;
}

// The handle of the current stream of a GPU that our kernels run on.
int64_t current_stream(c10::DeviceIndex index) {
    THPObjectPtr number = checked(PyLong_FromLong(index));
    if (index >= 64 || (python.checked_gpus >> index & 1) == 0) {
        checked(PyObject_CallOneArg(python.check_cuda, number));
        if (index < 64) python.checked_gpus |= uint64_t{1} << index;
    }
    THPObjectPtr handle = checked(PyObject_CallOneArg(python.current_stream, number));
    const int64_t stream = PyLong_AsLongLong(handle);
    if (stream == -1 && PyErr_Occurred()) throw_python_error();
    return stream;
}

// What values are computed from. Nothing where Python is to say what is wrong. Needs the GIL.
std::optional<Source> source_of(PyObject* weight, const c10::Device& device) {
    THPObjectPtr record = checked(PyObject_GetAttr(weight, python.record));
    THPObjectPtr found = checked(PyObject_CallOneArg(python.values_source, record));
    THPObjectPtr keeps_values = checked(PyObject_GetAttr(record, python.keeps_values));
    PyObject *data, *scale, *amax;
    long long block_rows;
    int e4m3_max, columnwise;
    if (!PyArg_ParseTuple(found, "OOOLip", &data, &scale, &amax, &block_rows, &e4m3_max, &columnwise))
        throw_python_error();
    for (PyObject* buffer : {data, scale, amax}) {
        if (!is_exact(buffer)) return std::nullopt;
        const Tensor& tensor = THPVariable_Unpack(buffer);
        if ((tensor.key_set() | kPlain) != kPlain || tensor.device() != device || !has_memory(tensor))
            return std::nullopt;
    }
    Source source{THPVariable_Unpack(data),
                  THPVariable_Unpack(scale),
                  THPVariable_Unpack(amax),
                  block_rows,
                  e4m3_max,
                  columnwise != 0,
                  keeps_values.get() == Py_True,
                  0};
    if (source.data.dim() != 2) return std::nullopt;
    if (device.is_cuda()) source.stream = current_stream(device.index());
    return source;
}

Tensor values_of(const Source& source, at::ScalarType dtype) {
    int64_t rows = source.data.size(0), cols = 2 * source.data.size(1);
    if (source.columnwise) {
        rows = 2 * source.data.size(1);
        cols = source.data.size(0);
    }
    Tensor values = at::empty({rows, cols}, source.data.options().dtype(dtype));
    DequantizeCall call{};
    const bool on_cpu = source.data.is_cpu();
    call.device = on_cpu ? -1 : source.data.get_device();
    call.stream = source.stream;
    call.threads = on_cpu ? at::get_num_threads() : 0;
    call.data = source.data.const_data_ptr();
    call.scale = source.scale.const_data_ptr();
    call.amax = source.amax.const_data_ptr();
    call.output = values.mutable_data_ptr();
    call.rows = rows;
    call.cols = cols;
    call.columnwise = source.columnwise;
    call.block_rows = source.block_rows;
    call.e4m3_max = source.e4m3_max;
    call.dtype = dtype_code(dtype);
    const char* error = python.dequantize(call);
    TORCH_CHECK(error == nullptr, error);
    return values;
}

// The node

// A matrix of all its last dimension's rows.
Tensor as_rows(const Tensor& tensor) {
    return tensor.dim() == 2 ? tensor : tensor.reshape({-1, tensor.size(-1)});
}

THPObjectPtr wrapped(const Tensor& tensor) {
    return checked(tensor.defined() ? THPVariable_Wrap(tensor) : Py_NewRef(Py_None));
}

Tensor unwrapped(PyObject* object) {
    return object == Py_None ? Tensor() : Tensor(THPVariable_Unpack(object));
}

struct LinearBackward : Node {
    SavedVariable x, weight;
    SavedVariable values;  // of the weight, where it keeps them
    std::mutex mutex;      // two threads may go back through one graph

    std::string name() const override { return "LinearBackward"; }

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
        TORCH_CHECK(false,
                    "compiled autograd cannot trace the node in C++ of F.linear with an NVFP4 weight: set "
                    "ZEROFP4_AUTOGRAD=0, which takes the one in Python");
    }

    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex);
        x.reset_data();
        weight.reset_data();
        values.reset_data();
    }

    variable_list apply(variable_list&& grads) override {
        std::lock_guard<std::mutex> lock(mutex);
        const Tensor grad = grads[0].defined() ? std::move(grads[0]) : input_metadata(0).zeros_like();
        const Tensor saved_x = x.unpack(getptr()), saved_weight = weight.unpack(getptr());
        const Tensor saved_values = values.unpack(getptr());
        const at::ScalarType dtype = grad.scalar_type();
        const bool is_fast = is_default_state(false) && !at::GradMode::is_enabled() && is_plain(grad) &&
                             dtype_code(dtype) >= 0 && (!saved_x.defined() || is_plain(saved_x)) &&
                             !has_tangent(grad) && !has_tangent(saved_x);
        if (is_fast) {
            std::optional<variable_list> found = gradients(grad, saved_x, saved_weight, saved_values);
            if (found) return *std::move(found);
        }
        return python_gradients(grad, saved_x, saved_weight);
    }

    // Those of x, weight and bias. Nothing where Python has to find them.
    std::optional<variable_list> gradients(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                           const Tensor& kept) {
        const bool x_needs = weight.defined() && task_should_compute_output(0);
        const bool weight_needs = x.defined() && task_should_compute_output(1);
        const at::ScalarType dtype = grad.scalar_type();
        const bool reads_kept = kept.defined() && kept.scalar_type() == dtype;
        std::optional<Source> source;
        Tensor place;
        {
            Gil gil;
            if (x_needs && !reads_kept) {
                THPObjectPtr object = checked(THPVariable_Wrap(weight));
                if (Py_TYPE(object.get()) != reinterpret_cast<PyTypeObject*>(python.weight_type))
                    return std::nullopt;
                source = source_of(object, grad.device());
                if (!source) return std::nullopt;
            }
            if (weight_needs) place = gradient_place(dtype);  // last: what it gives it gives once
        }
        variable_list result(3);
        if (x_needs) result[0] = at::matmul(grad, reads_kept ? kept : values_of(*source, dtype));
        const Tensor rows = as_rows(grad);
        if (weight_needs) {
            const Tensor others = as_rows(x.scalar_type() == dtype ? x : x.to(dtype));
            if (place.defined()) {
                at::mm_out(place, rows.t(), others);
                result[1] = std::move(place);
            } else {
                result[1] = at::mm(rows.t(), others);
            }
        }
        if (task_should_compute_output(2)) result[2] = rows.sum(0);
        return result;
    }

    // Memory for the gradient of the weight, if it has a place.
    Tensor gradient_place(at::ScalarType dtype) {
        THPObjectPtr node = checked(torch::autograd::functionToPyObject(getptr()));
        THPObjectPtr one = checked(PyLong_FromLong(1));
        auto* wanted = reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype));
        THPObjectPtr place = checked(
            PyObject_CallFunctionObjArgs(python.gradient_place, node.get(), one.get(), wanted, nullptr));
        return unwrapped(place);
    }

    variable_list python_gradients(const Tensor& grad, const Tensor& x, const Tensor& weight) {
        Gil gil;
        THPObjectPtr node = checked(torch::autograd::functionToPyObject(getptr()));
        THPObjectPtr own_grad = wrapped(grad), own_x = wrapped(x), own_weight = wrapped(weight);
        PyObject* bias_needs = next_edge(2).is_valid() ? Py_True : Py_False;
        THPObjectPtr found =
            checked(PyObject_CallFunctionObjArgs(python.gradients, node.get(), own_grad.get(), own_x.get(),
                                                 own_weight.get(), bias_needs, nullptr));
        PyObject *of_x, *of_weight, *of_bias;
        if (!PyArg_ParseTuple(found, "OOO", &of_x, &of_weight, &of_bias)) throw_python_error();
        return {unwrapped(of_x), unwrapped(of_weight), unwrapped(of_bias)};
    }
};

template <class Pointer>
Pointer new_node() {
    if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
        return Pointer(new LinearBackward());
    } else {
        return c10::make_intrusive<LinearBackward>();
    }
}

Tensor forward(const Tensor& x, const Tensor& weight, const Tensor& bias, const Source& source) {
    NodePointer node;
    if (at::GradMode::is_enabled() && torch::autograd::compute_requires_grad(x, weight, bias)) {
        node = new_node<NodePointer>();
        node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
    }
    Tensor y, values;
    {
        const bool autocast = !is_default_state(false);
        at::AutoDispatchBelowADInplaceOrView below;
        values = values_of(source, weight.scalar_type());
        // Autocast would keep its copy of a leaf, which has no history here, for other operations.
        y = autocast ? at::linear(x.detach(), values, bias.defined() ? bias.detach() : bias)
                     : at::linear(x, values, bias);
    }
    if (node) {
        auto* saved = static_cast<LinearBackward*>(&*node);
        if (weight.requires_grad()) saved->x = SavedVariable(x, false);
        if (x.requires_grad()) saved->weight = SavedVariable(weight, false);
        if (x.requires_grad() && source.keeps_values) saved->values = SavedVariable(values, false);
        torch::autograd::set_history(y, node);
    }
    return y;
}

// Python's side

PyObject* saved_tensors(PyObject* self, void*) {
    HANDLE_TH_ERRORS
    const auto& node = reinterpret_cast<torch::autograd::THPCppFunction*>(self)->cdata;
    auto* linear = static_cast<LinearBackward*>(&*node);
    THPObjectPtr x = wrapped(linear->x.unpack(node)), weight = wrapped(linear->weight.unpack(node));
    return PyTuple_Pack(2, x.get(), weight.get());
    END_HANDLE_TH_ERRORS
}

// Which torch's macro of a node's properties names.
using torch::autograd::THPCppFunction_input_metadata;
using torch::autograd::THPCppFunction_metadata;
using torch::autograd::THPCppFunction_next_functions;
using torch::autograd::THPCppFunction_requires_grad;

PyGetSetDef kProperties[] = {THP_FUNCTION_DEFAULT_PROPERTIES,
                             {"saved_tensors", saved_tensors, nullptr, nullptr, nullptr},
                             {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyTypeObject node_type;

}  // namespace

// linear(x, weight, bias or None): F.linear; None for what the Python node has to do.
PyObject* linear(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 3, "linear() takes x, weight and bias, got ", count, " arguments");
    const bool has_bias = given[2] != Py_None;
    if (!is_default_state(true) || !is_exact(given[0]) || (has_bias && !is_exact(given[2])) ||
        Py_TYPE(given[1]) != reinterpret_cast<PyTypeObject*>(python.weight_type))
        Py_RETURN_NONE;
    const Tensor& x = THPVariable_Unpack(given[0]);
    const Tensor& weight = THPVariable_Unpack(given[1]);
    const Tensor bias = unwrapped(given[2]);
    if (!is_plain(x) || (has_bias && !is_plain(bias)) || weight.is_inference() ||
        dtype_code(weight.scalar_type()) < 0)
        Py_RETURN_NONE;
    const std::optional<Source> source = source_of(given[1], x.device());
    if (!source) Py_RETURN_NONE;
    Tensor y;
    {
        NoGil released;
        if (!has_tangent(x) && !has_tangent(weight) && !has_tangent(bias))
            y = forward(x, weight, bias, *source);
    }
    if (!y.defined()) Py_RETURN_NONE;
    return THPVariable_Wrap(std::move(y));
    END_HANDLE_TH_ERRORS
}

// configure(weight_type, values_source, gradient_place, gradients, check_cuda, current_stream, dequantize)
PyObject* configure(PyObject*, PyObject* given) {
    HANDLE_TH_ERRORS
    PyObject* capsule;
    if (!PyArg_ParseTuple(given, "OOOOOOO", &python.weight_type, &python.values_source,
                          &python.gradient_place, &python.gradients, &python.check_cuda,
                          &python.current_stream, &capsule))
        return nullptr;
    void* function = PyCapsule_GetPointer(capsule, kDequantizeCapsule);
    if (function == nullptr) return nullptr;
    python.dequantize = reinterpret_cast<DequantizeFunction>(function);
    python.record = PyUnicode_InternFromString("record");
    python.keeps_values = PyUnicode_InternFromString("keeps_values");
    Py_INCREF(given);  // and all that it holds
    torch::autograd::_initFunctionPyTypeObject(node_type, "LinearBackward", kProperties, nullptr);
    torch::autograd::registerCppFunction(typeid(LinearBackward), &node_type);
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// fits(dequantize): whether configure() can be given it.
PyObject* fits(PyObject*, PyObject* capsule) {
    return PyBool_FromLong(PyCapsule_IsValid(capsule, kDequantizeCapsule));
}

}  // namespace zerofp4
