// Products by cuBLASLt. On CUDA only: elsewhere there is none.

#include "cuda/gemm/product.h"

#include <memory>

#include "bindings/bindings.h"

namespace zerofp4::bindings {
namespace {

using cuda::Product;

const cuda::Kernels& cuda_kernels() {
    const cuda::Kernels* kernels = cuda::kernels();
    if (kernels == nullptr) throw std::runtime_error("zerofp4 was built without CUDA");
    return *kernels;
}

int64_t load_cublaslt(const std::string& name) { return cuda_kernels().load_cublaslt(name.c_str()); }

std::unique_ptr<Product> find_product(int device, int64_t rows, int64_t cols, int64_t contraction, int inputs,
                                      int output, bool a_transposed, bool b_transposed, bool accumulate,
                                      const std::array<uint32_t, 4>& alignments) {
    const cuda::Kernels& kernels = cuda_kernels();
    const DeviceGuard guard(kernels, device);
    return kernels.find_product({rows, cols, contraction, static_cast<Inputs>(inputs),
                                 static_cast<DType>(output), a_transposed, b_transposed, accumulate,
                                 alignments[0], alignments[1], alignments[2], alignments[3]});
}

void run(Product& product, const Target& target, uintptr_t a, uintptr_t b, uintptr_t a_scale,
         uintptr_t b_scale, uintptr_t alpha, uintptr_t bias, uintptr_t output, uintptr_t workspace) {
    const ProductAddresses addresses{pointer<const void>(a),       pointer<const void>(b),
                                     pointer<const void>(a_scale), pointer<const void>(b_scale),
                                     pointer<const float>(alpha),  pointer<const void>(bias),
                                     pointer<void>(output),        pointer<void>(workspace)};
    const DeviceGuard guard(cuda_kernels(), target.device);
    product.run(addresses, reinterpret_cast<cudaStream_t>(target.stream));
}

}  // namespace

void bind_product(py::module_& m) {
    m.def("load_cublaslt", &load_cublaslt);
    // inputs: Inputs. alignments: of a, b, bias (0 without one), output
    m.def("find_product", &find_product, NoGil(), "device"_a, "rows"_a, "cols"_a, "contraction"_a, "inputs"_a,
          "output"_a, "a_transposed"_a, "b_transposed"_a, "accumulate"_a, "alignments"_a);
    py::class_<Product>(m, "Product")
        .def_property_readonly("workspace", &Product::workspace)
        .def("run", &run, NoGil(), "target"_a, "a"_a, "b"_a, "a_scale"_a, "b_scale"_a, "alpha"_a, "bias"_a,
             "output"_a, "workspace"_a);
}

}  // namespace zerofp4::bindings
