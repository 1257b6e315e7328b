// MXFP8 quantize: rowwise, columnwise or both from one reading.

#include "common/args/mxfp8.h"
#include "common/args/quantize.h"
#include "cuda/device/tuning.cuh"
#include "cuda/format/convert.cuh"
#include "cuda/format/magnitudes.cuh"
#include "cuda/mxfp8/units.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kSteps = 8;  // rows of a lane
template <bool kColumnwise>
constexpr int kBlocks =
    kColumnwise ? kTuning.quantize_mxfp8_columns_blocks : kTuning.quantize_mxfp8_rows_blocks;

// Lanes side by side, and rows that the others have at the same step. For the columnwise copy a unit is as
// high as its blocks, otherwise as wide as a warp can make it.
template <bool kColumnwise>
constexpr int kAcross = kColumnwise ? 8 : kLanes;
template <bool kColumnwise>
constexpr int kDown = kLanes / kAcross<kColumnwise>;
template <bool kColumnwise>
constexpr int kUnitRows = kDown<kColumnwise> * kSteps;
template <typename T, bool kColumnwise>
constexpr int kUnitCols = kAcross<kColumnwise> * kVector<T>;
static_assert(kUnitRows<true> == kMxfp8Block && kMxfp8Block % kUnitRows<false> == 0);

// Of kWords words in each of kWords lanes that are kStride apart, the largest of every word: lane i of them
// gets word i.
template <typename T, int kStride, int kWords>
__device__ __forceinline__ uint32_t share_largest(uint32_t (&words)[kWords]) {
#pragma unroll
    for (int distance = kWords / 2; distance > 0; distance /= 2) {
        const bool upper = (lane_index() / kStride & distance) != 0;
#pragma unroll
        for (int i = 0; i < distance; ++i) {
            const uint32_t kept = upper ? words[i + distance] : words[i];
            const uint32_t given = upper ? words[i] : words[i + distance];
            words[i] = larger_magnitudes<T>(kept, __shfl_xor_sync(kAllLanes, given, distance * kStride));
        }
    }
    return words[0];
}

// The scale bytes of the amaxes in this lane's word.
template <typename T>
__device__ __forceinline__ void scales_of_word(uint32_t amax, uint32_t (&scale)[kPerWord<T>]) {
    const uint32_t words[1] = {amax};
    float values[kPerWord<T>];
    unpack<T>(words, values);
#pragma unroll
    for (int k = 0; k < kPerWord<T>; ++k) scale[k] = mxfp8_scale(fabsf(values[k]));
}

// The factors of all scales that those kWords lanes have between them. Two travel in a word, as the lower
// half of a power of two is 0.
template <typename T, int kStride, int kWords>
__device__ __forceinline__ void gather_encode(const uint32_t (&scale)[kPerWord<T>],
                                              float (&encode)[kWords * kPerWord<T>]) {
    uint32_t own = to_bits(mxfp8_encode(scale[0]));
    if constexpr (kPerWord<T> == 2) own = __byte_perm(own, to_bits(mxfp8_encode(scale[1])), 0x7632);
    const int first = lane_index() & ~((kWords - 1) * kStride);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        const uint32_t word = __shfl_sync(kAllLanes, own, first + i * kStride);
        if constexpr (kPerWord<T> == 1) {
            encode[i] = from_bits(word);
        } else {
            encode[2 * i] = from_bits(word << 16);
            encode[2 * i + 1] = from_bits(word & 0xffff0000u);
        }
    }
}

// A unit of one warp and this lane's place in it.
template <typename T, bool kColumnwise, bool kWhole>
struct LaneUnit {
    static constexpr int kStepRows = kDown<kColumnwise>;
    static constexpr bool kIsWhole = kWhole;

    int64_t first_row;  // of the unit
    int64_t row;        // the lane's first; the others follow kStepRows apart
    int64_t col;
    Extent<kSteps, kVector<T>, kWhole> extent;

    __device__ __forceinline__ LaneUnit(const Mxfp8Args& args, const Unit& unit)
        : first_row(unit.row),
          row(unit.row + lane_index() / kAcross<kColumnwise>),
          col(unit.col + lane_index() % kAcross<kColumnwise> * kVector<T>),
          extent((args.rows - row + kStepRows - 1) / kStepRows, args.cols - col) {}
};

