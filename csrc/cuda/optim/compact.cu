// AdamW on a list of tensors in compact state, in one pass over their memory, and the tile amaxes of the
// masters as they are then. A warp takes a strip of 16 rows by 256 columns, two rows at a time, of which each
// lane has 16 neighbouring columns: all that is one byte or two is read and written as vectors of 16 bytes, a
// lane has the columns of a tile, and four lanes have a group. Shorter pieces of rows are slower to reach in
// memory, and longer ones are not faster.
//
// There are so few bytes that instructions count, too. Roots and reciprocals are short sequences that are
// correctly rounded in a range; what may lie outside is brought there first. The registers of a row
// leave room for 16 warps on an SM, too few to hide the latency of memory: while a lane updates a row, its
// next one is copied to shared memory.

#include "common/compact.h"
#include "cuda/device/raise.cuh"
#include "cuda/device/reciprocal.cuh"
#include "cuda/format/nibbles.cuh"
#include "cuda/optim/gradient.cuh"
#include "cuda/strip/tile_amax.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kCompactBlocksPerSm = 2;
constexpr int kColumns = 16;       // of a lane
constexpr int kMastersAtOnce = 8;  // those of all columns would not fit into registers
constexpr int kRowLanes = kCompactStripColumns / kColumns;
constexpr int kGroupLanes = kStateGroup / kColumns;
constexpr int kRowsAtOnce = kLanes / kRowLanes;
static_assert(kColumns == kBlock, "a lane has the columns of a tile");
static_assert(kColumns == kRandomColumns && kRandomColumns == 1 << 4 && kStateGroup == 1 << 6);
static_assert(kThreads == 256, "a thread for each code");

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

// The larger magnitude; NaN if one is.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
    return larger;
}

__device__ __forceinline__ float most_of_group(float lane_most) {
#pragma unroll
    for (int mask = 1; mask < kGroupLanes; mask *= 2)
        lane_most = larger_magnitude(lane_most, __shfl_xor_sync(kAllLanes, lane_most, mask));
    return lane_most;
}

// Puts an element in front of a lane's, whose last one falls out; and the other way round.
template <typename T, int kWords>
__device__ __forceinline__ void push_front(uint32_t (&words)[kWords], uint32_t element) {
    constexpr int kBits = 8 * static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = kWords - 1; i > 0; --i) words[i] = __funnelshift_lc(words[i - 1], words[i], kBits);
    words[0] = __funnelshift_lc(element << (32 - kBits), words[0], kBits);
}
template <typename T, int kWords>
__device__ __forceinline__ void pop_front(uint32_t (&words)[kWords]) {
    constexpr int kBits = 8 * static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = 0; i < kWords - 1; ++i) words[i] = __funnelshift_rc(words[i], words[i + 1], kBits);
    words[kWords - 1] = __funnelshift_rc(words[kWords - 1], 0, kBits);
}

__device__ __forceinline__ uint32_t element_bits(float x) { return to_bits(x); }
__device__ __forceinline__ uint32_t element_bits(BFloat16 x) { return x.bits; }
__device__ __forceinline__ uint32_t element_bits(uint8_t x) { return x; }
__device__ __forceinline__ uint32_t element_bits(int8_t x) { return static_cast<uint8_t>(x); }
__device__ __forceinline__ void set_element(uint32_t bits, float& to) { to = from_bits(bits); }
__device__ __forceinline__ void set_element(uint32_t bits, BFloat16& to) {
    to.bits = static_cast<uint16_t>(bits);
}
__device__ __forceinline__ void set_element(uint32_t bits, uint8_t& to) { to = static_cast<uint8_t>(bits); }
__device__ __forceinline__ void set_element(uint32_t bits, int8_t& to) { to = static_cast<int8_t>(bits); }

