// Compact scales to the padded layouts and back. A block takes 128 rows by 128 columns. A thread has 16 bytes
// in each of four rows that lie 32 apart, which are also 16 bytes of each of four swizzle atoms: exchanging
// words within the thread leads from one to the other.

#include "common/args/scale_layout.h"
#include "cuda/device/lists.cuh"
#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kChunk = 16;  // columns of a thread
constexpr int kChunkAtoms = kChunk / kAtomColumns;
constexpr int kChunkRows = 4;
constexpr int kRowStep = kAtomRows / kChunkRows;
static_assert(kThreads * kChunk * kChunkRows == kLayoutRows * kLayoutColumns);

using ChunkScales = uint32_t[kChunkRows][kChunkAtoms];  // 4 bytes of every row and atom

// What a thread works on.
struct Chunk {
    int64_t row;      // the first one; the others follow kRowStep apart
    int64_t col;      // the first one
    int existing;     // columns, at most kChunk
    int padded;       // the same with padding
    int64_t columns;  // of the compact scales
    int64_t pitch;    // of the expanded scales

    __device__ __forceinline__ int64_t row_of(int q) const { return row + kRowStep * q; }
    __device__ __forceinline__ int64_t compact(int q, int shift) const {
        return (row_of(q) >> shift) * columns + col;
    }
    __device__ __forceinline__ int64_t expanded(int q) const { return row_of(q) * pitch + col; }
    // Of the first atom; the others follow.
    __device__ __forceinline__ int64_t swizzled() const { return swizzled_offset(row, col, columns); }
};

// kAcross neighbouring lanes have neighbouring chunks of a row, the others those of the rows below: the more
// across, the longer the runs of bytes on the compact side, and the shorter on the swizzled one.
template <int kAcross>
__device__ __forceinline__ Chunk chunk_of(const ScaleLayoutDescriptor& item) {
    constexpr int kWarpsAcross = kLayoutColumns / kChunk / kAcross;
    const uint32_t columns = static_cast<uint32_t>(item.columns);
    const uint32_t tile = blockIdx.x - static_cast<uint32_t>(item.unit_begin);
    const uint32_t tiles = (columns + kLayoutColumns - 1) / kLayoutColumns;
    const uint32_t down = tile / tiles;
    const int lane = lane_index(), warp = warp_index();
    Chunk at;
    at.row = down * kLayoutRows + warp / kWarpsAcross * (kLanes / kAcross) + lane / kAcross;
    at.col =
        (tile - down * tiles) * kLayoutColumns + (warp % kWarpsAcross * kAcross + lane % kAcross) * kChunk;
    at.columns = columns;
    at.pitch = round_up(at.columns, kAtomColumns);
    at.existing = clamp_count(at.columns - at.col, kChunk);
    at.padded = clamp_count(at.pitch - at.col, kChunk);
    return at;
}

// The first `count` of 16 bytes. kWhole: all or none, at a multiple of 16.
template <bool kWhole>
__device__ __forceinline__ void load_row(const uint8_t* p, int count, uint32_t (&words)[kChunkAtoms]) {
    if constexpr (kWhole) {
        words[0] = words[1] = words[2] = words[3] = 0;
        if (count > 0) load_words<true>(p, words);
    } else {
        load16(p, count, words);
    }
}

template <bool kWhole>
__device__ __forceinline__ void store_row(uint8_t* p, const uint32_t (&words)[kChunkAtoms], int count) {
    if constexpr (kWhole) {
        if (count > 0) *reinterpret_cast<uint4*>(p) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
        store16(p, words, count);
    }
}

