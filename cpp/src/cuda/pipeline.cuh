// SPDX-License-Identifier: Apache-2.0
//
// Asynchronous copies to shared memory, and the barriers by which the warps of a CTA hand buffers to each other.
//
// A barrier counts arrivals; when all that it was made for have come, its phase is complete and the next begins. Phases
// are told apart by their parity alone: await(barrier, parity) returns when the phase under way has the other parity,
// so at once with parity 1 if it is the first. Who awaits a phase must therefore know that the one before it is
// complete, and that the one after it can't be. Whatever a thread, or the warp that it has synchronised with, did
// before it arrived is visible to those who awaited.
#pragma once

#include <cstdint>

namespace replayssm {
namespace cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes. The rest of the line, which is wanted next, comes to the L2.
__device__ inline void request_16_bytes(void* target, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(target)), "l"(source)
               : "memory");
}
// The same, or as many zeros.
__device__ inline void request_16_bytes(void* target, const void* source, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source),
               "r"(exists ? 16 : 0)
               : "memory");
}
__device__ inline void request_4_bytes(void* target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(target)), "l"(source) : "memory");
}
// Eight elements of an input. A loop, so that the common case does not pay for the other.
template <typename Staged>
__device__ inline void request_input(Staged* target, const Staged* source, bool aligned) {
  if (aligned) {
    request_16_bytes(target, source);
  } else {
#pragma unroll 1
    for (int i = 0; i < 8; ++i) target[i] = source[i];
  }
}

// Makes a group of what this thread requested since the last one; and until all of its groups but the kLater last have
// come.
__device__ inline void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLater>
__device__ inline void await_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}
// Until all that this thread requested has come.
__device__ inline void await_requests() { asm volatile("cp.async.wait_all;" ::: "memory"); }

using Barrier = uint64_t;

__device__ inline void init_barrier(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// After which the memory may become another barrier; for one thread, when no other needs it.
__device__ inline void end_barrier(Barrier* barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void arrive(Barrier* barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier))
               : "memory");
}

// True for one lane of a whole warp, the same every time. The compiler knows that it is one, unlike with lane == 0, and
// makes no loop over the lanes of instructions that are for one.
__device__ inline bool elect_lane() {
#if __CUDA_ARCH__ >= 900
  uint32_t elected;
  asm volatile("{ .reg .pred one; elect.sync _|one, 0xffffffff; selp.u32 %0, 1, 0, one; }" : "=r"(elected));
  return elected;
#else
  return threadIdx.x % 32 == 0;
#endif
}

// Whole blocks, by one thread and without any other's registers: bytes, source and target are multiples of 16. The
// barrier has to be told of the bytes too: its phase is complete when they have come.
__device__ inline void request_block(void* target, const void* source, int bytes, Barrier* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(target)),
               "l"(source), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}
__device__ inline void arrive_expecting(Barrier* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#else
  arrive(barrier);
#endif
}

// A whole block from shared to global memory, by one thread; whoever has stored what it holds did so before
// finish_stores_before_blocks(). And until all blocks that this thread has sent so have been read, or are stored.
__device__ inline void send_block(void* target, const void* source, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(target),
      "r"(shared_address(source)), "r"(bytes)
      : "memory");
#endif
}
__device__ inline void await_blocks_read() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
__device__ inline void await_blocks_stored() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

// Between stores to shared memory and blocks requested or sent, by whichever thread, for or from the same place.
__device__ inline void finish_stores_before_blocks() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Between a thread's stores to global memory and blocks requested, by whichever thread, from the same place.
__device__ inline void finish_writes_before_blocks() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// Arrives when all that this thread requested has come. Orders nothing else.
__device__ inline void arrive_with_requests(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void await(Barrier* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
#if __CUDA_ARCH__ >= 900
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
#else
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
#endif
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

}  // namespace cuda
}  // namespace replayssm
