// decide: whether a step writes, from a vote of the ranks.

#include "common/args/decide.h"

#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {

void decide(const DecideArgs& args, int) {
    bool differ = false;
    for (int i = 0; args.vote != nullptr && i < args.equal; ++i) differ = differ || differs(args, i);
    const bool skip = decide_words(args, differ);
    for (int i = 0; i < args.count; ++i) args.present[i] = present_flag(args, skip, i);
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
