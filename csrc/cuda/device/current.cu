// Selecting the device of a launch.
//
// Not by cudaSetDevice, which since CUDA 12 initializes the device that it is given: on the way back that
// would be a context of hundreds of megabytes on a GPU that the process does not use, such as GPU 0, which is
// every thread's first. The driver's stack of contexts goes back to what there was, also to none, and torch's
// own idea of the current device stays as it is.

#include "cuda/device/launch.cuh"

namespace zerofp4::cuda {
namespace {

constexpr unsigned kDriverVersion = 12000;  // that of the signatures below

// What cuda.h declares: CUcontext, and results of which 0 is success.
using Context = void*;

struct Driver {
    int (*retain)(Context*, int device);
    int (*release)(int device);
    int (*push)(Context);
    int (*pop)(Context*);
};

template <class Function>
void find(const char* name, Function& function) {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    check(cudaGetDriverEntryPointByVersion(name, &address, kDriverVersion, cudaEnableDefault, &found), name);
#else
    check(cudaGetDriverEntryPoint(name, &address, cudaEnableDefault, &found), name);
#endif
    if (address == nullptr || found != cudaDriverEntryPointSuccess)
        throw std::runtime_error(std::string(name) + ": the driver does not have it");
    function = reinterpret_cast<Function>(address);
}

const Driver& driver() {
    static const Driver functions = [] {
        Driver d{};
        find("cuDevicePrimaryCtxRetain", d.retain);
        find("cuDevicePrimaryCtxRelease", d.release);
        find("cuCtxPushCurrent", d.push);
        find("cuCtxPopCurrent", d.pop);
        return d;
    }();
    return functions;
}

void check_driver(int result, const char* operation) {
    if (result != 0) throw std::runtime_error(std::string(operation) + ": error " + std::to_string(result));
}

}  // namespace

int enter_device(int device) {
    int current = 0;
    check(cudaGetDevice(&current), "cudaGetDevice");
    if (current == device) return -1;
    // The runtime works in the context that is current in the driver; a primary one is its own.
    Context context = nullptr;
    check_driver(driver().retain(&context, device), "cuDevicePrimaryCtxRetain");
    const int pushed = driver().push(context);
    if (pushed != 0) driver().release(device);
    check_driver(pushed, "cuCtxPushCurrent");
    return device;
}

void leave_device(int entered) {
    if (entered < 0) return;
    Context context = nullptr;
    driver().pop(&context);
    driver().release(entered);
}

}  // namespace zerofp4::cuda
