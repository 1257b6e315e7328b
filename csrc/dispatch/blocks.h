#pragma once
// What a CUDA plan keeps in device memory: descriptors, and the item in which every thread block begins.

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "common/bits.h"

namespace zerofp4 {

// Callers compare them, to know whether they must be copied again: no byte of T may be padding, which nobody
// sets.
template <class T>
std::string bytes_of(const std::vector<T>& values) {
    static_assert(std::has_unique_object_representations_v<T>);
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// For every block of `per_block` consecutive units, the item that the block's first unit belongs to.
// `first_unit` is the member of an item that says where its units begin; items without units have none of
// their own.
template <class Item, class Base>
std::vector<int32_t> first_items(const std::vector<Item>& items, int64_t Base::* first_unit, int64_t units,
                                 int64_t per_block) {
    std::vector<int32_t> firsts;
    firsts.reserve(static_cast<size_t>(ceil_div(units, per_block)));
    size_t item = 0;
    for (int64_t unit = 0; unit < units; unit += per_block) {
        while (item + 1 < items.size() && items[item + 1].*first_unit <= unit) ++item;
        firsts.push_back(static_cast<int32_t>(item));
    }
    return firsts;
}

}  // namespace zerofp4