// A lane's elements of a row, as vectors, or one by one: the first `count`.
struct Vectors {
    template <typename T, int kWords>
    static __device__ __forceinline__ void load(const T* p, int, uint32_t (&words)[kWords]) {
        load_words<false>(p, words);
    }
    template <typename T, int kWords>
    static __device__ __forceinline__ void store(T* p, int, uint32_t (&words)[kWords]) {
#pragma unroll
        for (int i = 0; i < kWords; i += 4)
            reinterpret_cast<uint4*>(p)[i / 4] =
                make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
    }
};
struct Elements {
    template <typename T, int kWords>
    static __device__ __forceinline__ void load(const T* p, int count, uint32_t (&words)[kWords]) {
#pragma unroll 1
        for (int k = kColumns - 1; k >= 0; --k) push_front<T>(words, k < count ? element_bits(p[k]) : 0u);
    }
    template <typename T, int kWords>
    static __device__ __forceinline__ void store(T* p, int count, uint32_t (&words)[kWords]) {
#pragma unroll 1
        for (int k = 0; k < count; ++k) {
            set_element(words[0], p[k]);
            pop_front<T>(words);
        }
    }
};

// The next row of each lane, as it is stored: what is one array of 16 elements, vector by vector.
struct StagedRows {
    static constexpr int kMost = 10;  // float masters and gradients, and two moments
    uint4 vectors[kMost][kThreads];
    StateScales scales[kThreads];
};

// Goes through a lane's vectors in the order in which they were added.
class Staging {
  public:
    __device__ __forceinline__ explicit Staging(StagedRows& rows) : rows(rows) {}

    template <typename T>
    __device__ __forceinline__ void add(const T* p) {
#pragma unroll
        for (int i = 0; i < kColumns * static_cast<int>(sizeof(T)) / 16; ++i)
            copy_async<16>(&rows.vectors[next++][threadIdx.x], reinterpret_cast<const uint4*>(p) + i);
    }
    template <int kWords>
    __device__ __forceinline__ void take(uint32_t (&words)[kWords]) {
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
            const uint4 vector = rows.vectors[next++][threadIdx.x];
            words[i] = vector.x, words[i + 1] = vector.y, words[i + 2] = vector.z, words[i + 3] = vector.w;
        }
    }

  private:
    StagedRows& rows;
    int next = 0;
};

// What a lane has of a row, as it is stored, and its gradients.
template <typename Masters>
struct LaneRow {
    float gradients[kColumns];
    uint32_t exp_avg[kColumns / 4];
    uint32_t exp_avg_sq[kColumns / 4];
    StateScales scales;
    Masters masters;

    // `index`: of the first element in the tensor's arrays. `group`: of the scales.
    template <typename Gradient>
    static __device__ __forceinline__ void stage(StagedRows& rows, const AdamWDescriptor& tensor,
                                                 const Gradient& gradient, int64_t index, int64_t group) {
        Staging staging(rows);
        staging.add(in_global(tensor.compact.exp_avg) + index);
        staging.add(in_global(tensor.compact.exp_avg_sq) + index);
        Masters::stage(staging, tensor, index);
        if constexpr (Gradient::kIsOneArray) staging.add(gradient.own + index);
        copy_async<sizeof(StateScales)>(&rows.scales[threadIdx.x], in_global(tensor.compact.scales) + group);
    }
    template <typename Gradient>
    __device__ __forceinline__ void take(StagedRows& rows, const Gradient& gradient, int64_t index) {
        typename Gradient::Words words;
        if constexpr (!Gradient::kIsOneArray) gradient.load(index, words);
        wait_for_copies();
        Staging staging(rows);
        staging.take(exp_avg);
        staging.take(exp_avg_sq);
        masters.take(staging);
        if constexpr (Gradient::kIsOneArray) staging.take(words);
        scales = rows.scales[threadIdx.x];
        gradient.take(index, words, gradients);
    }
    template <typename Gradient>
    __device__ __forceinline__ void load_elements(const AdamWDescriptor& tensor, const Gradient& gradient,
                                                  int64_t index, int64_t group, int count) {
        load<Elements>(tensor.compact, index, count);
        scales = count > 0 ? in_global(tensor.compact.scales)[group] : StateScales{};
        masters.template load<Elements>(tensor, index, count);
#pragma unroll 1
        for (int k = kColumns - 1; k >= 0; --k) {
#pragma unroll
            for (int i = kColumns - 1; i > 0; --i) gradients[i] = gradients[i - 1];
            gradients[0] = k < count ? gradient.at(index + k) : 0.0f;
        }
    }
    template <typename Access>
    __device__ __forceinline__ void store(const AdamWDescriptor& tensor, int64_t index, int count) {
        masters.template store<Access>(tensor, index, count);
        Access::store(in_global(tensor.compact.exp_avg) + index, count, exp_avg);
        Access::store(in_global(tensor.compact.exp_avg_sq) + index, count, exp_avg_sq);
    }

