// Products by cuBLASLt on the current device.

#include <mutex>
#include <unordered_map>

#include "cuda/device/launch.cuh"
#include "cuda/gemm/lt_product.h"

namespace zerofp4::cuda {

// Values of beta: alpha and beta are both read from the device, or none is.
__device__ float product_betas[2] = {0.0f, 1.0f};

namespace {

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

}  // namespace

int64_t load_cublaslt(const char* name) {
    lt::load(name);
    return static_cast<int64_t>(lt::library().version());
}

std::unique_ptr<Product> find_product(const ProductProblem& problem) {
    const OutsideCapture outside;
    void* betas = nullptr;
    check(cudaGetSymbolAddress(&betas, product_betas), "cudaGetSymbolAddress");
    auto product = std::make_unique<LtProduct>(lt::library(), current_handle(),
                                               static_cast<const float*>(betas), problem);
    if (!product->choose(problem)) return nullptr;
    return product;
}

}  // namespace zerofp4::cuda
