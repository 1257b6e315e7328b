// Quantization: of a matrix, of a stack of them, of a matrix in groups of rows; and values of groups.

#include "dispatch/quantize.h"

#include "bindings/bindings.h"
#include "bindings/struct_class.h"
#include "common/hadamard.h"

namespace zerofp4::bindings {
namespace {

// What a call is given besides x and the buffers that it writes, 0 where there is none.
struct Given {
    uintptr_t amax, columnwise_amax, rng_state, skip;
};

// The quantization of matrices of one shape with one set of options, worked out once: what is left for a
// call are addresses.
class Quantization {
  public:
    // Of the buffers of a record, 0 where there is none: the codes and the scales by layout of the rowwise
    // and of the columnwise copy, the amax of the input, and that of its transform.
    using Buffers = std::array<uintptr_t, 2 * (1 + kScaleLayouts) + 2>;

    Quantization(int dtype, int64_t rows, int64_t cols, int block_rows, bool hadamard, bool random_signs,
                 float e4m3_max, bool squared_error) {
        options_.dtype = static_cast<DType>(dtype);
        options_.rows = rows;
        options_.cols = cols;
        options_.block_rows = block_rows;
        options_.hadamard = hadamard;
        options_.signs = random_signs ? kRandomSigns : 0;
        options_.choice = {e4m3_max, squared_error};
    }

    // values: where those of the rowwise codes go, or 0. experts: matrices of a stack.
    void run(const Target& target, uintptr_t input, const Buffers& buffers, uintptr_t amax,
             uintptr_t columnwise_amax, uintptr_t rng_state, uintptr_t skip, int64_t experts,
             uintptr_t values) const {
        auto [missing, args] = passes(input, buffers, {amax, columnwise_amax, rng_state, skip});
        args.values = pointer<void>(values);
        if (missing.amax || missing.hadamard_amax) tensor_amax(target, missing, experts);
        quantize(target, args, experts);
    }

    // Of one matrix in groups of rows, each with amaxes of its own.
    void run_groups(const Target& target, uintptr_t input, const Buffers& buffers, uintptr_t amax,
                    uintptr_t columnwise_amax, uintptr_t rng_state, uintptr_t splits, bool wide,
                    int32_t count, uintptr_t offsets, uintptr_t error) const {
        const auto [missing, args] = passes(input, buffers, {amax, columnwise_amax, rng_state, 0});
        const GroupSplits groups{pointer<const void>(splits), wide, count, args.rows};
        if (missing.amax || missing.hadamard_amax) grouped_amax(target, {missing, groups});
        quantize_grouped(target, {args, groups, pointer<int64_t>(offsets), pointer<int32_t>(error)});
    }

  private:
    // A pass for the amaxes that are kept and not given, and the quantization, which stores those given.
    std::pair<AmaxArgs, QuantizeArgs> passes(uintptr_t input, const Buffers& buffers,
                                             const Given& given) const {
        const auto kept = pointer<float>(buffers[buffers.size() - 2]);
        const auto columnwise_kept = pointer<float>(buffers[buffers.size() - 1]);
        const auto amax = pointer<float>(given.amax), columnwise_amax = pointer<float>(given.columnwise_amax);
        QuantizeArgs args = options_;
        args.input = pointer<const void>(input);
        args.rng_state = pointer<const int64_t>(given.rng_state);
        args.skip = pointer<const float>(given.skip);
        args.columnwise_amax = columnwise_amax ? columnwise_amax : columnwise_kept;
        args.amax = amax ? amax : kept ? kept : args.columnwise_amax;
        args.stored_amax = amax ? kept : nullptr;
        args.stored_columnwise_amax = columnwise_amax ? columnwise_kept : nullptr;
        const uintptr_t* columnwise = &buffers[1 + kScaleLayouts];
        args.rowwise_data = pointer<uint8_t>(buffers[0]);
        args.columnwise_data = pointer<uint8_t>(columnwise[0]);
        for (int layout = 0; layout < kScaleLayouts; ++layout) {
            args.rowwise_scale[layout] = pointer<uint8_t>(buffers[1 + layout]);
            args.columnwise_scale[layout] = pointer<uint8_t>(columnwise[1 + layout]);
        }
        return {{args.input, args.dtype, args.rows, args.cols, args.signs, args.skip, amax ? nullptr : kept,
                 columnwise_amax ? nullptr : columnwise_kept},
                args};
    }

    QuantizeArgs options_{};
};

}  // namespace

void bind_quantize(py::module_& m) {
    py::class_<Quantization>(m, "Quantization")
        .def(py::init<int, int64_t, int64_t, int, bool, bool, float, bool>(), py::kw_only(), "dtype"_a,
             "rows"_a, "cols"_a, "block_rows"_a, "hadamard"_a, "random_signs"_a, "e4m3_max"_a,
             "squared_error"_a)
        .def("run", &Quantization::run, NoGil(), "target"_a, "input"_a, "buffers"_a, "amax"_a,
             "columnwise_amax"_a, "rng_state"_a, "skip"_a, "experts"_a, "values"_a = 0)
        .def("run_groups", &Quantization::run_groups, NoGil());
    using Args = GroupedValuesArgs;
    struct_class<Args>(m, "GroupedValuesArgs",
                       {FIELD(Args, data),
                        FIELD(Args, scale),
                        FIELD(Args, amax),
                        FIELD(Args, other_amax),
                        {"other_e4m3_max",
                         [](void* args, const py::handle& value) {
                             static_cast<Args*>(args)->other_factor = decode_factor(value.cast<float>());
                         }},
                        FIELD(Args, offsets),
                        FIELD(Args, data_offsets),
                        FIELD(Args, error),
                        FIELD(Args, output),
                        FIELD(Args, ends),
                        FIELD(Args, tokens),
                        FIELD(Args, cols),
                        FIELD(Args, data_rows),
                        FIELD(Args, count),
                        FIELD(Args, columnwise)});
    m.def("grouped_values", &zerofp4::grouped_values, NoGil());
}

}  // namespace zerofp4::bindings
