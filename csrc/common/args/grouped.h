#pragma once
// A matrix [tokens, cols] in groups of consecutive rows, each quantized by itself into a storage that all
// share: where in it a group lies, and how large it is.

#include "common/args/quantize.h"

namespace zerofp4 {

// Rows of every group, where the operation runs. Valid when none is negative and their sum is `tokens`.
struct GroupSplits {
    const void* rows;  // int32[count] or int64[count]
    int32_t wide;      // whether it is int64
    int32_t count;
    int64_t tokens;

    // Negative where the number cannot be that of a group.
    ZEROFP4_HD int64_t rows_of(int64_t group) const {
        const int64_t n =
            wide ? static_cast<const int64_t*>(rows)[group] : static_cast<const int32_t*>(rows)[group];
        return n <= tokens ? n : -1;
    }
};

// A group and where it begins: its row of the input, and its rows of the storage, where groups are padded.
struct GroupPlace {
    int64_t group;
    int64_t rows;
    int64_t row;
    int64_t data_row;   // a multiple of 16
    int64_t scale_row;  // a multiple of 128
};

ZEROFP4_HD void pass_group(GroupPlace& place) {
    place.row += place.rows;
    place.data_row += round_up(place.rows, kBlock);
    place.scale_row += round_up(place.rows, kAtomRows);
    ++place.group;
}

// What the storage has room for, whatever the splits.
ZEROFP4_HD int64_t most_data_rows(const GroupSplits& splits) {
    return round_up(splits.tokens + int64_t{kBlock - 1} * splits.count, kBlock);
}
ZEROFP4_HD int64_t most_scale_rows(const GroupSplits& splits) {
    return round_up(splits.tokens + int64_t{kAtomRows - 1} * splits.count, kAtomRows);
}

// `whole` is of the storage, its amaxes and stored amaxes float[count], its rng_state int64[count][2] or
// null; its choice is off, there is no skip and no `values`, and block_rows is 1.
struct GroupedArgs {
    QuantizeArgs whole;
    GroupSplits splits;
    int64_t* offsets;  // [3][count + 1]: the rows at which groups begin in the input, the data and the scales
    int32_t* error;    // int32[1]: 1 where the splits are not valid; then all groups are empty, else 0
};

// The amaxes are float[count].
struct GroupedAmaxArgs {
    AmaxArgs whole;
    GroupSplits splits;
};

// Calls visit(buffer, bytes, padded) for every buffer of codes and scales, also for those that are null, with
// what it has for 16 rows of the data, or of the scales where it is `padded`. 16 columns of scales of the
// transpose are 16 of its rows as well: a group's buffer begins at its row all the same.
template <class Args, class Visit>
ZEROFP4_HD void visit_buffers(Args& args, const Visit& visit) {
    const int64_t columns = ceil_div(args.cols, kBlock);
    const int64_t across = kBlock * round_up(columns, kAtomColumns), along = round_up(args.cols, kAtomRows);
    visit(args.rowwise_data, kBlock / 2 * args.cols, false);
    visit(args.rowwise_scale[kCompact], kBlock * columns, false);
    visit(args.rowwise_scale[kExpanded], across, true);
    visit(args.rowwise_scale[kSwizzled], across, true);
    visit(args.columnwise_data, kBlock / 2 * args.cols, false);
    visit(args.columnwise_scale[kCompact], args.cols, false);
    visit(args.columnwise_scale[kExpanded], along, true);
    visit(args.columnwise_scale[kSwizzled], along, true);
}

// The padded columnwise scales of a group end at a multiple of 4 columns, 64 rows of the group, and the next
// one's begin at one of 128: what lies between.
struct ScaleGap {
    int64_t begin;  // bytes, from the group's first
    int64_t end;
};

ZEROFP4_HD ScaleGap columnwise_gap(const GroupPlace& place, int64_t cols) {
    const int64_t column = round_up(cols, kAtomRows);
    return {column * round_up(ceil_div(place.rows, kBlock), kAtomColumns),
            column * (round_up(place.rows, kAtomRows) / kBlock)};
}

// A group as a matrix of its own, of `rows` up to a multiple of 16: those past place.rows are zeros that are
// not in the input. Its amaxes are given ones.
ZEROFP4_HD QuantizeArgs arguments_of(const QuantizeArgs& whole, const GroupPlace& place) {
    QuantizeArgs args = whole;
    args.input = static_cast<const uint8_t*>(whole.input) + place.row * whole.cols * size_of(whole.dtype);
    args.rows = round_up(place.rows, kBlock);
    args.amax = whole.amax + place.group;
    args.columnwise_amax = whole.columnwise_amax ? whole.columnwise_amax + place.group : nullptr;
    args.rng_state = whole.rng_state ? whole.rng_state + 2 * place.group : nullptr;
    args.values = nullptr;
    visit_buffers(args, [&](uint8_t*& buffer, int64_t bytes, bool padded) {
        if (buffer) buffer += (padded ? place.scale_row : place.data_row) / kBlock * bytes;
    });
    return args;
}

ZEROFP4_HD AmaxArgs arguments_of(const AmaxArgs& whole, const GroupPlace& place) {
    AmaxArgs args = whole;
    args.input = static_cast<const uint8_t*>(whole.input) + place.row * whole.cols * size_of(whole.dtype);
    args.rows = place.rows;
    args.amax = whole.amax ? whole.amax + place.group : nullptr;
    args.hadamard_amax = whole.hadamard_amax ? whole.hadamard_amax + place.group : nullptr;
    return args;
}

}  // namespace zerofp4
