// AdamW on a list of tensors in compact state, in one pass over their memory, and the tile amaxes of the
// masters as they are then. A warp takes a strip of 16 rows by 256 columns, two rows at a time: shorter
// pieces of rows are slower to reach in memory, and longer ones are not faster.
//
// The registers of a pair leave room for 16 warps on an SM, too few to hide the latency of memory: while a
// warp updates a pair, the next two are copied to shared memory (row_ring.cuh). There are so few bytes that
// instructions count, too: what is the same for all lanes is kept once for the warp, and all that is rare is
// out of line, so that the loop over the pairs of a whole strip has the registers to itself.

#include "cuda/device/tuning.cuh"
#include "cuda/optim/compact_row.cuh"
#include "cuda/optim/gradient.cuh"
#include "cuda/strip/tile_amax.cuh"

namespace zerofp4::cuda {
namespace {

// Small blocks: the place of a warp that has ended is empty until its whole block has.
constexpr int kCompactThreads = 128;
constexpr int kCompactWarps = kCompactThreads / kLanes;

__device__ const CodeValues kCodeValues = make_code_values();

// A pair of rows in shared memory, with all that is one array.
template <typename Masters, typename Gradient>
struct Stage {
    using Gradients =
        std::conditional_t<Gradient::kIsOneArray, StagedPair<typename Gradient::Element>, NothingStaged>;

    StagedPair<int8_t> exp_avg;
    StagedPair<uint8_t> exp_avg_sq;
    typename Masters::Staged masters;
    Gradients gradients;
    StagedScales scales;
};

// What a warp has in shared memory: two stages of what is frequent. Of pairs with more bytes there is one,
// and behind it masters on their way back.
constexpr int kRingBytes = 2 * sizeof(Stage<SplitMasters, GivenGradient<BFloat16, kColumns>>);
template <typename AnyStage>
constexpr int kStages = kRingBytes >= 2 * sizeof(AnyStage) ? 2 : 1;

struct alignas(16) Ring {
    uint8_t bytes[kRingBytes];

    template <typename AnyStage>
    __device__ __forceinline__ AnyStage& stage(int i) {
        return reinterpret_cast<AnyStage*>(bytes)[i];
    }
    template <typename AnyStage>
    __device__ __forceinline__ auto& masters_of(int i) {
        using Masters = decltype(AnyStage::masters);
        static_assert(sizeof(AnyStage) + sizeof(Masters) <= kRingBytes);
        if constexpr (kStages<AnyStage> > 1) {
            return stage<AnyStage>(i).masters;
        } else {
            return *reinterpret_cast<Masters*>(bytes + sizeof(AnyStage));
        }
    }
};

// Where a pair of rows begins in each array; the same for all lanes.
template <typename Masters, typename Gradient>
struct PairArrays {
    int8_t* exp_avg;
    uint8_t* exp_avg_sq;
    typename Masters::Arrays masters;
    const typename Gradient::Element* gradients = nullptr;  // where they are one array
    StateScales* scales;

