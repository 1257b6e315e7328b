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

// Added to the number that a rank sends once it has given up, as is 1 + the rank that it has given up on,
// from bit kMissingBit on. Numbers of barriers wrap round, and those of two ranks differ by less than 2^23.
constexpr int32_t kGaveUp = 1 << 30;
constexpr int kMissingBit = 24;
static_assert(kMaxPeers < 1 << (30 - kMissingBit));

// What the threads of a barrier have found.
struct Meeting {
    volatile int absent;   // so many ranks have not come yet
    volatile int missing;  // 1 + a rank that did not come in time, to this rank or to one that has come; or 0
};

// Watches one rank until all have come or one is missing.
__device__ __forceinline__ void wait_for(const uint32_t* flag, int other, uint32_t number, int64_t timeout_ns,
                                         Meeting& meeting) {
    const int64_t begin = nanoseconds();
    bool has_come = false;
    while (meeting.absent > 0 && meeting.missing == 0) {
        const int32_t ahead = static_cast<int32_t>(load_acquire(flag) - number);
        if (ahead >= kGaveUp / 2) {
            meeting.missing = (ahead - kGaveUp + (1 << (kMissingBit - 1))) >> kMissingBit;
        } else if (!has_come && ahead >= 0) {
            has_come = true;
            atomicSub(const_cast<int*>(&meeting.absent), 1);
        } else if (!has_come && nanoseconds() - begin > timeout_ns) {
            meeting.missing = other + 1;
        } else {
            __nanosleep(100);
        }
    }
}

// One block, a thread for every rank. What this rank has queued before is done and seen by all behind it.
__global__ void __launch_bounds__(kThreads) barrier_kernel(const __grid_constant__ BarrierArgs args) {
    wait_for_previous_kernel_and_hold_next();
    __shared__ uint32_t number;
    __shared__ int known;
    __shared__ Meeting meeting;
    const int other = static_cast<int>(threadIdx.x);
    if (threadIdx.x == 0) {
        number = *args.passed + 1;
        // Once for all threads: the barrier of another stream may write it.
        const bool gave_up = *args.failed != 0.0f;
        known = !gave_up ? 0 : *args.status != 0 ? *args.status : args.rank + 1;
        meeting.missing = known;
        meeting.absent = args.count - 1;
    }
    __syncthreads();
    const bool has_peer = other < args.count && other != args.rank;
    if (has_peer && known == 0) {
        __threadfence_system();
        store_release(args.flags[other] + args.rank, number);
        wait_for(args.flags[args.rank] + other, other, number, args.timeout_ns, meeting);
    }
    __syncthreads();
    const int missing = meeting.missing;
    if (has_peer && missing != 0)  // so that nobody waits for this rank until its own time has passed
        store_release(args.flags[other] + args.rank, number + kGaveUp + (missing << kMissingBit));
    if (threadIdx.x != 0) return;
    *args.passed = number;
    if (missing != 0 && known == 0) {
        *args.status = missing;
        __threadfence_system();
        *args.failed = 1.0f;
    }
}

}  // namespace

void barrier(const BarrierArgs& args, cudaStream_t stream) {
    static_assert(kMaxPeers <= kThreads);
    launch("barrier", barrier_kernel, int64_t{1}, stream, args);
}

}  // namespace zerofp4::cuda
