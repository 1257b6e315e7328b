#include "dispatch/gather.h"

#include "dispatch/blocks.h"

namespace zerofp4 {
namespace {

constexpr size_t kFields = 4;

// Items of their integers, cut into units.
std::vector<GatherDescriptor> cut(const std::vector<int64_t>& words, GatherItems& all) {
    if (words.size() % kFields != 0) throw std::invalid_argument("an item of a gather has four integers");
    std::vector<GatherDescriptor> items;
    items.reserve(words.size() / kFields);
    for (size_t i = 0; i < words.size(); i += kFields) {
        GatherDescriptor item{};
        item.input = reinterpret_cast<const uint8_t*>(words[i]);
        item.output = reinterpret_cast<uint8_t*>(words[i + 1]);
        item.low = reinterpret_cast<const uint8_t*>(words[i + 2]);
        item.bytes = words[i + 3];
        item.unit_begin = all.units;
        all.units += gather_units(item);
        items.push_back(item);
    }
    all.count = static_cast<int64_t>(items.size());
    return items;
}

std::string units_of(const std::vector<GatherDescriptor>& items, const GatherItems& all) {
    return bytes_of(first_items(items, &GatherDescriptor::unit_begin, all.units, 1));
}

}  // namespace

GatherPlan::GatherPlan(bool on_cpu, const std::vector<int64_t>& own, const std::vector<int64_t>& received,
                       uintptr_t staging, int64_t slot, int rank, int ranks, uintptr_t reduced, float hash,
                       uintptr_t status)
    : on_cpu_(on_cpu), own_(cut(own, table_.own)), received_(cut(received, table_.received)) {
    if (on_cpu_) table_.own.items = own_.data(), table_.received.items = received_.data();
    table_.staging = reinterpret_cast<uint8_t*>(staging);
    table_.slot = slot;
    table_.rank = rank;
    table_.ranks = ranks;
    table_.reduced = reinterpret_cast<const float*>(reduced);
    table_.hash = hash;
    table_.status = reinterpret_cast<int32_t*>(status);
}

std::string GatherPlan::descriptor_bytes() const {
    return bytes_of(own_) + bytes_of(received_) + units_of(own_, table_.own) +
           units_of(received_, table_.received);
}

void GatherPlan::set_device_descriptors(uintptr_t address) {
    if (on_cpu_) return;
    table_.own.items = reinterpret_cast<const GatherDescriptor*>(address);
    table_.received.items = table_.own.items + own_.size();
    table_.own.unit_items = reinterpret_cast<const int32_t*>(table_.received.items + received_.size());
    table_.received.unit_items = table_.own.unit_items + table_.own.units;
}

void GatherPlan::pack(const Target& target, int32_t state) const {
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.gather_pack(table_, state, threads); },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.gather_pack(table_, state, stream); });
}

void GatherPlan::unpack(const Target& target) const {
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.gather_unpack(table_, threads); },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.gather_unpack(table_, stream); });
}

}  // namespace zerofp4
