// SPDX-License-Identifier: Apache-2.0
//
// Marks functions that both implementations compile: host C++ and, under nvcc, device code too.
#pragma once

#ifdef __CUDACC__
#define REPLAYSSM_HOST_DEVICE __host__ __device__
#else
#define REPLAYSSM_HOST_DEVICE
#endif
