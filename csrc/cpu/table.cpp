// The table of functions of one instruction set.

#include <type_traits>

#include "cpu/kernels.h"

#define ZEROFP4_STRING(x) #x
#define ZEROFP4_NAME(x) ZEROFP4_STRING(x)

// Every field of the table but the first, which is the function of that name.
#define ZEROFP4_EACH(DO) \
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
    DO(pad_scale)        \
    DO(unpad_scale)      \
    DO(quantize_mxfp8)   \
    DO(dequantize_mxfp8) \
    DO(adamw_update)     \
    DO(compact_update)   \
    DO(average)          \
    DO(round_means)      \
    DO(average_means)    \
    DO(find_nonfinite)   \
    DO(add_squares)      \
    DO(decide)           \
    DO(widen)

namespace zerofp4::cpu::ZEROFP4_ISA {

#define ZEROFP4_DECLARE(name) std::remove_pointer_t<decltype(Kernels::name)> name;
ZEROFP4_EACH(ZEROFP4_DECLARE)

constexpr Kernels make_table() {
    Kernels table{};
    table.isa = ZEROFP4_NAME(ZEROFP4_ISA);
#define ZEROFP4_SET(name) table.name = &name;
    ZEROFP4_EACH(ZEROFP4_SET)
    return table;
}

#define ZEROFP4_COUNT(name) +1
static_assert(sizeof(Kernels) == (1 ZEROFP4_EACH(ZEROFP4_COUNT)) * sizeof(void*), "a field is not set");

extern const Kernels kTable;
constexpr Kernels kTable = make_table();

}  // namespace zerofp4::cpu::ZEROFP4_ISA
