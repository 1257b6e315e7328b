// zerofp4._C: addresses, sizes and streams as integers, no torch. zerofp4/ops is its only caller and
// checks everything before it calls.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "common/hadamard.h"
#include "dispatch/lists.h"
#include "dispatch/plan.h"
#include "dispatch/update.h"

namespace py = pybind11;
using namespace zerofp4;

namespace {

using Addresses = std::array<uintptr_t, kScaleLayouts>;

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

WeightDescriptor weight_descriptor(uintptr_t master, int64_t start, int64_t numel, int64_t rows, int64_t cols,
                                   int master_dtype, int weight_dtype, uintptr_t codes, uintptr_t amax,
                                   uintptr_t columnwise_amax, const Addresses& rowwise_scale,
                                   const Addresses& columnwise_scale, int64_t tile_offset,
                                   int64_t amax_offset) {
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
    return weight;
}

TransposeDescriptor transpose_descriptor(uintptr_t input, uintptr_t output, int64_t rows, int64_t cols) {
    return {pointer<const uint8_t>(input), pointer<uint8_t>(output), rows, cols, 0};
}

void tensor_amax(const Target& target, uintptr_t input, int dtype, int64_t rows, int64_t cols,
                 bool random_signs, uintptr_t skip, uintptr_t amax, uintptr_t hadamard_amax) {
    const AmaxArgs args{pointer<const void>(input),
                        static_cast<DType>(dtype),
                        rows,
                        cols,
                        random_signs ? kRandomSigns : 0,
                        pointer<const float>(skip),
                        pointer<float>(amax),
                        pointer<float>(hadamard_amax)};
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.tensor_amax(args, threads); },
        [&](cudaStream_t stream) { cuda::tensor_amax(args, stream); });
}

QuantizeArgs quantize_args(uintptr_t input, int dtype, int64_t rows, int64_t cols, int block_rows,
                           bool hadamard, bool random_signs, float e4m3_max, bool squared_error,
                           uintptr_t rng_state, uintptr_t amax, uintptr_t columnwise_amax, uintptr_t skip,
                           uintptr_t rowwise_data, uintptr_t columnwise_data, uintptr_t values,
                           const Addresses& rowwise_scale, const Addresses& columnwise_scale,
                           uintptr_t stored_amax, uintptr_t stored_columnwise_amax) {
    QuantizeArgs args{};
    args.input = pointer<const void>(input);
    args.dtype = static_cast<DType>(dtype);
    args.rows = rows;
    args.cols = cols;
    args.block_rows = block_rows;
    args.hadamard = hadamard;
    args.signs = random_signs ? kRandomSigns : 0;
    args.choice = {e4m3_max, squared_error};
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

void quantize(const Target& target, const QuantizeArgs& args) {
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.quantize(args, threads); },
        [&](cudaStream_t stream) { cuda::quantize(args, stream); });
}

GroupSplits group_splits(uintptr_t rows, bool wide, int32_t count, int64_t tokens) {
    return {pointer<const void>(rows), wide, count, tokens};
}

void grouped_amax(const Target& target, uintptr_t input, int dtype, int64_t rows, int64_t cols,
                  bool random_signs, const GroupSplits& splits, uintptr_t amax, uintptr_t hadamard_amax) {
    const AmaxArgs whole{pointer<const void>(input),
                         static_cast<DType>(dtype),
                         rows,
                         cols,
                         random_signs ? kRandomSigns : 0,
                         nullptr,
                         pointer<float>(amax),
                         pointer<float>(hadamard_amax)};
    const GroupedAmaxArgs args{whole, splits};
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.grouped_amax(args, threads); },
        [&](cudaStream_t stream) { cuda::grouped_amax(args, stream); });
}

void quantize_grouped(const Target& target, const QuantizeArgs& whole, const GroupSplits& splits,
                      uintptr_t offsets, uintptr_t error) {
    const GroupedArgs args{whole, splits, pointer<int64_t>(offsets), pointer<int32_t>(error)};
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.quantize_grouped(args, threads); },
        [&](cudaStream_t stream) { cuda::quantize_grouped(args, stream); });
}

void convert(const Target& target, uintptr_t input, float factor, int64_t numel, int format,
             uintptr_t output) {
    const ConvertArgs args{pointer<const float>(input), factor, numel, static_cast<Format>(format),
                           pointer<void>(output)};
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.convert(args, threads); },
        [&](cudaStream_t stream) { cuda::convert(args, stream); });
}

using Mxfp8Copy = std::array<uintptr_t, 3>;  // data, compact scale, swizzled scale

void quantize_mxfp8(const Target& target, uintptr_t input, int dtype, int64_t rows, int64_t cols,
                    uintptr_t skip, const Mxfp8Copy& rowwise, const Mxfp8Copy& columnwise) {
    const Mxfp8Args args{pointer<const void>(input),
                         static_cast<DType>(dtype),
                         rows,
                         cols,
                         pointer<const float>(skip),
                         pointer<uint8_t>(rowwise[0]),
                         pointer<uint8_t>(rowwise[1]),
                         pointer<uint8_t>(rowwise[2]),
                         pointer<uint8_t>(columnwise[0]),
                         pointer<uint8_t>(columnwise[1]),
                         pointer<uint8_t>(columnwise[2])};
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.quantize_mxfp8(args, threads); },
        [&](cudaStream_t stream) { cuda::quantize_mxfp8(args, stream); });
}

