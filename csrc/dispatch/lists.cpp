#include "dispatch/lists.h"

#include "common/scale.h"

namespace zerofp4 {
namespace {

bool is_multiple(uintptr_t address, int64_t bytes) { return address % static_cast<uintptr_t>(bytes) == 0; }

template <class T>
uintptr_t address_of(const T* p) {
    return reinterpret_cast<uintptr_t>(p);
}

int shift_of(int64_t block_rows, int layout) { return layout == kCompact && block_rows == kBlock ? 4 : 0; }

// Cuts the item into units; says how many they are.
int64_t cut(Mxfp8DequantizeDescriptor& item, DType dtype, bool on_cpu) {
    const int64_t vector = 16 / size_of(dtype);
    item.aligned = item.cols % vector == 0 && is_multiple(address_of(item.output), 16) &&
                   is_multiple(address_of(item.data), vector) &&
                   (!item.columnwise || is_multiple(address_of(item.scale), vector));
    const int64_t across = ceil_div(item.cols, on_cpu ? kMxfp8PieceColumns : kWarpBytes / size_of(dtype));
    item.across = static_cast<uint32_t>(across);
    if (on_cpu) return item.rows * across;
    return ceil_div(ceil_div(item.rows, kMxfp8WarpRows) * across, kUnitWarps);
}

int64_t dequantize_units(const DequantizeDescriptor& item, DType dtype, bool on_cpu) {
    if (on_cpu) return ceil_div(item.rows, kValueRows) * ceil_div(item.cols, kValueColumns);
    const int64_t rows = item.columnwise ? kWarpSquare : kWarpRows;
    const int64_t cols = item.columnwise ? kWarpSquare : kWarpBytes / size_of(dtype);
    return ceil_div(ceil_div(item.rows, rows) * ceil_div(item.cols, cols), kUnitWarps);
}

}  // namespace

DequantizeDescriptor dequantize_descriptor(uintptr_t data, uintptr_t scale, uintptr_t amax, uintptr_t output,
                                           int64_t rows, int64_t cols, bool columnwise, int64_t block_rows,
                                           int layout, int e4m3_max) {
    const int64_t columns = ceil_div(columnwise ? rows : cols, kBlock);
    const int64_t pitch = layout == kCompact ? columns : round_up(columns, kAtomColumns);
    DequantizeDescriptor item{};
    item.data = reinterpret_cast<const uint8_t*>(data);
    item.scale = reinterpret_cast<const uint8_t*>(scale);
    item.amax = reinterpret_cast<const float*>(amax);
    item.output = reinterpret_cast<void*>(output);
    item.rows = rows;
    item.cols = cols;
    item.columnwise = columnwise;
    item.factor_bits = to_bits(decode_factor(static_cast<float>(e4m3_max)));
    item.scale_pitch = static_cast<uint32_t>(pitch);
    item.scale_shift = shift_of(block_rows, layout);
    item.swizzled = layout == kSwizzled;
    return item;
}

DequantizeList::DequantizeList(bool on_cpu, std::vector<DequantizeDescriptor> items, int dtype)
    : ItemList(on_cpu, std::move(items),
               [&](DequantizeDescriptor& item) {
                   const int64_t vector = 16 / size_of(static_cast<DType>(dtype));
                   const bool whole =
                       item.cols % vector == 0 && (!item.columnwise || item.rows % kBlock == 0);
                   item.aligned = whole && is_multiple(address_of(item.output), 16) &&
                                  is_multiple(address_of(item.data), item.columnwise ? 8 : vector / 2);
                   return dequantize_units(item, static_cast<DType>(dtype), on_cpu);
               }),
      dtype_(static_cast<DType>(dtype)) {}

void DequantizeList::run(const Target& target) const {
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.dequantize(table_, dtype_, threads); },
        [&](const cuda::Kernels& k, cudaStream_t stream) {
            k.dequantize(table_, dtype_, items_.data(), stream);
        });
}

void DequantizeList::run_product(const Target& target, const ProductScale& scale) const {
    dispatch(
        target,
        [&](const cpu::Kernels& k, int threads) {
            *scale.alpha = scale.value();
            k.dequantize(table_, dtype_, threads);
        },
        [&](const cuda::Kernels& k, cudaStream_t stream) {
            k.product_values(table_, dtype_, scale, items_.data(), stream);
        });
}

ProductScale product_scale(uintptr_t amax_a, int e4m3_max_a, uintptr_t amax_b, int e4m3_max_b,
                           uintptr_t alpha) {
    return {{reinterpret_cast<const float*>(amax_a), reinterpret_cast<const float*>(amax_b)},
            {decode_factor(static_cast<float>(e4m3_max_a)), decode_factor(static_cast<float>(e4m3_max_b))},
            reinterpret_cast<float*>(alpha)};
}

Mxfp8DequantizeDescriptor mxfp8_dequantize_descriptor(uintptr_t data, uintptr_t scale, uintptr_t output,
                                                      int64_t rows, int64_t cols, bool columnwise,
                                                      int layout) {
    Mxfp8DequantizeDescriptor item{};
    item.data = reinterpret_cast<const uint8_t*>(data);
    item.scale = reinterpret_cast<const uint8_t*>(scale);
    item.output = reinterpret_cast<void*>(output);
    item.rows = rows;
    item.cols = cols;
    item.columnwise = columnwise;
    item.swizzled = layout == kSwizzled;
    return item;
}

Mxfp8DequantizeList::Mxfp8DequantizeList(bool on_cpu, std::vector<Mxfp8DequantizeDescriptor> items, int dtype)
    : ItemList(on_cpu, std::move(items),
               [&](Mxfp8DequantizeDescriptor& item) { return cut(item, static_cast<DType>(dtype), on_cpu); }),
      dtype_(static_cast<DType>(dtype)) {}

void Mxfp8DequantizeList::run(const Target& target) const {
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.dequantize_mxfp8(table_, dtype_, threads); },
        [&](const cuda::Kernels& k, cudaStream_t stream) {
            k.dequantize_mxfp8(table_, dtype_, items_.data(), stream);
        });
}

ScaleLayoutDescriptor scale_layout_descriptor(uintptr_t input, uintptr_t output, int64_t rows,
                                              int64_t columns, int64_t block_rows, int layout) {
    const bool aligned = columns % 16 == 0 && is_multiple(input, 16) && is_multiple(output, 16);
    ScaleLayoutDescriptor item{};
    item.input = reinterpret_cast<const uint8_t*>(input);
    item.output = reinterpret_cast<uint8_t*>(output);
    item.rows = rows;
    item.columns = columns;
    item.shift = shift_of(block_rows, kCompact);
    item.layout = static_cast<ScaleLayout>(layout);
    item.aligned = aligned;
    return item;
}

ScaleLayoutList::ScaleLayoutList(bool on_cpu, std::vector<ScaleLayoutDescriptor> items, bool pad)
    : ItemList(on_cpu, std::move(items),
               [](const ScaleLayoutDescriptor& item) {
                   return ceil_div(item.rows, kLayoutRows) * ceil_div(item.columns, kLayoutColumns);
               }),
      pad_(pad) {}

void ScaleLayoutList::run(const Target& target) const {
    dispatch(
        target,
        [&](const cpu::Kernels& k, int threads) { (pad_ ? k.pad_scale : k.unpad_scale)(table_, threads); },
        [&](const cuda::Kernels& k, cudaStream_t stream) {
            (pad_ ? k.pad_scale : k.unpad_scale)(table_, items_.data(), stream);
        });
}

}  // namespace zerofp4
