// The optimizer's update of a list of tensors, and the mean and the check of gradients.

#include <algorithm>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/struct_class.h"
#include "common/compact.h"
#include "common/squares.h"
#include "dispatch/update.h"

namespace zerofp4::bindings {

template <>
void assign(PeerRows& field, const py::handle& value) {
    assign(field.of, value);
}

namespace {

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
            on_either(target, [&](const auto& kernels, auto where) { kernels.add_squares(args, where); });
        }
    }

    void find_nonfinite(const Target& target, const py::bytes& addresses, uintptr_t found,
                        uintptr_t when) const {
        for (size_t first = 0; first < positions_.size(); first += kListTensors) {
            NonfiniteArgs args{
                part(addresses, first), {}, pointer<int32_t>(found), pointer<const int64_t>(when)};
            std::copy_n(words_.data() + first, args.list.count, args.words);
            on_either(target, [&](const auto& kernels, auto where) { kernels.find_nonfinite(args, where); });
        }
    }

    void widen(const Target& target, const py::bytes& addresses, const py::bytes& outputs) const {
        for (size_t first = 0; first < positions_.size(); first += kListTensors) {
            WidenArgs args{part(addresses, first), {}};
            for (int i = 0; i < args.list.count; ++i) args.outputs[i] = at<float>(outputs, first + i);
            on_either(target, [&](const auto& kernels, auto where) { kernels.widen(args, where); });
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
    using State = CompactState;
    struct_class<State>(m, "CompactState",
                        {FIELD(State, high), FIELD(State, low), FIELD(State, exp_avg),
                         FIELD(State, exp_avg_sq), FIELD(State, scales), FIELD(State, first_group),
                         FIELD(State, first_block), FIELD(State, number), FIELD(State, aligned)});
    using Tensor = AdamWDescriptor;
    struct_class<Tensor>(
        m, "AdamWDescriptor",
        {FIELD(Tensor, master), FIELD(Tensor, exp_avg), FIELD(Tensor, exp_avg_sq), FIELD(Tensor, step),
         FIELD(Tensor, present), FIELD(Tensor, gradient_dtype), FIELD(Tensor, start), FIELD(Tensor, numel),
         FIELD(Tensor, rows), FIELD(Tensor, cols), FIELD(Tensor, weight_dtype), FIELD(Tensor, tile_offset),
         FIELD(Tensor, amax_offset), FIELD(Tensor, own_offset), FIELD(Tensor, compact)});
    using Options = AdamWOptions;
    struct_class<Options>(m, "AdamWOptions",
                          {FIELD(Options, lr_address), FIELD(Options, skip), FIELD(Options, factor),
                           FIELD(Options, lr), FIELD(Options, beta1), FIELD(Options, beta2),
                           FIELD(Options, eps), FIELD(Options, weight_decay), FIELD(Options, maximize)});
    using Pieces = GradientPieces;
    struct_class<Pieces>(
        m, "GradientPieces",
        {FIELD(Pieces, received), FIELD(Pieces, stride), FIELD(Pieces, masters), FIELD(Pieces, rank),
         FIELD(Pieces, count), FIELD(Pieces, share), FIELD(Pieces, rows)});
    using Average = AverageArgs;
    struct_class<Average>(m, "AverageArgs",
                          {FIELD(Average, pieces), FIELD(Average, own), FIELD(Average, dtype),
                           FIELD(Average, rank), FIELD(Average, count), FIELD(Average, numel),
                           FIELD(Average, output), FIELD(Average, squares), FIELD(Average, rows)});
    py::class_<AdamWPlan>(m, "AdamWPlan")
        .def(py::init<bool, bool, std::vector<AdamWDescriptor>, uintptr_t>(), py::kw_only(), "on_cpu"_a,
             "compact"_a, "tensors"_a, "reduced"_a)
        .def("descriptor_bytes", [](const AdamWPlan& plan) { return py::bytes(plan.descriptor_bytes()); })
        .def("set_device_descriptors", &AdamWPlan::set_device_descriptors)
        .def("begin", &begin_adamw, "target"_a, "options"_a, "first"_a, "gradients"_a, NoGil())
        .def("update", &AdamWPlan::update, "target"_a, "pieces"_a, NoGil());
    m.def(
        "average",
        [](const Target& target, const AverageArgs& args) {
            on_either(target, [&](const auto& kernels, auto where) { kernels.average(args, where); });
        },
        NoGil());
    using Rounded = RoundMeansArgs;
    struct_class<Rounded>(
        m, "RoundMeansArgs",
        {FIELD(Rounded, pieces), FIELD(Rounded, count), FIELD(Rounded, numel), FIELD(Rounded, bytes),
         FIELD(Rounded, strips), FIELD(Rounded, format), FIELD(Rounded, values), FIELD(Rounded, output),
         FIELD(Rounded, slices), FIELD(Rounded, step), FIELD(Rounded, host)});
    m.def(
        "round_means",
        [](const Target& target, const RoundMeansArgs& args) {
            on_either(target, [&](const auto& kernels, auto where) { kernels.round_means(args, where); });
        },
        NoGil());
    using Means = AverageMeansArgs;
    struct_class<Means>(m, "AverageMeansArgs",
                        {FIELD(Means, pieces), FIELD(Means, count), FIELD(Means, numel), FIELD(Means, bytes),
                         FIELD(Means, strips), FIELD(Means, format), FIELD(Means, received),
                         FIELD(Means, output), FIELD(Means, hosts), FIELD(Means, slice)});
    m.def(
        "average_means",
        [](const Target& target, const AverageMeansArgs& args) {
            on_either(target, [&](const auto& kernels, auto where) { kernels.average_means(args, where); });
        },
        NoGil());
    m.attr("MEANS_AT_ONCE") = kMeansAtOnce;
    using Decide = DecideArgs;
    struct_class<Decide>(
        m, "DecideArgs",
        {FIELD(Decide, vote), FIELD(Decide, failed), FIELD(Decide, decision), FIELD(Decide, present),
         FIELD(Decide, found_inf), FIELD(Decide, count), FIELD(Decide, equal), FIELD(Decide, looks),
         FIELD(Decide, counts), FIELD(Decide, goes_on), FIELD(Decide, keeps)});
    m.def(
        "decide",
        [](const Target& target, const DecideArgs& args) {
            on_either(target, [&](const auto& kernels, auto where) { kernels.decide(args, where); });
        },
        NoGil());
    m.attr("DECISION_WORDS") = sizeof(Decision) / sizeof(double);
    m.attr("VOTE_FLAGS") = kVoteFlags;
    m.attr("RANDOM_COLUMNS") = kRandomColumns;
    m.attr("SQUARE_RANGES") = kSquareRanges;
    m.attr("SQUARE_WORDS") = kSquareWords;
    m.attr("SQUARE_COPIES") = kSquareCopies;
    py::class_<MultiTensorList>(m, "MultiTensorList")
        .def(py::init<std::vector<size_t>, std::vector<int64_t>, std::vector<int32_t>, int>(), "positions"_a,
             "numels"_a, "words"_a, "dtype"_a)
        .def("add_squares", &MultiTensorList::add_squares, "target"_a, "addresses"_a, "squares"_a, NoGil())
        .def("find_nonfinite", &MultiTensorList::find_nonfinite, "target"_a, "addresses"_a, "found"_a,
             "when"_a, NoGil())
        .def("widen", &MultiTensorList::widen, "target"_a, "addresses"_a, "outputs"_a, NoGil());
}

}  // namespace zerofp4::bindings
