// AdamW on a list of tensors in one pass over their memory, and the amaxes of the masters as they are
// then. A thread block takes a strip of 16 rows by 128 columns, each of its warps two rows: memory that is
// both read and written is fastest where what all blocks have on their way lies close together, in short work
// that is done once. For the same reason nothing is marked as used for the last time.
//
// Unlike in partial_amax, what lies at another alignment than a vector's is never accessed as shifted
// vectors: four arrays would each be shifted by another number of elements, and three of them stored. There a
// lane's elements are not neighbours: each access of a warp is to 32 elements side by side.

#include <algorithm>

#include "common/adamw.h"
#include "cuda/device/raise.cuh"
#include "cuda/device/tuning.cuh"
#include "cuda/optim/gradient.cuh"
#include "cuda/strip/tile_amax.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kWarpRows = kBlock / kWarps;
constexpr int kStripTiles = kLanes / kTileLanes;

// How many columns a lane's elements of a row are apart: neighbours, read as one vector, or one of each 32.
constexpr int kNeighbours = 1, kSpread = kLanes;
static_assert(kSpread * kLaneColumns == kStripColumns);
static_assert(kBlock % kWarps == 0);

constexpr int kGradientsPerLaunch = 480;  // kernel arguments may take 4 KB

struct BeginArgs {
    AdamWOptions options;
    const AdamWDescriptor* tensors;
    AdamWStep* steps;
    int32_t count;
    uintptr_t gradients[kGradientsPerLaunch];
};
static_assert(sizeof(BeginArgs) <= 4096);

__global__ void __launch_bounds__(kThreads) adamw_begin_kernel(const __grid_constant__ BeginArgs args) {
    wait_for_previous_kernel();
    const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
    if (i >= args.count) return;
    const void* gradient = reinterpret_cast<const void*>(args.gradients[i]);
    args.steps[i] = adamw_scalars(args.options, args.tensors[i], gradient);
}

// The arrays of a tensor at this lane's first element of a row, which a masked lane may not own. They advance
// row by row: an offset beside them would take registers that are not there, and spilled ones cost 2%.
template <typename Gradient>
struct LaneArrays {
    float* master;
    float* exp_avg;
    float* exp_avg_sq;
    Gradient gradient;

    __device__ __forceinline__ void advance(int64_t pitch) {
        master += pitch, exp_avg += pitch, exp_avg_sq += pitch;
        gradient.advance(pitch);
    }
};

template <typename Gradient>
__device__ __forceinline__ LaneArrays<Gradient> arrays_of(const AdamWTable& table,
                                                          const AdamWDescriptor& tensor,
                                                          const AdamWStep& step, int64_t row, int64_t col) {
    const int64_t index = row * tensor.cols + col - tensor.start;
    return {in_global(tensor.master) + index, in_global(tensor.exp_avg) + index,
            in_global(tensor.exp_avg_sq) + index, Gradient(table, tensor, step, index)};
}

// Whether a lane's four elements of every row can be read as one vector from each array.
template <typename Gradient>
__device__ __forceinline__ bool has_vectors(const AdamWDescriptor& tensor,
                                            const LaneArrays<Gradient>& arrays) {
    return tensor.cols % kLaneColumns == 0 && is_aligned(arrays.master, 16) &&
           is_aligned(arrays.exp_avg, 16) && is_aligned(arrays.exp_avg_sq, 16) &&
           arrays.gradient.has_vectors();
}

// A lane's elements of one row.
struct Values {
    float master[kLaneColumns];
    float exp_avg[kLaneColumns];
    float exp_avg_sq[kLaneColumns];
    float gradient[kLaneColumns];
};

__device__ __forceinline__ void load_vector(const float* p, float (&values)[kLaneColumns]) {
    const float4 x = *reinterpret_cast<const float4*>(p);
    values[0] = x.x, values[1] = x.y, values[2] = x.z, values[3] = x.w;
}

