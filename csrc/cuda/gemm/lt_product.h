#pragma once
// A product by cuBLASLt, whose epilogue multiplies the float32 sums with alpha, read from the device, adds
// the bias and rounds once. Nothing here calls the CUDA runtime.
//
// cuBLASLt's matrices are column-major, so ours are their transposes: out^T [cols, rows] = b a^T, with b as
// its first factor. The bias lies along the rows of out^T.

#include <mutex>
#include <utility>

#include "cuda/gemm/cublaslt.h"
#include "cuda/gemm/product.h"

namespace zerofp4::cuda {

// A descriptor that is destroyed with its owner.
template <class T>
class Owned {
  public:
    explicit Owned(lt::Status (*destroy)(T)) : destroy_(destroy) {}
    ~Owned() {
        if (value_ != nullptr) destroy_(value_);
    }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;

    T* address() { return &value_; }
    T get() const { return value_; }

  private:
    lt::Status (*destroy_)(T);
    T value_ = nullptr;
};

inline lt::DataType data_type(DType dtype) {
    return dtype == DType::kFloat32 ? lt::kR32F : dtype == DType::kFloat16 ? lt::kR16F : lt::kR16BF;
}

inline lt::DataType data_type(Inputs inputs) {
    if (inputs == Inputs::kNVFP4) return lt::kR4E2M1;
    return inputs == Inputs::kMXFP8 ? lt::kR8E4M3 : inputs == Inputs::kFloat16 ? lt::kR16F : lt::kR16BF;
}

class LtProduct : public Product {
  public:
    // betas: 0 and 1 in the device's memory: alpha and beta are both read from there, or none is.
    LtProduct(const lt::Library& library, lt::Handle handle, const float* betas,
              const ProductProblem& problem)
        : lib_(library),
          handle_(handle),
          desc_(lib_.desc_destroy),
          a_(lib_.layout_destroy),
          b_(lib_.layout_destroy),
          out_(lib_.layout_destroy),
          one_(betas + 1),
          beta_(betas + problem.accumulate),
          has_scales_(has_scales(problem.inputs)) {
        describe(problem);
        make_layout(b_, data_type(problem.inputs), problem.contraction, problem.cols, problem.b_transposed);
        make_layout(a_, data_type(problem.inputs), problem.contraction, problem.rows, problem.a_transposed);
        make_layout(out_, data_type(problem.output), problem.cols, problem.rows, false);
    }

    // Whether there is an algorithm.
    bool choose(const ProductProblem& problem) {
        Owned<lt::Preference> preference(lib_.preference_destroy);
        lib_.check(lib_.preference_create(preference.address()), "cublasLtMatmulPreferenceCreate");
        using Attribute = lt::PreferenceAttribute;
        const auto prefer = [&](Attribute attribute, auto value) {
            lib_.check(lib_.preference_set(preference.get(), attribute, &value, sizeof value),
                       "cublasLtMatmulPreferenceSetAttribute");
        };
        prefer(Attribute::kMaxWorkspaceBytes, static_cast<uint64_t>(kMostWorkspace));
        // Parts of a sum that is split stay in float32: in the output's dtype each would be rounded.
        prefer(Attribute::kReductionSchemeMask, lt::kReductionComputeType);
        prefer(Attribute::kMinAlignmentA, problem.b_alignment);
        prefer(Attribute::kMinAlignmentB, problem.a_alignment);
        prefer(Attribute::kMinAlignmentC, problem.output_alignment);
        prefer(Attribute::kMinAlignmentD, problem.output_alignment);
        lt::HeuristicResult results[kAlgorithms] = {};
        int count = 0;
        const lt::Status status = lib_.heuristic(handle_, desc_.get(), b_.get(), a_.get(), out_.get(),
                                                 out_.get(), preference.get(), kAlgorithms, results, &count);
        if (status == lt::kNotSupported) return false;
        if (status == lt::kInvalidValue && has_scales_) return false;  // as versions say that lack a mode
        lib_.check(status, "cublasLtMatmulAlgoGetHeuristic");
        for (int i = 0; i < count; ++i) {
            if (results[i].state != lt::kSuccess) continue;
            chosen_ = results[i];
            return true;
        }
        return false;
    }