template <bool kWhole>
__device__ __forceinline__ void pad_chunk(const ScaleLayoutDescriptor& item, const Chunk& at) {
    const uint8_t* input = in_global(item.input);
    uint8_t* output = in_global(item.output);
    ChunkScales scales;
#pragma unroll
    for (int q = 0; q < kChunkRows; ++q) {
        const int count = at.row_of(q) < item.rows ? at.existing : 0;
        load_row<kWhole>(input + at.compact(q, item.shift), count, scales[q]);
    }
    if (item.layout == kExpanded) {
#pragma unroll
        for (int q = 0; q < kChunkRows; ++q) {
            store_row<kWhole>(output + at.expanded(q), scales[q], at.padded);
        }
    } else {
        uint8_t* atoms = output + at.swizzled();
#pragma unroll
        for (int a = 0; a < kChunkAtoms; ++a) {
            const uint32_t words[kChunkRows] = {scales[0][a], scales[1][a], scales[2][a], scales[3][a]};
            store_row<kWhole>(atoms + kAtomBytes * a, words, kAtomColumns * a < at.padded ? 16 : 0);
        }
    }
}

// Of the rows that share a compact row the first writes it.
template <bool kWhole>
__device__ __forceinline__ void unpad_chunk(const ScaleLayoutDescriptor& item, const Chunk& at) {
    const uint8_t* input = in_global(item.input);
    uint8_t* output = in_global(item.output);
    ChunkScales scales;
    if (item.layout == kExpanded) {
#pragma unroll
        for (int q = 0; q < kChunkRows; ++q) {
            load_row<kWhole>(input + at.expanded(q), at.padded, scales[q]);
        }
    } else {
        const uint8_t* atoms = input + at.swizzled();
#pragma unroll
        for (int a = 0; a < kChunkAtoms; ++a) {
            uint32_t words[kChunkRows];
            load_row<kWhole>(atoms + kAtomBytes * a, kAtomColumns * a < at.padded ? 16 : 0, words);
#pragma unroll
            for (int q = 0; q < kChunkRows; ++q) scales[q][a] = words[q];
        }
    }
#pragma unroll
    for (int q = 0; q < kChunkRows; ++q) {
        const bool writes = at.row_of(q) < item.rows && (at.row_of(q) & ((1 << item.shift) - 1)) == 0;
        store_row<kWhole>(output + at.compact(q, item.shift), scales[q], writes ? at.existing : 0);
    }
}

// What is written comes in runs of 128 bytes.
constexpr int kPadAcross = 4;
constexpr int kUnpadAcross = 8;

template <bool kPad>
__device__ __forceinline__ void change_layout(const ScaleLayoutDescriptor& item) {
    const Chunk at = chunk_of<kPad ? kPadAcross : kUnpadAcross>(item);
    if (at.existing == 0) return;
    if constexpr (kPad) {
        item.aligned ? pad_chunk<true>(item, at) : pad_chunk<false>(item, at);
    } else {
        item.aligned ? unpad_chunk<true>(item, at) : unpad_chunk<false>(item, at);
    }
}

template <bool kPad>
__global__ void __launch_bounds__(kThreads)
    layout_kernel(const __grid_constant__ ScaleLayoutDescriptor item) {
    wait_for_previous_kernel();
    change_layout<kPad>(item);
}

template <bool kPad>
__global__ void __launch_bounds__(kThreads)
    layout_list_kernel(const __grid_constant__ ItemTable<ScaleLayoutDescriptor> table,
                       const __grid_constant__ ItemArguments<ScaleLayoutDescriptor> arguments) {
    wait_for_previous_kernel();
    change_layout<kPad>(item_of_block(table, arguments));
}

}  // namespace

void pad_scale(const ScaleLayoutTable& table, const ScaleLayoutDescriptor* host, cudaStream_t stream) {
    launch_list("pad_scale", layout_kernel<true>, layout_list_kernel<true>, table, host, stream);
}

void unpad_scale(const ScaleLayoutTable& table, const ScaleLayoutDescriptor* host, cudaStream_t stream) {
    launch_list("unpad_scale", layout_kernel<false>, layout_list_kernel<false>, table, host, stream);
}

}  // namespace zerofp4::cuda
