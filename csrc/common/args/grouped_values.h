#pragma once
// The values of groups of rows as a product of all groups in one launch takes them: rows without the padding
// between groups, columns of all groups side by side, times a factor for each group or without global scales.

#include "common/args/grouped.h"

namespace zerofp4 {

struct GroupedValuesArgs {
    const uint8_t* data;          // a copy of a storage of groups
    const uint8_t* scale;         // compact
    const float* amax;            // float[count]; null: values without global scales
    const float* other_amax;      // float[count], of what each group is multiplied with; null where amax is
    float other_factor;           // decode_factor(e4m3_max) of that
    const int64_t* offsets;       // [count + 1], where groups begin in the rows,
    const int64_t* data_offsets;  // [count + 1], and in the data
    const int32_t* error;         // int32[1]
    BFloat16* output;             // [tokens, cols], of the columnwise copy [cols, data_rows]
    int32_t* ends;  // int32[count], written: where groups end in the rows, or columns, of output
    int64_t tokens;
    int64_t cols;
    int64_t data_rows;
    int32_t count;
    int32_t columnwise;

    ZEROFP4_HD int64_t rows() const { return columnwise ? cols : tokens; }
    ZEROFP4_HD int64_t width() const { return columnwise ? data_rows : cols; }

    // The rows, or columns, of output at which groups begin. What is behind the last one in columns counts as
    // a group more.
    ZEROFP4_HD const int64_t* begins() const { return columnwise ? data_offsets : offsets; }
    ZEROFP4_HD int64_t places() const { return columnwise ? count + 1 : count; }
};

// Where splits are not valid everything is NaN: one group has all, and in columns each ends somewhere else,
// so that none of their products is an empty sum.
ZEROFP4_HD int32_t end_of_group(const GroupedValuesArgs& args, int64_t group) {
    const int64_t other = args.columnwise ? kBlock / 2 * (group + 1) : args.tokens;
    return static_cast<int32_t>(*args.error ? other : args.begins()[group + 1]);
}

// A group's part of output, as rows of which each lies in one piece in all three; pitches are in bytes of
// data and of scales, and in elements of output.
struct GroupLines {
    const uint8_t* data;
    const uint8_t* scale;
    BFloat16* output;
    int64_t data_pitch;
    int64_t scale_pitch;
    int64_t pitch;
    int64_t begin, end;  // the group's rows, or columns, of output
    float amax;          // for block_decode

    ZEROFP4_HD void move(int64_t rows, int64_t cols) {
        data += rows * data_pitch + cols / 2;
        scale += rows * scale_pitch + cols / kBlock;
        output += rows * pitch + cols;
    }
};

ZEROFP4_HD GroupLines lines_of(const GroupedValuesArgs& args, int64_t group) {
    const bool bad = *args.error;
    const int64_t columns = ceil_div(args.cols, kBlock);
    const int64_t begin = bad ? 0 : args.begins()[group], row = bad ? 0 : args.data_offsets[group];
    GroupLines lines{};
    lines.begin = begin;
    if (args.columnwise) {
        lines.end = bad || group == args.count ? args.data_rows : args.begins()[group + 1];
        const int64_t own = lines.end - begin;
        lines.data = args.data + args.cols * (row / 2), lines.data_pitch = own / 2;
        lines.scale = args.scale + args.cols * (row / kBlock), lines.scale_pitch = own / kBlock;
        lines.output = args.output + begin, lines.pitch = args.data_rows;
    } else {
        lines.end = bad ? args.tokens : args.begins()[group + 1];
        lines.data = args.data + row * (args.cols / 2), lines.data_pitch = args.cols / 2;
        lines.scale = args.scale + row * columns, lines.scale_pitch = columns;
        lines.output = args.output + begin * args.cols, lines.pitch = args.cols;
    }
    lines.amax = kE2M1Max * kE4M3Max;  // with which a block's factor is its scale
    if (args.amax && group < args.count)
        lines.amax = (args.other_amax[group] * args.other_factor) * args.amax[group];
    if (bad) lines.amax = kInf - kInf;
    return lines;
}

}  // namespace zerofp4
