// Kernels by address, for zerofp4._autograd: what a layer of a recipe launches.

#include <algorithm>
#include <map>
#include <mutex>

#include "autograd/layer_calls.h"
#include "bindings/bindings.h"
#include "dispatch/lists.h"
#include "dispatch/quantize.h"

namespace zerofp4::bindings {
namespace {

// Calls run(). Returns null, or the text of what it throws.
template <class Run>
const char* error_of(const Run& run) noexcept {
    static thread_local std::string error;
    try {
        run();
        return nullptr;
    } catch (const std::exception& thrown) {
        error = thrown.what();
        return error.c_str();
    }
}

AmaxArgs amax_args(const QuantizeArgs& of, float* amax, float* hadamard_amax) {
    return {of.input, of.dtype, of.rows, of.cols, of.signs, nullptr, amax, hadamard_amax};
}

QuantizeArgs with_amaxes(QuantizeArgs args, const float* amax, const float* hadamard_amax) {
    args.amax = amax ? amax : hadamard_amax;
    args.columnwise_amax = hadamard_amax;
    return args;
}

const char* quantize_for_layer(const Target& target, const QuantizeArgs& args, int64_t experts, float* amax,
                               float* hadamard_amax) noexcept {
    return error_of([&] {
        tensor_amax(target, amax_args(args, amax, hadamard_amax), experts);
        quantize(target, with_amaxes(args, amax, hadamard_amax), experts);
    });
}

const char* quantize_groups_for_layer(const Target& target, const GroupedArgs& given, float* amax,
                                      float* hadamard_amax) noexcept {
    return error_of([&] {
        GroupedArgs args = given;
        args.whole = with_amaxes(given.whole, amax, hadamard_amax);
        grouped_amax(target, {amax_args(given.whole, amax, hadamard_amax), given.splits});
        quantize_grouped(target, args);
    });
}

const char* group_values_for_layer(const Target& target, const GroupedValuesArgs& args) noexcept {
    return error_of([&] { grouped_values(target, args); });
}

const char* stacked_values_for_layer(const Target& target, DType dtype, const StackedOperand& given,
                                     const void* neutral_amax) noexcept {
    return error_of([&] {
        const int64_t value_bytes = given.rows * given.cols * size_of(dtype);
        const auto run = [&](int64_t first, int64_t count) {
            const auto list = stacked_values(
                target.is_cpu(), count, given.data + first, given.scale + first,
                reinterpret_cast<uintptr_t>(given.values) + static_cast<uintptr_t>(first * value_bytes),
                reinterpret_cast<uintptr_t>(neutral_amax), given.rows, given.cols, given.block_rows,
                static_cast<int>(dtype));
            // Longer lists need a table in the device's memory.
            const bool fits = target.is_cpu() || list->count() <= kArgumentItems;
            if (fits) list->run(target);
            return fits;
        };
        if (run(0, given.count)) return;
        for (int64_t first = 0; first < given.count; first += kArgumentItems)
            run(first, std::min<int64_t>(kArgumentItems, given.count - first));
    });
}

DequantizeDescriptor descriptor_of(const ProductOperand& operand, const void* neutral_amax) {
    const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
    return dequantize_descriptor(address(operand.data), address(operand.scale), address(neutral_amax),
                                 address(operand.values), operand.rows, operand.cols, false,
                                 operand.block_rows, kCompact, static_cast<int>(kE4M3Max));
}

const char* values_for_layer(const Target& target, DType dtype, const ProductOperand& a,
                             const ProductOperand& b, const void* neutral_amax, void* alpha) noexcept {
    return error_of([&] {
        const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
        const ProductScale scale =
            product_scale(address(a.amax), a.e4m3_max, address(b.amax), b.e4m3_max, address(alpha));
        std::vector<DequantizeDescriptor> items{descriptor_of(a, neutral_amax),
                                                descriptor_of(b, neutral_amax)};
        DequantizeList(target.is_cpu(), std::move(items), static_cast<int>(dtype)).run_product(target, scale);
    });
}

// Tokens that vary from step to step make new sizes without end.
constexpr size_t kProducts = 4096;

const char* find_for_layer(int device, const ProductProblem& p,
                           std::shared_ptr<cuda::Product>& found) noexcept {
    static std::mutex mutex;
    // Never freed: a process that ends may have let go of cuBLASLt before.
    static auto& products = *new std::map<std::array<int64_t, 13>, std::shared_ptr<cuda::Product>>;
    return error_of([&] {
        const std::array<int64_t, 13> key{device,
                                          p.rows,
                                          p.cols,
                                          p.contraction,
                                          static_cast<int64_t>(p.inputs),
                                          static_cast<int64_t>(p.output),
                                          p.a_transposed,
                                          p.b_transposed,
                                          p.accumulate,
                                          p.a_alignment,
                                          p.b_alignment,
                                          p.bias_alignment,
                                          p.output_alignment};
        std::lock_guard<std::mutex> lock(mutex);
        auto entry = products.find(key);
        if (entry == products.end()) {
            const cuda::Kernels* kernels = cuda::kernels();
            if (kernels == nullptr) throw std::runtime_error("zerofp4 was built without CUDA");
            const DeviceGuard guard(*kernels, device);
            if (products.size() == kProducts) products.clear();
            entry = products.emplace(key, kernels->find_product(p)).first;
        }
        found = entry->second;
    });
}

const char* run_for_layer(const Target& target, cuda::Product& product,
                          const ProductAddresses& addresses) noexcept {
    return error_of([&] {
        dispatch(
            target, [](const cpu::Kernels&, int) { throw std::runtime_error("cuBLASLt is a GPU's"); },
            [&](const cuda::Kernels&, cudaStream_t stream) { product.run(addresses, stream); });
    });
}

}  // namespace

void bind_layer(py::module_& m) {
    static LayerFunctions functions{&quantize_for_layer,     &quantize_groups_for_layer,
                                    &group_values_for_layer, &stacked_values_for_layer,
                                    &values_for_layer,       &find_for_layer,
                                    &run_for_layer};
    m.attr("layer_functions") = py::capsule(&functions, kLayerCapsule);
}

}  // namespace zerofp4::bindings
