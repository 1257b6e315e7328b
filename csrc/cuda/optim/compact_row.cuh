#pragma once
// AdamW of what a lane has of a row of compact state. update_row is the specification, operation by
// operation; the CPU makes the same bytes. Roots and reciprocals are short sequences that are correctly
// rounded in a range; what may lie outside is brought there first.

#include "cuda/device/reciprocal.cuh"
#include "cuda/optim/compact_masters.cuh"

namespace zerofp4::cuda {

// Correctly rounded from 2^-101 to the largest float, as is sqrt.rn, which looks first whether x is in range.
__device__ __forceinline__ float short_root(float x) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    const float root = x * r;
    return __fmaf_rn(__fmaf_rn(-root, root, x), r * 0.5f, root);
}

// Of every x that is not negative, at most kMostRoot.
__device__ __forceinline__ float any_root(float x) {
    const bool small = x < 0x1p-96f;
    const float root = short_root(small ? x * 0x1p96f : x);
    if (x == kInf) return kMostRoot;
    return x > 0.0f ? (small ? root * 0x1p-48f : root) : x;
}

__device__ __forceinline__ float most_of_group(float lane_most) {
#pragma unroll
    for (int mask = 1; mask < kGroupLanes; mask *= 2)
        lane_most = larger_magnitude(lane_most, __shfl_xor_sync(kAllLanes, lane_most, mask));
    return lane_most;
}

// The value of byte i of a word of codes, from a table in shared memory. The product of bytes is its offset.
__device__ __forceinline__ float look_up(const float (&table)[256], uint32_t word, int i) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(table);
    return *reinterpret_cast<const float*>(bytes + __dp4a(word, uint32_t{sizeof(float)} << 8 * i, 0u));
}

// What a lane has of a row, as it is stored, and its gradients.
template <typename Masters>
struct LaneRow {
    float gradients[kColumns];
    uint32_t exp_avg[kColumns / 4];
    uint32_t exp_avg_sq[kColumns / 4];
    StateScales scales;
    Masters masters;
};

// AdamW of a lane's elements of a row. Elements that are not there are zeros, and change no maximum.
template <typename Masters>
__device__ __forceinline__ void update_row(const AdamWStep& step, const RandomBytes& random,
                                           const CodeValues& values, LaneRow<Masters>& row) {
    const float (&g)[kColumns] = row.gradients;
    StateScales& scales = row.scales;
    float m[kColumns], v[kColumns];

    // ---- Decode: the moments as they were.
#pragma unroll
    for (int k = 0; k < kColumns; ++k)
        m[k] = scales.exp_avg * look_up(values.moments, row.exp_avg[k / 4], k % 4);

    // ---- Moments: the new ones, and the largest of the lane.
    if (step.lerp_from_start) {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) m[k] = m[k] + step.lerp_factor * (g[k] - m[k]);
    } else {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) m[k] = g[k] + step.lerp_factor * (g[k] - m[k]);
    }
    float m_most = 0.0f, v_most = 0.0f;
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
        const float root = scales.exp_avg_sq * look_up(values.roots, row.exp_avg_sq[k / 4], k % 4);
        v[k] = (root * root) * step.beta2 + (g[k] * step.weight2) * g[k];
        m_most = larger_magnitude(m_most, m[k]);
        v_most = larger_magnitude(v_most, v[k]);
    }

    // ---- Masters. From here on v has the roots.
    if (scales.exp_avg_sq >= step.least_scale && v_most < kInf) {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) v[k] = short_root(v[k]);
    } else {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) v[k] = any_root(v[k]);
    }
    const auto updated = [&](int k, float master) {
        const float update = m[k] * short_reciprocal(v[k] * step.inv_sqrt + step.eps);
        return master * step.decay - step.step_size * update;
    };
#pragma unroll
    for (int first = 0; first < kColumns; first += kMastersAtOnce) {
        float x[kMastersAtOnce];
        bool has_nan = false;
#pragma unroll
        for (int k = 0; k < kMastersAtOnce; ++k) x[k] = updated(first + k, row.masters.quick_at(first + k));
#pragma unroll
        for (int k = 0; k < kMastersAtOnce; k += 2) has_nan |= x[k] != x[k] || x[k + 1] != x[k + 1];
        // Where NaN is, or zeros that somebody has written, which quick_at makes NaN.
        if (Masters::kIsSplit && has_nan) {
#pragma unroll
            for (int k = 0; k < kMastersAtOnce; ++k) {
                x[k] = updated(first + k, row.masters.at(first + k));
                x[k] = x[k] == x[k] ? x[k] : from_bits(0x7fc00000u);
            }
        }
        row.masters.set(first, x, random);
    }

    // ---- Encode: the new scales of the group, then the codes.
    m_most = most_of_group(m_most);
    v_most = most_of_group(v_most);
    if (m_most >= kSmallScale && m_most < kLargeScale && v_most >= kSmallScale && v_most < kInf) {
        v_most = short_root(v_most);
        scales = {m_most, v_most};
    } else {
        const float factor = scale_factor(m_most);
        const bool m_finite = m_most < kInf, v_finite = v_most == v_most;
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
            m[k] = m_finite ? m[k] * factor : 0.0f;
            v[k] = v_finite ? v[k] : 0.0f;
        }
        v_most = v_finite ? any_root(v_most) : 0.0f;
        scales = {m_finite ? m_most : kInf, v_finite ? v_most : kInf};
        m_most = m_finite ? m_most * factor : 0.0f;
    }
    const float m_inverse = m_most > 0.0f ? short_reciprocal(m_most) : 0.0f;
    const float v_inverse = v_most > 0.0f ? short_reciprocal(v_most) : 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
        uint32_t m_code[4], v_code[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            m_code[k] = moment_code(m[4 * i + k] * m_inverse);
            v_code[k] = root_code(v[4 * i + k] * v_inverse);
        }
        row.exp_avg[i] = pack_bytes<0>(m_code[0], m_code[1], m_code[2], m_code[3]);
        row.exp_avg_sq[i] = pack_bytes<0>(v_code[0], v_code[1], v_code[2], v_code[3]);
    }
}

}  // namespace zerofp4::cuda
