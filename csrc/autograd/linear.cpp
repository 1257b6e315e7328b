// F.linear where x or the weight is quantized, as an autograd node. A plain x is multiplied with an NVFP4
// weight here; what is not plain (modes, subclasses, MXFP8 weights, gradients of gradients) in
// zerofp4/tensors/products.py, to the same bytes.

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <optional>

#include "autograd/call_python.h"
#include "autograd/quantization.h"

namespace zerofp4 {
namespace {

// What configure() was given, for as long as the process lives.
struct {
    PyObject* weight_type;
    PyObject* values_source;
    PyObject* product;
    PyObject* gradients;
    PyObject* gradient_place;
    PyObject* check_cuda;
    PyObject* current_stream;
    PyObject* record;           // the name of the attribute
    unsigned long slow_on_cpu;  // a bit for each dtype_code
    uint64_t checked_gpus;
} python;

// The handle of the current stream of a GPU that our kernels run on.
int64_t current_stream(c10::DeviceIndex index) {
    Gil gil;
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

}  // namespace

Target target_of(const Tensor& tensor) {
    if (tensor.is_cpu()) return {-1, 0, at::get_num_threads()};
    return {tensor.get_device(), current_stream(tensor.device().index()), 0};
}

Tensor values_of(const Copy& copy, bool columnwise, at::ScalarType dtype, const Target& target) {
    const int64_t rows = columnwise ? copy.cols() : copy.rows(),
                  cols = columnwise ? copy.rows() : copy.cols();
    Tensor values = at::empty({rows, cols}, copy.data.options().dtype(dtype));
    const CopyCall call{copy.data.const_data_ptr(),
                        copy.scale.const_data_ptr(),
                        copy.amax.const_data_ptr(),
                        values.mutable_data_ptr(),
                        rows,
                        cols,
                        copy.block_rows,
                        copy.e4m3_max,
                        columnwise};
    check(kernels().dequantize(target, static_cast<DType>(dtype_code(dtype)), call));
    return values;
}

PyTypeObject* weight_type() { return reinterpret_cast<PyTypeObject*>(python.weight_type); }

Tensor gradient_place(const NodePointer& node, at::ScalarType dtype) {
    THPObjectPtr object = checked(torch::autograd::functionToPyObject(node));
    return unwrapped(call_python(python.gradient_place, object.get(), dtype));
}

namespace {

// Values of a weight

// What values are computed from.
struct Source {
    Copy copy;
    bool columnwise;
    Target target;
};

// Nothing where Python is to say what is wrong. Needs the GIL.
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
        if (!is_dense(tensor) || tensor.device() != device || !holds(tensor)) return std::nullopt;
    }
    Copy copy{unwrapped(data), unwrapped(scale), unwrapped(amax), block_rows, e4m3_max};
    if (copy.data.dim() != 2) return std::nullopt;
    const Target target = target_of(copy.data);
    return Source{std::move(copy), columnwise != 0, target};
}

Tensor values_of(const Source& source, at::ScalarType dtype) {
    return values_of(source.copy, source.columnwise, dtype, source.target);
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

// The node

struct LinearBackward : OwnNode {
    SavedVariable x, weight;

    std::string name() const override { return "LinearBackward"; }

    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex);
        x.reset_data();
        weight.reset_data();
    }

