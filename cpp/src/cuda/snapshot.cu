// SPDX-License-Identifier: Apache-2.0
//
// materialize, restore, refresh_read_copy and copy.
//
// Each consists of kernels that move data, which only look at cursors, and one that reports bad rows and (restore,
// copy) moves the cursors afterwards. All of them derive a row's verdict from the same cursors by the same function.
//
// copy's verdict also needs the lists: a destination named before, or that is a source, is refused. So no accepted row
// changes a cursor that another row's verdict reads, and the cursor kernel needs no order among its rows.
#include <algorithm>

#include "head_state.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kCopyThreads = 256;

struct Verdict {
  int32_t code;  // replayssm_row_error
  int64_t given, expected;
};

__device__ Verdict slot_range(const replayssm_table& table, int32_t slot, int32_t lowest) {
  if (slot >= lowest && slot < table.num_slots) return {REPLAYSSM_ROW_OK, 0, 0};
  return {REPLAYSSM_ROW_SLOT_RANGE, slot, table.num_slots};
}

// ---- materialize: the state is fold_kernel's work (fold.cu), the conv inputs are this kernel's --------------------

struct TailParams {
  Problem problem;
  replayssm_layer layer;
  replayssm_table table;
  const int32_t* slots;
  float* conv_tail;  // NULL: only report
  bool wants_state, has_decay;
};

__global__ void tail_kernel(const __grid_constant__ TailParams params) {
  const Problem& problem = params.problem;
  const int K = problem.geometry.conv_kernel;
  const int64_t C = problem.conv_channels;
  const int32_t row = blockIdx.x / (K - 1), tap = blockIdx.x % (K - 1);
  const int32_t slot = params.slots[row];
  const bool reporter = tap == 0 && threadIdx.x == 0;
  Verdict verdict = slot_range(params.table, slot, -1);
  replayssm_cursor cursor{};
  if (verdict.code == REPLAYSSM_ROW_OK && slot >= 0) {
    cursor = params.table.cursors[slot];
    const replayssm_row_error error = materialize_error(cursor, problem, params.has_decay || !params.wants_state);
    if (error != REPLAYSSM_ROW_OK) {
      const bool records = error == REPLAYSSM_ROW_NO_DECAY || error == REPLAYSSM_ROW_HAS_RECORDS;
      verdict = {error, records ? cursor.history : slot, records ? 0 : cursor.flags};
    }
  }
  if (verdict.code != REPLAYSSM_ROW_OK && reporter) {
    report(params.table.error, verdict.code, row, verdict.given, verdict.expected);
  }
  if (verdict.code != REPLAYSSM_ROW_OK || slot < 0 || !params.conv_tail) return;

  const int64_t input = cursor.tokens - (K - 1) + tap;
  const char* ring = section_of(params.layer.conv_ring, slot);
  float* tail = params.conv_tail + blockIdx.x * C;
  for (int64_t c = threadIdx.x; c < C; c += kCopyThreads) {
    tail[c] = input < 0 ? 0.0f : load_scalar(ring, problem.config.activation, input % problem.conv_rows * C + c);
  }
}

// ---- restore -------------------------------------------------------------------------------------------------------

struct RestoreParams {
  Problem problem;
  replayssm_layer layer;
  replayssm_table table;
  const int32_t* slots;
  const float* state;
  const float* conv_tail;
  bool state_aligned;
};

__device__ Verdict restore_verdict(const replayssm_table& table, int32_t slot) {
  const Verdict verdict = slot_range(table, slot, -1);
  if (verdict.code != REPLAYSSM_ROW_OK || slot < 0) return verdict;
  const int32_t flags = table.cursors[slot].flags;
  const replayssm_row_error error = slot_writable(flags);
  return error == REPLAYSSM_ROW_OK ? verdict : Verdict{error, slot, flags};
}

