// The optimizer's update of a list of tensors, and the mean and the check of gradients.

#include <algorithm>
#include <utility>

#include "bindings/bindings.h"
#include "common/compact.h"
#include "common/squares.h"
#include "dispatch/update.h"

namespace zerofp4::bindings {
namespace {

AdamWDescriptor adamw_descriptor(uintptr_t master, uintptr_t exp_avg, uintptr_t exp_avg_sq, uintptr_t step,
                                 uintptr_t present, int gradient_dtype, int64_t start, int64_t numel,
                                 int64_t rows, int64_t cols, int weight_dtype, int64_t tile_offset,
                                 int64_t amax_offset, int64_t own_offset, const CompactState& compact) {
    AdamWDescriptor tensor{};
    tensor.master = pointer<float>(master);
    tensor.exp_avg = pointer<float>(exp_avg);
    tensor.exp_avg_sq = pointer<float>(exp_avg_sq);
    tensor.step = pointer<float>(step);
    tensor.present = pointer<const double>(present);
    tensor.gradient_dtype = static_cast<DType>(gradient_dtype);
    tensor.start = start;
    tensor.numel = numel;
    tensor.rows = rows;
    tensor.cols = cols;
    tensor.weight_dtype = static_cast<DType>(weight_dtype);
    tensor.tile_offset = tile_offset;
    tensor.amax_offset = amax_offset;
    tensor.own_offset = own_offset;
    tensor.compact = compact;
    tensor.compact.aligned = compact.aligned && master % 16 == 0;
    return tensor;
}

CompactState compact_state(uintptr_t high, uintptr_t low, uintptr_t exp_avg, uintptr_t exp_avg_sq,
                           uintptr_t scales, int64_t first_group, uint64_t first_block, uint32_t number) {
    CompactState state{};
    state.high = pointer<BFloat16>(high);
    state.low = pointer<uint8_t>(low);
    state.exp_avg = pointer<int8_t>(exp_avg);
    state.exp_avg_sq = pointer<uint8_t>(exp_avg_sq);
    state.scales = pointer<StateScales>(scales);
    state.first_group = first_group;
    state.first_block = first_block;
    state.number = number;
    state.aligned = (high | low | exp_avg | exp_avg_sq) % 16 == 0;
    return state;
}

AdamWOptions adamw_options(uintptr_t lr_address, uintptr_t skip, uintptr_t factor, double lr, double beta1,
                           double beta2, double eps, double weight_decay, bool maximize) {
    AdamWOptions options{};
    options.lr_address = pointer<const float>(lr_address);
    options.skip = pointer<const float>(skip);
    options.factor = pointer<const float>(factor);
    options.lr = lr;
    options.beta1 = beta1;
    options.beta2 = beta2;
    options.eps = eps;
    options.weight_decay = weight_decay;
    options.maximize = maximize;
    return options;
}

GradientPieces gradient_pieces(uintptr_t received, int64_t stride, uintptr_t masters, int rank, int count,
                               const std::vector<uintptr_t>& rows) {
    GradientPieces pieces{};
    pieces.received = pointer<const void>(received);
    pieces.stride = stride;
    pieces.masters = pointer<const void>(masters);
    pieces.rank = rank;
    pieces.count = count;
    pieces.share = count > 0 ? 1.0 / count : 0.0;
    pieces.rows = peer_rows(rows);
    return pieces;
}

void average(const Target& target, uintptr_t pieces, uintptr_t own, int dtype, int rank, int64_t count,
             int64_t numel, uintptr_t output, uintptr_t squares, const std::vector<uintptr_t>& rows) {
    const AverageArgs args{pointer<const void>(pieces),
                           pointer<const void>(own),
                           static_cast<DType>(dtype),
                           rank,
                           count,
                           numel,
                           pointer<float>(output),
                           pointer<uint64_t>(squares),
                           peer_rows(rows)};
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.average(args, threads); },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.average(args, stream); });
}

