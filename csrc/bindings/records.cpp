// What torch.compile asks a quantized tensor in each call of compiled code, without a frame of Python: a
// buffer of its record, and which buffers there are. This knows the attributes of the records in
// zerofp4/storage, and of torch no more than the rest.

#include "bindings/bindings.h"

namespace zerofp4::bindings {
namespace {

// The names of attributes.
struct Names {
    py::str record{"record"}, fields{"context_fields"}, wait{"_wait"}, amax{"amax"};
    py::str columnwise_amax{"columnwise_amax"}, place{"place"}, scales{"scale_places"};
    py::str gate{"gate"}, scale_gate{"scale_gate"};
};

// Never destroyed: the interpreter is gone before statics are.
const Names& names() {
    static const Names* made = new Names();
    return *made;
}

// Waits for what is on its way to a side, as Gate.wait() does.
void wait(const py::object& side, const py::str& gate_name) {
    const py::object gate = side.attr(gate_name);
    if (gate.is_none()) return;
    const py::object wait = gate.attr(names().wait);
    if (!wait.is_none()) wait();
}

// A buffer that a side may have: its elements, or its scales in a layout.
struct Buffer {
    py::str side;
    py::object layout;  // None for the elements
    py::str name;

    // None where it does not exist.
    py::object of(const py::object& found_side) const {
        if (found_side.is_none()) return py::none();
        if (layout.is_none()) return found_side.attr(names().place);
        const py::dict scales = found_side.attr(names().scales);
        PyObject* found = PyDict_GetItemWithError(scales.ptr(), layout.ptr());
        if (found == nullptr && PyErr_Occurred()) throw py::error_already_set();
        return found == nullptr ? py::object(py::none()) : py::reinterpret_borrow<py::object>(found);
    }

    // Of tensor.record, as Sides.buffer() finds it.
    py::object read(const py::handle& tensor) const {
        const py::object found_side = tensor.attr(names().record).attr(side);
        if (!found_side.is_none()) wait(found_side, layout.is_none() ? names().gate : names().scale_gate);
        return of(found_side);
    }
};

py::object amax_of(const py::object& side) {
    return side.is_none() ? py::object(py::none()) : side.attr(names().amax);
}

// (names of the buffers, values of the context's fields) of tensor.record, as Sides.buffers() gives them.
py::tuple flatten(const std::vector<Buffer>& buffers, const py::handle& tensor) {
    const py::object record = tensor.attr(names().record);
    const py::object rowwise = record.attr(buffers.front().side);
    const py::object columnwise = record.attr(buffers.back().side);
    for (const py::object& side : {rowwise, columnwise}) {
        if (!side.is_none()) wait(side, names().gate);
    }
    py::list found;
    for (const Buffer& buffer : buffers) {
        const bool is_first = buffer.side.equal(buffers.front().side);
        if (!buffer.of(is_first ? rowwise : columnwise).is_none()) found.append(buffer.name);
    }
    const py::object amax = amax_of(rowwise.is_none() ? columnwise : rowwise);
    const py::object columnwise_amax = amax_of(columnwise);
    if (!amax.is_none()) found.append(names().amax);
    if (!columnwise_amax.is_none() && !columnwise_amax.is(amax)) found.append(names().columnwise_amax);
    const py::tuple fields = record.attr(names().fields);
    py::tuple context(fields.size());
    for (size_t i = 0; i < fields.size(); ++i) context[i] = record.attr(fields[i]);
    return py::make_tuple(found, context);
}

Buffer buffer_of(const py::handle& described) {
    const auto [side, layout, name] = described.cast<std::tuple<py::str, py::object, py::str>>();
    return {side, layout, name};
}

}  // namespace

void bind_records(py::module_& m) {
    // (side, layout or None for the elements, name): a function of a tensor that gives this buffer.
    m.def("buffer_reader", [](const py::tuple& described) {
        return py::cpp_function(
            [buffer = buffer_of(described)](const py::handle& tensor) { return buffer.read(tensor); });
    });
    // Names of sides: a function of a tensor that gives the amax of the first that exists.
    m.def("amax_reader", [](const std::vector<py::str>& sides) {
        return py::cpp_function([sides](const py::handle& tensor) {
            const py::object record = tensor.attr(names().record);
            for (const py::str& name : sides) {
                const py::object side = record.attr(name);
                if (!side.is_none()) return amax_of(side);
            }
            return py::object(py::none());
        });
    });
    // The buffers of both sides in their order: a method __tensor_flatten__ of a class of tensors.
    m.def("flatten_method", [](const py::type& owner, const py::list& described) {
        std::vector<Buffer> buffers;
        for (const py::handle& each : described) buffers.push_back(buffer_of(each));
        return py::cpp_function([buffers](const py::handle& tensor) { return flatten(buffers, tensor); },
                                py::name("__tensor_flatten__"), py::is_method(owner));
    });
}

}  // namespace zerofp4::bindings