// A CTA owns a (row, head), and a share of the row's conv inputs.
template <int kStateDim>
__global__ __launch_bounds__(kMaxHeadThreads) void restore_kernel(const __grid_constant__ RestoreParams params) {
  const Problem& problem = params.problem;
  const replayssm_geometry& g = problem.geometry;
  const int row = blockIdx.x / g.num_heads, head = blockIdx.x % g.num_heads;
  const int32_t slot_index = params.slots[row];
  if (slot_index < 0 || restore_verdict(params.table, slot_index).code != REPLAYSSM_ROW_OK) return;
  const int p = threadIdx.x / kLanes * kRowsPerGroup, lane = threadIdx.x % kLanes;
  HeadState<kStateDim> state = {};
  if (p < g.head_dim) {
#pragma unroll
    for (int i = 0; i < kRowsPerGroup; ++i)
#pragma unroll
      for (int c = 0; c < kHeadChunks<kStateDim>; ++c) {
        const int64_t state_row = static_cast<int64_t>(blockIdx.x) * g.head_dim + p + i;
        load_vector<kHeadVec>(params.state, REPLAYSSM_FP32, state_row * kStateDim + (c * kLanes + lane) * kHeadVec,
                              params.state_aligned, state[i][c]);
      }
  }
  const HeadSlot slot(problem, params.layer, slot_index, head);
  const replayssm_cursor& cursor = params.table.cursors[slot_index];
  const StateOwner owner{problem, params.layer, params.table.error, head, row, cursor.stream, cursor.writes};
  store_state<kStateDim>(owner, slot, p, lane, state);

  // The slot will stand at K-1 tokens: input r lies in ring row r.
  const int64_t tail_size = static_cast<int64_t>(g.conv_kernel - 1) * problem.conv_channels;
  char* ring = section_of(params.layer.conv_ring, slot_index);
  for (int64_t i = head * blockDim.x + threadIdx.x; i < tail_size; i += g.num_heads * blockDim.x) {
    store_scalar(ring, problem.config.activation, i, params.conv_tail[row * tail_size + i]);
  }
}

// One warp a row.
__global__ void restore_cursor_kernel(replayssm_table table, const int32_t* slots, int32_t layer, int32_t taps) {
  const int32_t row = blockIdx.x, slot = slots[row], lane = threadIdx.x;
  const Verdict verdict = restore_verdict(table, slot);
  if (verdict.code != REPLAYSSM_ROW_OK && lane == 0) {
    report(table.error, verdict.code, row, verdict.given, verdict.expected);
  }
  if (verdict.code != REPLAYSSM_ROW_OK || slot < 0) return;

  replayssm_cursor& cursor = table.cursors[slot];
  uint8_t* restored = table.restored + static_cast<int64_t>(slot) * table.num_layers;
  const bool continues = cursor.flags & REPLAYSSM_SLOT_RESTORING;
  bool complete = true;
  for (int32_t l = lane; l < table.num_layers; l += 32) {
    const uint8_t is_restored = l == layer ? 1 : continues ? restored[l] : 0;
    restored[l] = is_restored;
    complete = complete && is_restored;
  }
  complete = __all_sync(0xffffffffu, complete);
  if (lane != 0) return;
  if (complete) {
    cursor = replayssm_cursor{taps, cursor.stream, cursor.writes + 1, 0, 0};
  } else {
    cursor.flags = REPLAYSSM_SLOT_RESTORING;
  }
}

// ---- refresh_read_copy ----------------------------------------------------------------------------------------------

struct RefreshParams {
  Problem problem;
  replayssm_layer layer;
  replayssm_table table;
  const int32_t* slots;
};

