#include "autograd/quantization.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>

#include <limits>
#include <utility>

#include "common/hadamard.h"
#include "common/scale.h"

namespace zerofp4 {
namespace {

PyObject* neutral_amax_of;

}  // namespace

void set_neutral_amax(PyObject* function) { neutral_amax_of = function; }

Launch begin_launch(const Tensor& tensor, const Scheme& scheme, bool apart) {
    THPObjectPtr device = checked(THPDevice_New(tensor.device()));
    THPObjectPtr neutral_amax = checked(PyObject_CallOneArg(neutral_amax_of, device));
    return {target_of(tensor), unwrapped(neutral_amax), scheme.by_cublaslt != 0, apart};
}

// Memory

Tensor part_of(const Tensor& whole, int64_t offset, c10::IntArrayRef sizes, at::ScalarType dtype) {
    auto part = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(whole.storage()),
                                                     whole.key_set(), c10::scalarTypeToTypeMeta(dtype));
    part->set_storage_offset(offset);
    part->set_sizes_contiguous(sizes);
    return Tensor(std::move(part));
}

void allocate(const at::TensorOptions& options, c10::ArrayRef<Piece> pieces, Tensor* made) {
    constexpr int64_t kAlignment = 256;
    const auto size_of_piece = [](const Piece& piece) {
        return c10::multiply_integers(piece.sizes) * static_cast<int64_t>(c10::elementSize(piece.dtype));
    };
    int64_t end = 0;
    for (const Piece& piece : pieces) end = round_up(end, kAlignment) + size_of_piece(piece);
    const Tensor whole = at::empty({end}, options.dtype(at::kByte));
    int64_t begin = 0;
    for (const Piece& piece : pieces) {
        const int64_t offset = begin / static_cast<int64_t>(c10::elementSize(piece.dtype));
        *made++ = part_of(whole, offset, piece.sizes, piece.dtype);
        begin = round_up(begin + size_of_piece(piece), kAlignment);
    }
}

namespace {

// The rows of all dimensions but the last, contiguous.
Tensor matrix_of(const Tensor& tensor) {
    Tensor whole = tensor.contiguous();
    if (whole.dim() == 2) return whole;
    const int64_t cols = whole.size(-1);
    return part_of(whole, whole.storage_offset(), {whole.numel() / cols, cols}, whole.scalar_type());
}

// Copies

struct CopyShape {
    at::DimVector data, scale;
    int64_t amaxes;
};

// Of a matrix, or of a stack of so many.
CopyShape shape_of(int64_t rows, int64_t cols, int64_t block_rows, int64_t experts = 0) {
    CopyShape shape{{rows, cols / 2}, {ceil_div(rows, block_rows), ceil_div(cols, kBlock)}, 1};
    if (experts == 0) return shape;
    shape.data.insert(shape.data.begin(), experts);
    shape.scale.insert(shape.scale.begin(), experts);
    shape.amaxes = experts;
    return shape;
}

Copy new_copy(const Tensor& x, const CopyShape& shape, const FourOverSix& choice, int64_t block_rows,
              bool apart) {
    const std::array<Piece, 3> pieces{
        {{shape.data, at::kByte}, {shape.scale, at::kFloat8_e4m3fn}, {{shape.amaxes}, at::kFloat}}};
    std::array<Tensor, 3> made;
    if (apart) {
        for (size_t i = 0; i < 3; ++i)
            made[i] = at::empty(pieces[i].sizes, x.options().dtype(pieces[i].dtype));
    } else {
        made = allocate(x.options(), pieces);
    }
    auto& [data, scale, amax] = made;
    return {std::move(data), std::move(scale), std::move(amax), block_rows, e4m3_max_of(choice)};
}

// Arguments

QuantizeArgs arguments_of(const Tensor& x, int64_t block_rows, const FourOverSix& choice) {
    QuantizeArgs args{};
    args.input = x.const_data_ptr();
    args.dtype = static_cast<DType>(dtype_code(x.scalar_type()));
    args.rows = x.size(-2);
    args.cols = x.size(-1);
    args.block_rows = static_cast<int32_t>(block_rows);
    args.signs = kRandomSigns;
    args.choice = choice;
    return args;
}

void write_rowwise(QuantizeArgs& args, const Copy& copy) {
    args.rowwise_data = copy.data.mutable_data_ptr<uint8_t>();
    args.rowwise_scale[kCompact] = static_cast<uint8_t*>(copy.scale.mutable_data_ptr());
}

// A quantization in blocks of 1x16: its arguments, the copies that it writes, where amaxes go.
struct Quantization {
    QuantizeArgs args;
    Quantized made;
    float* amax = nullptr;
    float* hadamard_amax = nullptr;
};

// rowwise, columnwise: the copies that are asked for.
Quantization begin_quantization(const Tensor& x, const CopyShape* rowwise, const CopyShape* columnwise,
                                const FourOverSix& choice, const Tensor& rng_state, const Scheme& scheme,
                                const Launch& launch) {
    Quantization q{arguments_of(x, 1, choice), {}};
    auto& [args, made, amax, hadamard_amax] = q;
    args.hadamard = columnwise && scheme.hadamard;
    args.signs = args.hadamard && !scheme.random_signs ? 0 : kRandomSigns;
    args.rng_state = rng_state.defined() ? rng_state.const_data_ptr<int64_t>() : nullptr;
    if (rowwise) {
        made.rowwise = new_copy(x, *rowwise, choice, 1, false);  // which no pass keeps
        write_rowwise(args, made.rowwise);
    }
    if (columnwise) {
        made.columnwise = new_copy(x, *columnwise, choice, 1, launch.apart);
        args.columnwise_data = made.columnwise.data.mutable_data_ptr<uint8_t>();
        args.columnwise_scale[kCompact] = static_cast<uint8_t*>(made.columnwise.scale.mutable_data_ptr());
        if (rowwise && !args.hadamard) made.rowwise.amax = made.columnwise.amax;
    }
    if (args.hadamard) hadamard_amax = made.columnwise.amax.mutable_data_ptr<float>();
    if (rowwise) amax = made.rowwise.amax.mutable_data_ptr<float>();
    if (!rowwise && !args.hadamard) amax = made.columnwise.amax.mutable_data_ptr<float>();
    return q;
}

}  // namespace

