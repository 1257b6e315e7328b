#pragma once
// What a vote of the ranks means for a step: the words that the update and the cast read on the device.

#include "common/bits.h"
#include "common/macros.h"

namespace zerofp4 {

// Stays where it is from step to step, with a presence flag for each parameter after it. A gradient's word is
// above 0, and the larger the earlier its parameter.
struct Decision {
    int32_t own;        // the word of this rank's first gradient with a NaN or Inf, or 0
    int32_t nonfinite;  // that of any rank, when gradients were last looked at
    int32_t first;      // the largest of these in a step
    int32_t skipped;    // how many steps were skipped for them
    float skip;         // 1 if the step, or bucket, changes nothing
    float refused;      // 1 if the ranks do not take it
};

// The vote is the maximum over all ranks of
//   presence flags [count] | words that must be equal on all ranks [equal] | their negatives [equal] | flags
// and the last two flags are the word of the first NaN or Inf, and 1 + a rank with an error.
constexpr int kVoteFlags = 4;

struct DecideArgs {
    const double* vote;   // null in a world of one
    const float* failed;  // not 0 once a rank did not come to a barrier; may be null
    Decision* decision;
    double* present;   // [count]: the flags of the vote, or 0 if the step changes nothing
    float* found_inf;  // becomes `skip`; null for a clip
    int32_t count, equal;
    bool looks;    // the vote is on gradients: else an earlier one was, and its words stay
    bool counts;   // a skipped step is counted
    bool goes_on;  // the vote is on a further bucket of a step: found_inf and `first` only grow
    bool keeps;    // a step that an earlier vote refused stays refused
};

// Compared, not added: inf - inf is a NaN.
ZEROFP4_HD bool differs(const DecideArgs& args, int i) {
    const double* equal = args.vote + args.count;
    return equal[i] != -equal[args.equal + i];
}

// Everything but the presence flags. differ: whether any words differ between ranks. Returns `skip`.
ZEROFP4_HD bool decide_words(const DecideArgs& args, bool differ) {
    Decision& made = *args.decision;
    int32_t word = made.own;
    bool refused = false;
    if (args.vote != nullptr) {
        const double* flags = args.vote + args.count + 2 * args.equal;
        word = static_cast<int32_t>(flags[kVoteFlags - 2]);
        refused = differ || flags[kVoteFlags - 1] != 0.0 || (args.keeps && made.refused != 0.0f);
    }
    const int32_t before = args.goes_on ? made.first : 0;
    if (args.looks) {
        made.nonfinite = word;
        made.first = word > before ? word : before;
    }
    const bool skip = made.nonfinite != 0 || refused || (args.failed != nullptr && *args.failed != 0.0f);
    if (args.counts && made.nonfinite != 0 && before == 0 && !refused) ++made.skipped;
    // With goes_on, the cast of an earlier bucket may write 1 on another stream meanwhile.
    if (args.found_inf != nullptr && (skip || !args.goes_on)) *args.found_inf = skip ? 1.0f : 0.0f;
    made.skip = skip ? 1.0f : 0.0f;
    made.refused = refused ? 1.0f : 0.0f;
    return skip;
}

ZEROFP4_HD double present_flag(const DecideArgs& args, bool skip, int i) { return skip ? 0.0 : args.vote[i]; }

}  // namespace zerofp4
