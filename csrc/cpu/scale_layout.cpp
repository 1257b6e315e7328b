// pad_scale and unpad_scale: compact scales to the expanded or the swizzled layout and back.
//
// The swizzled layout is walked 16 atoms at a time, that is one cache line of every one of 128 rows.

#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int kPieceColumns = 16 * kAtomColumns;
constexpr int64_t kPieceGrain = 8;  // pieces of 128 x 64 bytes that are worth a thread

// 128 rows by 64 columns of the padded scale.
struct Piece {
    int64_t row, col;
    int64_t cols;         // scale columns, without padding, of the whole matrix
    int64_t count;        // those that lie in this piece, at most 64
    int64_t padded;       // the same with padding
    int64_t padded_cols;  // of the whole matrix
};

template <class Body>
void for_pieces(const ScaleLayoutArgs& args, int threads, const Body& body) {
    const int64_t cols = ceil_div(args.cols, kBlock), padded_cols = round_up(cols, kAtomColumns);
    const int64_t pieces_per_row = ceil_div(cols, kPieceColumns);
    const int64_t pieces = ceil_div(args.rows, kAtomRows) * pieces_per_row;
    parallel_shares(pieces, threads, kPieceGrain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t row = i / pieces_per_row * kAtomRows, col = i % pieces_per_row * kPieceColumns;
            body(Piece{row, col, cols, least(kPieceColumns, cols - col),
                       least(kPieceColumns, padded_cols - col), padded_cols});
        }
    });
}

// Calls body(row, offset, step): where the piece's part of a row begins in the padded layout, and how far
// apart its groups of four columns are.
template <class Body>
ZEROFP4_HD void for_rows(const Piece& piece, ScaleLayout layout, int64_t rows, const Body& body) {
    for (int64_t row = piece.row; row < rows; ++row) {
        if (layout == kSwizzled) {
            body(row, swizzled_offset(row, piece.col, piece.cols), int64_t{kAtomBytes});
        } else {
            body(row, row * piece.padded_cols + piece.col, int64_t{kAtomColumns});
        }
    }
}

}  // namespace

void pad_scale(const ScaleLayoutArgs& args, int threads) {
    for_pieces(args, threads, [&](const Piece& piece) {
        for_rows(piece, args.layout, piece.row + kAtomRows, [&](int64_t row, int64_t offset, int64_t step) {
            uint8_t line[kPieceColumns] = {};
            if (row < args.rows) {
                std::memcpy(line, args.input + row / args.block_rows * piece.cols + piece.col,
                            static_cast<size_t>(piece.count));
            }
            for (int64_t j = 0; j < piece.padded; j += kAtomColumns, offset += step) {
                std::memcpy(args.output + offset, line + j, kAtomColumns);
            }
        });
    });
}

void unpad_scale(const ScaleLayoutArgs& args, int threads) {
    for_pieces(args, threads, [&](const Piece& piece) {
        const int64_t end = least(args.rows, piece.row + kAtomRows);
        for_rows(piece, args.layout, end, [&](int64_t row, int64_t offset, int64_t step) {
            if (row % args.block_rows != 0) return;
            uint8_t line[kPieceColumns];
            for (int64_t j = 0; j < piece.padded; j += kAtomColumns, offset += step) {
                std::memcpy(line + j, args.input + offset, kAtomColumns);
            }
            std::memcpy(args.output + row / args.block_rows * piece.cols + piece.col, line,
                        static_cast<size_t>(piece.count));
        });
    });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
