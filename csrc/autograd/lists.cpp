// What a step asks of hundreds of tensors, in one loop each. zerofp4/ops/tensor_lists.py is the only caller.

#include <cstring>
#include <unordered_map>
#include <vector>

#include "autograd/functions.h"
#include "autograd/plain.h"

namespace zerofp4 {
namespace {

// The tensor of item i of a list; Python's TypeError for what is no tensor.
const Tensor& tensor_at(PyObject* list, Py_ssize_t i) {
    PyObject* item = PyList_GET_ITEM(list, i);
    TORCH_CHECK_TYPE(PyObject_TypeCheck(item, reinterpret_cast<PyTypeObject*>(THPVariableClass)), "item ", i,
                     " is a ", Py_TYPE(item)->tp_name, ", not a tensor");
    return THPVariable_Unpack(item);
}

Py_ssize_t size_of(PyObject* list) {
    TORCH_CHECK_TYPE(PyList_Check(list), "expected a list of tensors, got a ", Py_TYPE(list)->tp_name);
    return PyList_GET_SIZE(list);
}

// A list of what make(tensor), a new reference, is for each tensor.
template <class Make>
PyObject* map(PyObject* tensors, Make make) {
    const Py_ssize_t count = size_of(tensors);
    THPObjectPtr made = checked(PyList_New(count));
    for (Py_ssize_t i = 0; i < count; ++i)
        PyList_SET_ITEM(made.get(), i, checked(make(tensor_at(tensors, i))).release());
    return made.release();
}

int64_t address_of(const Tensor& tensor) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.data_ptr()));
}

// A bytes object of `count` elements of T.
template <class T>
struct Room {
    explicit Room(Py_ssize_t count)
        : bytes(checked(PyBytes_FromStringAndSize(nullptr, count * static_cast<Py_ssize_t>(sizeof(T))))) {}

    void set(Py_ssize_t i, const T& value) {
        std::memcpy(PyBytes_AS_STRING(bytes.get()) + i * static_cast<Py_ssize_t>(sizeof(T)), &value,
                    sizeof(T));
    }

    THPObjectPtr bytes;
};

struct Kind {
    int64_t elements;
    int32_t dimensions;  // -1 for None
    int8_t dtype, device_type, device_index;
    uint8_t contiguous : 1, aligned : 1;
};
static_assert(sizeof(Kind) == 16, "padding would be compared, too");

Kind kind_of(const Tensor& tensor, int64_t address) {
    const c10::Device device = tensor.device();
    Kind kind{};
    kind.elements = tensor.numel();
    kind.dimensions = static_cast<int32_t>(tensor.dim());
    kind.dtype = static_cast<int8_t>(tensor.scalar_type());
    kind.device_type = static_cast<int8_t>(device.type());
    kind.device_index = static_cast<int8_t>(device.index());
    kind.contiguous = tensor.is_contiguous();
    kind.aligned = address % static_cast<int64_t>(tensor.itemsize()) == 0;
    return kind;
}

// What Python's TensorFacts has of `count` tensors and Nones.
struct Facts {
    explicit Facts(Py_ssize_t count) : addresses(count), kinds(count) {}

    // Adds the next item; with `plain` only None and tensors that are plain and whole, else it returns false.
    bool add(PyObject* item, bool plain) {
        int64_t address = -1;
        Kind kind{};
        kind.dimensions = -1;
        if (item != Py_None) {
            const Tensor& tensor = THPVariable_Unpack(item);
            if (plain && !(is_dense(tensor) && has_memory(tensor))) return false;
            address = address_of(tensor);
            kind = kind_of(tensor, address);
        }
        addresses.set(next, address);
        kinds.set(next++, kind);
        return true;
    }

    PyObject* pair() const { return PyTuple_Pack(2, addresses.bytes.get(), kinds.bytes.get()); }

    Room<int64_t> addresses;
    Room<Kind> kinds;
    Py_ssize_t next = 0;
};

// plain: None for tensors that are not.
PyObject* facts_of(PyObject* tensors, bool plain) {
    const Py_ssize_t count = size_of(tensors);
    Facts found(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* item = PyList_GET_ITEM(tensors, i);
        if (item != Py_None) tensor_at(tensors, i);  // raises TypeError for what is no tensor
        if (!found.add(item, plain)) Py_RETURN_NONE;
    }
    return found.pair();
}

}  // namespace

