// Operations on one matrix, or on a stack of them in tiles: their amaxes, their quantization.

#include "dispatch/quantize.h"

#include "bindings/bindings.h"
#include "common/hadamard.h"

namespace zerofp4::bindings {
namespace {

void tensor_amax(const Target& target, uintptr_t input, int dtype, int64_t rows, int64_t cols,
                 bool random_signs, uintptr_t skip, uintptr_t amax, uintptr_t hadamard_amax,
                 int64_t experts) {
    const AmaxArgs args{pointer<const void>(input),
                        static_cast<DType>(dtype),
                        rows,
                        cols,
                        random_signs ? kRandomSigns : 0,
                        pointer<const float>(skip),
                        pointer<float>(amax),
                        pointer<float>(hadamard_amax)};
    zerofp4::tensor_amax(target, args, experts);
}

// What is the same in every call for matrices of one shape.
QuantizeArgs quantize_options(int dtype, int64_t rows, int64_t cols, int block_rows, bool hadamard,
                              bool random_signs, float e4m3_max, bool squared_error) {
    QuantizeArgs args{};
    args.dtype = static_cast<DType>(dtype);
    args.rows = rows;
    args.cols = cols;
    args.block_rows = block_rows;
    args.hadamard = hadamard;
    args.signs = random_signs ? kRandomSigns : 0;
    args.choice = {e4m3_max, squared_error};
    return args;
}

QuantizeArgs quantize_args(uintptr_t input, int dtype, int64_t rows, int64_t cols, int block_rows,
                           bool hadamard, bool random_signs, float e4m3_max, bool squared_error,
                           uintptr_t rng_state, uintptr_t amax, uintptr_t columnwise_amax, uintptr_t skip,
                           uintptr_t rowwise_data, uintptr_t columnwise_data, uintptr_t values,
                           const Addresses& rowwise_scale, const Addresses& columnwise_scale,
                           uintptr_t stored_amax, uintptr_t stored_columnwise_amax) {
    QuantizeArgs args =
        quantize_options(dtype, rows, cols, block_rows, hadamard, random_signs, e4m3_max, squared_error);
    args.input = pointer<const void>(input);
    args.rng_state = pointer<const int64_t>(rng_state);
    args.amax = pointer<const float>(amax);
    args.columnwise_amax = pointer<const float>(columnwise_amax);
    args.skip = pointer<const float>(skip);
    args.rowwise_data = pointer<uint8_t>(rowwise_data);
    args.columnwise_data = pointer<uint8_t>(columnwise_data);
    args.values = pointer<void>(values);
    for (int layout = 0; layout < kScaleLayouts; ++layout) {
        args.rowwise_scale[layout] = pointer<uint8_t>(rowwise_scale[layout]);
        args.columnwise_scale[layout] = pointer<uint8_t>(columnwise_scale[layout]);
    }
    args.stored_amax = pointer<float>(stored_amax);
    args.stored_columnwise_amax = pointer<float>(stored_columnwise_amax);
    return args;
}

// The quantization of matrices of one shape with one set of options, worked out once: what is left for a
// call are addresses.
class Quantization {
  public:
    // Of the buffers of a record, 0 where there is none: the codes and the scales by layout of the rowwise
    // and of the columnwise copy, the amax of the input, and that of its transform.
    using Buffers = std::array<uintptr_t, 2 * (1 + kScaleLayouts) + 2>;

    Quantization(int dtype, int64_t rows, int64_t cols, int block_rows, bool hadamard, bool random_signs,
                 float e4m3_max, bool squared_error)
        : options_(quantize_options(dtype, rows, cols, block_rows, hadamard, random_signs, e4m3_max,
                                    squared_error)) {}

    // A pass for the amaxes that are kept and not given, then the quantization, which stores those given.
    void run(const Target& target, uintptr_t input, const Buffers& buffers, uintptr_t given_amax,
             uintptr_t given_columnwise_amax, uintptr_t rng_state, uintptr_t skip, int64_t experts) const {
        const uintptr_t kept[] = {buffers[buffers.size() - 2], buffers[buffers.size() - 1]};
        const uintptr_t given[] = {given_amax, given_columnwise_amax};
        uintptr_t missing[2], used[2], stored[2];
        for (int i = 0; i < 2; ++i) {
            missing[i] = given[i] ? 0 : kept[i];
            used[i] = given[i] ? given[i] : kept[i];
            stored[i] = given[i] ? kept[i] : 0;
        }
        if (missing[0] || missing[1]) {
            tensor_amax(target, input, static_cast<int>(options_.dtype), options_.rows, options_.cols,
                        options_.signs != 0, skip, missing[0], missing[1], experts);
        }
        QuantizeArgs args = options_;
        args.input = pointer<const void>(input);
        args.rng_state = pointer<const int64_t>(rng_state);
        args.amax = pointer<const float>(used[0] ? used[0] : used[1]);
        args.columnwise_amax = pointer<const float>(used[1]);
        args.skip = pointer<const float>(skip);
        const uintptr_t* columnwise = &buffers[1 + kScaleLayouts];
        args.rowwise_data = pointer<uint8_t>(buffers[0]);
        args.columnwise_data = pointer<uint8_t>(columnwise[0]);
        for (int layout = 0; layout < kScaleLayouts; ++layout) {
            args.rowwise_scale[layout] = pointer<uint8_t>(buffers[1 + layout]);
            args.columnwise_scale[layout] = pointer<uint8_t>(columnwise[1 + layout]);
        }
        args.stored_amax = pointer<float>(stored[0]);
        args.stored_columnwise_amax = pointer<float>(stored[1]);
        zerofp4::quantize(target, args, experts);
    }

  private:
    QuantizeArgs options_;
};

}  // namespace

void bind_quantize(py::module_& m) {
    py::class_<QuantizeArgs>(m, "QuantizeArgs")
        .def(py::init(&quantize_args), py::kw_only(), "input"_a, "dtype"_a, "rows"_a, "cols"_a,
             "block_rows"_a, "hadamard"_a = false, "random_signs"_a = true, "e4m3_max"_a = 0.0f,
             "squared_error"_a = false, "rng_state"_a = 0, "amax"_a, "columnwise_amax"_a = 0, "skip"_a = 0,
             "rowwise_data"_a = 0, "columnwise_data"_a = 0, "values"_a = 0, "rowwise_scale"_a = Addresses{},
             "columnwise_scale"_a = Addresses{}, "stored_amax"_a = 0, "stored_columnwise_amax"_a = 0);
    py::class_<Quantization>(m, "Quantization")
        .def(py::init<int, int64_t, int64_t, int, bool, bool, float, bool>(), py::kw_only(), "dtype"_a,
             "rows"_a, "cols"_a, "block_rows"_a, "hadamard"_a, "random_signs"_a, "e4m3_max"_a,
             "squared_error"_a)
        .def("run", &Quantization::run, NoGil(), "target"_a, "input"_a, "buffers"_a, "given_amax"_a = 0,
             "given_columnwise_amax"_a = 0, "rng_state"_a = 0, "skip"_a = 0, "experts"_a = 1);
    m.def("tensor_amax", &tensor_amax, NoGil());
    m.def("quantize", &zerofp4::quantize, NoGil());
}

}  // namespace zerofp4::bindings
