// A barrier of the ranks of one host, on flags that they share: no host waits, and no rank for ever.

#include "common/args/peers.h"
#include "cuda/device/launch.cuh"

namespace zerofp4::cuda {
namespace {

__device__ __forceinline__ void store_release(uint32_t* p, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

__device__ __forceinline__ int64_t nanoseconds() {
    int64_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
    return time;
}

// Whether the other rank came in time. Numbers of barriers wrap round.
__device__ __forceinline__ bool wait_for(const uint32_t* flag, uint32_t number, int64_t timeout_ns) {
    const int64_t begin = nanoseconds();
    while (static_cast<int32_t>(load_acquire(flag) - number) < 0) {
        if (nanoseconds() - begin > timeout_ns) return false;
        __nanosleep(100);
    }
    return true;
}

// One block, a thread for every rank. What this rank has queued before is done and seen by all behind it.
__global__ void __launch_bounds__(kThreads) barrier_kernel(const __grid_constant__ BarrierArgs args) {
    wait_for_previous_kernel_and_hold_next();
    __shared__ int missing;
    const int other = static_cast<int>(threadIdx.x);
    const uint32_t number = *args.passed + 1;
    const bool gave_up = *args.failed != 0.0f;
    if (threadIdx.x == 0) missing = 0;
    __syncthreads();  // everybody has read the number
    if (other < args.count && other != args.rank && !gave_up) {
        __threadfence_system();
        store_release(args.flags[other] + args.rank, number);
        if (!wait_for(args.flags[args.rank] + other, number, args.timeout_ns)) atomicMax(&missing, other + 1);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    *args.passed = number;
    if (missing != 0) {
        *args.failed = 1.0f;
        *args.status = missing;
        __threadfence_system();
    }
}

}  // namespace

void barrier(const BarrierArgs& args, cudaStream_t stream) {
    static_assert(kMaxPeers <= kThreads);
    launch("barrier", barrier_kernel, int64_t{1}, stream, args);
}

}  // namespace zerofp4::cuda
