#pragma once
// Structs of addresses and numbers that Python makes from keyword arguments.

#include <algorithm>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

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

struct Field {
    const char* name;
    void (*set)(void* made, const py::handle& value);
};

template <class Struct, auto member>
void set(void* made, const py::handle& value) {
    assign(static_cast<Struct*>(made)->*member, value);
}

// A field by its own name.
#define FIELD(Struct, name) {#name, &set<Struct, &Struct::name>}

inline void set_fields(void* made, const std::vector<Field>& fields, const py::kwargs& given) {
    for (const auto& [key, value] : given) {
        const auto name = py::cast<std::string_view>(key);
        const auto found = std::find_if(fields.begin(), fields.end(),
                                        [name](const Field& field) { return name == field.name; });
        if (found == fields.end()) throw py::type_error("no field " + std::string(name));
        found->set(made, value);
    }
}

// The class of a struct with these fields, by their keywords; what is not given is 0.
template <class Struct>
void struct_class(py::module_& m, const char* name, std::vector<Field> fields) {
    py::class_<Struct>(m, name).def(py::init([fields = std::move(fields)](const py::kwargs& given) {
        Struct made{};
        set_fields(&made, fields, given);
        return made;
    }));
}

}  // namespace zerofp4::bindings
