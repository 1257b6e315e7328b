#pragma once
// What layers of an NVFP4 recipe quantize, on the stream and in the memory of one pass.

#include <c10/util/SmallVector.h>

#include <array>

#include "autograd/plain.h"

namespace zerofp4 {

// How the layers of a recipe quantize on a device.
struct Scheme {
    int hadamard;
    int random_signs;
    int stochastic;
    FourOverSix choice;  // of inputs, and of weights that are quantized for a call
    int has_tiles;       // such weights are in blocks of 16x16
    int by_cublaslt;
};

constexpr const char* kSchemeCapsule = "zerofp4._autograd.scheme";

// Where the launches of one pass run. neutral_amax: with which values have no global scale. apart: copies
// have memory of their own, each buffer: operators must not return tensors that share theirs.
struct Launch {
    Target target;
    Tensor neutral_amax;
    bool by_cublaslt;
    bool apart;
};

// What ops.neutral_amax is, for as long as the process lives.
void set_neutral_amax(PyObject* function);
// On the current stream of the tensor's device. Needs the GIL.
Launch begin_launch(const Tensor& tensor, const Scheme& scheme, bool apart = false);

// Memory

// Contiguous elements in the storage of another tensor, without history, and without torch's dispatcher,
// which for a view takes the host half as long as a launch.
Tensor part_of(const Tensor& whole, int64_t offset, c10::IntArrayRef sizes, at::ScalarType dtype);

struct Piece {
    at::DimVector sizes;
    at::ScalarType dtype;
};

// Tensors in one allocation, each at a multiple of 256 bytes of it, as if it had one of its own.
void allocate(const at::TensorOptions& options, c10::ArrayRef<Piece> pieces, Tensor* made);

template <size_t N>
std::array<Tensor, N> allocate(const at::TensorOptions& options, const std::array<Piece, N>& pieces) {
    std::array<Tensor, N> made;
    allocate(options, c10::ArrayRef<Piece>(pieces.data(), N), made.data());
    return made;
}

// Copies

int e4m3_max_of(const FourOverSix& choice);

struct Quantized {
    Copy rowwise, columnwise;
};

// Groups of rows of a matrix [tokens, cols]. splits: int32 or int64 [groups], their rows. offsets int64
// [3, groups + 1] and error int32 [1] are what zerofp4::quantize_grouped writes.
struct Groups {
    Tensor splits, offsets, error;
    int64_t tokens = 0, cols = 0;

    bool defined() const { return splits.defined(); }
    int64_t count() const { return splits.size(0); }
    GroupSplits sizes() const;
};

struct QuantizedGroups {
    Groups groups;
    Quantized copies;
};

// Conditions

bool is_of(const Tensor& tensor, c10::IntArrayRef sizes, const c10::Device& device);

// Whether these are the codes of a matrix [rows, cols] on the device, or of a stack of so many.
bool are_codes(const Copy& codes, int64_t rows, int64_t cols, const c10::Device& device, int64_t experts = 0);
// Whether a weight can be quantized on the device.
bool is_quantizable(const Tensor& weight, const Scheme& scheme, const c10::Device& device);

// Quantization

// x [..., K] in blocks of 1x16.
Quantized quantize(const Tensor& x, bool rowwise, bool columnwise, const FourOverSix& choice,
                   const Tensor& rng_state, const Scheme& scheme, const Launch& launch);
// x [tokens, K] in groups, each with an amax of its own. rng_state: of each.
QuantizedGroups quantize_groups(const Tensor& x, const Tensor& splits, bool rowwise, bool columnwise,
                                const Tensor& rng_state, const Scheme& scheme, const Launch& launch);
// The rows of a weight [N, K], or of a stack of them, in blocks of 16x16.
Copy quantize_weight(const Tensor& weight, const Scheme& scheme, const Launch& launch);

// For stochastic rounding, drawn as ops.draw_rng_state draws them; undefined where the scheme has none.
Tensor draw_rng_state(const Tensor& like, c10::IntArrayRef sizes, const Scheme& scheme);

}  // namespace zerofp4
