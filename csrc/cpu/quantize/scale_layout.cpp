// pad_scale and unpad_scale: compact scales to the expanded or the swizzled layout and back, 128 rows by 128
// columns at a time. Four rows that lie 32 apart are worked on together: in the swizzled layout their bytes
// are neighbours.

#include "cpu/device/parallel.h"
#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int kTogether = 4;
constexpr int kRowStep = kAtomRows / kTogether;
constexpr int64_t kUnitGrain = 4;  // units (16 KB) that are worth a thread

using Lines = uint8_t[kTogether][kLayoutColumns];

// Four rows of a unit. `count` columns exist, `padded` with padding.
struct Piece {
    int64_t row, col;
    int64_t count, padded;

    ZEROFP4_HD int64_t row_of(int q) const { return row + kRowStep * q; }
    ZEROFP4_HD int64_t compact(const ScaleLayoutDescriptor& item, int q) const {
        return (row_of(q) >> item.shift) * item.columns + col;
    }
    ZEROFP4_HD int64_t expanded(const ScaleLayoutDescriptor& item, int q) const {
        return row_of(q) * round_up(item.columns, kAtomColumns) + col;
    }
    ZEROFP4_HD int64_t swizzled(const ScaleLayoutDescriptor& item) const {
        return swizzled_offset(row, col, item.columns);
    }
};

template <class Body>
void for_pieces(const ScaleLayoutTable& table, int threads, const Body& body) {
    parallel_items(table.items, table.count, &ScaleLayoutDescriptor::unit_begin, table.units, threads,
                   kUnitGrain, [&](const ScaleLayoutDescriptor& item, int64_t begin, int64_t end) {
                       const int64_t across = ceil_div(item.columns, kLayoutColumns);
                       for (int64_t unit = begin; unit < end; ++unit) {
                           const int64_t row = unit / across * kLayoutRows,
                                         col = unit % across * kLayoutColumns;
                           const int64_t count = least(kLayoutColumns, item.columns - col);
                           const int64_t padded = round_up(count, kAtomColumns);
                           for (int r = 0; r < kRowStep; ++r) body(item, Piece{row + r, col, count, padded});
                       }
                   });
}

// Copies at most a line.
ZEROFP4_HD void copy_line(uint8_t* out, const uint8_t* in, int64_t bytes) {
    if (bytes == kLayoutColumns) {
        std::memcpy(out, in, kLayoutColumns);
    } else {
        std::memcpy(out, in, static_cast<size_t>(bytes));
    }
}

void pad_piece(const ScaleLayoutDescriptor& item, const Piece& piece) {
    Lines lines = {};
    for (int q = 0; q < kTogether; ++q) {
        if (piece.row_of(q) < item.rows)
            copy_line(lines[q], item.input + piece.compact(item, q), piece.count);
    }
    if (item.layout == kExpanded) {
        for (int q = 0; q < kTogether; ++q) {
            copy_line(item.output + piece.expanded(item, q), lines[q], piece.padded);
        }
        return;
    }
    uint8_t* atom = item.output + piece.swizzled(item);
    for (int64_t j = 0; j < piece.padded; j += kAtomColumns, atom += kAtomBytes) {
        for (int q = 0; q < kTogether; ++q) std::memcpy(atom + kAtomColumns * q, &lines[q][j], kAtomColumns);
    }
}

// Of the rows that share a compact row the first one is taken.
void unpad_piece(const ScaleLayoutDescriptor& item, const Piece& piece) {
    Lines lines;
    if (item.layout == kExpanded) {
        for (int q = 0; q < kTogether; ++q) {
            copy_line(lines[q], item.input + piece.expanded(item, q), piece.padded);
        }
    } else {
        const uint8_t* atom = item.input + piece.swizzled(item);
        for (int64_t j = 0; j < piece.padded; j += kAtomColumns, atom += kAtomBytes) {
            for (int q = 0; q < kTogether; ++q)
                std::memcpy(&lines[q][j], atom + kAtomColumns * q, kAtomColumns);
        }
    }
    for (int q = 0; q < kTogether; ++q) {
        const int64_t row = piece.row_of(q);
        if (row >= item.rows || row % (1 << item.shift) != 0) continue;
        copy_line(item.output + piece.compact(item, q), lines[q], piece.count);
    }
}

}  // namespace

void pad_scale(const ScaleLayoutTable& table, int threads) { for_pieces(table, threads, pad_piece); }

void unpad_scale(const ScaleLayoutTable& table, int threads) { for_pieces(table, threads, unpad_piece); }

}  // namespace zerofp4::cpu::ZEROFP4_ISA
