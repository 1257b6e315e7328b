#pragma once
// The matrix that a thread block quantizes a tile of: the only one of a launch, or one of many.

#include "common/args/grouped.h"
#include "cuda/format/scale_tile.cuh"
#include "cuda/strip/matrix_strip.cuh"

namespace zerofp4::cuda {

// One of many matrices, as if it were alone. Rows from `input_rows` on are zeros that are not in the input.
struct OwnMatrix {
    QuantizeArgs args;
    int64_t input_rows;
};

// What is null or how wide it is, is the same for all matrices of a launch. What differs is read where it is
// used, of the only matrix from the kernel's arguments, of one of many from shared memory: registers that
// held it would be missing in the loop over strips.
class TileMatrix {
    // Of values: of two variables the compiler would choose the address, which may be anywhere.
    template <auto kField>
    __device__ __forceinline__ auto get() const {
        using Field = std::remove_cv_t<std::remove_reference_t<decltype(whole.*kField)>>;
        const Field field = is_only_ ? Field{whole.*kField} : Field{own_.args.*kField};
        if constexpr (std::is_pointer_v<Field>) {
            return in_global(field);
        } else {
            return field;
        }
    }
    template <auto kField>
    __device__ __forceinline__ ScaleBuffers get_scales() const {
        using Buffer = uint8_t*;
        ScaleBuffers buffers;
#pragma unroll
        for (int layout = 0; layout < kScaleLayouts; ++layout) {
            buffers.of[layout] =
                in_global(is_only_ ? Buffer{(whole.*kField)[layout]} : Buffer{(own_.args.*kField)[layout]});
        }
        return buffers;
    }

  public:
    const QuantizeArgs& whole;  // of all matrices; where a field differs, of the first

    // own: in shared memory, not looked at where the matrix is the only one.
    __device__ __forceinline__ TileMatrix(const QuantizeArgs& whole, const OwnMatrix& own, bool is_only)
        : whole(whole), own_(own), is_only_(is_only) {}

    // Rows that are stored, and those that are read.
    __device__ __forceinline__ int64_t rows() const { return get<&QuantizeArgs::rows>(); }
    template <typename T>
    __device__ __forceinline__ Matrix<T> input() const {
        return {static_cast<const T*>(get<&QuantizeArgs::input>()),
                is_only_ ? int64_t{whole.rows} : int64_t{own_.input_rows}, whole.cols};
    }
    __device__ __forceinline__ const int64_t* rng_state() const { return get<&QuantizeArgs::rng_state>(); }
    __device__ __forceinline__ const float* amax() const { return get<&QuantizeArgs::amax>(); }
    __device__ __forceinline__ const float* columnwise_amax() const {
        return get<&QuantizeArgs::columnwise_amax>();
    }
    __device__ __forceinline__ uint8_t* rowwise_data() const { return get<&QuantizeArgs::rowwise_data>(); }
    __device__ __forceinline__ uint8_t* columnwise_data() const {
        return get<&QuantizeArgs::columnwise_data>();
    }
    __device__ __forceinline__ void* values() const { return get<&QuantizeArgs::values>(); }
    __device__ __forceinline__ ScaleBuffers rowwise_scale() const {
        return get_scales<&QuantizeArgs::rowwise_scale>();
    }
    __device__ __forceinline__ ScaleBuffers columnwise_scale() const {
        return get_scales<&QuantizeArgs::columnwise_scale>();
    }

  private:
    const volatile OwnMatrix& own_;  // volatile: the compiler would keep it in registers
    bool is_only_;
};

}  // namespace zerofp4::cuda
