#pragma once
// Thread blocks that share out a list of tensors: each has kElements of one, the last of a tensor fewer.

#include "common/args/tensor_list.h"
#include "cuda/device/launch.cuh"

namespace zerofp4::cuda {

// What a block has of a tensor.
template <typename T>
struct ListPiece {
    int tensor;
    const T* first;
    int64_t numel;
};

template <typename T, int64_t kElements>
__device__ __forceinline__ ListPiece<T> piece_of_block(const TensorList& list, int block) {
    int low = 0, high = list.count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (list.block_begin[middle] <= block ? low : high) = middle;
    }
    const int64_t begin = (block - list.block_begin[low]) * kElements;
    const T* tensor = static_cast<const T*>(list.tensors[low]);
    return {low, tensor + begin, min(kElements, list.numels[low] - begin)};
}

// Gives every tensor its blocks and returns their number; raises where they are too many.
template <int64_t kElements>
int64_t share_out(TensorList& list, const char* name) {
    int64_t blocks = 0;
    for (int t = 0; t < list.count; ++t) {
        list.block_begin[t] = static_cast<int32_t>(blocks);
        blocks += ceil_div(list.numels[t], kElements);
        grid_size(name, blocks);
    }
    return blocks;
}

}  // namespace zerofp4::cuda
