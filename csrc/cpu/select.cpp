// Compiled once: the choice of an instruction set, and the operation that is too small to need one.

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/kernels.h"

namespace zerofp4::cpu {

namespace baseline {
extern const Kernels kTable;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kTable;
}
namespace avx512 {
extern const Kernels kTable;
}
#endif

namespace {

struct Candidate {
    const Kernels* kernels;
    bool supported;
};

const Kernels& choose() {
    // From the most to the least preferred.
    const Candidate candidates[] = {
#if defined(__x86_64__)
        {&avx512::kTable, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                              __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("bmi2") &&
                              __builtin_cpu_supports("fma")},
        {&avx2::kTable,
         __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma")},
#endif
        {&baseline::kTable, true},
    };
    const char* forced = std::getenv("ZEROFP4_CPU_ISA");
    std::string runnable;
    for (const Candidate& candidate : candidates) {
        if (!candidate.supported) continue;
        if (forced == nullptr || std::string(forced) == candidate.kernels->isa) return *candidate.kernels;
        runnable += std::string(runnable.empty() ? "" : ", ") + candidate.kernels->isa;
    }
    throw std::runtime_error("ZEROFP4_CPU_ISA: this build runs " + runnable + " on this processor, not '" +
                             forced + "'");
}

}  // namespace

const Kernels& kernels() {
    static const Kernels& chosen = choose();
    return chosen;
}

void cast_begin(const CastTable& table, float error) {
    std::memset(table.reduced, 0, static_cast<size_t>(table.reduced_numel) * sizeof(float));
    for (int i = 0; i < kHeaderWords; ++i) table.reduced[i] = header_word(i, error, table.hash);
}

}  // namespace zerofp4::cpu
