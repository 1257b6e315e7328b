#pragma once
// The gradients of an update as floats: one array times a factor, or the mean of what the ranks have brought.

#include "common/adamw.h"
#include "cpu/device/parallel.h"

namespace zerofp4::cpu::ZEROFP4_ISA {

// Of `count` elements from `index` of the tensor on, negative to maximize.
template <class G>
inline void load_gradients(const GradientPieces& pieces, const AdamWDescriptor& tensor, const AdamWStep& step,
                           int64_t index, int64_t count, float* __restrict values) {
    const G* own = static_cast<const G*>(step.gradient) + index;
    if (pieces.count == 0) {
        for (int64_t i = 0; i < count; ++i) values[i] = load_float(own[i]) * step.factor;
        return;
    }
    const int64_t place = place_in_rows(pieces, tensor) + index;
    for (int r = 0; r < pieces.count; ++r) {
        const G* brought = row_of<G>(pieces, r);
        brought = brought == nullptr ? own : brought + place;
        for (int64_t i = 0; i < count; ++i)
            values[i] = r == 0 ? load_float(brought[i]) : values[i] + load_float(brought[i]);
    }
    const float by = static_cast<float>(step.maximize ? -pieces.count : pieces.count);
    for (int64_t i = 0; i < count; ++i) values[i] /= by;
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
