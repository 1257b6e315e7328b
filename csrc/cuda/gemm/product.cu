// Products by cuBLASLt, whose epilogue multiplies the float32 sums with alpha, read from the device, adds the
// bias and rounds once.
//
// cuBLASLt's matrices are column-major, so ours are their transposes: out^T [cols, rows] = b a^T, with b as
// its first factor. The bias lies along the rows of out^T.

#include <mutex>
#include <unordered_map>

#include "cuda/device/launch.cuh"
#include "cuda/gemm/cublaslt.h"
#include "cuda/gemm/product.h"

namespace zerofp4::cuda {

// Values of beta: alpha and beta are both read from the device, or none is.
__device__ float product_betas[2] = {0.0f, 1.0f};

namespace {

constexpr int64_t kMostWorkspace = 32 << 20;  // what cuBLAS recommends for Hopper
constexpr int kAlgorithms = 4;                // asked for; the first that is usable is taken

// What cuBLASLt allocates while it sets itself up is no part of a graph that another call is capturing.
class OutsideCapture {
  public:
    OutsideCapture() {
        check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
    }
    ~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    OutsideCapture(const OutsideCapture&) = delete;
    OutsideCapture& operator=(const OutsideCapture&) = delete;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The handle of the current device. Kept until the process ends, when its driver may be gone already.
lt::Handle current_handle() {
    static std::mutex mutex;
    static std::unordered_map<int, lt::Handle> handles;
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    const std::lock_guard<std::mutex> lock(mutex);
    lt::Handle& handle = handles[device];
    if (handle == nullptr) lt::library().check(lt::library().create(&handle), "cublasLtCreate");
    return handle;
}

lt::DataType data_type(DType dtype) {
    return dtype == DType::kFloat32 ? lt::kR32F : dtype == DType::kFloat16 ? lt::kR16F : lt::kR16BF;
}

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

class LtProduct : public Product {
  public:
    explicit LtProduct(const ProductProblem& problem)
        : handle_(current_handle()),
          desc_(lib_.desc_destroy),
          a_(lib_.layout_destroy),
          b_(lib_.layout_destroy),
          out_(lib_.layout_destroy) {
        void* betas = nullptr;
        check(cudaGetSymbolAddress(&betas, product_betas), "cudaGetSymbolAddress");
        one_ = static_cast<const float*>(betas) + 1;
        beta_ = static_cast<const float*>(betas) + (problem.accumulate ? 1 : 0);
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
        const float* alpha = at.alpha == nullptr ? one_ : at.alpha;
        lib_.check(lib_.matmul(handle_, desc_.get(), alpha, at.b, b_.get(), at.a, a_.get(), beta_, at.output,
                               out_.get(), at.output, out_.get(), &chosen_.algorithm, at.workspace,
                               chosen_.workspace, stream),
                   "cublasLtMatmul");
    }

  private:
    template <class T>
    void set(lt::DescAttribute attribute, T value) {
        lib_.check(lib_.desc_set(desc_.get(), attribute, &value, sizeof value),
                   "cublasLtMatmulDescSetAttribute");
    }

    void describe(const ProductProblem& problem) {
        lib_.check(lib_.desc_create(desc_.address(), lt::kCompute32F, lt::kR32F), "cublasLtMatmulDescCreate");
        set(lt::DescAttribute::kPointerMode, lt::kPointerModeDevice);
        set(lt::DescAttribute::kTransA, problem.b_transposed ? lt::kOpN : lt::kOpT);
        set(lt::DescAttribute::kTransB, problem.a_transposed ? lt::kOpT : lt::kOpN);
        if (problem.bias_alignment == 0) return;
        set(lt::DescAttribute::kEpilogue, lt::kEpilogueBias);
        // The heuristic takes the alignment that it may count on from the address.
        set(lt::DescAttribute::kBiasPointer, static_cast<uintptr_t>(problem.bias_alignment));
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

    const lt::Library& lib_ = lt::library();
    const lt::Handle handle_;
    Owned<lt::Desc> desc_;
    Owned<lt::Layout> a_, b_, out_;
    const float* one_ = nullptr;
    const float* beta_ = nullptr;
    lt::HeuristicResult chosen_{};
    std::mutex mutex_;  // of the descriptor, into which every run writes its bias
};

}  // namespace

int64_t load_cublaslt(const char* name) {
    lt::load(name);
    return static_cast<int64_t>(lt::library().version());
}

std::unique_ptr<Product> find_product(const ProductProblem& problem) {
    const OutsideCapture outside;
    auto product = std::make_unique<LtProduct>(problem);
    if (!product->choose(problem)) return nullptr;
    return product;
}

}  // namespace zerofp4::cuda
