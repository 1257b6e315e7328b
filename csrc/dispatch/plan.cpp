#include "dispatch/plan.h"

#include <algorithm>
#include <stdexcept>

#include "dispatch/blocks.h"

namespace zerofp4 {
namespace {

int64_t scale_squares(const WeightDescriptor& weight) {
    return ceil_div(weight.rows, kBlock * kScaleTiles) * ceil_div(weight.cols, kBlock * kScaleTiles);
}

}  // namespace

int64_t partition_strips(ShardGeometry& weight, int64_t begin, int64_t columns) {
    weight.strip_begin = begin;
    weight.first_strip = weight.first_chunk = weight.chunks = 0;
    if (weight.numel == 0) return begin;
    const int64_t last = weight.start + weight.numel - 1;
    const int64_t first_row = weight.start / weight.cols;
    const int64_t last_row = last / weight.cols;
    weight.first_strip = first_row / kBlock;
    weight.chunks = ceil_div(weight.cols, columns);
    if (first_row == last_row) {
        weight.first_chunk = weight.start % weight.cols / columns;
        weight.chunks = last % weight.cols / columns - weight.first_chunk + 1;
    }
    return begin + (last_row / kBlock - weight.first_strip + 1) * weight.chunks;
}

void partition(bool on_cpu, std::vector<WeightDescriptor>& weights, CastTable& table) {
    table.strip_units = table.scale_units = 0;
    for (WeightDescriptor& weight : weights) {
        weight.scale_begin = table.scale_units;
        const int64_t squares = scale_squares(weight);
        // Where scales come with the codes, a unit has the amax to write.
        if (weight.tile_offset >= 0) table.scale_units += ceil_div(squares, on_cpu ? 1 : kWarpSquares);
        if (weight.tile_offset < 0 && squares > 0) ++table.scale_units;
        table.has_kind[kind_of(weight)] = true;
        table.strip_units = partition_strips(weight, table.strip_units);
    }
    table.weights = weights.data();
    table.count = static_cast<int64_t>(weights.size());
}

CastPlan::CastPlan(bool on_cpu, std::vector<WeightDescriptor> weights, uintptr_t reduced,
                   int64_t reduced_numel, float hash, uintptr_t found_inf, uintptr_t status)
    : on_cpu_(on_cpu), weights_(std::move(weights)) {
    partition(on_cpu, weights_, table_);
    if (!on_cpu_) table_.weights = nullptr;
    table_.reduced = reinterpret_cast<float*>(reduced);
    table_.reduced_numel = reduced_numel;
    table_.hash = hash;
    table_.found_inf = reinterpret_cast<float*>(found_inf);
    table_.status = reinterpret_cast<int32_t*>(status);
}

std::string CastPlan::descriptor_bytes() const {
    return bytes_of(weights_) +
           bytes_of(first_items(weights_, &WeightDescriptor::strip_begin, table_.strip_units, kBlockStrips)) +
           bytes_of(first_items(weights_, &WeightDescriptor::scale_begin, table_.scale_units, kBlockScales));
}

void CastPlan::set_device_descriptors(uintptr_t address) {
    if (on_cpu_) return;
    table_.weights = reinterpret_cast<const WeightDescriptor*>(address);
    table_.strip_items = reinterpret_cast<const int32_t*>(table_.weights + weights_.size());
    table_.scale_items = table_.strip_items + ceil_div(table_.strip_units, kBlockStrips);
}

void CastPlan::begin(const Target& target, bool error) const {
    const float word = error ? kInf : 0.0f;
    dispatch(
        target, [&](const cpu::Kernels&, int) { cpu::cast_begin(table_, word); },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.cast_begin(table_, word, stream); });
}

void CastPlan::amax(const Target& target) const {
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.partial_amax(table_, threads); },
        [&](const cuda::Kernels& k, cudaStream_t stream) {
            k.partial_amax(table_, weights_.data(), stream);
        });
}

void CastPlan::scale(const Target& target) const {
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.fused_scale(table_, threads); },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.fused_scale(table_, weights_.data(), stream); });
}

void CastPlan::cast(const Target& target) const { cast_strips(target, 0, table_.strip_units); }

void CastPlan::cast_before(const Target& target, int64_t weight, int64_t row) const {
    cast_strips(target, 0, strips_before(weight, row));
}

void CastPlan::cast_from(const Target& target, int64_t weight, int64_t row) const {
    cast_strips(target, strips_before(weight, row), table_.strip_units);
}

// Whole thread blocks, with the strips of all rows before that one and of all weights before its own.
int64_t CastPlan::strips_before(int64_t weight, int64_t row) const {
    if (weight < 0 || weight > table_.count) throw std::out_of_range("no weight of this plan");
    if (row < 0 || row > (weight == table_.count ? 0 : weights_[weight].rows))
        throw std::out_of_range("no row of this weight");
    if (weight == table_.count) return table_.strip_units;
    const ShardGeometry& own = weights_[weight];
    const int64_t end = weight + 1 == table_.count ? table_.strip_units : weights_[weight + 1].strip_begin;
    const int64_t down = std::max<int64_t>(ceil_div(row, kBlock) - own.first_strip, 0);
    const int64_t strips = std::min(own.strip_begin + down * own.chunks, end);
    return std::min(round_up(strips, kBlockStrips), table_.strip_units);
}

void CastPlan::cast_strips(const Target& target, int64_t begin, int64_t end) const {
    CastTable table = table_;
    table.cast_begin = begin;
    table.cast_end = end;
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.partial_cast(table, threads); },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.partial_cast(table, weights_.data(), stream); });
}

void CastPlan::spread_scales(const Target& target) const {
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.spread_scales(table_, threads); },
        [&](const cuda::Kernels& k, cudaStream_t stream) {
            k.spread_scales(table_, weights_.data(), stream);
        });
}

void CastPlan::begin_amax(const Target& target) const {
    begin(target, false);
    amax(target);
}

void CastPlan::scale_cast(const Target& target) const {
    scale(target);
    cast(target);
}

TransposePlan::TransposePlan(bool on_cpu, std::vector<TransposeDescriptor> items)
    : on_cpu_(on_cpu), items_(std::move(items)) {
    const int64_t tile = on_cpu ? kTransposeTile : kBlockTile;
    for (TransposeDescriptor& item : items_) {
        item.tile_begin = table_.tiles;
        table_.tiles += ceil_div(item.rows, tile) * ceil_div(item.cols, tile);
    }
    table_.items = on_cpu_ ? items_.data() : nullptr;
    table_.count = static_cast<int64_t>(items_.size());
}

std::string TransposePlan::descriptor_bytes() const {
    return bytes_of(items_) +
           bytes_of(first_items(items_, &TransposeDescriptor::tile_begin, table_.tiles, 1));
}

void TransposePlan::set_device_descriptors(uintptr_t address) {
    if (on_cpu_) return;
    table_.items = reinterpret_cast<const TransposeDescriptor*>(address);
    table_.tile_items = reinterpret_cast<const int32_t*>(table_.items + items_.size());
}

void TransposePlan::run(const Target& target) const {
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.transpose(table_, threads); },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.transpose(table_, items_.data(), stream); });
}

}  // namespace zerofp4
