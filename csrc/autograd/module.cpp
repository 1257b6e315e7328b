// zerofp4._autograd: what needs torch's own interface in C++, built against one torch.
// zerofp4/ops/extension.py loads it.

#include <Python.h>

#include "autograd/calls.h"
#include "autograd/functions.h"

namespace zerofp4 {
namespace {

const KernelCalls* connected;

// connect(kernel_calls of zerofp4._C): whether they are those that this was built for. They are used from
// then on, for as long as the process lives.
PyObject* connect(PyObject*, PyObject* capsule) {
    if (!PyCapsule_IsValid(capsule, kCallsCapsule)) Py_RETURN_FALSE;
    connected = static_cast<const KernelCalls*>(PyCapsule_GetPointer(capsule, kCallsCapsule));
    Py_RETURN_TRUE;
}

PyMethodDef kMethods[] = {
    {"addresses", &addresses, METH_O, nullptr},
    {"configure", &configure, METH_VARARGS, nullptr},
    {"configure_layer", &configure_layer, METH_VARARGS, nullptr},
    {"connect", &connect, METH_O, nullptr},
    {"facts", &facts, METH_O, nullptr},
    {"gradients", &gradients, METH_O, nullptr},
    {"implement", &implement, METH_O, nullptr},
    {"layer", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&layer)), METH_FASTCALL, nullptr},
    {"linear", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&linear)), METH_FASTCALL, nullptr},
    {"plain_facts", &plain_facts, METH_O, nullptr},
    {"scheme", &scheme, METH_VARARGS, nullptr},
    {"state_facts", &state_facts, METH_VARARGS, nullptr},
    {"versions", &versions, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_autograd", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

const KernelCalls& kernels() { return *connected; }

}  // namespace zerofp4

// Nothing of torch is touched here: it may be another one than this was built against.
PyMODINIT_FUNC PyInit__autograd() {
    PyObject* made = PyModule_Create(&zerofp4::module);
    if (made != nullptr && PyModule_AddStringConstant(made, "TORCH_VERSION", ZEROFP4_TORCH_VERSION) < 0)
        Py_CLEAR(made);
    return made;
}
