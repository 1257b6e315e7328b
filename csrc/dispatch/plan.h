#pragma once
// The multi-tensor dispatcher: descriptors of many weights, the partition of their work, one launch per
// stage.

#include <string>
#include <vector>

#include "common/args/cast.h"
#include "common/args/transpose.h"
#include "dispatch/target.h"

namespace zerofp4 {

// Cuts the owned range into strip units that begin with unit `begin`; returns the unit after the last one. A
// shard inside one row visits only the chunks it touches.
int64_t partition_strips(ShardGeometry& weight, int64_t begin, int64_t columns = kStripColumns);

// Fills in strip_begin, first_strip, first_chunk, chunks and scale_begin of every descriptor, and the units
// in `table`.
void partition(bool on_cpu, std::vector<WeightDescriptor>& weights, CastTable& table);

// The stages of a cast for a list of weights. Holds addresses only; whoever builds it keeps the memory alive.
// Not copied, as no plan or list is: its table points into itself.
class CastPlan {
  public:
    CastPlan(const CastPlan&) = delete;
    CastPlan& operator=(const CastPlan&) = delete;
    CastPlan(bool on_cpu, std::vector<WeightDescriptor> weights, uintptr_t reduced, int64_t reduced_numel,
             float hash, uintptr_t found_inf, uintptr_t status);

    // Bytes of the descriptors, to be copied to the device; and where they are there. A CPU plan and a plan
    // of one weight need no such copy.
    std::string descriptor_bytes() const;
    void set_device_descriptors(uintptr_t address);

    void begin(const Target& target, bool error) const;
    void scale(const Target& target) const;
    // The cast in two: when the first is done, codes of the weights before this one are there, and those of
    // its rows before this one.
    void cast_before(const Target& target, int64_t weight, int64_t row) const;
    void cast_from(const Target& target, int64_t weight, int64_t row) const;

    // Every scale of weights in tiles from their compact rowwise ones, which other ranks made: no stage of a
    // step.
    void spread_scales(const Target& target) const;

    // Two stages in one call: what a step does before and after the reduction.
    void begin_amax(const Target& target) const;
    void scale_cast(const Target& target) const;

  private:
    void amax(const Target& target) const;
    void cast(const Target& target) const;
    int64_t strips_before(int64_t weight, int64_t row) const;
    void cast_strips(const Target& target, int64_t begin, int64_t end) const;

    bool on_cpu_;
    std::vector<WeightDescriptor> weights_;
    CastTable table_{};
};

// The packed transposes of a list of weights in one launch.
class TransposePlan {
  public:
    TransposePlan(const TransposePlan&) = delete;
    TransposePlan& operator=(const TransposePlan&) = delete;
    TransposePlan(bool on_cpu, std::vector<TransposeDescriptor> items);

    std::string descriptor_bytes() const;
    void set_device_descriptors(uintptr_t address);
    void run(const Target& target) const;

  private:
    bool on_cpu_;
    std::vector<TransposeDescriptor> items_;
    TransposeTable table_{};
};

}  // namespace zerofp4