// Tensors of one dtype, read by launches that differ only in where the tensors lie: at positions of a vector
// of int64 addresses that each call is given. words: by tensor, above 0, for find_nonfinite().
class MultiTensorList {
  public:
    MultiTensorList(std::vector<size_t> positions, std::vector<int64_t> numels, std::vector<int32_t> words,
                    int dtype)
        : positions_(std::move(positions)),
          numels_(std::move(numels)),
          words_(std::move(words)),
          dtype_(static_cast<DType>(dtype)) {
        if (numels_.size() != positions_.size() || words_.size() != positions_.size())
            throw py::value_error("not as many lengths and words as positions");
    }

    void add_squares(const Target& target, const py::bytes& addresses, uintptr_t squares) const {
        for (size_t first = 0; first < positions_.size(); first += kListTensors) {
            const SquaresArgs args{part(addresses, first), pointer<uint64_t>(squares)};
            dispatch(
                target, [&](const cpu::Kernels& k, int threads) { k.add_squares(args, threads); },
                [&](const cuda::Kernels& k, cudaStream_t stream) { k.add_squares(args, stream); });
        }
    }

    void find_nonfinite(const Target& target, const py::bytes& addresses, uintptr_t found, uintptr_t flag,
                        uintptr_t when) const {
        for (size_t first = 0; first < positions_.size(); first += kListTensors) {
            NonfiniteArgs args{part(addresses, first),
                               {},
                               pointer<int32_t>(found),
                               pointer<float>(flag),
                               pointer<const int64_t>(when)};
            std::copy_n(words_.data() + first, args.list.count, args.words);
            dispatch(
                target, [&](const cpu::Kernels& k, int threads) { k.find_nonfinite(args, threads); },
                [&](const cuda::Kernels& k, cudaStream_t stream) { k.find_nonfinite(args, stream); });
        }
    }

    void widen(const Target& target, const py::bytes& addresses, const py::bytes& outputs) const {
        for (size_t first = 0; first < positions_.size(); first += kListTensors) {
            WidenArgs args{part(addresses, first), {}};
            for (int i = 0; i < args.list.count; ++i) args.outputs[i] = at<float>(outputs, first + i);
            dispatch(
                target, [&](const cpu::Kernels& k, int threads) { k.widen(args, threads); },
                [&](const cuda::Kernels& k, cudaStream_t stream) { k.widen(args, stream); });
        }
    }

  private:
    // The address of the i-th tensor of this dtype.
    template <class T>
    T* at(const py::bytes& addresses, size_t i) const {
        const auto* words = reinterpret_cast<const int64_t*>(PyBytes_AS_STRING(addresses.ptr()));
        const size_t count = static_cast<size_t>(PyBytes_GET_SIZE(addresses.ptr())) / sizeof(int64_t);
        if (positions_[i] >= count) throw py::index_error("fewer addresses than tensors");
        return pointer<T>(static_cast<uintptr_t>(words[positions_[i]]));
    }

    // From `first` on as many as travel at once.
    TensorList part(const py::bytes& addresses, size_t first) const {
        TensorList list{};
        list.count = static_cast<int32_t>(std::min<size_t>(positions_.size() - first, kListTensors));
        for (int i = 0; i < list.count; ++i) list.tensors[i] = at<const void>(addresses, first + i);
        std::copy_n(numels_.data() + first, list.count, list.numels);
        list.dtype = dtype_;
        return list;
    }

    std::vector<size_t> positions_;
    std::vector<int64_t> numels_;
    std::vector<int32_t> words_;
    DType dtype_;
};

