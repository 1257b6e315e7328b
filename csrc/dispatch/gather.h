#pragma once
// The gather of packed codes of a list of weights, before and after its collective.

#include <string>
#include <vector>

#include "common/args/gather.h"
#include "dispatch/target.h"

namespace zerofp4 {

// Holds addresses only; whoever builds it keeps the memory alive.
class GatherPlan {
  public:
    GatherPlan(const GatherPlan&) = delete;
    GatherPlan& operator=(const GatherPlan&) = delete;

    // An item is four integers: addresses of input, output and of the byte with the low code of the first
    // byte (0 where it is no other), then the number of bytes. `own` go into the slot, `received` come out.
    GatherPlan(bool on_cpu, const std::vector<int64_t>& own, const std::vector<int64_t>& received,
               uintptr_t staging, int64_t slot, int rank, int ranks, uintptr_t reduced, float hash,
               uintptr_t status);

    // Bytes of the descriptors, to be copied to the device, however few they are; and where they are there.
    std::string descriptor_bytes() const;
    void set_device_descriptors(uintptr_t address);

    // `state` is what the host knows of this rank, a GatherState.
    void pack(const Target& target, int32_t state) const;
    void unpack(const Target& target) const;

  private:
    bool on_cpu_;
    GatherTable table_{};  // before the items, whose units it counts
    std::vector<GatherDescriptor> own_;
    std::vector<GatherDescriptor> received_;
};

}  // namespace zerofp4
