#pragma once
// Lists of tensors in one launch: a thread block works on one item. The items of a short list travel in the
// kernel's arguments.

#include "common/args/list.h"
#include "cuda/device/units.cuh"

namespace zerofp4::cuda {

template <typename Item>
struct ItemArguments {
    Item items[kArgumentItems];
};

template <typename Item>
__device__ __forceinline__ Item item_of_block(const ItemTable<Item>& table,
                                              const ItemArguments<Item>& arguments) {
    const Item* items = table.items == nullptr ? arguments.items : table.items;
    return items[find_item<&Item::unit_begin>(items, 0, table.count, blockIdx.x)];
}

// `host` are the items in host memory.
template <typename Item>
ItemArguments<Item> argument_items(const ItemTable<Item>& table, const Item* host) {
    ItemArguments<Item> arguments{};
    if (table.items == nullptr) std::copy(host, host + table.count, arguments.items);
    return arguments;
}

// Launches `single` for a list of one, `many` for a longer one.
template <typename Item>
void launch_list(const char* operation, void (*single)(Item),
                 void (*many)(ItemTable<Item>, ItemArguments<Item>), const ItemTable<Item>& table,
                 const Item* host, cudaStream_t stream) {
    if (table.count == 1) return launch(operation, single, table.units, stream, host[0]);
    launch(operation, many, table.units, stream, table, argument_items(table, host));
}

}  // namespace zerofp4::cuda
