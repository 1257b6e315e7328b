// What plans ask about the tensors of a list before every call, in one loop in C. A tensor's framework hands
// out the function that describes it, DLPack's (version 1.3): so this knows of torch no more than the rest.

#include <algorithm>
#include <cstring>
#include <utility>

#include "bindings/bindings.h"

namespace zerofp4::bindings {
namespace {

// The parts of DLPack's C interface that are used, as the standard lays them out.
struct DlTensor {
    void* data;
    int32_t device_type, device_id;
    int32_t dimensions;
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};

struct DlExchange {
    uint32_t major, minor;
    const void* previous;
    void (*allocate)();
    void (*from_object)();
    void (*to_object)();
    int (*describe)(void* object, DlTensor* tensor);  // 0, or -1 with a Python exception; may be null
};

constexpr const char* kCapsule = "dlpack_exchange_api";

struct Kind {
    int64_t elements;
    int32_t device_type, device_id;
    int32_t dimensions;  // -1 for None
    uint8_t type_code, type_bits;
    uint8_t contiguous, aligned;
};

bool lies_contiguously(const DlTensor& tensor) {
    int64_t step = 1;
    for (int32_t i = tensor.dimensions; i-- > 0; step *= tensor.shape[i]) {
        if (tensor.shape[i] != 1 && tensor.strides[i] != step) return false;
    }
    return true;
}

int64_t address_of(const DlTensor& tensor) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset);
}

Kind kind_of(const DlTensor& tensor) {
    int64_t elements = 1;
    for (int32_t i = 0; i < tensor.dimensions; ++i) elements *= tensor.shape[i];
    const int64_t bytes = std::max(1, tensor.type_bits / 8);
    return {elements,
            tensor.device_type,
            tensor.device_id,
            tensor.dimensions,
            tensor.type_code,
            tensor.type_bits,
            static_cast<uint8_t>(lies_contiguously(tensor)),
            static_cast<uint8_t>(address_of(tensor) % bytes == 0)};
}

// `count` elements of T, whose memory is returned with it.
template <class T>
std::pair<py::bytes, T*> room_for(Py_ssize_t count) {
    py::bytes bytes = py::reinterpret_steal<py::bytes>(
        PyBytes_FromStringAndSize(nullptr, count * static_cast<Py_ssize_t>(sizeof(T))));
    if (!bytes) throw py::error_already_set();
    return {bytes, reinterpret_cast<T*>(PyBytes_AS_STRING(bytes.ptr()))};
}

class TensorReader {
  public:
    explicit TensorReader(const py::capsule& exchange)
        : exchange_(static_cast<const DlExchange*>(PyCapsule_GetPointer(exchange.ptr(), kCapsule))) {
        if (exchange_ == nullptr) throw py::error_already_set();
        if (exchange_->major != 1 || exchange_->describe == nullptr)
            throw py::value_error("tensors are not described in DLPack's version 1");
    }

    py::bytes addresses(const py::list& tensors) const {
        const Py_ssize_t count = PyList_GET_SIZE(tensors.ptr());
        const auto [bytes, to] = room_for<int64_t>(count);
        for (Py_ssize_t i = 0; i < count; ++i) {
            const int64_t address = address_of(describe(PyList_GET_ITEM(tensors.ptr(), i)));
            std::memcpy(to + i, &address, sizeof address);
        }
        return bytes;
    }

    // (addresses, kinds). The address of None is -1.
    py::tuple facts(const py::list& tensors) const {
        const Py_ssize_t count = PyList_GET_SIZE(tensors.ptr());
        const auto [addresses, addresses_to] = room_for<int64_t>(count);
        const auto [kinds, kinds_to] = room_for<Kind>(count);
        for (Py_ssize_t i = 0; i < count; ++i) {
            PyObject* object = PyList_GET_ITEM(tensors.ptr(), i);
            int64_t address = -1;
            Kind kind{};
            kind.dimensions = -1;
            if (object != Py_None) {
                const DlTensor tensor = describe(object);
                address = address_of(tensor);
                kind = kind_of(tensor);
            }
            std::memcpy(addresses_to + i, &address, sizeof address);
            std::memcpy(kinds_to + i, &kind, sizeof kind);
        }
        return py::make_tuple(addresses, kinds);
    }

  private:
    DlTensor describe(PyObject* object) const {
        DlTensor tensor{};
        if (exchange_->describe(object, &tensor) != 0) throw py::error_already_set();
        return tensor;
    }

    const DlExchange* exchange_;  // the framework's, for as long as the process lives
};

}  // namespace

void bind_tensors(py::module_& m) {
    py::class_<TensorReader>(m, "TensorReader")
        .def(py::init<const py::capsule&>(), "exchange"_a)
        .def("addresses", &TensorReader::addresses, "tensors"_a)
        .def("facts", &TensorReader::facts, "tensors"_a);
}

}  // namespace zerofp4::bindings
