// zerofp4._C: addresses, sizes and streams as integers, no torch. zerofp4/ops is its only caller and
// checks everything before it calls.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

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
                                   uintptr_t columnwise_amax, uintptr_t given_amax,
                                   const Addresses& rowwise_scale, const Addresses& columnwise_scale,
                                   int64_t tile_offset, int64_t amax_offset) {
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
    weight.given_amax = pointer<const float>(given_amax);
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

void quantize_rows(const Target& target, uintptr_t input, int dtype, int64_t rows, int64_t cols,
                   uintptr_t amax, uintptr_t rowwise_data, uintptr_t rowwise_scale, uintptr_t columnwise_data,
                   uintptr_t columnwise_scale) {
    const QuantizeRowsArgs args{pointer<const void>(input),
                                static_cast<DType>(dtype),
                                rows,
                                cols,
                                pointer<const float>(amax),
                                pointer<uint8_t>(rowwise_data),
                                pointer<uint8_t>(rowwise_scale),
                                pointer<uint8_t>(columnwise_data),
                                pointer<uint8_t>(columnwise_scale)};
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.quantize_rows(args, threads); },
        [&](cudaStream_t stream) { cuda::quantize_rows(args, stream); });
}

void dequantize(const Target& target, uintptr_t data, uintptr_t scale, uintptr_t amax, int64_t rows,
                int64_t cols, int64_t block_rows, int dtype, uintptr_t output) {
    const DequantizeArgs args{pointer<const uint8_t>(data),
                              pointer<const uint8_t>(scale),
                              pointer<const float>(amax),
                              rows,
                              cols,
                              block_rows,
                              static_cast<DType>(dtype),
                              pointer<void>(output)};
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.dequantize(args, threads); },
        [&](cudaStream_t stream) { cuda::dequantize(args, stream); });
}

ScaleLayoutArgs scale_layout_args(uintptr_t input, uintptr_t output, int64_t rows, int64_t cols,
                                  int64_t block_rows, int layout) {
    return {pointer<const uint8_t>(input),   pointer<uint8_t>(output), rows, cols, block_rows,
            static_cast<ScaleLayout>(layout)};
}

void pad_scale(const Target& target, uintptr_t input, uintptr_t output, int64_t rows, int64_t cols,
               int64_t block_rows, int layout) {
    const ScaleLayoutArgs args = scale_layout_args(input, output, rows, cols, block_rows, layout);
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.pad_scale(args, threads); },
        [&](cudaStream_t stream) { cuda::pad_scale(args, stream); });
}

void unpad_scale(const Target& target, uintptr_t input, uintptr_t output, int64_t rows, int64_t cols,
                 int64_t block_rows, int layout) {
    const ScaleLayoutArgs args = scale_layout_args(input, output, rows, cols, block_rows, layout);
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.unpad_scale(args, threads); },
        [&](cudaStream_t stream) { cuda::unpad_scale(args, stream); });
}

void convert(const Target& target, uintptr_t input, float factor, int64_t numel, int format,
             uintptr_t output) {
    const ConvertArgs args{pointer<const float>(input), factor, numel, static_cast<Format>(format),
                           pointer<void>(output)};
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.convert(args, threads); },
        [&](cudaStream_t stream) { cuda::convert(args, stream); });
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
             "given_amax"_a, "rowwise_scale"_a, "columnwise_scale"_a, "tile_offset"_a, "amax_offset"_a);
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

    m.def("quantize_rows", &quantize_rows, no_gil);
    m.def("dequantize", &dequantize, no_gil);
    m.def("pad_scale", &pad_scale, no_gil);
    m.def("unpad_scale", &unpad_scale, no_gil);
    m.def("convert", &convert, no_gil);
}