// A CTA owns a (row, head).
template <int kStateDim>
__global__ __launch_bounds__(kMaxHeadThreads) void refresh_kernel(const __grid_constant__ RefreshParams params) {
  const Problem& problem = params.problem;
  const replayssm_geometry& g = problem.geometry;
  const int row = blockIdx.x / g.num_heads, head = blockIdx.x % g.num_heads;
  const int32_t slot_index = params.slots[row];
  const Verdict verdict = restore_verdict(params.table, slot_index);
  if (verdict.code != REPLAYSSM_ROW_OK && head == 0 && threadIdx.x == 0) {
    report(params.table.error, verdict.code, row, verdict.given, verdict.expected);
  }
  if (verdict.code != REPLAYSSM_ROW_OK || slot_index < 0) return;
  const replayssm_cursor& cursor = params.table.cursors[slot_index];
  if (cursor.writes == 0) return;
  const int p = threadIdx.x / kLanes * kRowsPerGroup, lane = threadIdx.x % kLanes;
  const HeadSlot slot(problem, params.layer, slot_index, head);
  HeadState<kStateDim> state = {};
  if (p < g.head_dim) load_state<kStateDim>(problem, slot.checkpoint, p, lane, state);
  const StateOwner owner{problem, params.layer, params.table.error, head, row, cursor.stream, cursor.writes};
  store_state<kStateDim>(owner, slot, p, lane, state, true);
}

// ---- copy ----------------------------------------------------------------------------------------------------------

struct CopyParams {
  replayssm_table table;
  char* data;
  int64_t layer_stride, slot_stride;
  const int32_t* src;
  const int32_t* dst;
  int32_t rows, blocks_per_row;
};

// For all threads of a CTA together.
__device__ Verdict copy_verdict(const CopyParams& params, int32_t row) {
  const int32_t src = params.src[row], dst = params.dst[row];
  bool named_twice = false;
  for (int32_t i = threadIdx.x; i < params.rows; i += blockDim.x) {
    named_twice = named_twice || (i < row && params.dst[i] == dst) || params.src[i] == dst;
  }
  named_twice = __syncthreads_or(named_twice);

  Verdict verdict = slot_range(params.table, src, 0);
  if (verdict.code == REPLAYSSM_ROW_OK) verdict = slot_range(params.table, dst, 0);
  if (verdict.code != REPLAYSSM_ROW_OK) return verdict;
  const int32_t src_flags = params.table.cursors[src].flags, dst_flags = params.table.cursors[dst].flags;
  const replayssm_row_error src_error = slot_readable(src_flags), dst_error = slot_writable(dst_flags);
  if (src_error != REPLAYSSM_ROW_OK) return {src_error, src, src_flags};
  if (dst_error != REPLAYSSM_ROW_OK) return {dst_error, dst, dst_flags};
  if (named_twice) return {REPLAYSSM_ROW_SLOT_OPEN, dst, 0};
  return verdict;
}

__global__ __launch_bounds__(kCopyThreads) void copy_kernel(const __grid_constant__ CopyParams params) {
  const int32_t row = blockIdx.x / params.blocks_per_row;
  if (copy_verdict(params, row).code != REPLAYSSM_ROW_OK) return;
  const int64_t words = params.slot_stride / 16;
  const int64_t first = static_cast<int64_t>(blockIdx.x % params.blocks_per_row) * kCopyThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(params.blocks_per_row) * kCopyThreads;
  for (int32_t layer = 0; layer < params.table.num_layers; ++layer) {
    char* slots = params.data + layer * params.layer_stride;
    const auto* source = reinterpret_cast<const uint4*>(slots + params.src[row] * params.slot_stride);
    auto* target = reinterpret_cast<uint4*>(slots + params.dst[row] * params.slot_stride);
    int64_t i = first;
    for (; i + 3 * step < words; i += 4 * step) {
      uint4 word[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) word[k] = __ldcs(source + i + k * step);
#pragma unroll
      for (int k = 0; k < 4; ++k) __stcs(target + i + k * step, word[k]);
    }
    for (; i < words; i += step) target[i] = source[i];
  }
}

__global__ void copy_cursor_kernel(const __grid_constant__ CopyParams params) {
  const int32_t row = blockIdx.x;
  const Verdict verdict = copy_verdict(params, row);
  if (threadIdx.x != 0) return;
  if (verdict.code == REPLAYSSM_ROW_OK) {
    params.table.cursors[params.dst[row]] = params.table.cursors[params.src[row]];
  } else {
    report(params.table.error, verdict.code, row, verdict.given, verdict.expected);
  }
}