void dequantize_mxfp8(const Target& target, uintptr_t data, uintptr_t scale, int64_t rows, int64_t cols,
                      bool columnwise, int layout, int dtype, uintptr_t output) {
    const auto item = mxfp8_dequantize_descriptor(data, scale, output, rows, cols, columnwise, layout);
    Mxfp8DequantizeList(target.is_cpu(), {item}, dtype).run(target);
}

// What the classes of lists have in common.
template <class List>
py::class_<List> list_class(py::module_& m, const char* name) {
    return py::class_<List>(m, name)
        .def("descriptor_bytes", [](const List& list) { return py::bytes(list.descriptor_bytes()); })
        .def("set_device_descriptors", &List::set_device_descriptors)
        .def("run", &List::run, py::call_guard<py::gil_scoped_release>());
}

AdamWDescriptor adamw_descriptor(uintptr_t master, uintptr_t exp_avg, uintptr_t exp_avg_sq, uintptr_t step,
                                 int gradient_dtype, int64_t start, int64_t numel, int64_t rows, int64_t cols,
                                 int weight_dtype, int64_t tile_offset, int64_t amax_offset) {
    AdamWDescriptor tensor{};
    tensor.master = pointer<float>(master);
    tensor.exp_avg = pointer<float>(exp_avg);
    tensor.exp_avg_sq = pointer<float>(exp_avg_sq);
    tensor.step = pointer<float>(step);
    tensor.gradient_dtype = static_cast<DType>(gradient_dtype);
    tensor.start = start;
    tensor.numel = numel;
    tensor.rows = rows;
    tensor.cols = cols;
    tensor.weight_dtype = static_cast<DType>(weight_dtype);
    tensor.tile_offset = tile_offset;
    tensor.amax_offset = amax_offset;
    return tensor;
}

AdamWOptions adamw_options(uintptr_t lr_address, double lr, double beta1, double beta2, double eps,
                           double weight_decay, bool maximize) {
    return {pointer<const float>(lr_address), lr, beta1, beta2, eps, weight_decay, maximize};
}

