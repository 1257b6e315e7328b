// Operations on lists of matrices: dequantize and scale layouts.

#include "dispatch/lists.h"

#include "bindings/bindings.h"
#include "bindings/list_class.h"

namespace zerofp4::bindings {
namespace {

// A list of one, without an object that Python would have to make for it.
void dequantize(const Target& target, uintptr_t data, uintptr_t scale, uintptr_t amax, uintptr_t output,
                int64_t rows, int64_t cols, bool columnwise, int64_t block_rows, int layout, int e4m3_max,
                int dtype) {
    const DequantizeDescriptor item = dequantize_descriptor(data, scale, amax, output, rows, cols, columnwise,
                                                            block_rows, layout, e4m3_max);
    DequantizeList(target.is_cpu(), {item}, dtype).run(target);
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
    // input, output, rows, columns, block_rows, layout
    list_class<ScaleLayoutList, bool>(m, "ScaleLayoutList", 6, "pad", [](const int64_t* f) {
        return scale_layout_descriptor(f[0], f[1], f[2], f[3], f[4], static_cast<int>(f[5]));
    });
}

}  // namespace zerofp4::bindings
