#include "dispatch/update.h"

#include <algorithm>
#include <stdexcept>

#include "common/compact.h"
#include "dispatch/blocks.h"
#include "dispatch/plan.h"

namespace zerofp4 {
namespace {

// Kernels count rows and columns in 32 bits, up to the end of the last strip.
void check_extents(const AdamWDescriptor& tensor) {
    constexpr int64_t kMost = INT32_MAX - kCompactStripColumns;
    if (std::max(tensor.rows, tensor.cols) <= kMost) return;
    throw std::invalid_argument("compact state of a matrix [" + std::to_string(tensor.rows) + ", " +
                                std::to_string(tensor.cols) + "]: it may have at most " +
                                std::to_string(kMost) + " rows or columns; reshape it, or use full state");
}

}  // namespace

AdamWPlan::AdamWPlan(bool on_cpu, bool compact, std::vector<AdamWDescriptor> tensors, uintptr_t reduced)
    : on_cpu_(on_cpu), compact_(compact), tensors_(std::move(tensors)), steps_(on_cpu ? tensors_.size() : 0) {
    const int64_t columns = compact && !on_cpu ? kCompactStripColumns : kStripColumns;
    for (AdamWDescriptor& tensor : tensors_) {
        if (compact) check_extents(tensor);
        table_.strip_units = partition_strips(tensor, table_.strip_units, columns);
    }
    table_.tensors = on_cpu_ ? tensors_.data() : nullptr;
    table_.steps = steps_.data();
    table_.count = static_cast<int64_t>(tensors_.size());
    table_.reduced = reinterpret_cast<float*>(reduced);
}

std::string AdamWPlan::descriptor_bytes() const {
    return bytes_of(tensors_) + std::string(tensors_.size() * sizeof(AdamWStep), '\0') +
           bytes_of(first_items(tensors_, &AdamWDescriptor::strip_begin, table_.strip_units, kBlockStrips));
}

void AdamWPlan::set_device_descriptors(uintptr_t address) {
    if (on_cpu_) return;
    table_.tensors = reinterpret_cast<const AdamWDescriptor*>(address);
    table_.steps = reinterpret_cast<AdamWStep*>(address + tensors_.size() * sizeof(AdamWDescriptor));
    table_.strip_items = reinterpret_cast<const int32_t*>(table_.steps + tensors_.size());
}

void AdamWPlan::begin(const Target& target, const AdamWOptions& options, int64_t first,
                      const std::vector<uintptr_t>& gradients) {
    dispatch(
        target,
        [&](const cpu::Kernels&, int) {
            for (size_t i = 0; i < gradients.size(); ++i) {
                const void* gradient = reinterpret_cast<const void*>(gradients[i]);
                steps_[first + i] = adamw_scalars(options, tensors_[first + i], gradient);
            }
        },
        [&](const cuda::Kernels& k, cudaStream_t stream) {
            const int64_t count = static_cast<int64_t>(gradients.size());
            k.adamw_begin(table_, options, first, gradients.data(), count, stream);
        });
}

void AdamWPlan::update(const Target& target, const GradientPieces& pieces) const {
    AdamWTable table = table_;
    table.pieces = pieces;
    dispatch(
        target,
        [&](const cpu::Kernels& k, int threads) {
            (compact_ ? k.compact_update : k.adamw_update)(table, threads);
        },
        [&](const cuda::Kernels& k, cudaStream_t stream) {
            (compact_ ? k.compact_update : k.adamw_update)(table, stream);
        });
}

}  // namespace zerofp4
