// The plans of a step: CastPlan and TransposePlan.

#include "bindings/bindings.h"
#include "dispatch/plan.h"

namespace zerofp4::bindings {
namespace {

WeightDescriptor weight_descriptor(uintptr_t master, int64_t start, int64_t numel, int64_t rows, int64_t cols,
                                   int master_dtype, int weight_dtype, uintptr_t codes, uintptr_t amax,
                                   uintptr_t columnwise_amax, const Addresses& rowwise_scale,
                                   const Addresses& columnwise_scale, int64_t tile_offset,
                                   int64_t amax_offset, int block_rows, int e4m3_max, bool squared_error,
                                   int64_t own_offset, const std::array<int64_t, 2>& cut_offsets) {
    WeightDescriptor weight{};
    weight.master = pointer<const void>(master);
    weight.start = start;
    weight.numel = numel;
    weight.rows = rows;
    weight.cols = cols;
    weight.master_dtype = static_cast<DType>(master_dtype);
    weight.weight_dtype = static_cast<DType>(weight_dtype);
    weight.codes = pointer<uint8_t>(codes);
    weight.amax = pointer<float>(amax);
    weight.columnwise_amax = pointer<float>(columnwise_amax);
    for (int layout = 0; layout < kScaleLayouts; ++layout) {
        weight.rowwise_scale[layout] = pointer<uint8_t>(rowwise_scale[layout]);
        weight.columnwise_scale[layout] = pointer<uint8_t>(columnwise_scale[layout]);
    }
    weight.tile_offset = tile_offset;
    weight.amax_offset = amax_offset;
    weight.block_rows = block_rows;
    weight.e4m3_max = e4m3_max;
    weight.squared_error = squared_error;
    weight.own_offset = own_offset;
    for (int i = 0; i < 2; ++i) weight.cut_offsets[i] = cut_offsets[i];
    return weight;
}

TransposeDescriptor transpose_descriptor(uintptr_t input, uintptr_t output, int64_t rows, int64_t cols) {
    return {pointer<const uint8_t>(input), pointer<uint8_t>(output), rows, cols, 0};
}

}  // namespace

void bind_cast(py::module_& m) {
    py::class_<WeightDescriptor>(m, "WeightDescriptor")
        .def(py::init(&weight_descriptor), py::kw_only(), "master"_a, "start"_a, "numel"_a, "rows"_a,
             "cols"_a, "master_dtype"_a, "weight_dtype"_a, "codes"_a, "amax"_a, "columnwise_amax"_a,
             "rowwise_scale"_a, "columnwise_scale"_a, "tile_offset"_a, "amax_offset"_a, "block_rows"_a,
             "e4m3_max"_a, "squared_error"_a, "own_offset"_a, "cut_offsets"_a);
    py::class_<TransposeDescriptor>(m, "TransposeDescriptor")
        .def(py::init(&transpose_descriptor), "input"_a, "output"_a, "rows"_a, "cols"_a);

    py::class_<CastPlan>(m, "CastPlan")
        .def(py::init<bool, std::vector<WeightDescriptor>, uintptr_t, int64_t, float, uintptr_t, uintptr_t>(),
             py::kw_only(), "on_cpu"_a, "weights"_a, "reduced"_a, "reduced_numel"_a, "hash"_a, "found_inf"_a,
             "status"_a)
        .def("descriptor_bytes", [](const CastPlan& plan) { return py::bytes(plan.descriptor_bytes()); })
        .def("set_device_descriptors", &CastPlan::set_device_descriptors)
        .def("begin", &CastPlan::begin, "target"_a, "error"_a, NoGil())
        .def("scale", &CastPlan::scale, NoGil())
        .def("cast_before", &CastPlan::cast_before, NoGil())
        .def("cast_from", &CastPlan::cast_from, NoGil())
        .def("spread_scales", &CastPlan::spread_scales, NoGil())
        .def("begin_amax", &CastPlan::begin_amax, NoGil())
        .def("scale_cast", &CastPlan::scale_cast, NoGil());
    py::class_<TransposePlan>(m, "TransposePlan")
        .def(py::init<bool, std::vector<TransposeDescriptor>>(), "on_cpu"_a, "items"_a)
        .def("descriptor_bytes", [](const TransposePlan& plan) { return py::bytes(plan.descriptor_bytes()); })
        .def("set_device_descriptors", &TransposePlan::set_device_descriptors)
        .def("run", &TransposePlan::run, NoGil());
}

}  // namespace zerofp4::bindings