template <typename Gradient>
__device__ __forceinline__ void load_vectors(const LaneArrays<Gradient>& arrays,
                                             typename Gradient::Words& words, Values& values) {
    arrays.gradient.load(0, words);
    load_vector(arrays.exp_avg_sq, values.exp_avg_sq);
    load_vector(arrays.exp_avg, values.exp_avg);
    load_vector(arrays.master, values.master);
}

template <int kApart, typename Gradient>
__device__ __forceinline__ void load_masked(const LaneArrays<Gradient>& arrays, const LaneRange& owned,
                                            Values& values) {
#pragma unroll
    for (int k = 0; k < kLaneColumns; ++k) {
        const bool has = owned.has(k);
        const int at = k * kApart;
        values.gradient[k] = has ? arrays.gradient.at(at) : 0.0f;
        values.exp_avg_sq[k] = has ? arrays.exp_avg_sq[at] : 0.0f;
        values.exp_avg[k] = has ? arrays.exp_avg[at] : 0.0f;
        values.master[k] = has ? arrays.master[at] : 0.0f;
    }
}

__device__ __forceinline__ float4 vector_of(const float (&values)[kLaneColumns]) {
    return make_float4(values[0], values[1], values[2], values[3]);
}

// (A plain store of a vector made of floats is split into stores of its floats.)
template <typename Gradient>
__device__ __forceinline__ void store_vectors(const LaneArrays<Gradient>& arrays, const Values& values) {
    __stwb(reinterpret_cast<float4*>(arrays.exp_avg_sq), vector_of(values.exp_avg_sq));
    __stwb(reinterpret_cast<float4*>(arrays.exp_avg), vector_of(values.exp_avg));
    __stwb(reinterpret_cast<float4*>(arrays.master), vector_of(values.master));
}

template <int kApart, typename Gradient>
__device__ __forceinline__ void store_masked(const LaneArrays<Gradient>& arrays, const LaneRange& owned,
                                             const Values& values) {
#pragma unroll
    for (int k = 0; k < kLaneColumns; ++k) {
        if (!owned.has(k)) continue;
        const int at = k * kApart;
        arrays.exp_avg_sq[at] = values.exp_avg_sq[k];
        arrays.exp_avg[at] = values.exp_avg[k];
        arrays.master[at] = values.master[k];
    }
}

__device__ __forceinline__ void update_values(const AdamWStep& step, Values& values) {
#pragma unroll
    for (int k = 0; k < kLaneColumns; ++k)
        adamw_element(step, values.gradient[k], values.master[k], values.exp_avg[k], values.exp_avg_sq[k]);
}

// The largest magnitude bits of a lane's owned elements, of each tile: neighbours are in one.
template <int kApart>
struct LaneBits {
    static constexpr int kTiles = kApart == kNeighbours ? 1 : kLaneColumns;
    uint32_t of[kTiles] = {};

    __device__ __forceinline__ void raise(const float (&values)[kLaneColumns], const LaneRange& owned) {
#pragma unroll
        for (int k = 0; k < kLaneColumns; ++k) {
            uint32_t& bits = of[kTiles == 1 ? 0 : k];
            bits = max(bits, owned.has(k) ? magnitude_bits(values[k]) : 0u);
        }
    }
};

// A lane's first column of a strip.
template <int kApart>
__device__ __forceinline__ int lane_column() {
    return kApart == kNeighbours ? lane_index() * kLaneColumns : lane_index();
}

// As lane_range, of a lane's elements that are so far apart.
template <int kApart>
__device__ __forceinline__ LaneRange range_of(const ShardGeometry& tensor, int64_t index, int64_t col) {
    if constexpr (kApart == kNeighbours) {
        return lane_range(tensor, index, col);
    } else {
        const int existing = clamp_count(ceil_div(tensor.cols - col, kApart), kLaneColumns);
        return {clamp_count(ceil_div(-index, kApart), kLaneColumns),
                clamp_count(ceil_div(tensor.numel - index, kApart), existing)};
    }
}

