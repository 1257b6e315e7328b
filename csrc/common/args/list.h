#pragma once
// Operations that work on a list of tensors in one launch, without a plan: dequantize, scale layouts. A list
// of one is how they work on a single tensor.

#include "common/dtype.h"

namespace zerofp4 {

// Items with their units in a row: an item has the units from its own unit_begin up to the next item's, the
// last one those up to `units`. A unit is a piece of work on the CPU and a thread block on CUDA.
template <class Item>
struct ItemTable {
    const Item* items;  // where the operation runs; null on CUDA when they travel in the kernel's arguments
    int64_t count;
    int64_t units;
};

// So many items travel in the arguments of a kernel, which have room for 4 KB.
constexpr int kArgumentItems = 32;

}  // namespace zerofp4