template <typename T, typename Lane>
__device__ __forceinline__ void load_unit(const Mxfp8Args& args, const Lane& lane,
                                          uint32_t (&words)[kSteps][kVectorWords]) {
    const T* p = static_cast<const T*>(args.input) + lane.row * args.cols + lane.col;
    const int64_t pitch = Lane::kStepRows * args.cols;
#pragma unroll
    for (int s = 0; s < kSteps; ++s, p += pitch)
        load_vector<Lane::kIsWhole, true>(p, lane.extent.count(s), words[s]);
}

// Elements of a row, each times factor(column), to bytes.
template <bool kWhole, int kCols, typename Factor>
__device__ __forceinline__ void store_row(uint8_t* p, int count, const float (&x)[kCols],
                                          const Factor& factor) {
    uint32_t codes[kCols / 4];
#pragma unroll
    for (int i = 0; i < kCols; i += 4) {
        codes[i / 4] = convert_four_e4m3(
            {x[i] * factor(i), x[i + 1] * factor(i + 1), x[i + 2] * factor(i + 2), x[i + 3] * factor(i + 3)});
    }
    store_vector<kWhole>(p, count, codes);
}

// Makes and stores the scales of the blocks along the rows; encode gets the factors of this lane's rows.
template <typename T, typename Lane>
__device__ __forceinline__ void rowwise_scales(const Mxfp8Args& args, const Lane& lane,
                                               const uint32_t (&words)[kSteps][kVectorWords],
                                               float (&encode)[kSteps]) {
    constexpr int kBlockLanes = kMxfp8Block / kVector<T>;  // that share a block: as many as words of amaxes
    uint32_t amax[kBlockLanes];
#pragma unroll
    for (int s = 0; s < kSteps; s += kPerWord<T>) {
        uint32_t row[kPerWord<T>];
#pragma unroll
        for (int k = 0; k < kPerWord<T>; ++k) {
            const uint32_t (&x)[kVectorWords] = words[s + k];
            row[k] = larger_magnitudes<T>(larger_magnitudes<T>(x[0], x[1]), larger_magnitudes<T>(x[2], x[3]));
        }
        if constexpr (kPerWord<T> == 1) {
            amax[s] = row[0];
        } else {  // the amaxes of two rows in one word
            amax[s / 2] = larger_magnitudes<T>(__byte_perm(row[0], row[1], 0x5410),
                                               __byte_perm(row[0], row[1], 0x7632));
        }
    }
    uint32_t scale[kPerWord<T>];
    scales_of_word<T>(share_largest<T, 1>(amax), scale);
    gather_encode<T, 1, kBlockLanes>(scale, encode);

    const int64_t block = lane.col / kMxfp8Block, pitch = ceil_div(args.cols, kMxfp8Block);
    const int64_t first = lane.row + lane_index() % kBlockLanes * kPerWord<T> * Lane::kStepRows;
#pragma unroll
    for (int k = 0; k < kPerWord<T>; ++k) {
        const int64_t row = first + k * Lane::kStepRows;
        if (row < args.rows && block < pitch)
            args.rowwise_scale[row * pitch + block] = static_cast<uint8_t>(scale[k]);
        if (args.rowwise_swizzled && block < round_up(pitch, kAtomColumns))
            args.rowwise_swizzled[swizzled_offset(row, block, pitch)] = static_cast<uint8_t>(scale[k]);
    }
}

// The same for the blocks along the columns, and this lane's columns.
template <typename T, typename Lane>
__device__ __forceinline__ void columnwise_scales(const Mxfp8Args& args, const Lane& lane,
                                                  const uint32_t (&words)[kSteps][kVectorWords],
                                                  float (&encode)[kVector<T>]) {
    uint32_t amax[kVectorWords];
#pragma unroll
    for (int i = 0; i < kVectorWords; ++i) {
        amax[i] = words[0][i];
#pragma unroll
        for (int s = 1; s < kSteps; ++s) amax[i] = larger_magnitudes<T>(amax[i], words[s][i]);
    }
    static_assert(Lane::kStepRows == kVectorWords,
                  "as many lanes share a column as there are words of amaxes");
    uint32_t scale[kPerWord<T>];
    scales_of_word<T>(share_largest<T, kAcross<true>>(amax), scale);
    gather_encode<T, kAcross<true>, kVectorWords>(scale, encode);

    const int64_t block = lane.first_row / kMxfp8Block, blocks = ceil_div(args.rows, kMxfp8Block);
    const int64_t first = lane.col + lane_index() / kAcross<true> * kPerWord<T>;
#pragma unroll
    for (int k = 0; k < kPerWord<T>; ++k) {
        const int64_t col = first + k;
        if (block < blocks && col < args.cols)
            args.columnwise_scale[block * args.cols + col] = static_cast<uint8_t>(scale[k]);
        if (args.columnwise_swizzled && col < round_up(args.cols, kAtomRows))
            args.columnwise_swizzled[swizzled_offset(col, block, blocks)] = static_cast<uint8_t>(scale[k]);
    }
}

