#pragma once
// AdamW: the scalars of a step and the update of one element. The order of every operation is that of
// reference.adamw_step; sources are compiled without contraction into fused multiply-adds.

#include "common/args/adamw.h"

namespace zerofp4 {

ZEROFP4_HD float square_root(float x) {
#if ZEROFP4_DEVICE_CODE
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x);
#endif
}

ZEROFP4_HD double square_root(double x) {
#if ZEROFP4_DEVICE_CODE
    return __dsqrt_rn(x);
#else
    return __builtin_sqrt(x);
#endif
}

// base^exponent by repeated squaring: the same bits everywhere, which no pow() promises.
ZEROFP4_HD double power(double base, int64_t exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent /= 2, base *= base) {
        if (exponent % 2 == 1) result *= base;
    }
    return result;
}

// Counts the step of a tensor that has a gradient, and computes its scalars: in double, each rounded to float
// once. In a step that is skipped no tensor has one, nor has one that is not present.
ZEROFP4_HD AdamWStep adamw_scalars(const AdamWOptions& options, const AdamWDescriptor& tensor,
                                   const void* gradient) {
    AdamWStep step{};
    if (gradient == nullptr || (tensor.present && *tensor.present == 0.0)) return step;
    if (options.skip && *options.skip != 0.0f) return step;
    step.gradient = gradient;
    *tensor.step += 1.0f;
    const int64_t count = static_cast<int64_t>(*tensor.step);
    const double lr = options.lr_address ? static_cast<double>(*options.lr_address) : options.lr;
    // torch.lerp: from the end where the weight is large, so that a weight of 1 gives the end itself.
    const float weight1 = static_cast<float>(1.0 - options.beta1);
    step.lerp_from_start = weight1 < 0.5f;
    step.lerp_factor = step.lerp_from_start ? weight1 : -(1.0f - weight1);
    step.decay = static_cast<float>(1.0 - lr * options.weight_decay);
    step.beta2 = static_cast<float>(options.beta2);
    step.weight2 = static_cast<float>(1.0 - options.beta2);
    step.step_size = static_cast<float>(lr / (1.0 - power(options.beta1, count)));
    step.inv_sqrt = static_cast<float>(1.0 / square_root(1.0 - power(options.beta2, count)));
    step.eps = static_cast<float>(options.eps);
    const float factor = options.factor ? *options.factor : 1.0f;
    step.factor = options.maximize ? -factor : factor;
    step.maximize = options.maximize;
    step.count = static_cast<uint32_t>(count);
    if (tensor.compact.exp_avg != nullptr) {
        step.eps = step.eps < 0x1p-126f ? 0x1p-126f : step.eps > 0x1p100f ? 0x1p100f : step.eps;
        // A second moment is at least (scale / 2^9)^2 * beta2, here 2^-100.
        step.least_scale = static_cast<float>(0x1p-41 / square_root(options.beta2));
    }
    return step;
}

// g: the gradient, or its negative to maximize.
ZEROFP4_HD void adamw_moments(const AdamWStep& step, float g, float& exp_avg, float& exp_avg_sq) {
    exp_avg = (step.lerp_from_start ? exp_avg : g) + step.lerp_factor * (g - exp_avg);
    exp_avg_sq = exp_avg_sq * step.beta2 + (g * step.weight2) * g;
}

ZEROFP4_HD void adamw_element(const AdamWStep& step, float g, float& master, float& exp_avg,
                              float& exp_avg_sq) {
    adamw_moments(step, g, exp_avg, exp_avg_sq);
    const float denominator = square_root(exp_avg_sq) * step.inv_sqrt + step.eps;
    master = master * step.decay - step.step_size * (exp_avg / denominator);
}

}  // namespace zerofp4