// addresses(tensors): the address of each as an int64, in one bytes object.
PyObject* addresses(PyObject*, PyObject* tensors) {
    HANDLE_TH_ERRORS
    const Py_ssize_t count = size_of(tensors);
    Room<int64_t> found(count);
    for (Py_ssize_t i = 0; i < count; ++i) found.set(i, address_of(tensor_at(tensors, i)));
    return found.bytes.release();
    END_HANDLE_TH_ERRORS
}

// facts(tensors and Nones): (addresses, kinds), both bytes. The address of None is -1.
PyObject* facts(PyObject*, PyObject* tensors) {
    HANDLE_TH_ERRORS
    return facts_of(tensors, false);
    END_HANDLE_TH_ERRORS
}

// plain_facts(tensors and Nones): facts(), if each tensor is of no class with a dispatch of its own, dense on
// a CPU or a GPU, without a lazy sign or conjugation, and its storage holds all its elements; else None.
PyObject* plain_facts(PyObject*, PyObject* tensors) {
    HANDLE_TH_ERRORS
    return facts_of(tensors, true);
    END_HANDLE_TH_ERRORS
}

// gradients(tensors): the grad of each.
PyObject* gradients(PyObject*, PyObject* tensors) {
    HANDLE_TH_ERRORS
    return map(tensors, [](const Tensor& tensor) { return THPVariable_Wrap(tensor.grad()); });
    END_HANDLE_TH_ERRORS
}

// state_facts(tensors, state, keys): plain_facts() of the tensors, and of what `state`, a dict by tensor, has
// of each under the keys of its tuple: Nones where it has nothing of a tensor. None where a key is missing,
// or something is not plain.
PyObject* state_facts(PyObject*, PyObject* given) {
    HANDLE_TH_ERRORS
    PyObject *tensors, *state, *keys;
    if (!PyArg_ParseTuple(given, "O!O!O!", &PyList_Type, &tensors, &PyDict_Type, &state, &PyList_Type, &keys))
        throw python_error();
    const Py_ssize_t count = PyList_GET_SIZE(tensors);
    TORCH_CHECK_VALUE(PyList_GET_SIZE(keys) == count, "not as many tuples of keys as tensors");
    // By identity: torch hashes each tensor in Python. Most states are in the order of the tensors, so that
    // the next one is found without the map.
    std::unordered_map<PyObject*, PyObject*> by_tensor;
    Py_ssize_t next = 0;
    const auto state_of = [&](PyObject* tensor) -> PyObject* {
        PyObject *key, *entries;
        Py_ssize_t at = next;
        if (PyDict_Next(state, &at, &key, &entries) && key == tensor) {
            next = at;
            return entries;
        }
        if (by_tensor.empty())
            for (at = 0; PyDict_Next(state, &at, &key, &entries);) by_tensor.emplace(key, entries);
        const auto found = by_tensor.find(tensor);
        return found == by_tensor.end() ? nullptr : found->second;
    };
    std::vector<PyObject*> items;
    for (Py_ssize_t i = 0; i < count; ++i) items.push_back(PyList_GET_ITEM(tensors, i));
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* own = PyList_GET_ITEM(keys, i);
        TORCH_CHECK_TYPE(PyTuple_Check(own), "keys of tensor ", i, " are no tuple");
        PyObject* found = state_of(items[i]);
        if (found != nullptr && !PyDict_Check(found)) Py_RETURN_NONE;
        const bool is_there = found != nullptr && PyDict_GET_SIZE(found) > 0;
        for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(own); ++k) {
            PyObject* item = is_there ? PyDict_GetItemWithError(found, PyTuple_GET_ITEM(own, k)) : Py_None;
            if (item == nullptr && PyErr_Occurred() != nullptr) throw python_error();
            if (item == nullptr) Py_RETURN_NONE;
            items.push_back(item);
        }
    }
    Facts facts(static_cast<Py_ssize_t>(items.size()));
    for (PyObject* item : items) {
        if (item != Py_None && !THPVariable_Check(item)) Py_RETURN_NONE;
        if (!facts.add(item, true)) Py_RETURN_NONE;
    }
    return facts.pair();
    END_HANDLE_TH_ERRORS
}

// versions(tensors): autograd's count of writes to each.
PyObject* versions(PyObject*, PyObject* tensors) {
    HANDLE_TH_ERRORS
    return map(tensors, [](const Tensor& tensor) { return PyLong_FromLongLong(tensor._version()); });
    END_HANDLE_TH_ERRORS
}

}  // namespace zerofp4
