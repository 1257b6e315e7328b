#pragma once
// Memory of the ranks of one host, all of which can read and write it, and a barrier of these ranks.

#include <cstdint>

namespace zerofp4 {

constexpr int kMaxPeers = 16;

// By rank, where each has its copy of the same thing; null where ranks do not share memory.
struct PeerRows {
    const void* of[kMaxPeers];
};

// A rank says that it has come by writing the number of the barrier into its word of every other rank's
// flags, and that it has given up by writing there a number that is far ahead.
struct BarrierArgs {
    uint32_t* flags[kMaxPeers];  // by rank: its [count] flags
    uint32_t* passed;            // uint32[1] of this rank: how many barriers it has passed
    float* failed;               // float[1] of this rank: not 0 once a rank did not come; then none waits
    int32_t* status;             // int32[1] that the host can read: 1 + the rank that did not come, or 0
    int32_t rank;
    int32_t count;
    int64_t timeout_ns;
};

}  // namespace zerofp4