  private:
    template <typename Access>
    __device__ __forceinline__ void load(const CompactState& state, int64_t index, int count) {
        Access::load(in_global(state.exp_avg) + index, count, exp_avg);
        Access::load(in_global(state.exp_avg_sq) + index, count, exp_avg_sq);
    }
};

// Byte i of a word.
__device__ __forceinline__ uint32_t byte_of(uint32_t word, int i) { return __byte_perm(word, 0, 0x4440 + i); }

// Byte kByte of each of four words.
template <int kByte>
__device__ __forceinline__ uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    constexpr unsigned kPair = kByte | (4 + kByte) << 4;
    return __byte_perm(__byte_perm(a, b, kPair), __byte_perm(c, d, kPair), 0x5410);
}

template <typename Masters>
__device__ __forceinline__ float most_of(const Masters& masters) {
    float most = 0.0f;
#pragma unroll
    for (int k = 0; k < kColumns; ++k) most = larger_magnitude(most, masters.at(k));
    return most;
}

// A lane's masters of a row, as they are stored.
struct FloatMasters {
    static constexpr bool kIsSplit = false;
    uint32_t words[kColumns];

    template <typename Access>
    __device__ __forceinline__ void load(const AdamWDescriptor& tensor, int64_t index, int count) {
        Access::load(in_global(tensor.master) + index, count, words);
    }
    template <typename Access>
    __device__ __forceinline__ void store(const AdamWDescriptor& tensor, int64_t index, int count) {
        Access::store(in_global(tensor.master) + index, count, words);
    }
    static __device__ __forceinline__ void stage(Staging& staging, const AdamWDescriptor& tensor,
                                                 int64_t index) {
        staging.add(in_global(tensor.master) + index);
    }
    __device__ __forceinline__ void take(Staging& staging) { staging.take(words); }
    __device__ __forceinline__ float at(int k) const { return from_bits(words[k]); }
    __device__ __forceinline__ float quick_at(int k) const { return at(k); }
    // Takes elements from `first` on.
    __device__ __forceinline__ void set(int first, const float (&values)[kMastersAtOnce],
                                        const RandomBytes&) {
#pragma unroll
        for (int i = 0; i < kMastersAtOnce; ++i) words[first + i] = to_bits(values[i]);
    }
    // The largest magnitude, of which the bits that matter to a weight of this dtype are right.
    __device__ __forceinline__ float most(DType) const { return most_of(*this); }
};

struct SplitMasters {
    static constexpr bool kIsSplit = true;
    uint32_t high[kColumns / 2];
    uint32_t low[kColumns / 4];

