#pragma once
// Optimizer updates of a list of tensors.

#include <string>
#include <vector>

#include "common/adamw.h"
#include "dispatch/target.h"

namespace zerofp4 {

// AdamW for a list of tensors. Holds addresses only; whoever builds it keeps the memory alive.
class AdamWPlan {
  public:
    AdamWPlan(const AdamWPlan&) = delete;
    AdamWPlan& operator=(const AdamWPlan&) = delete;

    // `compact`: all tensors are in compact state, or none. `reduced` is the vector that the amaxes of
    // tensors with an amax_offset >= 0 go to. Throws std::invalid_argument for compact state of about 2^31
    // rows or columns.
    AdamWPlan(bool on_cpu, bool compact, std::vector<AdamWDescriptor> tensors, uintptr_t reduced);

    // For CUDA: the bytes of the descriptors, with room for the scalars of a step, to be copied to the
    // device; and where they are there.
    std::string descriptor_bytes() const;
    void set_device_descriptors(uintptr_t address);

    // Counts the step of tensors [first, first + gradients.size()), which share their options, where the
    // address of the gradient is not 0. Comes before `update` for all tensors. Where that is given pieces,
    // the gradients are this rank's own.
    void begin(const Target& target, const AdamWOptions& options, int64_t first,
               const std::vector<uintptr_t>& gradients);
    void update(const Target& target, const GradientPieces& pieces) const;

  private:
    bool on_cpu_;
    bool compact_;
    std::vector<AdamWDescriptor> tensors_;
    std::vector<AdamWStep> steps_;  // of a CPU plan
    AdamWTable table_{};
};

}  // namespace zerofp4
