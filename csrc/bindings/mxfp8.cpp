// MXFP8: one matrix, and a list of them.

#include "bindings/bindings.h"
#include "bindings/list_class.h"
#include "dispatch/lists.h"

namespace zerofp4::bindings {
namespace {

using Mxfp8Copy = std::array<uintptr_t, 3>;  // data, compact scale, swizzled scale

void quantize_mxfp8(const Target& target, uintptr_t input, int dtype, int64_t rows, int64_t cols,
                    uintptr_t skip, const Mxfp8Copy& rowwise, const Mxfp8Copy& columnwise) {
    const Mxfp8Args args{pointer<const void>(input),
                         static_cast<DType>(dtype),
                         rows,
                         cols,
                         pointer<const float>(skip),
                         pointer<uint8_t>(rowwise[0]),
                         pointer<uint8_t>(rowwise[1]),
                         pointer<uint8_t>(rowwise[2]),
                         pointer<uint8_t>(columnwise[0]),
                         pointer<uint8_t>(columnwise[1]),
                         pointer<uint8_t>(columnwise[2])};
    on_either(target, [&](const auto& kernels, auto where) { kernels.quantize_mxfp8(args, where); });
}

}  // namespace

void bind_mxfp8(py::module_& m) {
    // data, scale, output, rows, cols, columnwise, layout
    list_class<Mxfp8DequantizeList, int>(m, "Mxfp8DequantizeList", 7, "dtype", [](const int64_t* f) {
        return mxfp8_dequantize_descriptor(f[0], f[1], f[2], f[3], f[4], f[5] != 0, static_cast<int>(f[6]));
    });
    m.def("quantize_mxfp8", &quantize_mxfp8, NoGil());
}

}  // namespace zerofp4::bindings