    template <typename Access>
    __device__ __forceinline__ void load(const AdamWDescriptor& tensor, int64_t index, int count) {
        Access::load(in_global(tensor.compact.high) + index, count, high);
        if (tensor.compact.low != nullptr)
            return Access::load(in_global(tensor.compact.low) + index, count, low);
#pragma unroll
        for (uint32_t& word : low) word = 0;  // where there is no state yet
    }
    template <typename Access>
    __device__ __forceinline__ void store(const AdamWDescriptor& tensor, int64_t index, int count) {
        Access::store(in_global(tensor.compact.high) + index, count, high);
        Access::store(in_global(tensor.compact.low) + index, count, low);
    }
    static __device__ __forceinline__ void stage(Staging& staging, const AdamWDescriptor& tensor,
                                                 int64_t index) {
        staging.add(in_global(tensor.compact.high) + index);
        staging.add(in_global(tensor.compact.low) + index);
    }
    __device__ __forceinline__ void take(Staging& staging) {
        staging.take(high);
        staging.take(low);
    }
    // join_master. Counted from -128 on the low byte lies behind the magnitude of the high part.
    __device__ __forceinline__ float at(int k) const {
        const uint32_t magnitude = high[k / 2] & (k % 2 == 0 ? 0x00007fffu : 0x7fff0000u);
        const uint32_t from_least =
            __byte_perm(magnitude, low[k / 4] ^ 0x80808080u, (k % 2 == 0 ? 0x1042 : 0x3240) + k % 4 * 16);
        const int32_t joined = max(static_cast<int32_t>(from_least) - 0x8000, 0);
        const uint32_t sign = (k % 2 == 0 ? high[k / 2] << 16 : high[k / 2]) & 0x80000000u;
        return from_bits(static_cast<uint32_t>(joined) | sign);
    }
    // join_master in half of the instructions, but a NaN if the high part is zero and the low byte negative.
    __device__ __forceinline__ float quick_at(int k) const {
        const uint32_t steps = permute(low[k / 4], 0u, 0x8804u + 0x1110u * (k % 4));
        return from_bits((k % 2 == 0 ? high[k / 2] << 16 : high[k / 2] & 0xffff0000u) + steps);
    }
    // round_master of each, of which none is NaN but 0x7fc00000.
    __device__ __forceinline__ void set(int first, const float (&values)[kMastersAtOnce],
                                        const RandomBytes& random) {
#pragma unroll
        for (int i = 0; i < kMastersAtOnce; i += 4) {
            const float four[4] = {values[i], values[i + 1], values[i + 2], values[i + 3]};
            set_four(first + i, four, random.words[(first + i) / 4]);
        }
    }
    // The high parts are what the masters are when rounded to bfloat16.
    __device__ __forceinline__ float most(DType weight_dtype) const {
        if (weight_dtype != DType::kBFloat16) return most_of(*this);
        uint32_t most = high[0];
#pragma unroll
        for (uint32_t word : high) most = larger_magnitudes<BFloat16>(most, word);
        most = magnitudes<BFloat16>(most);
        return from_bits(widened<BFloat16>(max(most & 0xffffu, most >> 16)));
    }

  private:
    // 0x8000 more round the high part, and have the low byte count from -128. For an odd random byte the sum
    // is a step less: if the low byte was 0 it is 0xff now, below a smaller high part. All others get the
    // step back.
    __device__ __forceinline__ void set_four(int k, const float (&values)[4], uint32_t random) {
        const uint32_t odd = random & 0x01010101u, odd_signs = random << 7;
        uint32_t bits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            bits[i] = to_bits(values[i]) + permute(random, odd_signs, 0xccc0u + 0x1111u * i) + 0x8000u;
        high[k / 2] = __byte_perm(bits[0], bits[1], 0x7632);
        high[k / 2 + 1] = __byte_perm(bits[2], bits[3], 0x7632);
        // Inverted if odd, so that it is always a 0 that is treated otherwise.
        const uint32_t inverted = permute<0xba98>(odd_signs, 0u);
        const uint32_t bytes = pack_bytes<1>(bits[0], bits[1], bits[2], bits[3]) ^ inverted;
        // 1 where a byte is 0, and perhaps where one is 1.
        const uint32_t zeros = ((bytes - 0x01010101u) & ~bytes & 0x80808080u) >> 7;
        low[k / 4] = ((bytes | zeros) - odd) ^ inverted ^ 0x80808080u;
    }
};

__device__ const CodeValues kCodeValues = make_code_values();

// AdamW of a lane's elements of a row. Elements that are not there are zeros, and change no maximum.
template <typename Masters>
__device__ __forceinline__ void update_row(const AdamWStep& step, const RandomBytes& random,
                                           const CodeValues& values, LaneRow<Masters>& row) {
    const float (&g)[kColumns] = row.gradients;
    StateScales& scales = row.scales;
    float m[kColumns], v[kColumns];

    // The new moments.
#pragma unroll
    for (int k = 0; k < kColumns; ++k)
        m[k] = scales.exp_avg * values.moments[byte_of(row.exp_avg[k / 4], k % 4)];
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
        const float root = scales.exp_avg_sq * values.roots[byte_of(row.exp_avg_sq[k / 4], k % 4)];
        v[k] = (root * root) * step.beta2 + (g[k] * step.weight2) * g[k];
        m_most = larger_magnitude(m_most, m[k]);
        v_most = larger_magnitude(v_most, v[k]);
    }

    // The masters. From here on v has the roots.
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

    // The new codes.
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