// gradients: int64 addresses, -1 where there is none. An empty tensor has no address, but its steps count;
// nothing is read there.
void begin_adamw(AdamWPlan& plan, const Target& target, const AdamWOptions& options, int64_t first,
                 const py::bytes& gradients) {
    const auto* words = reinterpret_cast<const int64_t*>(PyBytes_AS_STRING(gradients.ptr()));
    const size_t count = static_cast<size_t>(PyBytes_GET_SIZE(gradients.ptr())) / sizeof(int64_t);
    std::vector<uintptr_t> addresses(count);
    for (size_t i = 0; i < count; ++i)
        addresses[i] = words[i] < 0 ? 0 : words[i] == 0 ? 1 : static_cast<uintptr_t>(words[i]);
    plan.begin(target, options, first, addresses);
}

}  // namespace

void bind_optim(py::module_& m) {
    py::class_<CompactState>(m, "CompactState")
        .def(py::init(&compact_state), py::kw_only(), "high"_a, "low"_a, "exp_avg"_a, "exp_avg_sq"_a,
             "scales"_a, "first_group"_a, "first_block"_a, "number"_a);
    py::class_<AdamWDescriptor>(m, "AdamWDescriptor")
        .def(py::init(&adamw_descriptor), py::kw_only(), "master"_a, "exp_avg"_a, "exp_avg_sq"_a, "step"_a,
             "present"_a, "gradient_dtype"_a, "start"_a, "numel"_a, "rows"_a, "cols"_a, "weight_dtype"_a,
             "tile_offset"_a, "amax_offset"_a, "own_offset"_a, "compact"_a = CompactState{});
    py::class_<AdamWOptions>(m, "AdamWOptions")
        .def(py::init(&adamw_options), py::kw_only(), "lr_address"_a, "skip"_a, "factor"_a, "lr"_a, "beta1"_a,
             "beta2"_a, "eps"_a, "weight_decay"_a, "maximize"_a);
    py::class_<GradientPieces>(m, "GradientPieces")
        .def(py::init(&gradient_pieces), py::kw_only(), "received"_a = 0, "stride"_a = 0, "masters"_a = 0,
             "rank"_a = 0, "count"_a = 0, "rows"_a = std::vector<uintptr_t>());
    py::class_<AdamWPlan>(m, "AdamWPlan")
        .def(py::init<bool, bool, std::vector<AdamWDescriptor>, uintptr_t>(), py::kw_only(), "on_cpu"_a,
             "compact"_a, "tensors"_a, "reduced"_a)
        .def("descriptor_bytes", [](const AdamWPlan& plan) { return py::bytes(plan.descriptor_bytes()); })
        .def("set_device_descriptors", &AdamWPlan::set_device_descriptors)
        .def("begin", &begin_adamw, "target"_a, "options"_a, "first"_a, "gradients"_a, NoGil())
        .def("update", &AdamWPlan::update, "target"_a, "pieces"_a, NoGil());
    m.def("average", &average, py::kw_only(), "target"_a, "pieces"_a, "own"_a = 0, "dtype"_a, "rank"_a = 0,
          "count"_a, "numel"_a, "output"_a, "squares"_a = 0, "rows"_a = std::vector<uintptr_t>(), NoGil());
    m.attr("RANDOM_COLUMNS") = kRandomColumns;
    m.attr("SQUARE_RANGES") = kSquareRanges;
    m.attr("SQUARE_WORDS") = kSquareWords;
    m.attr("SQUARE_COPIES") = kSquareCopies;
    py::class_<MultiTensorList>(m, "MultiTensorList")
        .def(py::init<std::vector<size_t>, std::vector<int64_t>, std::vector<int32_t>, int>(), "positions"_a,
             "numels"_a, "words"_a, "dtype"_a)
        .def("add_squares", &MultiTensorList::add_squares, "target"_a, "addresses"_a, "squares"_a, NoGil())
        .def("find_nonfinite", &MultiTensorList::find_nonfinite, "target"_a, "addresses"_a, "found"_a,
             "flag"_a, "when"_a, NoGil())
        .def("widen", &MultiTensorList::widen, "target"_a, "addresses"_a, "outputs"_a, NoGil());
}

}  // namespace zerofp4::bindings
