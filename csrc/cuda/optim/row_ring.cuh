#pragma once
// Pairs of rows of a strip on their way through shared memory. A warp has a ring of stages of its own: while
// it updates a pair, those that follow are copied to the other stages. With split masters and gradients in
// bfloat16 a stage is, in bytes:
//
//      0       512     1024                2048    2560                3584   3648
//      | exp_avg | exp_avg_sq | high parts    | low bytes | gradients       | scales |
//      row 0, row 1           row 0, row 1                                  4 + 4 groups
//
// In memory and for the L2 cache an access of a warp is to 32 vectors of 16 bytes side by side: two rows of
// an array of bytes, one row of bfloat16, half of a row of floats. A lane, though, works on 16 columns: on
// one vector of bytes, on two neighbouring ones of bfloat16, on four of floats. If lanes read those from
// memory themselves, each access would touch every sector of the L2 for a half or a quarter of it.

#include "cuda/device/units.cuh"
#include "cuda/optim/compact_lane.cuh"

namespace zerofp4::cuda {

// The same for all lanes, said aloud: the compiler keeps it once for the warp, and not in registers of every
// lane.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(kAllLanes, x, 0); }
__device__ __forceinline__ int32_t uniform(int32_t x) { return __shfl_sync(kAllLanes, x, 0); }
__device__ __forceinline__ bool uniform(bool x) { return __any_sync(kAllLanes, x); }
__device__ __forceinline__ float uniform(float x) { return __shfl_sync(kAllLanes, x, 0); }
template <typename T>
__device__ __forceinline__ T* uniform(T* p) {
    const auto bits = reinterpret_cast<uint64_t>(p);
    const uint32_t low = uniform(static_cast<uint32_t>(bits));
    const uint32_t high = uniform(static_cast<uint32_t>(bits >> 32));
    return in_global(reinterpret_cast<T*>(static_cast<uint64_t>(high) << 32 | low));
}

// Of a strip whose rows are read as vectors: with fewer than kMostPitch columns, offsets in a pair fit 32
// bits.
struct StripShape {
    int32_t pitch;    // of a row
    int32_t groups;   // of a row
    int32_t columns;  // of the strip
};
constexpr int32_t kMostPitch = 1 << 28;

// A pair of rows of an array of T. Its vectors are numbered row by row; access i of a warp is to vectors
// 32 * i + lane, and lane l works on those from kVectors * l on.
template <typename T>
class StagedPair {
  public:
    static constexpr int kVectors = static_cast<int>(sizeof(T));
    using Words = uint32_t[4 * kVectors];

    // `first`: the pair's first element in memory. Columns past the last one become zeros.
    __device__ __forceinline__ void request(const T* first, const StripShape& shape) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
            copy_async<16>(&vectors[slot_of_access(i)], address(first, i, shape), exists(i, shape));
    }
    __device__ __forceinline__ void take(Words& words) const {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const uint4 vector = vectors[slot_of_lane(i)];
            words[4 * i] = vector.x, words[4 * i + 1] = vector.y;
            words[4 * i + 2] = vector.z, words[4 * i + 3] = vector.w;
        }
    }
    // Stores what the lanes have: through here, unless a lane has but one vector.
    __device__ __forceinline__ void store(T* first, const StripShape& shape, const Words& words) {
        const auto vector_of = [&](int i) {
            return make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        };
        if constexpr (kVectors > 1) {
#pragma unroll
            for (int i = 0; i < kVectors; ++i) vectors[slot_of_lane(i)] = vector_of(i);
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const uint4 vector = kVectors > 1 ? vectors[slot_of_access(i)] : vector_of(i);
            if (exists(i, shape)) *reinterpret_cast<uint4*>(address(first, i, shape)) = vector;
        }
    }

  private:
    static constexpr int kRowVectors = kRowLanes * kVectors;

    static __device__ __forceinline__ int column_of(int i) {
        return (i * kLanes + lane_index()) % kRowVectors * kVector<T>;
    }
    static __device__ __forceinline__ bool exists(int i, const StripShape& shape) {
        return column_of(i) < shape.columns;
    }
    template <typename Element>
    static __device__ __forceinline__ Element* address(Element* first, int i, const StripShape& shape) {
        const auto row = static_cast<uint32_t>((i * kLanes + lane_index()) / kRowVectors);
        const uint32_t offset =
            row * static_cast<uint32_t>(shape.pitch) + static_cast<uint32_t>(column_of(i));
        return in_global(first) + offset;
    }
    // Where a vector is kept, so that neither those of an access nor those of eight lanes share a bank.
    static __device__ __forceinline__ int slot_of(int vector) {
        return vector ^ (vector >> 3 & (kVectors - 1));
    }
    static __device__ __forceinline__ int slot_of_access(int i) { return slot_of(i * kLanes + lane_index()); }
    static __device__ __forceinline__ int slot_of_lane(int i) { return slot_of(lane_index() * kVectors + i); }

    uint4 vectors[kVectors * kLanes];
};

// The scales of a pair of rows.
class StagedScales {
  public:
    __device__ __forceinline__ void request(const StateScales* first, const StripShape& shape) {
        const int lane = lane_index(), group = lane % kRowGroups;
        if (lane < kRowsAtOnce * kRowGroups)
            copy_async<sizeof(StateScales)>(&scales[lane], first + (lane / kRowGroups * shape.groups + group),
                                            group * kStateGroup < shape.columns);
    }
    // Zeros for a lane past the last column, also where others of its group have elements.
    __device__ __forceinline__ StateScales take(const StripShape& shape) const {
        const bool exists = lane_index() % kRowLanes * kColumns < shape.columns;
        return exists ? scales[lane_index() / kGroupLanes] : StateScales{};
    }
    // The first lane of each group stores what it has.
    static __device__ __forceinline__ void store(StateScales* first, const StripShape& shape,
                                                 const StateScales& mine) {
        const int lane = lane_index(), group = lane % kRowLanes / kGroupLanes;
        if (lane % kGroupLanes == 0 && group * kStateGroup < shape.columns)
            in_global(first)[lane / kRowLanes * shape.groups + group] = mine;
    }

  private:
    StateScales scales[kRowsAtOnce * kRowGroups];
};

// In place of a pair that is not staged.
struct NothingStaged {};

}  // namespace zerofp4::cuda
