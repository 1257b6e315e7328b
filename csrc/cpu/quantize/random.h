#pragma once
// The random bytes of a patch.

#include "cpu/device/philox.h"
#include "cpu/strip/values.h"

namespace zerofp4::cpu::ZEROFP4_ISA {

using RandomPatch = uint8_t[kPatchElements];

// Those of 128 groups of 16 elements, group by group.
ZEROFP4_HD void random_groups(const int64_t (&rng_state)[2], const uint64_t (&group)[kPatchBlocks],
                              RandomStream stream, RandomPatch& random) {
    draw_blocks<kPatchBlocks>(random, [&](int b) {
        Words groups;
        std::memcpy(&groups, group + b, sizeof groups);
        return random_bytes(rng_state, groups, stream);
    });
}

// Those of 128 runs of 16 elements, run by run; run b begins with element first + b / per_line * line_step +
// b % per_line * 16 of the stored matrix.
inline void random_runs(const int64_t* state, RandomStream stream, int64_t first, int per_line,
                        int64_t line_step, RandomPatch& random) {
    const int64_t rng_state[2] = {state[0], state[1]};
    uint64_t group[kPatchBlocks];
    int shift[kPatchBlocks];
    bool aligned = true;
    for (int b = 0; b < kPatchBlocks; ++b) {
        const int64_t element = first + b / per_line * line_step + b % per_line * kBlock;
        group[b] = static_cast<uint64_t>(element) / 16;
        shift[b] = static_cast<int>(element % 16);
        aligned = aligned && shift[b] == 0;
    }
    random_groups(rng_state, group, stream, random);
    if (aligned) return;
    // A run takes what is left of one group and the beginning of the next.
    for (int b = 0; b < kPatchBlocks; ++b) ++group[b];
    RandomPatch next;
    random_groups(rng_state, group, stream, next);
    for (int b = 0; b < kPatchBlocks; ++b) {
        uint8_t both[32];
        std::memcpy(both, random + 16 * b, 16);
        std::memcpy(both + 16, next + 16 * b, 16);
        std::memcpy(random + 16 * b, both + shift[b], 16);
    }
}

// Row-major over the patch, for a matrix that is stored with rows of `cols` elements.
inline void random_rows(const int64_t* state, const Patch& patch, int64_t cols, RandomPatch& random) {
    random_runs(state, kRowwiseStream, patch.row * cols + patch.col, kPatchTiles, cols, random);
}

// Row-major over the patch, for its transpose, which is stored with rows of `rows` elements.
inline void random_columns(const int64_t* state, const Patch& patch, int64_t rows, RandomPatch& random) {
    RandomPatch runs;
    random_runs(state, kColumnwiseStream, patch.col * rows + patch.row, 1, rows, runs);
    transpose_runs(runs, random);
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
