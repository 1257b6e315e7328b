#pragma once
// Structs of addresses and numbers that Python makes from keyword arguments.

#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <utility>

#include "bindings/bindings.h"

namespace zerofp4::bindings {

// value: an address, a number, or a struct of ours; of an array, at most as many as it has.
template <class T>
void assign(T& field, const py::handle& value) {
    if constexpr (std::is_array_v<T>) {
        const auto items = value.cast<std::vector<py::object>>();
        if (items.size() > std::extent_v<T>) throw py::value_error("more items than the array holds");
        for (size_t i = 0; i < items.size(); ++i) assign(field[i], items[i]);
    } else if constexpr (std::is_pointer_v<T>) {
        field = pointer<std::remove_pointer_t<T>>(value.cast<uintptr_t>());
    } else if constexpr (std::is_enum_v<T>) {
        field = static_cast<T>(value.cast<int>());
    } else {
        field = value.cast<T>();
    }
}

template <class T, class Owner>
auto field(T Owner::* member) {
    return [member](auto& made, const py::handle& value) { assign(made.*member, value); };
}

// A field by its own name.
#define FIELD(Struct, name) {#name, field(&Struct::name)}

template <class Struct>
using Fields = std::map<std::string, std::function<void(Struct&, const py::handle&)>>;

// The class of a struct with these fields, by their keywords; what is not given is 0.
template <class Struct>
void struct_class(py::module_& m, const char* name, Fields<Struct> fields) {
    const auto make = [fields = std::move(fields)](const py::kwargs& given) {
        Struct made{};
        for (const auto& [key, value] : given) {
            const auto name = py::cast<std::string>(key);
            const auto found = fields.find(name);
            if (found == fields.end()) throw py::type_error("no field " + name);
            found->second(made, value);
        }
        return made;
    };
    py::class_<Struct>(m, name).def(py::init(make));
}

}  // namespace zerofp4::bindings