    __device__ __forceinline__ PairArrays(const AdamWDescriptor& tensor, const Gradient& gradient,
                                          int64_t index, int64_t group)
        : exp_avg(uniform(tensor.compact.exp_avg + index)),
          exp_avg_sq(uniform(tensor.compact.exp_avg_sq + index)),
          masters(tensor, index),
          scales(uniform(tensor.compact.scales + group)) {
        if constexpr (Gradient::kIsOneArray) gradients = uniform(gradient.own + index);
    }
    __device__ __forceinline__ void advance(const StripShape& shape) {
        const int64_t elements = kRowsAtOnce * int64_t{shape.pitch};
        exp_avg += elements, exp_avg_sq += elements, gradients += elements;
        masters.advance(elements);
        scales += kRowsAtOnce * int64_t{shape.groups};
    }
    __device__ __forceinline__ void request(Stage<Masters, Gradient>& stage, const StripShape& shape) const {
        stage.masters.request(masters, shape);
        if constexpr (Gradient::kIsOneArray) stage.gradients.request(gradients, shape);
        stage.exp_avg.request(exp_avg, shape);
        stage.exp_avg_sq.request(exp_avg_sq, shape);
        stage.scales.request(scales, shape);
    }
};

// The lane's elements of the first of its rows of a strip. AdamWPlan sees to it that int32 is enough.
struct Place {
    int32_t row;
    int32_t col;
    int32_t columns;  // of the strip
    bool whole;       // all of the strip is owned, and lies at a vector's alignment in the state's arrays
    bool vector;      // the lane has elements of a whole strip: its columns are not past the last one
};

__device__ __forceinline__ Place place_of(const AdamWDescriptor& tensor, int64_t unit) {
    const auto [row, col] = strip_at<kCompactStripColumns>(tensor, unit);
    const int64_t first = row * tensor.cols + col - tensor.start;
    const int64_t columns = min(tensor.cols - col, static_cast<int64_t>(kCompactStripColumns));
    const int64_t end = first + (kBlock - 1) * tensor.cols + columns;
    const bool aligned = tensor.compact.aligned != 0 && tensor.cols < kMostPitch &&
                         ((tensor.cols | first) & (kColumns - 1)) == 0;
    const bool whole = row + kBlock <= tensor.rows && aligned && first >= 0 && end <= tensor.numel;
    const int32_t lane_col = static_cast<int32_t>(col) + lane_index() % kRowLanes * kColumns;
    return {static_cast<int32_t>(row) + lane_index() / kRowLanes, lane_col, static_cast<int32_t>(columns),
            whole, whole && lane_col < tensor.cols};
}

// The number of the column's unit of 2^kShift columns, counted row by row.
template <int kShift>
__device__ __forceinline__ int64_t unit_of(const AdamWDescriptor& tensor, const Place& at) {
    const int32_t of_row = (static_cast<int32_t>(tensor.cols) + (1 << kShift) - 1) >> kShift;
    return static_cast<int64_t>(at.row) * of_row + (at.col >> kShift);
}
__device__ __forceinline__ int64_t index_of(const AdamWDescriptor& tensor, const Place& at) {
    return unit_of<0>(tensor, at) - tensor.start;
}
__device__ __forceinline__ int64_t group_of(const AdamWDescriptor& tensor, const Place& at) {
    return unit_of<6>(tensor, at) - tensor.compact.first_group;
}
__device__ __forceinline__ uint64_t block_of(const AdamWDescriptor& tensor, const Place& at) {
    return tensor.compact.first_block + static_cast<uint64_t>(unit_of<4>(tensor, at));
}

// How many of a lane's elements of a row are owned, from the first on: a shard is cut between groups only.
__device__ __forceinline__ int owned_of_lane(const AdamWDescriptor& tensor, const Place& at, int64_t index) {
    return index < 0 ? 0 : clamp_count(min(tensor.cols - at.col, tensor.numel - index), kColumns);
}

// Goes on to the lane's next row of the strip, if there is one.
__device__ __forceinline__ bool next_rows(Place& at) {
    at.row += kRowsAtOnce;
    return at.row % kBlock >= kRowsAtOnce;
}

// As `uniform`, of all members.
__device__ __forceinline__ AdamWStep uniform_step(const AdamWStep& from) {
    AdamWStep step = from;
    step.gradient = uniform(static_cast<const uint8_t*>(from.gradient));
    step.lerp_from_start = uniform(from.lerp_from_start);
    for (float AdamWStep::* member : {&AdamWStep::lerp_factor, &AdamWStep::decay, &AdamWStep::beta2,
                                      &AdamWStep::weight2, &AdamWStep::step_size, &AdamWStep::inv_sqrt,
                                      &AdamWStep::eps, &AdamWStep::factor, &AdamWStep::least_scale})
        step.*member = uniform(from.*member);
    step.maximize = uniform(from.maximize);
    step.count = uniform(from.count);
    return step;
}

__device__ __forceinline__ const AdamWStep& step_of(const AdamWTable& table, const AdamWDescriptor& tensor) {
    return *in_global(table.steps + (&tensor - table.tensors));
}

// Updates a whole strip; gives the largest master of the lane's columns if amaxes are wanted.
template <typename Masters, typename Gradient>
__device__ __forceinline__ float update_pairs(const AdamWTable& table, const AdamWDescriptor& tensor,
                                              const AdamWStep& from, const Place& at,
                                              const CodeValues& values, Ring& ring) {
    using PairStage = Stage<Masters, Gradient>;
    constexpr int kDepth = kStages<PairStage>, kPairs = kBlock / kRowsAtOnce;
    const AdamWStep step = uniform_step(from);
    const Gradient gradient(table, tensor, step, 0);
    const Place first{at.row - lane_index() / kRowLanes, at.col - lane_index() % kRowLanes * kColumns};
    const auto pitch = uniform(static_cast<int32_t>(tensor.cols));
    const StripShape shape{pitch, (pitch + kStateGroup - 1) / kStateGroup, uniform(at.columns)};
    PairArrays<Masters, Gradient> here(tensor, gradient, index_of(tensor, first), group_of(tensor, first));
    PairArrays<Masters, Gradient> ahead = here;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
        ahead.request(ring.stage<PairStage>(i), shape);
        commit_copies();
        ahead.advance(shape);
    }
    const uint32_t number = uniform(tensor.compact.number);
    const bool amaxes = uniform(wants_amaxes(tensor));
    uint64_t block = block_of(tensor, at);
    int64_t index = index_of(tensor, at);  // of gradients that are not one array
    float most = 0.0f;
    int i = 0;
#pragma unroll 1
    for (int pair = 0; pair < kPairs; ++pair) {
        PairStage& stage = ring.stage<PairStage>(i);
        const RandomBytes random = master_bytes(number, step.count, block);
        block += kRowsAtOnce * (pitch / kRandomColumns);
        LaneRow<Masters> row{};
        typename Gradient::Words words{};
        if constexpr (!Gradient::kIsOneArray) {
            if (at.vector) gradient.load(index, words);
        }
        wait_for_copies<kDepth - 1>();
        __syncwarp();
        stage.exp_avg.take(row.exp_avg);
        stage.exp_avg_sq.take(row.exp_avg_sq);
        row.masters.take(stage.masters);
        if constexpr (Gradient::kIsOneArray) stage.gradients.take(words);
        row.scales = stage.scales.take(shape);
        const auto request_next = [&] {
            __syncwarp();
            if (pair + kDepth < kPairs) ahead.request(stage, shape);
            commit_copies();
            ahead.advance(shape);
        };
        if constexpr (kDepth == 1) request_next();
        if (Gradient::kIsOneArray || at.vector) gradient.take(index, words, row.gradients);
        index += kRowsAtOnce * int64_t{pitch};
        update_row(step, random, values, row);
        if (amaxes) most = larger_magnitude(most, row.masters.most(tensor.weight_dtype));
        row.masters.store(ring.masters_of<PairStage>(i), here.masters, shape);
        stage.exp_avg.store(here.exp_avg, shape, row.exp_avg);
        stage.exp_avg_sq.store(here.exp_avg_sq, shape, row.exp_avg_sq);
        stage.scales.store(here.scales, shape, row.scales);
        here.advance(shape);
        if constexpr (kDepth > 1) request_next();
        i = (i + 1) % kDepth;
    }
    return most;
}

// Updates what is owned of a strip, element by element.
template <typename Masters, typename Gradient>
__device__ __noinline__ float update_elements(const AdamWDescriptor& tensor, const AdamWStep& step,
                                              const Gradient& gradient, Place at,
                                              const CodeValues& values_of_codes) {
    const CodeValues& values = *in_shared(&values_of_codes);
    const CompactState& state = tensor.compact;
    float most = 0.0f;
    do {
        const int64_t index = index_of(tensor, at), group = group_of(tensor, at);
        const int count = owned_of_lane(tensor, at, index);
        LaneRow<Masters> row{};
        Elements::load(in_global(state.exp_avg) + index, count, row.exp_avg);
        Elements::load(in_global(state.exp_avg_sq) + index, count, row.exp_avg_sq);
        row.masters.template load<Elements>(tensor, index, count);
        if (count > 0) row.scales = in_global(state.scales)[group];
#pragma unroll 1
        for (int k = kColumns - 1; k >= 0; --k) {
#pragma unroll
            for (int i = kColumns - 1; i > 0; --i) row.gradients[i] = row.gradients[i - 1];
            row.gradients[0] = k < count ? gradient.at(index + k) : 0.0f;
        }
        update_row(step, master_bytes(state.number, step.count, block_of(tensor, at)), values, row);
        if (wants_amaxes(tensor)) most = larger_magnitude(most, row.masters.most(tensor.weight_dtype));
        row.masters.store_elements(tensor, index, count);
        Elements::store(in_global(state.exp_avg) + index, count, row.exp_avg);
        Elements::store(in_global(state.exp_avg_sq) + index, count, row.exp_avg_sq);
        if (lane_index() % kGroupLanes == 0 && count > 0) in_global(state.scales)[group] = row.scales;
    } while (next_rows(at));
    return most;
}

template <typename Masters>
__device__ __noinline__ float read_rows(const AdamWDescriptor& tensor, Place at) {
    float most = 0.0f;
    do {
        const int64_t index = index_of(tensor, at);
        Masters masters{};
        if (at.vector) {
            masters.template load<Vectors>(tensor, index, kColumns);
        } else if (!at.whole) {
            masters.template load<Elements>(tensor, index, owned_of_lane(tensor, at, index));
        }
        most = larger_magnitude(most, masters.most(tensor.weight_dtype));
    } while (next_rows(at));
    return most;
}

template <typename Masters, typename Gradient>
__device__ __forceinline__ float update_strip(const AdamWTable& table, const AdamWDescriptor& tensor,
                                              const AdamWStep& step, const Place& at,
                                              const CodeValues& values, Ring& ring) {
    const Gradient gradient(table, tensor, step, 0);
    if (uniform(at.whole && gradient.has_vectors()))
        return update_pairs<Masters, Gradient>(table, tensor, step, at, values, ring);
    return update_elements<Masters>(tensor, step, gradient, at, values);
}

// Updates or reads a strip that is not of the frequent kind. Out of line: beside the loop of that kind it
// would take registers from it.
template <template <typename, int> class Gradient>
__device__ __noinline__ float update_rare_strip(const AdamWTable& table, const AdamWDescriptor& tensor,
                                                uint32_t unit, const CodeValues& values_of_codes,
                                                Ring& ring_of_warp) {
    const CodeValues& values = *in_shared(&values_of_codes);
    Ring& ring = *in_shared(&ring_of_warp);
    const Place at = place_of(tensor, unit);
    const AdamWStep& step = step_of(table, tensor);
    const bool split = uniform(tensor.compact.high != nullptr);
    if (uniform(step.gradient == nullptr)) {
        if (!wants_amaxes(tensor)) return 0.0f;
        return split ? read_rows<SplitMasters>(tensor, at) : read_rows<FloatMasters>(tensor, at);
    }
    using Short = Gradient<BFloat16, kColumns>;
    using Long = Gradient<float, kColumns>;
    if (uniform(tensor.gradient_dtype == DType::kBFloat16))
        return split ? update_elements<SplitMasters>(tensor, step, Short(table, tensor, step, 0), at, values)
                     : update_strip<FloatMasters, Short>(table, tensor, step, at, values, ring);
    return split ? update_strip<SplitMasters, Long>(table, tensor, step, at, values, ring)
                 : update_strip<FloatMasters, Long>(table, tensor, step, at, values, ring);
}

// Gradient: GivenGradient, BroughtGradient or PeerGradient.
template <template <typename, int> class Gradient>
__global__ void __launch_bounds__(kCompactThreads, kTuning.compact_adamw_blocks)
    compact_update_kernel(const __grid_constant__ AdamWTable table) {
    __shared__ CodeValues values;
    __shared__ Ring rings[kCompactWarps];
    for (int i = threadIdx.x; i < 256; i += kCompactThreads) {
        values.moments[i] = kCodeValues.moments[i];
        values.roots[i] = kCodeValues.roots[i];
    }
    wait_for_previous_kernel();
    __syncthreads();
    const uint32_t unit = uniform(static_cast<uint32_t>(grid_warp<kCompactWarps>()));
    if (unit >= table.strip_units) return;
    ItemCursor<AdamWDescriptor, &AdamWDescriptor::strip_begin, false> cursor(
        table.tensors, table.count, table.strip_units, table.strip_items + unit / kBlockStrips,
        *table.tensors);
    cursor.seek(unit);
    const AdamWDescriptor& tensor = cursor.item();
    const Place at = place_of(tensor, unit);
    Ring& ring = rings[warp_index()];
    const AdamWStep& step = step_of(table, tensor);
    // All is read at once: one question after another would wait for memory each time. And a branch must be
    // seen to be the same for all lanes, or the loop behind it has no registers of the warp.
    using Frequent = Gradient<BFloat16, kColumns>;
    const bool frequent = (tensor.compact.high != nullptr) & (step.gradient != nullptr) &
                          (tensor.gradient_dtype == DType::kBFloat16) & at.whole &
                          Frequent(table, tensor, step, 0).has_vectors();
    float most = uniform(frequent)
                     ? update_pairs<SplitMasters, Frequent>(table, tensor, step, at, values, ring)
                     : update_rare_strip<Gradient>(table, tensor, unit, values, ring);
    if (!wants_amaxes(tensor)) return;
#pragma unroll
    for (int lanes = kRowLanes; lanes < kLanes; lanes *= 2)
        most = larger_magnitude(most, __shfl_xor_sync(kAllLanes, most, lanes));
    const float amax = round_to(tensor.weight_dtype, amax_of_bits(to_bits(most)));
    if (tensor.tile_offset >= 0 && lane_index() < kRowLanes && amax > 0.0f)
        table
            .reduced[tensor.tile_offset + at.row / kBlock * ceil_div(tensor.cols, kBlock) + at.col / kBlock] =
            amax;
    raise_words(table.reduced, tensor, amax);
}

}  // namespace

void compact_update(const AdamWTable& table, cudaStream_t stream) {
    const int64_t blocks = ceil_div(table.strip_units, kCompactWarps);
    if (table.pieces.count == 0) {
        launch<kCompactThreads>("compact_update", compact_update_kernel<GivenGradient>, blocks, stream,
                                table);
    } else if (table.pieces.received != nullptr) {
        launch<kCompactThreads>("compact_update of pieces", compact_update_kernel<BroughtGradient>, blocks,
                                stream, table);
    } else {
        launch<kCompactThreads>("compact_update of peers", compact_update_kernel<PeerGradient>, blocks,
                                stream, table);
    }
}

}  // namespace zerofp4::cuda
