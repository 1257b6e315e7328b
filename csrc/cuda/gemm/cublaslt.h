#pragma once
// What we use of cuBLASLt's C interface, which is the same in its versions 12 and 13. The library is the copy
// that the process has loaded already: nothing is linked, and no header of it is needed to build.

#include <cstddef>
#include <cstdint>

typedef struct CUstream_st* cudaStream_t;

namespace zerofp4::cuda::lt {

// Enumerations travel as 32-bit integers. Their names here are those of cublasLt.h without the prefixes.

using Status = int32_t;  // cublasStatus_t
constexpr Status kSuccess = 0;
constexpr Status kInvalidValue = 7;
constexpr Status kNotSupported = 15;

using DataType = int32_t;  // cudaDataType_t
constexpr DataType kR32F = 0, kR16F = 2, kR16BF = 14, kR8E4M3 = 28, kR4E2M1 = 33;

constexpr int32_t kCompute32F = 68;            // cublasComputeType_t
constexpr int32_t kOpN = 0, kOpT = 1;          // cublasOperation_t
constexpr int32_t kPointerModeDevice = 1;      // cublasLtPointerMode_t
constexpr int32_t kEpilogueBias = 4;           // cublasLtEpilogue_t, uint32_t
constexpr uint32_t kReductionComputeType = 2;  // cublasLtReductionScheme_t
// cublasLtMatmulMatrixScale_t
constexpr int32_t kScaleVec16E4M3 = 1, kScaleVec32E8M0 = 2;

enum class DescAttribute : int32_t {
    kPointerMode = 2,
    kTransA = 3,
    kTransB = 4,
    kEpilogue = 7,
    kBiasPointer = 8,
    kAlphaVectorBatchStride = 14,
    kAScalePointer = 17,
    kBScalePointer = 18,
    kBiasDataType = 26,
    kAScaleMode = 31,
    kBScaleMode = 32,
};

enum class PreferenceAttribute : int32_t {
    kMaxWorkspaceBytes = 1,
    kReductionSchemeMask = 3,
    kMinAlignmentA = 5,
    kMinAlignmentB = 6,
    kMinAlignmentC = 7,
    kMinAlignmentD = 8,
};

using Handle = struct HandleImpl*;
using Desc = struct DescImpl*;
using Layout = struct LayoutImpl*;
using Preference = struct PreferenceImpl*;

struct Algorithm {
    uint64_t data[8];
};

struct HeuristicResult {
    Algorithm algorithm;
    size_t workspace;
    Status state;
    float waves;
    int32_t reserved[4];
};

struct Library {
    size_t (*version)();
    const char* (*status_name)(Status);
    Status (*create)(Handle*);
    Status (*desc_create)(Desc*, int32_t compute_type, DataType scale_type);
    Status (*desc_destroy)(Desc);
    Status (*desc_set)(Desc, DescAttribute, const void* value, size_t bytes);
    Status (*layout_create)(Layout*, DataType, uint64_t rows, uint64_t cols, int64_t leading_dimension);
    Status (*layout_destroy)(Layout);
    Status (*preference_create)(Preference*);
    Status (*preference_destroy)(Preference);
    Status (*preference_set)(Preference, PreferenceAttribute, const void* value, size_t bytes);
    Status (*heuristic)(Handle, Desc, Layout a, Layout b, Layout c, Layout d, Preference, int requested,
                        HeuristicResult* results, int* returned);
    Status (*matmul)(Handle, Desc, const void* alpha, const void* a, Layout, const void* b, Layout,
                     const void* beta, const void* c, Layout, void* d, Layout, const Algorithm*,
                     void* workspace, size_t workspace_bytes, cudaStream_t);

    // Throws std::runtime_error with the operation's name unless the status is a success.
    void check(Status status, const char* operation) const;
};

// Looks the library up under its file name among those that the process has loaded; it is the one that all
// products use. Throws std::runtime_error where it is not there, or lacks a function.
void load(const char* name);

// Throws std::runtime_error before load.
const Library& library();

}  // namespace zerofp4::cuda::lt