py::dict build() {
    py::dict info;
    info["isas"] = ZEROFP4_ISAS;
#if defined(ZEROFP4_CUDA_VERSION)
    info["cuda_version"] = ZEROFP4_CUDA_VERSION;
    info["cuda_architectures"] = ZEROFP4_CUDA_ARCHITECTURES;
#endif
    return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    using namespace py::literals;
    const py::call_guard<py::gil_scoped_release> no_gil;

    m.attr("HEADER_WORDS") = kHeaderWords;
    m.attr("ERROR_WORD") = kErrorWord;
    m.attr("HASH_WORD") = kHashWord;
    m.attr("PEER_ERROR") = static_cast<int>(kPeerError);
    m.attr("PLAN_MISMATCH") = static_cast<int>(kPlanMismatch);
    m.def("build", &build);
    m.def("cpu_isa", [] { return cpu::kernels().isa; });

    py::class_<Target>(m, "Target").def(py::init<int, int64_t, int>(), "device"_a, "stream"_a, "threads"_a);
    py::class_<WeightDescriptor>(m, "WeightDescriptor")
        .def(py::init(&weight_descriptor), py::kw_only(), "master"_a, "start"_a, "numel"_a, "rows"_a,
             "cols"_a, "master_dtype"_a, "weight_dtype"_a, "codes"_a, "amax"_a, "columnwise_amax"_a,
             "rowwise_scale"_a, "columnwise_scale"_a, "tile_offset"_a, "amax_offset"_a);
    py::class_<TransposeDescriptor>(m, "TransposeDescriptor")
        .def(py::init(&transpose_descriptor), "input"_a, "output"_a, "rows"_a, "cols"_a);

    py::class_<CastPlan>(m, "CastPlan")
        .def(py::init<bool, std::vector<WeightDescriptor>, uintptr_t, int64_t, float, bool, uintptr_t,
                      uintptr_t>(),
             py::kw_only(), "on_cpu"_a, "weights"_a, "reduced"_a, "reduced_numel"_a, "hash"_a,
             "skip_nonfinite"_a, "found_inf"_a, "status"_a)
        .def("descriptor_bytes", [](const CastPlan& plan) { return py::bytes(plan.descriptor_bytes()); })
        .def("set_device_descriptors", &CastPlan::set_device_descriptors)
        .def("begin", &CastPlan::begin, "target"_a, "error"_a, no_gil)
        .def("amax", &CastPlan::amax, no_gil)
        .def("scale", &CastPlan::scale, no_gil)
        .def("cast", &CastPlan::cast, no_gil)
        .def("begin_amax", &CastPlan::begin_amax, no_gil)
        .def("scale_cast", &CastPlan::scale_cast, no_gil);
    py::class_<TransposePlan>(m, "TransposePlan")
        .def(py::init<bool, std::vector<TransposeDescriptor>>(), "on_cpu"_a, "items"_a)
        .def("descriptor_bytes", [](const TransposePlan& plan) { return py::bytes(plan.descriptor_bytes()); })
        .def("set_device_descriptors", &TransposePlan::set_device_descriptors)
        .def("run", &TransposePlan::run, no_gil);

    m.attr("ARGUMENT_ITEMS") = kArgumentItems;
    py::class_<DequantizeDescriptor>(m, "DequantizeDescriptor")
        .def(py::init(&dequantize_descriptor), py::kw_only(), "data"_a, "scale"_a, "amax"_a, "output"_a,
             "rows"_a, "cols"_a, "columnwise"_a, "block_rows"_a, "layout"_a, "e4m3_max"_a);
    list_class<DequantizeList>(m, "DequantizeList")
        .def(py::init<bool, std::vector<DequantizeDescriptor>, int>(), "on_cpu"_a, "items"_a, "dtype"_a);
    py::class_<Mxfp8DequantizeDescriptor>(m, "Mxfp8DequantizeDescriptor")
        .def(py::init(&mxfp8_dequantize_descriptor), py::kw_only(), "data"_a, "scale"_a, "output"_a, "rows"_a,
             "cols"_a, "columnwise"_a, "layout"_a);
    list_class<Mxfp8DequantizeList>(m, "Mxfp8DequantizeList")
        .def(py::init<bool, std::vector<Mxfp8DequantizeDescriptor>, int>(), "on_cpu"_a, "items"_a, "dtype"_a);
    py::class_<ScaleLayoutDescriptor>(m, "ScaleLayoutDescriptor")
        .def(py::init(&scale_layout_descriptor), py::kw_only(), "input"_a, "output"_a, "rows"_a, "columns"_a,
             "block_rows"_a, "layout"_a);
    list_class<ScaleLayoutList>(m, "ScaleLayoutList")
        .def(py::init<bool, std::vector<ScaleLayoutDescriptor>, bool>(), "on_cpu"_a, "items"_a, "pad"_a);

    py::class_<AdamWDescriptor>(m, "AdamWDescriptor")
        .def(py::init(&adamw_descriptor), py::kw_only(), "master"_a, "exp_avg"_a, "exp_avg_sq"_a, "step"_a,
             "gradient_dtype"_a, "start"_a, "numel"_a, "rows"_a, "cols"_a, "weight_dtype"_a, "tile_offset"_a,
             "amax_offset"_a);
    py::class_<AdamWOptions>(m, "AdamWOptions")
        .def(py::init(&adamw_options), py::kw_only(), "lr_address"_a, "lr"_a, "beta1"_a, "beta2"_a, "eps"_a,
             "weight_decay"_a, "maximize"_a);
    py::class_<AdamWPlan>(m, "AdamWPlan")
        .def(py::init<bool, std::vector<AdamWDescriptor>, uintptr_t>(), py::kw_only(), "on_cpu"_a,
             "tensors"_a, "reduced"_a)
        .def("descriptor_bytes", [](const AdamWPlan& plan) { return py::bytes(plan.descriptor_bytes()); })
        .def("step_bytes", &AdamWPlan::step_bytes)
        .def("set_device_tables", &AdamWPlan::set_device_tables, "descriptors"_a, "steps"_a)
        .def("begin", &AdamWPlan::begin, "target"_a, "options"_a, "first"_a, "gradients"_a, no_gil)
        .def("update", &AdamWPlan::update, no_gil);

    py::class_<QuantizeArgs>(m, "QuantizeArgs")
        .def(py::init(&quantize_args), py::kw_only(), "input"_a, "dtype"_a, "rows"_a, "cols"_a,
             "block_rows"_a, "hadamard"_a = false, "random_signs"_a = true, "e4m3_max"_a = 0.0f,
             "squared_error"_a = false, "rng_state"_a = 0, "amax"_a, "columnwise_amax"_a = 0, "skip"_a = 0,
             "rowwise_data"_a = 0, "columnwise_data"_a = 0, "values"_a = 0, "rowwise_scale"_a = Addresses{},
             "columnwise_scale"_a = Addresses{}, "stored_amax"_a = 0, "stored_columnwise_amax"_a = 0);
    m.def("tensor_amax", &tensor_amax, no_gil);
    m.def("quantize", &quantize, no_gil);
    py::class_<GroupSplits>(m, "GroupSplits")
        .def(py::init(&group_splits), "rows"_a, "wide"_a, "count"_a, "tokens"_a);
    m.def("grouped_amax", &grouped_amax, no_gil);
    m.def("quantize_grouped", &quantize_grouped, no_gil);
    m.def("convert", &convert, no_gil);
    m.def("quantize_mxfp8", &quantize_mxfp8, no_gil);
    m.def("dequantize_mxfp8", &dequantize_mxfp8, no_gil);
}
