// Finding cuBLASLt in the process.

#include <dlfcn.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "cuda/gemm/cublaslt.h"

namespace zerofp4::cuda::lt {
namespace {

std::atomic<const Library*> loaded = nullptr;  // read without the GIL

template <class Function>
void find(void* handle, const char* file, const char* name, Function& function) {
    void* symbol = dlsym(handle, name);
    if (symbol == nullptr) throw std::runtime_error(std::string(file) + " has no " + name);
    function = reinterpret_cast<Function>(symbol);
}

}  // namespace

void Library::check(Status status, const char* operation) const {
    if (status == kSuccess) return;
    throw std::runtime_error(std::string(operation) + ": " + status_name(status));
}

void load(const char* name) {
    // Without NOLOAD another copy than torch's might come in.
    void* handle = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) throw std::runtime_error(std::string(name) + " is not loaded in this process");
    Library found{};
    find(handle, name, "cublasLtGetVersion", found.version);
    find(handle, name, "cublasLtGetStatusName", found.status_name);
    find(handle, name, "cublasLtCreate", found.create);
    find(handle, name, "cublasLtMatmulDescCreate", found.desc_create);
    find(handle, name, "cublasLtMatmulDescDestroy", found.desc_destroy);
    find(handle, name, "cublasLtMatmulDescSetAttribute", found.desc_set);
    find(handle, name, "cublasLtMatrixLayoutCreate", found.layout_create);
    find(handle, name, "cublasLtMatrixLayoutDestroy", found.layout_destroy);
    find(handle, name, "cublasLtMatmulPreferenceCreate", found.preference_create);
    find(handle, name, "cublasLtMatmulPreferenceDestroy", found.preference_destroy);
    find(handle, name, "cublasLtMatmulPreferenceSetAttribute", found.preference_set);
    find(handle, name, "cublasLtMatmulAlgoGetHeuristic", found.heuristic);
    find(handle, name, "cublasLtMatmul", found.matmul);
    loaded = new Library(found);  // for as long as the process lives
}

const Library& library() {
    const Library* found = loaded;
    if (found == nullptr) throw std::runtime_error("cuBLASLt is not loaded");
    return *found;
}

}  // namespace zerofp4::cuda::lt
