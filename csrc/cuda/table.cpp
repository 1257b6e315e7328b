// The table of the CUDA operations.

#include <type_traits>

#include "cuda/kernels.h"

// Every field of the table, which is the function of that name.
#define ZEROFP4_EACH(DO) \
    DO(enter_device)     \
    DO(leave_device)     \
    DO(cast_begin)       \
    DO(partial_amax)     \
    DO(fused_scale)      \
    DO(partial_cast)     \
    DO(spread_scales)    \
    DO(transpose)        \
    DO(gather_pack)      \
    DO(gather_unpack)    \
    DO(tensor_amax)      \
    DO(quantize)         \
    DO(grouped_amax)     \
    DO(quantize_grouped) \
    DO(grouped_values)   \
    DO(dequantize)       \
    DO(product_values)   \
    DO(pad_scale)        \
    DO(unpad_scale)      \
    DO(quantize_mxfp8)   \
    DO(dequantize_mxfp8) \
    DO(adamw_begin)      \
    DO(adamw_update)     \
    DO(compact_update)   \
    DO(average)          \
    DO(round_means)      \
    DO(average_means)    \
    DO(find_nonfinite)   \
    DO(add_squares)      \
    DO(decide)           \
    DO(widen)            \
    DO(barrier)          \
    DO(load_cublaslt)    \
    DO(find_product)

namespace zerofp4::cuda {

#if defined(ZEROFP4_CUDA_VERSION)

#define ZEROFP4_DECLARE(name) std::remove_pointer_t<decltype(Kernels::name)> name;
ZEROFP4_EACH(ZEROFP4_DECLARE)

#define ZEROFP4_COUNT(name) +1
static_assert(sizeof(Kernels) == (0 ZEROFP4_EACH(ZEROFP4_COUNT)) * sizeof(void*), "a field is not set");

constexpr Kernels make_table() {
    Kernels table{};
#define ZEROFP4_SET(name) table.name = &name;
    ZEROFP4_EACH(ZEROFP4_SET)
    return table;
}

const Kernels* kernels() {
    static constexpr Kernels kTable = make_table();
    return &kTable;
}

#else

const Kernels* kernels() { return nullptr; }

#endif

}  // namespace zerofp4::cuda
