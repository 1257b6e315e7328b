#pragma once
// Operations on a list of tensors in one launch, without a plan.

#include <string>
#include <vector>

#include "common/args/dequantize.h"
#include "common/args/mxfp8.h"
#include "common/args/scale_layout.h"
#include "dispatch/blocks.h"
#include "dispatch/target.h"

namespace zerofp4 {

// The items of a list that is not empty, cut into units. Holds addresses only; whoever builds it keeps the
// memory alive.
template <class Item>
class ItemList {
  public:
    ItemList(const ItemList&) = delete;
    ItemList& operator=(const ItemList&) = delete;

    int64_t count() const { return table_.count; }
    // A list for CUDA of more than kArgumentItems items needs its descriptors in device memory: these bytes,
    // copied there before the launch.
    std::string descriptor_bytes() const { return bytes_of(items_); }
    void set_device_descriptors(uintptr_t address) { table_.items = reinterpret_cast<const Item*>(address); }

  protected:
    template <class Units>
    ItemList(bool on_cpu, std::vector<Item> items, const Units& units_of) : items_(std::move(items)) {
        for (Item& item : items_) {
            item.unit_begin = table_.units;
            table_.units += units_of(item);
        }
        table_.items = on_cpu ? items_.data() : nullptr;
        table_.count = static_cast<int64_t>(items_.size());
    }

    std::vector<Item> items_;
    ItemTable<Item> table_{};
};

// `rows` and `cols` are those of the values, also of a columnwise copy.
DequantizeDescriptor dequantize_descriptor(uintptr_t data, uintptr_t scale, uintptr_t amax, uintptr_t output,
                                           int64_t rows, int64_t cols, bool columnwise, int64_t block_rows,
                                           int layout, int e4m3_max);

// The values of a list of quantized matrices, all of one dtype.
class DequantizeList : public ItemList<DequantizeDescriptor> {
  public:
    DequantizeList(bool on_cpu, std::vector<DequantizeDescriptor> items, int dtype);
    void run(const Target& target) const;
    // The same, and the alpha of a product.
    void run_product(const Target& target, const ProductScale& scale) const;

  private:
    DType dtype_;
};

// Of two amaxes, and where alpha goes.
ProductScale product_scale(uintptr_t amax_a, int e4m3_max_a, uintptr_t amax_b, int e4m3_max_b,
                           uintptr_t alpha);

Mxfp8DequantizeDescriptor mxfp8_dequantize_descriptor(uintptr_t data, uintptr_t scale, uintptr_t output,
                                                      int64_t rows, int64_t cols, bool columnwise,
                                                      int layout);

// The values of a list of matrices in MXFP8, all of one dtype.
class Mxfp8DequantizeList : public ItemList<Mxfp8DequantizeDescriptor> {
  public:
    Mxfp8DequantizeList(bool on_cpu, std::vector<Mxfp8DequantizeDescriptor> items, int dtype);
    void run(const Target& target) const;

  private:
    DType dtype_;
};

// `columns` are those of the scales, without padding.
ScaleLayoutDescriptor scale_layout_descriptor(uintptr_t input, uintptr_t output, int64_t rows,
                                              int64_t columns, int64_t block_rows, int layout);

// Compact scales of a list of matrices to padded layouts (`pad`), or back.
class ScaleLayoutList : public ItemList<ScaleLayoutDescriptor> {
  public:
    ScaleLayoutList(bool on_cpu, std::vector<ScaleLayoutDescriptor> items, bool pad);
    void run(const Target& target) const;

  private:
    bool pad_;
};

}  // namespace zerofp4
