// The numbers of csrc/cuda/gemm/cublaslt.h against NVIDIA's headers, where this compiles.

#include <cublasLt.h>

#include <type_traits>

#include "cuda/gemm/cublaslt.h"

namespace lt = zerofp4::cuda::lt;

#define SAME(ours, theirs) static_assert(static_cast<int64_t>(ours) == static_cast<int64_t>(theirs), #theirs)

SAME(lt::kSuccess, CUBLAS_STATUS_SUCCESS);
SAME(lt::kInvalidValue, CUBLAS_STATUS_INVALID_VALUE);
SAME(lt::kNotSupported, CUBLAS_STATUS_NOT_SUPPORTED);

SAME(lt::kR32F, CUDA_R_32F);
SAME(lt::kR16F, CUDA_R_16F);
SAME(lt::kR16BF, CUDA_R_16BF);
SAME(lt::kR8E4M3, CUDA_R_8F_E4M3);
SAME(lt::kR4E2M1, CUDA_R_4F_E2M1);

SAME(lt::kCompute32F, CUBLAS_COMPUTE_32F);
SAME(lt::kOpN, CUBLAS_OP_N);
SAME(lt::kOpT, CUBLAS_OP_T);
SAME(lt::kPointerModeDevice, CUBLASLT_POINTER_MODE_DEVICE);
SAME(lt::kEpilogueBias, CUBLASLT_EPILOGUE_BIAS);
SAME(lt::kReductionComputeType, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
SAME(lt::kScaleVec16E4M3, CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3);
SAME(lt::kScaleVec32E8M0, CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);

SAME(lt::DescAttribute::kPointerMode, CUBLASLT_MATMUL_DESC_POINTER_MODE);
SAME(lt::DescAttribute::kTransA, CUBLASLT_MATMUL_DESC_TRANSA);
SAME(lt::DescAttribute::kTransB, CUBLASLT_MATMUL_DESC_TRANSB);
SAME(lt::DescAttribute::kEpilogue, CUBLASLT_MATMUL_DESC_EPILOGUE);
SAME(lt::DescAttribute::kBiasPointer, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
SAME(lt::DescAttribute::kAlphaVectorBatchStride, CUBLASLT_MATMUL_DESC_ALPHA_VECTOR_BATCH_STRIDE);
SAME(lt::DescAttribute::kAScalePointer, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
SAME(lt::DescAttribute::kBScalePointer, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
SAME(lt::DescAttribute::kBiasDataType, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);
SAME(lt::DescAttribute::kAScaleMode, CUBLASLT_MATMUL_DESC_A_SCALE_MODE);
SAME(lt::DescAttribute::kBScaleMode, CUBLASLT_MATMUL_DESC_B_SCALE_MODE);

SAME(lt::PreferenceAttribute::kMaxWorkspaceBytes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
SAME(lt::PreferenceAttribute::kReductionSchemeMask, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
SAME(lt::PreferenceAttribute::kMinAlignmentA, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
SAME(lt::PreferenceAttribute::kMinAlignmentB, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
SAME(lt::PreferenceAttribute::kMinAlignmentC, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
SAME(lt::PreferenceAttribute::kMinAlignmentD, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);

// Enumerations travel as 32-bit integers.
static_assert(sizeof(cublasStatus_t) == sizeof(lt::Status) && sizeof(cudaDataType_t) == sizeof(lt::DataType));
static_assert(sizeof(cublasLtMatmulDescAttributes_t) == sizeof(lt::DescAttribute));
static_assert(sizeof(cublasLtMatmulPreferenceAttributes_t) == sizeof(lt::PreferenceAttribute));
static_assert(sizeof(cublasLtEpilogue_t) == sizeof lt::kEpilogueBias);
static_assert(sizeof(cublasComputeType_t) == sizeof lt::kCompute32F);

using Theirs = cublasLtMatmulHeuristicResult_t;
using Ours = lt::HeuristicResult;
static_assert(sizeof(cublasLtMatmulAlgo_t) == sizeof(lt::Algorithm));
static_assert(alignof(Theirs) == alignof(Ours) && sizeof(Theirs) == sizeof(Ours));
SAME(offsetof(Ours, algorithm), offsetof(Theirs, algo));
SAME(offsetof(Ours, workspace), offsetof(Theirs, workspaceSize));
SAME(offsetof(Ours, state), offsetof(Theirs, state));
SAME(offsetof(Ours, waves), offsetof(Theirs, wavesCount));

// Arguments of the same sizes, pointers where those of NVIDIA's function are.
template <class Ours, class Theirs>
struct Same {
    static constexpr bool value =
        sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>;
};
template <class... A, class... B, class R, class S>
struct Same<R (*)(A...), S (*)(B...)> : std::conjunction<Same<R, S>, Same<A, B>...> {};
#define TAKES_THE_SAME(member, function) \
    static_assert(Same<decltype(lt::Library::member), decltype(&function)>::value, #function)
TAKES_THE_SAME(version, cublasLtGetVersion);
TAKES_THE_SAME(status_name, cublasLtGetStatusName);
TAKES_THE_SAME(create, cublasLtCreate);
TAKES_THE_SAME(desc_create, cublasLtMatmulDescCreate);
TAKES_THE_SAME(desc_destroy, cublasLtMatmulDescDestroy);
TAKES_THE_SAME(desc_set, cublasLtMatmulDescSetAttribute);
TAKES_THE_SAME(layout_create, cublasLtMatrixLayoutCreate);
TAKES_THE_SAME(layout_destroy, cublasLtMatrixLayoutDestroy);
TAKES_THE_SAME(preference_create, cublasLtMatmulPreferenceCreate);
TAKES_THE_SAME(preference_destroy, cublasLtMatmulPreferenceDestroy);
TAKES_THE_SAME(preference_set, cublasLtMatmulPreferenceSetAttribute);
TAKES_THE_SAME(heuristic, cublasLtMatmulAlgoGetHeuristic);
TAKES_THE_SAME(matmul, cublasLtMatmul);
