// decide: whether a step writes, from a vote of the ranks. One block: there are a few words, and a flag for
// each parameter.

#include "common/args/decide.h"
#include "cuda/device/launch.cuh"

namespace zerofp4::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) decide_kernel(const __grid_constant__ DecideArgs args) {
    wait_for_previous_kernel();
    __shared__ bool skip;
    const int thread = static_cast<int>(threadIdx.x);
    bool differ = false;
    for (int i = thread; args.vote != nullptr && i < args.equal; i += kThreads)
        differ = differ || differs(args, i);
    differ = __syncthreads_or(differ);
    if (thread == 0) skip = decide_words(args, differ);
    __syncthreads();
    for (int i = thread; i < args.count; i += kThreads) args.present[i] = present_flag(args, skip, i);
}

}  // namespace

void decide(const DecideArgs& args, cudaStream_t stream) {
    launch("decide", decide_kernel, int64_t{1}, stream, args);
}

}  // namespace zerofp4::cuda