    variable_list apply(variable_list&& grads) override {
        std::lock_guard<std::mutex> lock(mutex);
        const Tensor grad = grads[0].defined() ? std::move(grads[0]) : input_metadata(0).zeros_like();
        const Tensor saved_x = x.unpack(getptr()), saved_weight = weight.unpack(getptr());
        const bool is_fast = is_default_state(false) && !at::GradMode::is_enabled() && is_plain(grad) &&
                             dtype_code(grad.scalar_type()) >= 0 &&
                             (!saved_x.defined() || is_plain(saved_x)) && !has_tangent(grad) &&
                             !has_tangent(saved_x);
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
            if (weight_needs) place = gradient_place(getptr(), dtype);  // last: what it gives it gives once
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

    variable_list python_gradients(const Tensor& grad, const Tensor& x, const Tensor& weight) {
        Gil gil;
        THPObjectPtr node = checked(torch::autograd::functionToPyObject(getptr()));
        THPObjectPtr found =
            call_python(python.gradients, node.get(), grad, x, weight, next_edge(2).is_valid());
        PyObject *of_x, *of_weight, *of_bias;
        if (!PyArg_ParseTuple(found, "OOO", &of_x, &of_weight, &of_bias)) throw_python_error();
        return {unwrapped(of_x), unwrapped(of_weight), unwrapped(of_bias)};
    }
};

// If anything needs a gradient.
NodePointer begin_node(const Tensor& x, const Tensor& weight, const Tensor& bias) {
    if (!at::GradMode::is_enabled() || !torch::autograd::compute_requires_grad(x, weight, bias)) return {};
    NodePointer node = new_node<LinearBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
    auto* made = static_cast<LinearBackward*>(&*node);
    if (weight.requires_grad()) made->x = SavedVariable(x, false);
    if (x.requires_grad()) made->weight = SavedVariable(weight, false);
    return node;
}

Tensor product(const Tensor& x, const Tensor& weight, const Tensor& bias, const Source& source) {
    const bool autocast = !is_default_state(false);
    at::AutoDispatchBelowADInplaceOrView below;
    const Tensor values = values_of(source, weight.scalar_type());
    if (!autocast) return multiply(x, values, bias);
    // Autocast would keep its copy of a leaf, which has no history here, for other operations.
    return at::linear(x.detach(), values, bias.defined() ? bias.detach() : bias);
}

}  // namespace

// linear(x, weight, bias or None): F.linear; None where torch.func or forward AD asks what it is made of.
PyObject* linear(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 3, "linear() takes x, weight and bias, got ", count, " arguments");
    const bool has_bias = given[2] != Py_None, is_nvfp4 = Py_TYPE(given[1]) == weight_type();
    if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
        !THPVariable_Check(given[0]) || (!is_nvfp4 && !THPVariable_Check(given[1])) ||
        (has_bias && !THPVariable_Check(given[2])))
        Py_RETURN_NONE;
    const Tensor &x = THPVariable_Unpack(given[0]), &weight = THPVariable_Unpack(given[1]);
    const Tensor bias = unwrapped(given[2]);
    const bool is_usual =
        is_default_state(true) && is_exact(given[0]) && (!has_bias || is_exact(given[2])) && is_nvfp4 &&
        is_plain(x) && !(x.is_cpu() && at::autocast::is_autocast_enabled(at::kCPU)) &&
        (!has_bias || is_plain(bias)) && !weight.is_inference() && dtype_code(weight.scalar_type()) >= 0;
    const std::optional<Source> source = is_usual ? source_of(given[1], x.device()) : std::nullopt;
    bool is_dual;
    NodePointer node;
    Tensor y;
    {
        NoGil released;
        is_dual = has_tangent(x) || has_tangent(weight) || has_tangent(bias);
        // Before the product, which a checkpoint leaves out that needs no more than what is saved.
        if (!is_dual) node = begin_node(x, weight, bias);
        if (!is_dual && source) y = product(x, weight, bias, *source);
    }
    if (is_dual) Py_RETURN_NONE;
    if (!source) {
        const at::NoGradGuard no_grad;
        y = unwrapped(call_python(python.product, given[0], given[1], given[2]));
    }
    if (node) torch::autograd::set_history(y, node);
    return THPVariable_Wrap(std::move(y));
    END_HANDLE_TH_ERRORS
}

// What configure_linear in zerofp4/ops/native.py says.
PyObject* configure(PyObject*, PyObject* given) {
    HANDLE_TH_ERRORS
    if (!PyArg_ParseTuple(given, "OOOOOOOk", &python.weight_type, &python.values_source, &python.product,
                          &python.gradients, &python.gradient_place, &python.check_cuda,
                          &python.current_stream, &python.slow_on_cpu))
        return nullptr;
    python.record = PyUnicode_InternFromString("record");
    Py_INCREF(given);  // and all that it holds
    register_node<LinearBackward>("LinearBackward");
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

}  // namespace zerofp4
