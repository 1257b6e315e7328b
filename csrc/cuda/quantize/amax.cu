// The largest magnitude of a matrix, of each of a stack or of each group of rows, and that of its transform
// along the columns, in one pass. A warp takes strips of 16 rows by 128 columns, each lane 4 neighbouring
// columns of every row.

#include "common/args/grouped.h"
#include "cuda/device/groups.cuh"
#include "cuda/device/raise.cuh"
#include "cuda/format/transform.cuh"
#include "cuda/strip/matrix_strip.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kAmaxTurns = 2;  // strips of a warp

// Thread blocks for a matrix.
ZEROFP4_HD int64_t amax_parts(int64_t rows, int64_t cols) {
    return ceil_div(ceil_div(rows, kBlock) * ceil_div(cols, kStripColumns), kAmaxTurns * kWarps);
}

// Of groups all is given; else only `whole`, the only matrix or the first of a stack.
struct AmaxLaunch {
    GroupedAmaxArgs given;
    Matrices matrices;
    uint32_t parts;  // of a matrix of a stack
};

__global__ void clear_amaxes_kernel(const __grid_constant__ AmaxArgs args, int64_t count) {
    wait_for_previous_kernel();
    if (is_skipped(args.skip)) return;
    for (int64_t i = threadIdx.x; i < count; i += kThreads) {
        if (args.amax) args.amax[i] = 0.0f;
        if (args.hadamard_amax) args.hadamard_amax[i] = 0.0f;
    }
}

// The block's part of a matrix.
struct AmaxPart {
    int64_t matrix;
    const uint8_t* input;  // of the matrix
    int64_t rows;
    uint32_t index;  // of the part, counted along its rows of strips
    bool exists;
};

__device__ __forceinline__ AmaxPart find_part(const AmaxLaunch& launch) {
    const AmaxArgs& whole = launch.given.whole;
    const auto input_from = [&](int64_t row) {
        return static_cast<const uint8_t*>(whole.input) + row * whole.cols * size_of(whole.dtype);
    };
    if (launch.matrices == Matrices::kGroups) {
        const auto parts_of = [&](int64_t rows) { return amax_parts(rows, whole.cols); };
        const auto ignore = [](const GroupPlace&) {};
        const GroupSearch& search = search_groups(launch.given.splits, parts_of, ignore, ignore);
        const GroupPlace& group = search.place;
        if (!search.has_unit()) return {};
        return {group.group, input_from(group.row), group.rows, search.unit, true};
    }
    if (launch.matrices == Matrices::kOne) return {0, input_from(0), whole.rows, blockIdx.x, true};
    const uint32_t matrix = blockIdx.x / launch.parts;
    return {matrix, input_from(matrix * whole.rows), whole.rows, blockIdx.x - matrix * launch.parts, true};
}

// The largest magnitude bits of four times the transformed columns, not rounded to bfloat16: both are
// monotone.
template <typename T>
__device__ __forceinline__ uint32_t transformed_bits(const StripWords<T>& words) {
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < kLaneColumns; ++k) {
        float x[kBlock];
        column_values<T>(words, k, x);
        transform<T>(x, kRandomSigns);
#pragma unroll
        for (int r = 0; r < kBlock; ++r) bits = max(bits, magnitude_bits(x[r]));
    }
    return bits;
}

template <typename T, bool kTransform>
__global__ void __launch_bounds__(kThreads) amax_kernel(const __grid_constant__ AmaxLaunch launch) {
    wait_for_previous_kernel();
    const AmaxArgs& args = launch.given.whole;
    if (is_skipped(args.skip)) return;
    const AmaxPart part = find_part(launch);
    if (!part.exists) return;
    const Matrix<T> input{reinterpret_cast<const T*>(part.input), part.rows, args.cols};
    const uint32_t across = static_cast<uint32_t>(ceil_div(input.cols, kStripColumns));
    const int64_t strips = ceil_div(input.rows, kBlock) * across;
    uint32_t bits = 0, transformed = 0;
#pragma unroll 1
    for (int turn = 0; turn < kAmaxTurns; ++turn) {
        const int64_t strip = (static_cast<int64_t>(part.index) * kAmaxTurns + turn) * kWarps + warp_index();
        if (strip >= strips) break;
        const uint32_t down = static_cast<uint32_t>(strip) / across;
        const int64_t col =
            static_cast<int64_t>(static_cast<uint32_t>(strip) - down * across) * kStripColumns;
        StripWords<T> words;
        load_strip<T>(input, {static_cast<int64_t>(down) * kBlock, col + lane_index() * kLaneColumns}, words);
        bits = max(bits, strip_bits<T>(words));
        if constexpr (kTransform) {
            if (!args.signs) change_random_signs<T>(words);
            transformed = max(transformed, transformed_bits<T>(words));
        }
    }
    if (args.amax) raise_group(args.amax + part.matrix, amax_of_bits(bits));
    if constexpr (kTransform) {
        const float rounded = round_to<BFloat16>(quarter(from_bits(transformed)));
        raise_group(args.hadamard_amax + part.matrix, amax_of_bits(magnitude_bits(rounded)));
    }
}

// count: of amaxes of each kind.
void launch_amax(const AmaxLaunch& given, int64_t count, int64_t blocks, cudaStream_t stream) {
    const AmaxArgs& args = given.given.whole;
    launch("tensor_amax", clear_amaxes_kernel, 1, stream, args, count);
    with_dtype(args.dtype, [&](auto t) {
        using T = decltype(t);
        launch("tensor_amax", args.hadamard_amax ? amax_kernel<T, true> : amax_kernel<T, false>, blocks,
               stream, given);
    });
}

}  // namespace

void tensor_amax(const AmaxArgs& first, int64_t experts, cudaStream_t stream) {
    const int64_t parts = amax_parts(first.rows, first.cols);
    const Matrices matrices = experts == 1 ? Matrices::kOne : Matrices::kStack;
    launch_amax({{first, {}}, matrices, static_cast<uint32_t>(parts)}, experts, parts * experts, stream);
}

void grouped_amax(const GroupedAmaxArgs& args, cudaStream_t stream) {
    // A group ends within a part, which another one would go on with.
    const int64_t parts = amax_parts(most_data_rows(args.splits), args.whole.cols) + args.splits.count;
    const bool is_empty = args.whole.rows == 0 || args.whole.cols == 0;
    launch_amax({args, Matrices::kGroups, 0}, args.splits.count, is_empty ? 0 : parts, stream);
}

}  // namespace zerofp4::cuda
