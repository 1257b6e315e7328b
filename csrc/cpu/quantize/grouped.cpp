// quantize_grouped and grouped_amax: groups of consecutive rows, each as quantize and tensor_amax would take
// it alone. The pieces of all groups are shared out as those of one matrix.

#include "common/args/grouped.h"

#include "cpu/kernels.h"
#include "cpu/quantize/parts.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

bool are_valid(const GroupSplits& splits) {
    int64_t sum = 0;
    for (int64_t group = 0; group < splits.count; ++group) {
        const int64_t rows = splits.rows_of(group);
        if (rows < 0) return false;
        sum += rows;
    }
    return sum == splits.tokens;
}

// Calls body(place) for every group, and returns where the one after the last would begin.
template <class Body>
GroupPlace each_group(const GroupSplits& splits, bool valid, const Body& body) {
    GroupPlace place{};
    while (place.group < splits.count) {
        place.rows = valid ? splits.rows_of(place.group) : 0;
        body(place);
        pass_group(place);
    }
    return place;
}

// Shares out the pieces of all groups, pieces_of(rows) each, and calls body(place, begin, end) with a group's
// own piece numbers.
template <class PiecesOf, class Body>
void parallel_groups(const GroupSplits& splits, int threads, int64_t grain, const PiecesOf& pieces_of,
                     const Body& body) {
    int64_t pieces = 0;
    each_group(splits, true, [&](const GroupPlace& place) { pieces += pieces_of(place.rows); });
    parallel_shares(pieces, threads, grain, [&](int64_t begin, int64_t end) {
        int64_t first = 0;
        each_group(splits, true, [&](const GroupPlace& place) {
            const int64_t count = pieces_of(place.rows);
            const int64_t from = begin > first ? begin - first : 0, to = least(end - first, count);
            if (from < to) body(place, from, to);
            first += count;
        });
    });
}

void store_places(const GroupedArgs& args, bool valid) {
    const int64_t stride = args.splits.count + 1;
    const auto store = [&](const GroupPlace& place) {
        args.offsets[place.group] = place.row;
        args.offsets[stride + place.group] = place.data_row;
        args.offsets[2 * stride + place.group] = place.scale_row;
    };
    store(each_group(args.splits, valid, store));
}

void store_given_amaxes(const QuantizeArgs& whole, int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(float);
    if (whole.stored_amax) std::memcpy(whole.stored_amax, whole.amax, bytes);
    if (whole.stored_columnwise_amax) std::memcpy(whole.stored_columnwise_amax, whole.columnwise_amax, bytes);
}

void clear(uint8_t* buffer, int64_t begin, int64_t end) {
    if (buffer) std::memset(buffer + begin, 0, static_cast<size_t>(end - begin));
}

// What belongs to no group.
void clear_rest(const GroupedArgs& args, bool valid) {
    QuantizeArgs whole = args.whole;
    const GroupPlace end = each_group(args.splits, valid, [&](const GroupPlace& place) {
        const ScaleGap gap = columnwise_gap(place, whole.cols);
        const QuantizeArgs group = arguments_of(whole, place);
        clear(group.columnwise_scale[kExpanded], gap.begin, gap.end);
        clear(group.columnwise_scale[kSwizzled], gap.begin, gap.end);
    });
    const int64_t data_rows = most_data_rows(args.splits), scale_rows = most_scale_rows(args.splits);
    visit_buffers(whole, [&](uint8_t* buffer, int64_t bytes, bool padded) {
        const int64_t used = padded ? end.scale_row : end.data_row, most = padded ? scale_rows : data_rows;
        clear(buffer, used / kBlock * bytes, most / kBlock * bytes);
    });
}

}  // namespace

void grouped_amax(const GroupedAmaxArgs& args, int threads) {
    const AmaxArgs& whole = args.whole;
    const size_t bytes = static_cast<size_t>(args.splits.count) * sizeof(float);
    if (whole.amax) std::memset(whole.amax, 0, bytes);
    if (whole.hadamard_amax) std::memset(whole.hadamard_amax, 0, bytes);
    if (!are_valid(args.splits)) return;
    parallel_groups(
        args.splits, threads, kPatchGrain, [&](int64_t rows) { return patches_of(rows, whole.cols); },
        [&](const GroupPlace& place, int64_t begin, int64_t end) {
            raise_amaxes(arguments_of(whole, place), begin, end);
        });
}

void quantize_grouped(const GroupedArgs& args, int threads) {
    const bool valid = are_valid(args.splits);
    *args.error = valid ? 0 : 1;
    store_given_amaxes(args.whole, args.splits.count);
    store_places(args, valid);
    clear_rest(args, valid);
    if (!valid) return;
    parallel_groups(
        args.splits, threads, kTileGrain, [&](int64_t rows) { return tiles_of(rows, args.whole.cols); },
        [&](const GroupPlace& place, int64_t begin, int64_t end) {
            quantize_tiles(arguments_of(args.whole, place), place.rows, begin, end);
        });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
