// Floats to other formats, element by element, with the conversions that the other operations use.

#include "common/e2m1.h"
#include "common/e4m3.h"
#include "cpu/device/parallel.h"
#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int64_t kElementGrain = 1 << 15;

template <class Out, class Function>
void convert_each(const ConvertArgs& args, int threads, const Function& function) {
    Out* output = static_cast<Out*>(args.output);
    parallel_shares(args.numel, threads, kElementGrain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) output[i] = function(args.input[i] * args.factor);
    });
}

}  // namespace

void convert(const ConvertArgs& args, int threads) {
    switch (args.format) {
        case Format::kE2M1:
            return convert_each<uint8_t>(args, threads,
                                         [](float x) { return static_cast<uint8_t>(float_to_e2m1(x)); });
        case Format::kE4M3:
            return convert_each<uint8_t>(args, threads,
                                         [](float x) { return static_cast<uint8_t>(float_to_e4m3(x)); });
        case Format::kBFloat16:
            return convert_each<BFloat16>(args, threads, [](float x) { return to_bfloat16(x); });
        case Format::kFloat16:
            return convert_each<Float16>(args, threads, [](float x) { return to_float16(x); });
    }
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
