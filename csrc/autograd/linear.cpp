// F.linear with an NVFP4 weight as an autograd node in C++. Whatever is not plain goes to the Python node in
// zerofp4/tensors/products.py, which computes the same bytes.

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <mutex>
#include <optional>

#include "autograd/dequantize_call.h"
#include "autograd/functions.h"
#include "autograd/layer_calls.h"
#include "autograd/plain.h"

namespace zerofp4 {
namespace {

// What configure() was given, for as long as the process lives.
struct {
    PyObject* weight_type;
    PyObject* values_source;
    PyObject* gradient_place;
    PyObject* gradients;
    PyObject* check_cuda;
    PyObject* current_stream;
    PyObject* record;  // the name of the attribute
    DequantizeFunction dequantize;
    unsigned long slow_on_cpu;  // a bit for each dtype_code
    uint64_t checked_gpus;
} python;

}  // namespace

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

PyTypeObject* weight_type() { return reinterpret_cast<PyTypeObject*>(python.weight_type); }

namespace {

// Values of a weight

// What values are computed from. Nothing where Python is to say what is wrong. Needs the GIL.
std::optional<Source> source_of(PyObject* weight, const c10::Device& device) {
    THPObjectPtr record = checked(PyObject_GetAttr(weight, python.record));
    THPObjectPtr found = checked(PyObject_CallOneArg(python.values_source, record));
    PyObject *data, *scale, *amax;
    long long block_rows;
    int e4m3_max, columnwise;
    if (!PyArg_ParseTuple(found, "OOOLip", &data, &scale, &amax, &block_rows, &e4m3_max, &columnwise))
        throw_python_error();
    for (PyObject* buffer : {data, scale, amax}) {
        if (!is_exact(buffer)) return std::nullopt;
        const Tensor& tensor = THPVariable_Unpack(buffer);
        if ((tensor.key_set() | kPlain) != kPlain || tensor.device() != device || !holds(tensor))
            return std::nullopt;
    }
    Source source{THPVariable_Unpack(data),
                  THPVariable_Unpack(scale),
                  THPVariable_Unpack(amax),
                  block_rows,
                  e4m3_max,
                  columnwise != 0,
                  0};
    if (source.data.dim() != 2) return std::nullopt;
    if (device.is_cuda()) source.stream = current_stream(device.index());
    return source;
}

// Products, as multiply() in zerofp4/tensors/products.py

Tensor in_dtype(const Tensor& x, at::ScalarType dtype) {
    return !x.defined() || x.scalar_type() == dtype ? x : x.to(dtype);
}

// In what values like these are multiplied.
at::ScalarType factor_dtype(const Tensor& x) {
    const int code = dtype_code(x.scalar_type());
    return x.is_cpu() && code >= 0 && (python.slow_on_cpu >> code & 1) != 0 ? at::kFloat : x.scalar_type();
}

Tensor multiply(const Tensor& x, const Tensor& weight, const Tensor& bias) {
    const at::ScalarType dtype = x.scalar_type(), wide = factor_dtype(x);
    const bool is_one = weight.scalar_type() == dtype && (!bias.defined() || bias.scalar_type() == dtype);
    if (wide == dtype || !is_one) return at::linear(x, weight, bias);
    return at::linear(in_dtype(x, wide), in_dtype(weight, wide), in_dtype(bias, wide)).to(dtype);
}

Tensor multiply_by_autocast(const Tensor& x, const Tensor& weight, const Tensor& bias) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto cast = [](const Tensor& each) {
        const bool takes = each.defined() && dtype_code(each.scalar_type()) >= 0;
        return takes ? in_dtype(each, at::autocast::get_autocast_dtype(at::kCPU)) : each;
    };
    return multiply(cast(x), cast(weight), cast(bias));
}

// The node

struct LinearBackward : Node {
    SavedVariable x, weight;
    std::mutex mutex;  // two threads may go back through one graph

