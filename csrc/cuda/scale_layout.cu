// Compact scales to the padded layouts and back. A warp takes four swizzle atoms, 128 rows of 16 scale
// columns: a lane has 16 bytes in each of the rows lane, lane + 32, lane + 64 and lane + 96, which are also
// 16 bytes of each atom.

#include "cuda/units.cuh"
#include "cuda/vector.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kLayoutBlocksPerSm = 4;
constexpr int kUnitColumns = 16;
constexpr int kUnitAtoms = kUnitColumns / kAtomColumns;
constexpr int kUnitLaneRows = kAtomRows / kLanes;

using LaneScales = uint32_t[kUnitLaneRows][kUnitAtoms];  // 4 bytes of every row and atom

// What a lane works on, and the geometry of both sides.
struct LayoutUnit {
    int64_t row;      // the lane's first row; the others follow 32 apart
    int64_t col;      // first scale column of the unit
    int64_t columns;  // of the compact scales
    int64_t pitch;    // of the expanded scales
    int existing;     // columns of the unit that exist
    int padded;       // the same with padding, a multiple of 4

    __device__ __forceinline__ int64_t row_of(int q) const { return row + kLanes * q; }
    __device__ __forceinline__ int64_t expanded(int q) const { return row_of(q) * pitch + col; }
    __device__ __forceinline__ int64_t swizzled(int atom) const {
        return swizzled_offset(row, col + kAtomColumns * atom, columns);
    }
    __device__ __forceinline__ int64_t compact(int q, int64_t block_rows) const {
        return (block_rows == kBlock ? row_of(q) / kBlock : row_of(q)) * columns + col;
    }
};

__device__ __forceinline__ LayoutUnit layout_unit(const ScaleLayoutArgs& args, int64_t unit) {
    LayoutUnit at;
    at.columns = ceil_div(args.cols, kBlock);
    at.pitch = round_up(at.columns, kAtomColumns);
    const int64_t across = ceil_div(at.columns, kUnitColumns);
    const int64_t down = unit / across;
    at.row = down * kAtomRows + lane_index();
    at.col = (unit - down * across) * kUnitColumns;
    at.existing = clamp_count(at.columns - at.col, kUnitColumns);
    at.padded = clamp_count(at.pitch - at.col, kUnitColumns);
    return at;
}

template <ScaleLayout kLayout>
__device__ __forceinline__ void load_padded(const uint8_t* input, const LayoutUnit& at, LaneScales& scales) {
    if constexpr (kLayout == kExpanded) {
#pragma unroll
        for (int q = 0; q < kUnitLaneRows; ++q) load16(input + at.expanded(q), at.padded, scales[q]);
    } else {
#pragma unroll
        for (int atom = 0; atom < kUnitAtoms; ++atom) {
            uint32_t words[kUnitLaneRows];
            load16(input + at.swizzled(atom), kAtomColumns * atom < at.padded ? 16 : 0, words);
#pragma unroll
            for (int q = 0; q < kUnitLaneRows; ++q) scales[q][atom] = words[q];
        }
    }
}

template <ScaleLayout kLayout>
__device__ __forceinline__ void store_padded(uint8_t* output, const LayoutUnit& at,
                                             const LaneScales& scales) {
    if constexpr (kLayout == kExpanded) {
#pragma unroll
        for (int q = 0; q < kUnitLaneRows; ++q) store16(output + at.expanded(q), scales[q], at.padded);
    } else {
#pragma unroll
        for (int atom = 0; atom < kUnitAtoms; ++atom) {
            const uint32_t words[kUnitLaneRows] = {scales[0][atom], scales[1][atom], scales[2][atom],
                                                   scales[3][atom]};
            store16(output + at.swizzled(atom), words, kAtomColumns * atom < at.padded ? 16 : 0);
        }
    }
}

template <ScaleLayout kLayout>
__global__ void __launch_bounds__(kThreads, kLayoutBlocksPerSm)
    pad_scale_kernel(const __grid_constant__ ScaleLayoutArgs args, int64_t units) {
    wait_for_previous_kernel();
    for (int64_t unit = grid_warp(); unit < units; unit += grid_warps()) {
        const LayoutUnit at = layout_unit(args, unit);
        LaneScales scales;
#pragma unroll
        for (int q = 0; q < kUnitLaneRows; ++q) {
            const int count = at.row_of(q) < args.rows ? at.existing : 0;
            load16(args.input + at.compact(q, args.block_rows), count, scales[q]);
        }
        store_padded<kLayout>(args.output, at, scales);
    }
}

// Of the rows that share a compact row the first writes it.
template <ScaleLayout kLayout>
__global__ void __launch_bounds__(kThreads, kLayoutBlocksPerSm)
    unpad_scale_kernel(const __grid_constant__ ScaleLayoutArgs args, int64_t units) {
    wait_for_previous_kernel();
    for (int64_t unit = grid_warp(); unit < units; unit += grid_warps()) {
        const LayoutUnit at = layout_unit(args, unit);
        LaneScales scales;
        load_padded<kLayout>(args.input, at, scales);
#pragma unroll
        for (int q = 0; q < kUnitLaneRows; ++q) {
            const bool writes = at.row_of(q) < args.rows && at.row_of(q) % args.block_rows == 0;
            store16(args.output + at.compact(q, args.block_rows), scales[q], writes ? at.existing : 0);
        }
    }
}

using LayoutKernel = void (*)(ScaleLayoutArgs, int64_t);

void launch_layout(const char* operation, LayoutKernel kernel, const ScaleLayoutArgs& args,
                   cudaStream_t stream) {
    const int64_t units =
        ceil_div(args.rows, kAtomRows) * ceil_div(ceil_div(args.cols, kBlock), kUnitColumns);
    launch(operation, kernel, resident_blocks(operation, ceil_div(units, kWarps), kLayoutBlocksPerSm), stream,
           args, units);
}

}  // namespace

void pad_scale(const ScaleLayoutArgs& args, cudaStream_t stream) {
    const bool expanded = args.layout == kExpanded;
    launch_layout("pad_scale", expanded ? pad_scale_kernel<kExpanded> : pad_scale_kernel<kSwizzled>, args,
                  stream);
}

void unpad_scale(const ScaleLayoutArgs& args, cudaStream_t stream) {
    const bool expanded = args.layout == kExpanded;
    launch_layout("unpad_scale", expanded ? unpad_scale_kernel<kExpanded> : unpad_scale_kernel<kSwizzled>,
                  args, stream);
}

}  // namespace zerofp4::cuda
