// Kernels by address, for zerofp4._autograd: what products and the layers of a recipe launch.

#include "autograd/calls.h"

#include <algorithm>
#include <map>
#include <mutex>

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

uintptr_t address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

AmaxArgs amax_args(const QuantizeArgs& of, float* amax, float* hadamard_amax) {
    return {of.input, of.dtype, of.rows, of.cols, of.signs, nullptr, amax, hadamard_amax};
}

QuantizeArgs with_amaxes(QuantizeArgs args, const float* amax, const float* hadamard_amax) {
    args.amax = amax ? amax : hadamard_amax;
    args.columnwise_amax = hadamard_amax;
    return args;
}

const char* quantize_call(const Target& target, const QuantizeArgs& args, int64_t experts, float* amax,
                          float* hadamard_amax) noexcept {
    return error_of([&] {
        tensor_amax(target, amax_args(args, amax, hadamard_amax), experts);
        quantize(target, with_amaxes(args, amax, hadamard_amax), experts);
    });
}

const char* quantize_groups_call(const Target& target, const GroupedArgs& given, float* amax,
                                 float* hadamard_amax) noexcept {
    return error_of([&] {
        GroupedArgs args = given;
        args.whole = with_amaxes(given.whole, amax, hadamard_amax);
        grouped_amax(target, {amax_args(given.whole, amax, hadamard_amax), given.splits});
        quantize_grouped(target, args);
    });
}

const char* group_values_call(const Target& target, const GroupedValuesArgs& args) noexcept {
    return error_of([&] { grouped_values(target, args); });
}

DequantizeDescriptor descriptor_of(const CopyCall& copy, const void* amax, int e4m3_max) {
    return dequantize_descriptor(address(copy.data), address(copy.scale), address(amax), address(copy.values),
                                 copy.rows, copy.cols, copy.columnwise, copy.block_rows, kCompact, e4m3_max);
}

const char* dequantize_call(const Target& target, DType dtype, const CopyCall& copy) noexcept {
    return error_of([&] {
        const auto item = descriptor_of(copy, copy.amax, copy.e4m3_max);
        DequantizeList(target.is_cpu(), {item}, static_cast<int>(dtype)).run(target);
    });
}

const char* stacked_values_call(const Target& target, DType dtype, const StackCall& stack,
                                const void* neutral_amax) noexcept {
    return error_of([&] {
        const bool is_one = stack.rows % stack.block_rows == 0;  // in whole blocks: one matrix of all rows
        const int64_t count = is_one ? 1 : stack.count, rows = is_one ? stack.rows * stack.count : stack.rows;
        const int64_t scale_bytes = ceil_div(rows, stack.block_rows) * ceil_div(stack.cols, int64_t{kBlock});
        const auto part = [](const void* whole, int64_t offset) {
            return static_cast<const uint8_t*>(whole) + offset;
        };
        std::vector<DequantizeDescriptor> items;
        for (int64_t e = 0; e < count; ++e) {
            const int64_t before = e * rows * stack.cols;
            void* values = static_cast<uint8_t*>(stack.values) + before * size_of(dtype);
            const CopyCall copy{part(stack.data, before / 2),
                                part(stack.scale, e * scale_bytes),
                                nullptr,
                                values,
                                rows,
                                stack.cols,
                                stack.block_rows,
                                0,
                                false};
            items.push_back(descriptor_of(copy, neutral_amax, static_cast<int>(kE4M3Max)));
        }
        // Longer lists need a table in the device's memory.
        const int64_t most = target.is_cpu() ? count : kArgumentItems;
        for (int64_t first = 0; first < count; first += most) {
            std::vector<DequantizeDescriptor> some(items.begin() + first,
                                                   items.begin() + std::min(first + most, count));
            DequantizeList(target.is_cpu(), std::move(some), static_cast<int>(dtype)).run(target);
        }
    });
}

const char* product_values_call(const Target& target, DType dtype, const CopyCall& a, const CopyCall& b,
                                const void* neutral_amax, void* alpha) noexcept {
    return error_of([&] {
        const ProductScale scale =
            product_scale(address(a.amax), a.e4m3_max, address(b.amax), b.e4m3_max, address(alpha));
        const auto neutral = [&](const CopyCall& copy) {
            return descriptor_of(copy, neutral_amax, static_cast<int>(kE4M3Max));
        };
        DequantizeList(target.is_cpu(), {neutral(a), neutral(b)}, static_cast<int>(dtype))
            .run_product(target, scale);
    });
}

// Tokens that vary from step to step make new sizes without end.
constexpr size_t kProducts = 4096;

const char* find_product_call(int device, const ProductProblem& p,
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

const char* run_product_call(const Target& target, cuda::Product& product,
                             const ProductAddresses& addresses) noexcept {
    return error_of([&] {
        dispatch(
            target, [](const cpu::Kernels&, int) { throw std::runtime_error("cuBLASLt is a GPU's"); },
            [&](const cuda::Kernels&, cudaStream_t stream) { product.run(addresses, stream); });
    });
}

}  // namespace

void bind_calls(py::module_& m) {
    static KernelCalls calls{&dequantize_call,   &quantize_call,       &quantize_groups_call,
                             &group_values_call, &stacked_values_call, &product_values_call,
                             &find_product_call, &run_product_call};
    m.attr("kernel_calls") = py::capsule(&calls, kCallsCapsule);
}

}  // namespace zerofp4::bindings
