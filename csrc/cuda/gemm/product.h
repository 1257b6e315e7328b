#pragma once
// A product for which cuBLASLt has chosen an algorithm.

#include <memory>

#include "common/args/product.h"

typedef struct CUstream_st* cudaStream_t;

namespace zerofp4::cuda {

class Product {
  public:
    virtual ~Product() = default;

    // Bytes that run needs at addresses.workspace, aligned to 256.
    virtual int64_t workspace() const = 0;

    // Queues it, on the device that was current when it was found. Addresses have the alignments of the
    // problem. Any thread may call it.
    virtual void run(const ProductAddresses& addresses, cudaStream_t stream) = 0;
};

}  // namespace zerofp4::cuda
