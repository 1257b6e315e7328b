#pragma once
// AdamW on a list of tensors: what its kernels are given.

#include "common/args/cast.h"
#include "common/args/peers.h"

namespace zerofp4 {

// So many consecutive elements of a row of compact state share their scales; the last of a row may be fewer.
constexpr int kStateGroup = 64;

// The scales of a group's first and second moments.
struct alignas(8) StateScales {
    float exp_avg;
    float exp_avg_sq;  // of the square roots
};

// The arrays of a tensor in compact state (common/compact.h), [numel] but for the scales.
struct CompactState {
    BFloat16* high;  // of 24-bit masters, with `low`; null where the master is float32
    uint8_t* low;
    int8_t* exp_avg;
    uint8_t* exp_avg_sq;
    StateScales* scales;   // [groups], in the order of the elements
    int64_t first_group;   // of the first owned element, row-major [rows, groups of a row]
    uint64_t first_block;  // the random bytes of element (0, 0)
    uint32_t number;       // tells tensors apart that round with the same step count
    int32_t aligned;       // all arrays lie at 16 bytes
};

// One tensor of an update: its geometry says which elements of which matrix they are, for the tile amaxes
// and for the groups of compact state; one that has neither is a matrix of rows of 128 columns.
struct AdamWDescriptor : ShardGeometry {
    float* master;  // [numel], as are exp_avg and exp_avg_sq, which are null where there is no state yet
    float* exp_avg;
    float* exp_avg_sq;
    float* step;            // float[1]: how many updates there were
    const double* present;  // [1]: 0 where no rank has a gradient; null: there is one wherever one is given
    DType gradient_dtype;
    int32_t gradient_padding;
    CompactState compact;  // all null in a list of ordinary tensors
};

ZEROFP4_HD bool wants_amaxes(const AdamWDescriptor& tensor) { return tensor.amax_offset >= 0; }

// The options of a parameter group.
struct AdamWOptions {
    const float* lr_address;  // float[1] that is read in place of lr, or null
    const float* skip;        // float[1]: unless it is 0 nothing is updated or counted; or null
    const float* factor;      // float[1] that gradients are multiplied by, but no pieces; or null
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    int32_t maximize;
};

// What the elements of one tensor need in one step.
struct AdamWStep {
    const void* gradient;  // [numel]; null: nothing is updated, only amaxes are taken
    int32_t lerp_from_start;
    float lerp_factor;
    float decay;
    float beta2;
    float weight2;
    float step_size;
    float inv_sqrt;  // 1 / sqrt(1 - beta2^step)
    float eps;
    float factor;  // of gradients, but not of a mean of the ranks'; negative to maximize
    int32_t maximize;
    uint32_t count;     // this update's number, from 1 on
    float least_scale;  // of the second moments of a compact group whose roots need no care
};

// Gradients that the ranks have brought, whose mean is wanted: ((r0 + r1) + ...) / count, in float32. What
// AdamWStep::gradient points to is this rank's own. Masters lie in a slice as gradients do in the rows.
struct GradientPieces {
    const void* received;  // [count][stride], of every other rank; or null
    int64_t stride;
    const void* masters;  // the first of the slice
    int32_t rank;
    int32_t count;  // 0: there is nothing to add up
    double share;   // 1 / count
    PeerRows rows;  // of every rank, in place of `received`
};

// Where the rows of rank r begin; null for what is this rank's own and not in a row.
template <class G>
ZEROFP4_HD const G* row_of(const GradientPieces& pieces, int r) {
    if (pieces.received == nullptr) return static_cast<const G*>(pieces.rows.of[r]);
    return r == pieces.rank ? nullptr : static_cast<const G*>(pieces.received) + r * pieces.stride;
}

// Where the gradients of a tensor begin in the rows.
ZEROFP4_HD int64_t place_in_rows(const GradientPieces& pieces, const AdamWDescriptor& tensor) {
    if (tensor.compact.high != nullptr)
        return tensor.compact.high - static_cast<const BFloat16*>(pieces.masters);
    return tensor.master - static_cast<const float*>(pieces.masters);
}

// Everything the update is given, passed by value; tensors and steps are on the device that runs it.
struct AdamWTable {
    const AdamWDescriptor* tensors;
    AdamWStep* steps;
    int64_t count;
    int64_t strip_units;
    const int32_t* strip_items;  // CUDA: by kBlockStrips strips, the tensor that the first belongs to
    float* reduced;              // of the cast plan that wants the amaxes, or null
    GradientPieces pieces;
};

}  // namespace zerofp4