template <typename T, bool kRowwise, bool kColumnwise, bool kWhole>
__device__ __forceinline__ void quantize_unit(const Mxfp8Args& args, const Unit& unit) {
    const LaneUnit<T, kColumnwise, kWhole> lane(args, unit);
    uint32_t words[kSteps][kVectorWords];
    load_unit<T>(args, lane, words);
    float row_encode[kSteps], column_encode[kVector<T>];
    if constexpr (kRowwise) rowwise_scales<T>(args, lane, words, row_encode);
    if constexpr (kColumnwise) columnwise_scales<T>(args, lane, words, column_encode);

    int64_t offset = lane.row * args.cols + lane.col;
#pragma unroll
    for (int s = 0; s < kSteps; ++s, offset += lane.kStepRows * args.cols) {
        const int count = lane.extent.count(s);
        float x[kVector<T>];
        unpack<T>(words[s], x);
        if constexpr (kRowwise)
            store_row<kWhole>(args.rowwise_data + offset, count, x, [&](int) { return row_encode[s]; });
        if constexpr (kColumnwise)
            store_row<kWhole>(args.columnwise_data + offset, count, x,
                              [&](int i) { return column_encode[i]; });
    }
}

template <typename T, bool kRowwise, bool kColumnwise>
__global__ void __launch_bounds__(kThreads, kBlocks<kColumnwise>)
    quantize_mxfp8_kernel(const __grid_constant__ Mxfp8Args args, uint32_t across) {
    wait_for_previous_kernel();
    if (is_skipped(args.skip)) return;
    constexpr int kRows = kUnitRows<kColumnwise>, kCols = kUnitCols<T, kColumnwise>;
    const Unit unit = unit_of_warp<kRows, kCols>(blockIdx.x, across);
    const bool aligned = args.cols % kVector<T> == 0 && is_aligned(args.input, 4 * kVectorWords) &&
                         is_aligned(args.rowwise_data, kVector<T>) &&
                         is_aligned(args.columnwise_data, kVector<T>);
    const bool whole = aligned && unit.row + kRows <= args.rows && unit.col + kCols <= args.cols;
    if (__all_sync(kAllLanes, whole)) {
        quantize_unit<T, kRowwise, kColumnwise, true>(args, unit);
    } else if (unit.row < walked(args, args.rows)) {
        quantize_unit<T, kRowwise, kColumnwise, false>(args, unit);
    }
}

template <typename T, bool kRowwise, bool kColumnwise>
void launch_quantize(const Mxfp8Args& args, cudaStream_t stream) {
    const int64_t across = ceil_div(walked(args, args.cols), kUnitCols<T, kColumnwise>);
    const int64_t units = ceil_div(walked(args, args.rows), kUnitRows<kColumnwise>) * across;
    launch("quantize_mxfp8", quantize_mxfp8_kernel<T, kRowwise, kColumnwise>, ceil_div(units, kWarps), stream,
           args, across);
}

template <typename T>
void quantize_as(const Mxfp8Args& args, cudaStream_t stream) {
    if (!args.columnwise_data) return launch_quantize<T, true, false>(args, stream);
    if (!args.rowwise_data) return launch_quantize<T, false, true>(args, stream);
    launch_quantize<T, true, true>(args, stream);
}

}  // namespace

void quantize_mxfp8(const Mxfp8Args& args, cudaStream_t stream) {
    with_dtype(args.dtype, [&](auto t) { quantize_as<decltype(t)>(args, stream); });
}

}  // namespace zerofp4::cuda
