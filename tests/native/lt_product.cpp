// LtProduct with a cuBLASLt that writes down what it is asked for.

#include "cuda/gemm/lt_product.h"

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <string>

#include "cuda/gemm/cublaslt.cu"

namespace {

using namespace zerofp4;
using cuda::LtProduct;
namespace lt = cuda::lt;

// No stream: theirs come from whichever libstdc++ the process has, and some libraries of CUDA bring parts of
// one.
std::string said;
size_t own_version;
lt::Status answer;  // of the heuristic

template <class... Values>
void say(const char* format, Values... values) {
    char line[256];
    std::snprintf(line, sizeof line, format, values...);
    said += line;
}

template <class T>
lt::Status create(T* made) {
    *made = reinterpret_cast<T>(1);
    return lt::kSuccess;
}

template <class T>
lt::Status destroy(T) {
    return lt::kSuccess;
}

template <class Attribute>
void write(const char* what, Attribute attribute, const void* value, size_t bytes) {
    int64_t number = 0;
    std::memcpy(&number, value, bytes);
    say("%s %d %" PRId64 " %zu\n", what, static_cast<int>(attribute), number, bytes);
}

const lt::Library recorder{
    [] { return own_version; },
    [](lt::Status) { return "CUBLAS_STATUS"; },
    &create<lt::Handle>,
    [](lt::Desc* made, int32_t, lt::DataType) { return create(made); },
    &destroy<lt::Desc>,
    [](lt::Desc, lt::DescAttribute attribute, const void* value, size_t bytes) {
        write("set", attribute, value, bytes);
        return lt::kSuccess;
    },
    [](lt::Layout* made, lt::DataType type, uint64_t rows, uint64_t cols, int64_t leading_dimension) {
        say("layout %d %" PRIu64 " %" PRIu64 " %" PRId64 "\n", type, rows, cols, leading_dimension);
        return create(made);
    },
    &destroy<lt::Layout>,
    &create<lt::Preference>,
    &destroy<lt::Preference>,
    [](lt::Preference, lt::PreferenceAttribute attribute, const void* value, size_t bytes) {
        write("prefer", attribute, value, bytes);
        return lt::kSuccess;
    },
    [](lt::Handle, lt::Desc, lt::Layout, lt::Layout, lt::Layout, lt::Layout, lt::Preference, int,
       lt::HeuristicResult* results, int* returned) {
        say("heuristic\n");
        results[0].state = lt::kSuccess;
        *returned = 1;
        return answer;
    },
    [](lt::Handle, lt::Desc, const void* alpha, const void* a, lt::Layout, const void* b, lt::Layout,
       const void* beta, const void*, lt::Layout, void* d, lt::Layout, const lt::Algorithm*, void*, size_t,
       cudaStream_t) {
        say("matmul %p %p %p %p %p\n", alpha, a, b, beta, d);
        return lt::kSuccess;
    }};

const void* at(uintptr_t address) { return reinterpret_cast<const void*>(address); }

}  // namespace

// What a product [48, 64] with a contraction of 96 asks for, a line each, and its run with operands at 0x100
// and 0x200, scales at 0x300 and 0x400, alpha at 0x500, a bias at 0x600 and the output at 0x700. 0 and 1 lie
// at 0x800.
extern "C" const char* product(size_t version, int inputs, int output, bool accumulate,
                               uint32_t bias_alignment, int heuristic) {
    said.clear();
    own_version = version;
    answer = heuristic;
    const ProductProblem problem{48,
                                 64,
                                 96,
                                 static_cast<Inputs>(inputs),
                                 static_cast<DType>(output),
                                 false,
                                 false,
                                 accumulate,
                                 256,
                                 128,
                                 bias_alignment,
                                 64};
    try {
        LtProduct made(recorder, nullptr, static_cast<const float*>(at(0x800)), problem);
        if (made.choose(problem)) {
            say("run\n");
            made.run({at(0x100), at(0x200), at(0x300), at(0x400), static_cast<const float*>(at(0x500)),
                      bias_alignment ? at(0x600) : nullptr, const_cast<void*>(at(0x700)), nullptr},
                     nullptr);
        }
    } catch (const std::exception& error) {
        say("%s\n", error.what());
    }
    return said.c_str();
}