// The lane's elements of the first of its rows of a strip. AdamWPlan sees to it that int32 is enough.
struct Place {
    int32_t row;
    int32_t col;
    bool whole;   // all of the strip is owned, and lies at a vector's alignment in the state's arrays
    bool vector;  // the lane has elements of a whole strip: its columns are not past the last one
};

__device__ __forceinline__ Place place_of(const AdamWDescriptor& tensor, int64_t unit) {
    const auto [row, col] = strip_at<kCompactStripColumns>(tensor, unit);
    const int64_t first = row * tensor.cols + col - tensor.start;
    const int64_t columns = min(tensor.cols - col, static_cast<int64_t>(kCompactStripColumns));
    const int64_t end = first + (kBlock - 1) * tensor.cols + columns;
    const bool aligned = tensor.compact.aligned != 0 && ((tensor.cols | first) & (kColumns - 1)) == 0;
    const bool whole = row + kBlock <= tensor.rows && aligned && first >= 0 && end <= tensor.numel;
    const int32_t lane_col = static_cast<int32_t>(col) + lane_index() % kRowLanes * kColumns;
    return {static_cast<int32_t>(row) + lane_index() / kRowLanes, lane_col, whole,
            whole && lane_col < tensor.cols};
}

// The number of the column's unit of 2^kShift columns, counted row by row.
template <int kShift>
__device__ __forceinline__ int64_t unit_of(const AdamWDescriptor& tensor, const Place& at) {
    const int32_t of_row = (static_cast<int32_t>(tensor.cols) + (1 << kShift) - 1) >> kShift;
    return static_cast<int64_t>(at.row) * of_row + (at.col >> kShift);
}
__device__ __forceinline__ int64_t index_of(const AdamWDescriptor& tensor, const Place& at) {
    return unit_of<0>(tensor, at) - tensor.start;
}
__device__ __forceinline__ int64_t group_of(const AdamWDescriptor& tensor, const Place& at) {
    return unit_of<6>(tensor, at) - tensor.compact.first_group;
}
__device__ __forceinline__ uint64_t block_of(const AdamWDescriptor& tensor, const Place& at) {
    return tensor.compact.first_block + static_cast<uint64_t>(unit_of<4>(tensor, at));
}

// How many of a lane's elements of a row are owned, from the first on: a shard is cut between groups only.
__device__ __forceinline__ int owned_of_lane(const AdamWDescriptor& tensor, const Place& at, int64_t index) {
    return index < 0 ? 0 : clamp_count(min(tensor.cols - at.col, tensor.numel - index), kColumns);
}

// Goes on to the lane's next row of the strip, if there is one.
__device__ __forceinline__ bool next_rows(Place& at) {
    at.row += kRowsAtOnce;
    return at.row % kBlock >= kRowsAtOnce;
}

// All of a lane's rows.
template <typename Masters, typename Gradient>
__device__ __forceinline__ float update_rows(const AdamWTable& table, const AdamWDescriptor& tensor,
                                             const AdamWStep& step, Place at, const CodeValues& values,
                                             StagedRows& staged) {
    float most = 0.0f;
    const Gradient gradient(table, tensor, step, 0);
    const bool whole = at.whole && gradient.has_vectors(), vector = whole && at.vector;
    const auto stage = [&](const Place& of) {
        LaneRow<Masters>::stage(staged, tensor, gradient, index_of(tensor, of), group_of(tensor, of));
    };
    if (vector) stage(at);
    do {
        const int64_t index = index_of(tensor, at);
        const int64_t group = group_of(tensor, at);
        LaneRow<Masters> row{};
        int count = vector ? kColumns : 0;
        if (vector) {
            row.take(staged, gradient, index);
            Place next = at;
            if (next_rows(next)) stage(next);
        } else if (!whole) {
            count = owned_of_lane(tensor, at, index);
            row.load_elements(tensor, gradient, index, group, count);
        }
        const RandomBytes random = master_bytes(tensor.compact.number, step.count, block_of(tensor, at));
        update_row(step, random, values, row);
        if (wants_amaxes(tensor)) most = larger_magnitude(most, row.masters.most(tensor.weight_dtype));
        if (vector) {
            row.template store<Vectors>(tensor, index, kColumns);
        } else {
            row.template store<Elements>(tensor, index, count);
        }
        if (lane_index() % kGroupLanes == 0 && count > 0)
            in_global(tensor.compact.scales)[group] = row.scales;
    } while (next_rows(at));
    return most;
}