    int64_t workspace() const override { return static_cast<int64_t>(chosen_.workspace); }

    void run(const ProductAddresses& at, cudaStream_t stream) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (at.bias != nullptr) set(lt::DescAttribute::kBiasPointer, at.bias);
        if (has_scales_) set_scales(at.a_scale, at.b_scale);
        const float* alpha = at.alpha == nullptr ? one_ : at.alpha;
        lib_.check(lib_.matmul(handle_, desc_.get(), alpha, at.b, b_.get(), at.a, a_.get(), beta_, at.output,
                               out_.get(), at.output, out_.get(), &chosen_.algorithm, at.workspace,
                               chosen_.workspace, stream),
                   "cublasLtMatmul");
    }

  private:
    static constexpr int64_t kMostWorkspace = 32 << 20;  // what cuBLAS recommends for Hopper
    static constexpr int kAlgorithms = 4;                // asked for; the first that is usable is taken

    template <class T>
    void set(lt::DescAttribute attribute, T value) {
        lib_.check(lib_.desc_set(desc_.get(), attribute, &value, sizeof value),
                   "cublasLtMatmulDescSetAttribute");
    }

    void set_scales(const void* a, const void* b) {
        set(lt::DescAttribute::kAScalePointer, b);
        set(lt::DescAttribute::kBScalePointer, a);
    }

    void describe(const ProductProblem& problem) {
        lib_.check(lib_.desc_create(desc_.address(), lt::kCompute32F, lt::kR32F), "cublasLtMatmulDescCreate");
        set(lt::DescAttribute::kPointerMode, lt::kPointerModeDevice);
        set(lt::DescAttribute::kTransA, problem.b_transposed ? lt::kOpN : lt::kOpT);
        set(lt::DescAttribute::kTransB, problem.a_transposed ? lt::kOpT : lt::kOpN);
        if (has_scales_) describe_scales(problem.inputs);
        if (problem.bias_alignment == 0) return;
        set(lt::DescAttribute::kEpilogue, lt::kEpilogueBias);
        // With scales a bias is bfloat16 where the output is float32, unless it is said to be another.
        if (has_scales_) set(lt::DescAttribute::kBiasDataType, data_type(problem.output));
        // The heuristic takes the alignment that it may count on from the address.
        set(lt::DescAttribute::kBiasPointer, static_cast<uintptr_t>(problem.bias_alignment));
    }

    void describe_scales(Inputs inputs) {
        const int32_t mode = inputs == Inputs::kNVFP4 ? lt::kScaleVec16E4M3 : lt::kScaleVec32E8M0;
        set(lt::DescAttribute::kAScaleMode, mode);
        set(lt::DescAttribute::kBScaleMode, mode);
        // The heuristic refuses scales without an address, and reads none.
        const auto* somewhere = reinterpret_cast<const void*>(uintptr_t{16});
        set_scales(somewhere, somewhere);
        // These versions keep what the heuristic found under a key that does not tell products with scales
        // from others. The stride, which those with scales do not use, is part of the key.
        if (lib_.version() <= 120803) set(lt::DescAttribute::kAlphaVectorBatchStride, int64_t{1});
    }

    // Of a row-major matrix with `cols` columns, which is column-major with as many rows; transposed, of one
    // with `cols` rows.
    void make_layout(Owned<lt::Layout>& layout, lt::DataType type, int64_t cols, int64_t rows,
                     bool transposed) {
        if (transposed) std::swap(cols, rows);
        lib_.check(lib_.layout_create(layout.address(), type, static_cast<uint64_t>(cols),
                                      static_cast<uint64_t>(rows), cols),
                   "cublasLtMatrixLayoutCreate");
    }

    const lt::Library& lib_;
    const lt::Handle handle_;
    Owned<lt::Desc> desc_;
    Owned<lt::Layout> a_, b_, out_;
    const float* const one_;
    const float* const beta_;
    const bool has_scales_;
    lt::HeuristicResult chosen_{};
    std::mutex mutex_;  // of the descriptor, into which every run writes its addresses
};

}  // namespace zerofp4::cuda