// Whether all elements of the strip at (row, col) are owned.
__device__ __forceinline__ bool is_whole(const ShardGeometry& tensor, int64_t row, int64_t col) {
    const int64_t first = row * tensor.cols + col - tensor.start;
    return row + kBlock <= tensor.rows && col + kStripColumns <= tensor.cols && first >= 0 &&
           first + (kBlock - 1) * tensor.cols + kStripColumns <= tensor.numel;
}

// The largest bits that each warp has found, by tile of the strip.
using WarpBits = uint32_t[kWarps][kStripTiles];

template <int kApart>
__device__ __forceinline__ void leave(const LaneBits<kApart>& bits, WarpBits& of_warps) {
    constexpr int kSideBySide = kApart == kNeighbours ? kTileLanes : kBlock;
#pragma unroll
    for (int k = 0; k < LaneBits<kApart>::kTiles; ++k) {
        const uint32_t most = most_of_lanes<kSideBySide>(bits.of[k]);
        const int tile = (lane_column<kApart>() + k * kApart) / kBlock;
        if (lane_index() % kSideBySide == 0) of_warps[warp_index()][tile] = most;
    }
}

// Both do this warp's rows of the strip at (row, col), from `row` on, and leave the largest magnitude bits of
// what is owned, as it is afterwards.
template <int kApart, typename Gradient>
__device__ __forceinline__ void update_rows(const AdamWDescriptor& tensor, const AdamWStep& step,
                                            LaneArrays<Gradient> arrays, int64_t lane_col, bool whole,
                                            WarpBits& of_warps) {
    LaneBits<kApart> bits;
#pragma unroll 1  // more rows at once, and with them fewer blocks, or registers spilled, are slower
    for (int r = 0; r < kWarpRows; ++r) {
        const LaneRange owned = whole ? LaneRange{0, kLaneColumns}
                                      : range_of<kApart>(tensor, arrays.master - tensor.master, lane_col);
        const bool vectors = kApart == kNeighbours && owned.begin == 0 && owned.end == kLaneColumns;
        Values values;
        if (vectors) {
            typename Gradient::Words words;
            load_vectors(arrays, words, values);
            arrays.gradient.take(0, words, values.gradient);
        } else {
            load_masked<kApart>(arrays, owned, values);
        }
        update_values(step, values);
        bits.raise(values.master, owned);
        if (vectors) {
            store_vectors(arrays, values);
        } else {
            store_masked<kApart>(arrays, owned, values);
        }
        arrays.advance(tensor.cols);
    }
    if (wants_amaxes(tensor)) leave(bits, of_warps);
}

__device__ __forceinline__ void read_rows(const AdamWDescriptor& tensor, int64_t row, int64_t lane_col,
                                          bool whole, WarpBits& of_warps) {
    const int64_t pitch = tensor.cols;
    const int64_t index = row * pitch + lane_col - tensor.start;
    const float* master = in_global(tensor.master) + index;
    const bool vectors = whole && pitch % kLaneColumns == 0 && is_aligned(master, 16);
    LaneBits<kNeighbours> bits;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
        const LaneRange owned =
            whole ? LaneRange{0, kLaneColumns} : lane_range(tensor, index + r * pitch, lane_col);
        float values[kLaneColumns];
        if (vectors) {
            load_vector(master + r * pitch, values);
        } else {
#pragma unroll
            for (int k = 0; k < kLaneColumns; ++k) values[k] = owned.has(k) ? master[r * pitch + k] : 0.0f;
        }
        bits.raise(values, owned);
    }
    leave(bits, of_warps);
}

