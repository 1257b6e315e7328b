#include "conversions.h"

#include "common/dtype.h"
#include "common/e2m1.h"
#include "common/e4m3.h"

using namespace zerofp4;

extern "C" int convert(const float* input, float factor, int64_t numel, int format, void* output, void*) {
    uint8_t* bytes = static_cast<uint8_t*>(output);
    uint16_t* halves = static_cast<uint16_t*>(output);
    // A loop for each, which the compiler vectorizes as those of the operations.
    switch (format) {
        case kE2M1:
            for (int64_t i = 0; i < numel; ++i)
                bytes[i] = static_cast<uint8_t>(float_to_e2m1(input[i] * factor));
            break;
        case kE4M3:
            for (int64_t i = 0; i < numel; ++i)
                bytes[i] = static_cast<uint8_t>(float_to_e4m3(input[i] * factor));
            break;
        case kBFloat16:
            for (int64_t i = 0; i < numel; ++i) halves[i] = to_bfloat16(input[i] * factor).bits;
            break;
        case kFloat16:
            for (int64_t i = 0; i < numel; ++i) halves[i] = to_float16(input[i] * factor).bits;
            break;
    }
    return 0;
}
