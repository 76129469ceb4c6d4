/* SPDX-License-Identifier: Apache-2.0
 *
 * The two CUDA types that TensorRT's headers name, for builds without a CUDA toolkit. Such a library has no CUDA ops:
 * it registers, builds engines and computes on host memory, which is what tests need. */
#ifndef TRTLLM_REPLAYSSM_HOST_ONLY_CUDA_RUNTIME_API_H
#define TRTLLM_REPLAYSSM_HOST_ONLY_CUDA_RUNTIME_API_H

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;

#endif
