#pragma once
// How this thread's processor rounds and what it does with denormals.

#include "common/macros.h"

namespace zerofp4::cpu {

// The register that says so, and its value for rounding to nearest, with denormals, without exceptions. What
// lies in memory is not read before the register is written, nor written after that.
#if defined(__SSE__)
using FloatRegister = uint32_t;
constexpr FloatRegister kPlainFloats = 0x1f80u;
ZEROFP4_HOST FloatRegister read_float_register() {
    FloatRegister bits;
    asm volatile("stmxcsr %0" : "=m"(bits));
    return bits;
}
ZEROFP4_HOST void write_float_register(FloatRegister bits) {
    asm volatile("ldmxcsr %0" : : "m"(bits) : "memory");
}
#elif defined(__aarch64__)
using FloatRegister = uint64_t;
constexpr FloatRegister kPlainFloats = 0;
ZEROFP4_HOST FloatRegister read_float_register() {
    FloatRegister bits;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
}
ZEROFP4_HOST void write_float_register(FloatRegister bits) {
    asm volatile("msr fpcr, %0" : : "r"(bits) : "memory");
}
#else  // none that flushes denormals, as on RISC-V
using FloatRegister = uint32_t;
constexpr FloatRegister kPlainFloats = 0;
ZEROFP4_HOST FloatRegister read_float_register() { return 0; }
ZEROFP4_HOST void write_float_register(FloatRegister) {}
#endif

// Plain floats for as long as it lives, then what was set before. The caller may have told the processor to
// flush denormals to zero (torch.set_flush_denormal), which would change the scales of small values, and in
// its own thread only. Every thread that computes has one of these: the dispatcher's, and each worker.
class FloatMode {
  public:
    ZEROFP4_HOST FloatMode() : previous_(read_float_register()) { write_float_register(kPlainFloats); }
    ZEROFP4_HOST ~FloatMode() { write_float_register(previous_); }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

  private:
    FloatRegister previous_;
};

}  // namespace zerofp4::cpu