template <typename Gradient>
__device__ __forceinline__ void update_strip(const AdamWTable& table, const AdamWDescriptor& tensor,
                                             const AdamWStep& step, int64_t row, int64_t col, bool whole,
                                             WarpBits& of_warps) {
    const int64_t lane_col = col + lane_column<kNeighbours>();
    const LaneArrays<Gradient> arrays = arrays_of<Gradient>(table, tensor, step, row, lane_col);
    if (has_vectors(tensor, arrays)) {
        update_rows<kNeighbours>(tensor, step, arrays, lane_col, whole, of_warps);
    } else {
        const int64_t spread_col = col + lane_column<kSpread>();
        update_rows<kSpread>(tensor, step, arrays_of<Gradient>(table, tensor, step, row, spread_col),
                             spread_col, whole, of_warps);
    }
}

// Gradient: GivenGradient, BroughtGradient or PeerGradient.
template <template <typename, int> class Gradient>
__global__ void __launch_bounds__(kThreads, kTuning.adamw_blocks)
    adamw_update_kernel(const __grid_constant__ AdamWTable table) {
    wait_for_previous_kernel();
    const int64_t unit = blockIdx.x;
    ItemCursor<AdamWDescriptor, &AdamWDescriptor::strip_begin, false> cursor(
        table.tensors, table.count, table.strip_units, table.strip_items + unit / kBlockStrips,
        *table.tensors);
    cursor.seek(unit);
    const AdamWDescriptor& tensor = cursor.item();
    const auto [first_row, col] = strip_at(tensor, unit);
    const bool whole = is_whole(tensor, first_row, col);
    const int64_t row = first_row + warp_index() * kWarpRows;
    const int64_t lane_col = col + lane_column<kNeighbours>();
    const AdamWStep step = table.steps[cursor.index()];
    __shared__ WarpBits of_warps;
    if (step.gradient == nullptr) {
        if (wants_amaxes(tensor)) read_rows(tensor, row, lane_col, whole, of_warps);
    } else if (tensor.gradient_dtype == DType::kBFloat16) {
        update_strip<Gradient<BFloat16, kLaneColumns>>(table, tensor, step, row, col, whole, of_warps);
    } else {
        update_strip<Gradient<float, kLaneColumns>>(table, tensor, step, row, col, whole, of_warps);
    }
    if (!wants_amaxes(tensor)) return;
    __syncthreads();
    if (warp_index() != 0) return;
    uint32_t bits = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) bits = max(bits, of_warps[warp][lane_index() / kTileLanes]);
    const float amax = round_to(tensor.weight_dtype, amax_of_bits(bits));
    if (tensor.tile_offset >= 0) publish_tile(table.reduced, tensor, first_row, lane_col, amax);
    raise_words(table.reduced, tensor, amax);
}

}  // namespace

void adamw_begin(const AdamWTable& table, const AdamWOptions& options, int64_t first,
                 const uintptr_t* gradients, int64_t count, cudaStream_t stream) {
    for (int64_t done = 0; done < count; done += kGradientsPerLaunch) {
        const int64_t some = std::min<int64_t>(count - done, kGradientsPerLaunch);
        BeginArgs args{options, table.tensors + first + done, table.steps + first + done,
                       static_cast<int32_t>(some)};
        std::copy_n(gradients + done, some, args.gradients);
        launch("adamw_begin", adamw_begin_kernel, ceil_div(some, kThreads), stream, args);
    }
}

void adamw_update(const AdamWTable& table, cudaStream_t stream) {
    if (table.strip_units == 0) return;
    const int64_t blocks = table.strip_units;
    if (table.pieces.count == 0) {
        launch("adamw_update", adamw_update_kernel<GivenGradient>, blocks, stream, table);
    } else if (table.pieces.received != nullptr) {
        launch("adamw_update of pieces", adamw_update_kernel<BroughtGradient>, blocks, stream, table);
    } else {
        launch("adamw_update of peers", adamw_update_kernel<PeerGradient>, blocks, stream, table);
    }
}

}  // namespace zerofp4::cuda