bool starts_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// CTAs a row for `items` pieces of work of one thread each: enough to fill a GPU with one row, few enough that each has
// some of it to do.
int32_t blocks_for(int64_t items) {
  constexpr int64_t kItemsPerThread = 8, kMost = 512;
  const int64_t blocks = (items + kCopyThreads * kItemsPerThread - 1) / (kCopyThreads * kItemsPerThread);
  return static_cast<int32_t>(std::clamp<int64_t>(blocks, 1, kMost));
}

}  // namespace

replayssm_status materialize(const replayssm_exec& exec, const Problem& problem, const replayssm_layer& layer,
                             const replayssm_table& table, const int32_t* slots, int32_t rows,
                             const replayssm_tensor& A_log, float* state, float* conv_tail) {
  if (rows == 0) return REPLAYSSM_OK;
  if (state) {
    const replayssm_status status =
        launch_fold("materialize", exec,
                    materialize_params(problem, layer, table, A_log, slots, rows, state, starts_aligned(state)));
    if (status != REPLAYSSM_OK) return status;
  }
  const TailParams params{problem, layer, table, slots, conv_tail, state != nullptr, A_log.data != nullptr};
  return launch("materialize", tail_kernel, static_cast<int64_t>(rows) * (problem.geometry.conv_kernel - 1),
                kCopyThreads, 0, exec, params);
}

replayssm_status restore(const replayssm_exec& exec, const Problem& problem, const replayssm_layer& layer,
                         const replayssm_table& table, const int32_t* slots, int32_t rows, const float* state,
                         const float* conv_tail) {
  if (rows == 0) return REPLAYSSM_OK;
  const replayssm_geometry& g = problem.geometry;
  const RestoreParams params{problem, layer, table, slots, state, conv_tail, starts_aligned(state)};
  const replayssm_status status = launch("restore", g.state_dim == 64 ? restore_kernel<64> : restore_kernel<128>,
                                         static_cast<int64_t>(rows) * g.num_heads, head_threads(g), 0, exec, params);
  if (status != REPLAYSSM_OK) return status;
  return launch("restore", restore_cursor_kernel, rows, 32, 0, exec, table, slots, layer.layer, g.conv_kernel - 1);
}

replayssm_status refresh_read_copy(const replayssm_exec& exec, const Problem& problem, const replayssm_layer& layer,
                                   const replayssm_table& table, const int32_t* slots, int32_t rows) {
  if (rows == 0) return REPLAYSSM_OK;
  const replayssm_geometry& g = problem.geometry;
  return launch("refresh_read_copy", g.state_dim == 64 ? refresh_kernel<64> : refresh_kernel<128>,
                static_cast<int64_t>(rows) * g.num_heads, head_threads(g), 0, exec,
                RefreshParams{problem, layer, table, slots});
}

replayssm_status copy(const replayssm_exec& exec, const replayssm_table& table, void* data, int64_t layer_stride,
                      int64_t slot_stride, const int32_t* src, const int32_t* dst, int32_t rows) {
  if (rows == 0) return REPLAYSSM_OK;
  const int32_t blocks_per_row = blocks_for(slot_stride / 16);
  const CopyParams params{table, static_cast<char*>(data), layer_stride, slot_stride, src, dst, rows, blocks_per_row};
  const replayssm_status status =
      launch("copy", copy_kernel, static_cast<int64_t>(rows) * blocks_per_row, kCopyThreads, 0, exec, params);
  if (status != REPLAYSSM_OK) return status;
  return launch("copy", copy_cursor_kernel, rows, kCopyThreads, 0, exec, params);
}

cudaError_t load_snapshot_kernels() {
  for (cudaError_t error :
       {load_kernel(tail_kernel), load_kernel(restore_kernel<64>), load_kernel(restore_kernel<128>),
        load_kernel(restore_cursor_kernel), load_kernel(refresh_kernel<64>), load_kernel(refresh_kernel<128>),
        load_kernel(copy_kernel), load_kernel(copy_cursor_kernel)}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