int e4m3_max_of(const FourOverSix& choice) {
    return static_cast<int>(choice.e4m3_max ? choice.e4m3_max : kE4M3Max);
}

GroupSplits Groups::sizes() const {
    return {splits.const_data_ptr(), splits.scalar_type() == at::kLong, static_cast<int32_t>(count()),
            tokens};
}

// Conditions

bool is_of(const Tensor& tensor, c10::IntArrayRef sizes, const c10::Device& device) {
    return is_dense(tensor) && tensor.sizes() == sizes && tensor.is_contiguous() &&
           tensor.device() == device && holds(tensor);
}

bool are_codes(const Copy& codes, int64_t rows, int64_t cols, const c10::Device& device, int64_t experts) {
    const auto& [data, scale, amax, block_rows, e4m3_max] = codes;
    if (!data.defined() || !scale.defined() || !amax.defined()) return false;
    if ((block_rows != 1 && block_rows != kBlock) || (e4m3_max != 448 && e4m3_max != 256) || cols % 2 != 0)
        return false;
    const CopyShape shape = shape_of(rows, cols, block_rows, experts);
    return data.scalar_type() == at::kByte && amax.scalar_type() == at::kFloat &&
           (scale.scalar_type() == at::kFloat8_e4m3fn || scale.scalar_type() == at::kByte) &&
           is_of(data, shape.data, device) && is_of(amax, {shape.amaxes}, device) &&
           is_of(scale, shape.scale, device);
}

bool is_quantizable(const Tensor& weight, const Scheme& scheme, const c10::Device& device) {
    return scheme.has_tiles && is_plain(weight) && dtype_code(weight.scalar_type()) >= 0 &&
           weight.device() == device && holds(weight);
}

// Quantization

Quantized quantize(const Tensor& x, bool rowwise, bool columnwise, const FourOverSix& choice,
                   const Tensor& rng_state, const Scheme& scheme, const Launch& launch) {
    const Tensor matrix = matrix_of(x);
    const int64_t rows = matrix.size(0), cols = matrix.size(1);
    const CopyShape across = shape_of(rows, cols, 1);
    const CopyShape along = shape_of(cols, scheme.hadamard ? round_up(rows, kBlock) : rows, 1);
    Quantization q = begin_quantization(matrix, rowwise ? &across : nullptr, columnwise ? &along : nullptr,
                                        choice, rng_state, scheme, launch);
    check(kernels().quantize(launch.target, q.args, 1, q.amax, q.hadamard_amax));
    return std::move(q.made);
}

QuantizedGroups quantize_groups(const Tensor& x, const Tensor& splits, bool rowwise, bool columnwise,
                                const Tensor& rng_state, const Scheme& scheme, const Launch& launch) {
    const Tensor matrix = x.contiguous();
    Groups groups{splits, at::empty({3, splits.size(0) + 1}, splits.options().dtype(at::kLong)),
                  at::empty({1}, splits.options().dtype(at::kInt)), x.size(0), x.size(1)};
    const int64_t rows = most_data_rows(groups.sizes()), cols = groups.cols, count = groups.count();
    const CopyShape across{{rows, cols / 2}, {rows, ceil_div(cols, kBlock)}, count};
    const CopyShape along{{cols * (rows / 2)}, {cols * (rows / kBlock)}, count};
    Quantization q = begin_quantization(matrix, rowwise ? &across : nullptr, columnwise ? &along : nullptr,
                                        FourOverSix{}, rng_state, scheme, launch);
    const GroupedArgs args{q.args, groups.sizes(), groups.offsets.mutable_data_ptr<int64_t>(),
                           groups.error.mutable_data_ptr<int32_t>()};
    check(kernels().quantize_groups(launch.target, args, q.amax, q.hadamard_amax));
    return {std::move(groups), std::move(q.made)};
}

Copy quantize_weight(const Tensor& weight, const Scheme& scheme, const Launch& launch) {
    const Tensor whole = weight.contiguous();
    const int64_t experts = whole.dim() == 3 ? whole.size(0) : 0;
    const CopyShape shape = shape_of(whole.size(-2), whole.size(-1), kBlock, experts);
    Copy made = new_copy(whole, shape, scheme.choice, kBlock, launch.apart);
    QuantizeArgs args = arguments_of(whole, kBlock, scheme.choice);
    write_rowwise(args, made);
    check(kernels().quantize(launch.target, args, experts ? experts : 1, made.amax.mutable_data_ptr<float>(),
                             nullptr));
    return made;
}

Tensor draw_rng_state(const Tensor& like, c10::IntArrayRef sizes, const Scheme& scheme) {
    if (!scheme.stochastic) return Tensor();
    return at::randint(std::numeric_limits<int64_t>::max(), sizes, like.options().dtype(at::kLong));
}

}  // namespace zerofp4
