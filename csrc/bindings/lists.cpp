// Operations on lists of matrices: dequantize and scale layouts.

#include "dispatch/lists.h"

#include "bindings/bindings.h"
#include "bindings/list_class.h"
#include "common/e4m3.h"

namespace zerofp4::bindings {
namespace {

// data, scale, output, rows, cols, block_rows, amax, e4m3_max
using ProductOperand = std::tuple<uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t, int64_t, uintptr_t, int>;

// A list of one, without an object that Python would have to make for it.
void dequantize(const Target& target, uintptr_t data, uintptr_t scale, uintptr_t amax, uintptr_t output,
                int64_t rows, int64_t cols, bool columnwise, int64_t block_rows, int layout, int e4m3_max,
                int dtype) {
    const DequantizeDescriptor item = dequantize_descriptor(data, scale, amax, output, rows, cols, columnwise,
                                                            block_rows, layout, e4m3_max);
    DequantizeList(target.is_cpu(), {item}, dtype).run(target);
}

// The operands of a product in one launch, without their global scales: [rows, cols] and compact scales each.
void product_values(const Target& target, int dtype, const std::array<ProductOperand, 2>& operands,
                    uintptr_t neutral_amax, uintptr_t alpha) {
    std::vector<DequantizeDescriptor> items;
    for (const auto& [data, scale, output, rows, cols, block_rows, amax, e4m3_max] : operands) {
        items.push_back(dequantize_descriptor(data, scale, neutral_amax, output, rows, cols, false,
                                              block_rows, kCompact, static_cast<int>(kE4M3Max)));
    }
    const auto& [a, b] = operands;
    const ProductScale scale =
        product_scale(std::get<6>(a), std::get<7>(a), std::get<6>(b), std::get<7>(b), alpha);
    DequantizeList(target.is_cpu(), std::move(items), dtype).run_product(target, scale);
}

}  // namespace

void bind_lists(py::module_& m) {
    m.attr("ARGUMENT_ITEMS") = kArgumentItems;
    // data, scale, amax, output, rows, cols, columnwise, block_rows, layout, e4m3_max
    list_class<DequantizeList, int>(m, "DequantizeList", 10, "dtype", [](const int64_t* f) {
        return dequantize_descriptor(f[0], f[1], f[2], f[3], f[4], f[5], f[6] != 0, f[7],
                                     static_cast<int>(f[8]), static_cast<int>(f[9]));
    });
    m.def("dequantize", &dequantize, NoGil());
    m.def("product_values", &product_values, NoGil());
    // input, output, rows, columns, block_rows, layout
    list_class<ScaleLayoutList, bool>(m, "ScaleLayoutList", 6, "pad", [](const int64_t* f) {
        return scale_layout_descriptor(f[0], f[1], f[2], f[3], f[4], static_cast<int>(f[5]));
    });
}

}  // namespace zerofp4::bindings