template <typename Masters>
__device__ __forceinline__ float read_rows(const AdamWDescriptor& tensor, Place at) {
    float most = 0.0f;
    do {
        const int64_t index = index_of(tensor, at);
        Masters masters{};
        if (at.vector) {
            masters.template load<Vectors>(tensor, index, kColumns);
        } else if (!at.whole) {
            masters.template load<Elements>(tensor, index, owned_of_lane(tensor, at, index));
        }
        most = larger_magnitude(most, masters.most(tensor.weight_dtype));
    } while (next_rows(at));
    return most;
}

template <typename Masters, template <typename, int> class Gradient>
__device__ __forceinline__ float most_of_strip(const AdamWTable& table, const AdamWDescriptor& tensor,
                                               const Place& at, const CodeValues& values,
                                               StagedRows& staged) {
    const AdamWStep& step = *in_global(table.steps + (&tensor - table.tensors));
    if (step.gradient == nullptr) return wants_amaxes(tensor) ? read_rows<Masters>(tensor, at) : 0.0f;
    return tensor.gradient_dtype == DType::kBFloat16
               ? update_rows<Masters, Gradient<BFloat16, kColumns>>(table, tensor, step, at, values, staged)
               : update_rows<Masters, Gradient<float, kColumns>>(table, tensor, step, at, values, staged);
}

// Gradient: GivenGradient, BroughtGradient or PeerGradient.
template <template <typename, int> class Gradient>
__global__ void __launch_bounds__(kThreads, kCompactBlocksPerSm)
    compact_update_kernel(const __grid_constant__ AdamWTable table) {
    __shared__ CodeValues values;
    __shared__ StagedRows staged;
    values.moments[threadIdx.x] = kCodeValues.moments[threadIdx.x];
    values.roots[threadIdx.x] = kCodeValues.roots[threadIdx.x];
    wait_for_previous_kernel();
    __syncthreads();
    const int64_t unit = grid_warp();
    if (unit >= table.strip_units) return;
    ItemCursor<AdamWDescriptor, &AdamWDescriptor::strip_begin, false> cursor(
        table.tensors, table.count, table.strip_units, table.strip_items + unit / kBlockStrips,
        *table.tensors);
    cursor.seek(unit);
    const AdamWDescriptor& tensor = cursor.item();
    const Place at = place_of(tensor, unit);
    float most = tensor.compact.high != nullptr
                     ? most_of_strip<SplitMasters, Gradient>(table, tensor, at, values, staged)
                     : most_of_strip<FloatMasters, Gradient>(table, tensor, at, values, staged);
    if (!wants_amaxes(tensor)) return;
#pragma unroll
    for (int lanes = kRowLanes; lanes < kLanes; lanes *= 2)
        most = larger_magnitude(most, __shfl_xor_sync(kAllLanes, most, lanes));
    const float amax = round_to(tensor.weight_dtype, amax_of_bits(to_bits(most)));
    if (tensor.tile_offset >= 0 && lane_index() < kRowLanes && amax > 0.0f)
        table
            .reduced[tensor.tile_offset + at.row / kBlock * ceil_div(tensor.cols, kBlock) + at.col / kBlock] =
            amax;
    raise_words(table.reduced, tensor, amax);
}

}  // namespace

void compact_update(const AdamWTable& table, cudaStream_t stream) {
    const int64_t blocks = ceil_div(table.strip_units, kWarps);
    if (table.pieces.count == 0) {
        launch("compact_update", compact_update_kernel<GivenGradient>, blocks, stream, table);
    } else if (table.pieces.received != nullptr) {
        launch("compact_update of pieces", compact_update_kernel<BroughtGradient>, blocks, stream, table);
    } else {
        launch("compact_update of peers", compact_update_kernel<PeerGradient>, blocks, stream, table);
    }
}

}  // namespace zerofp4::cuda