    std::string name() const override { return "LinearBackward"; }

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
        TORCH_CHECK(
            false,
            "compiled autograd cannot trace a product with an NVFP4 weight: call backward() without it");
    }

    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex);
        x.reset_data();
        weight.reset_data();
    }

    variable_list apply(variable_list&& grads) override {
        std::lock_guard<std::mutex> lock(mutex);
        const Tensor grad = grads[0].defined() ? std::move(grads[0]) : input_metadata(0).zeros_like();
        const Tensor saved_x = x.unpack(getptr()), saved_weight = weight.unpack(getptr());
        const at::ScalarType dtype = grad.scalar_type();
        const bool is_fast = is_default_state(false) && !at::GradMode::is_enabled() && is_plain(grad) &&
                             dtype_code(dtype) >= 0 && (!saved_x.defined() || is_plain(saved_x)) &&
                             !has_tangent(grad) && !has_tangent(saved_x);
        if (is_fast) {
            std::optional<variable_list> found = gradients(grad, saved_x, saved_weight);
            if (found) return *std::move(found);
        }
        return python_gradients(grad, saved_x, saved_weight);
    }

    // Those of x, weight and bias. Nothing where Python has to find them.
    std::optional<variable_list> gradients(const Tensor& grad, const Tensor& x, const Tensor& weight) {
        const bool x_needs = weight.defined() && task_should_compute_output(0);
        const bool weight_needs = x.defined() && task_should_compute_output(1);
        const at::ScalarType dtype = grad.scalar_type();
        std::optional<Source> source;
        Tensor place;
        {
            Gil gil;
            if (x_needs) {
                THPObjectPtr object = checked(THPVariable_Wrap(weight));
                if (Py_TYPE(object.get()) != weight_type()) return std::nullopt;
                source = source_of(object, grad.device());
                if (!source) return std::nullopt;
            }
            if (weight_needs) place = gradient_place(dtype);  // last: what it gives it gives once
        }
        variable_list result(3);
        const at::ScalarType wide = factor_dtype(grad);
        const Tensor factor = in_dtype(grad, wide);
        if (x_needs) {
            const Tensor values = in_dtype(values_of(*source, dtype), wide);
            result[0] = in_dtype(at::matmul(factor, values), dtype);
        }
        const Tensor rows = as_rows(factor);
        if (weight_needs) {
            const Tensor others = as_rows(in_dtype(in_dtype(x, dtype), wide));
            if (place.defined() && wide == dtype) {
                at::mm_out(place, rows.t(), others);
            } else if (place.defined()) {
                place.copy_(at::mm(rows.t(), others));
            } else {
                place = in_dtype(at::mm(rows.t(), others), dtype);
            }
            result[1] = std::move(place);
        }
        if (task_should_compute_output(2)) result[2] = (wide == dtype ? rows : as_rows(grad)).sum(0);
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

Tensor forward(const Tensor& x, const Tensor& weight, const Tensor& bias, const Source& source) {
    NodePointer node;
    if (at::GradMode::is_enabled() && torch::autograd::compute_requires_grad(x, weight, bias)) {
        node = new_node<LinearBackward>();
        node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
        // Before the product, which a checkpoint leaves out that needs no more than what is saved.
        auto* saved = static_cast<LinearBackward*>(&*node);
        if (weight.requires_grad()) saved->x = SavedVariable(x, false);
        if (x.requires_grad()) saved->weight = SavedVariable(weight, false);
    }
    Tensor y;
    {
        const bool autocast = !is_default_state(false);
        at::AutoDispatchBelowADInplaceOrView below;
        const Tensor values = values_of(source, weight.scalar_type());
        if (!autocast) {
            y = multiply(x, values, bias);
        } else if (x.is_cpu() && at::autocast::is_autocast_enabled(at::kCPU)) {
            y = multiply_by_autocast(x, values, bias);
        } else {
            // Autocast would keep its copy of a leaf, which has no history here, for other operations.
            y = at::linear(x.detach(), values, bias.defined() ? bias.detach() : bias);
        }
    }
    if (node) torch::autograd::set_history(y, node);
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
        Py_TYPE(given[1]) != weight_type())
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

// configure(weight_type, values_source, gradient_place, gradients, check_cuda, current_stream, dequantize,
// slow_on_cpu)
PyObject* configure(PyObject*, PyObject* given) {
    HANDLE_TH_ERRORS
    PyObject* capsule;
    if (!PyArg_ParseTuple(given, "OOOOOOOk", &python.weight_type, &python.values_source,
                          &python.gradient_place, &python.gradients, &python.check_cuda,
                          &python.current_stream, &capsule, &python.slow_on_cpu))
        return nullptr;
    void* function = PyCapsule_GetPointer(capsule, kDequantizeCapsule);
    if (function == nullptr) return nullptr;
    python.dequantize = reinterpret_cast<DequantizeFunction>(function);
    python.record = PyUnicode_InternFromString("record");
    Py_INCREF(given);  // and all that it holds
    torch::autograd::_initFunctionPyTypeObject(node_type, "LinearBackward", kProperties, nullptr);
    torch::autograd::registerCppFunction(typeid(LinearBackward), &node_type);
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// fits(functions): whether configure() or configure_layer() can be given them.
PyObject* fits(PyObject*, PyObject* capsule) {
    return PyBool_FromLong(PyCapsule_IsValid(capsule, kDequantizeCapsule) ||
                           PyCapsule_IsValid(capsule, kLayerCapsule));
}

}  // namespace zerofp4
