// SPDX-License-Identifier: Apache-2.0
//
// prefill, conventional_step and conventional_verify: the recurrence itself,
//
//     S_t = exp(a_t) S_{t-1} + delta_t x_t (outer) B_t,      y_t = S_t C_t + D x_t.
//
// prefill, of what the tensor-core kernel (prefill_mma.cu) does not take. Rows of the state are independent given
// (delta, x, B, C): a CTA owns a head and walks the chunk's tokens with the state in registers (2 rows by N/8 columns a
// thread). Tokens come in tiles of 8 through two shared buffers: while a tile is computed on, the next one is on its
// way into registers as raw bits; it is converted to float32 once, on its way into shared memory, and the CTA meets
// once a tile. Records that the slot still holds are folded first, on the CUDA cores (records.cuh). The state is cast
// to the stored formats once, after the last token.
//
// conventional_step. The classical decode kernel: a CTA owns a (row, head) or part of its rows, and a thread asks for
// all it needs at once (its part of the state, 16 bytes a load, and its columns of B and C) without shared memory or
// barriers. For the tuned set all of it is in flight. More than one token a row: the same loop again, the state staying
// in registers; the next token's inputs are asked for before this one's sums and stores.
//
// conventional_verify. The same kernel, which stores the state after every token, as a snapshot, instead of after the
// last one. A row begins with the snapshot that the last commit left live. It may overwrite that one: a thread reads
// its part of the state into registers before its first store, and no other thread touches that part.
#include <algorithm>

#include "head_state.cuh"

namespace replayssm {
namespace cuda {
namespace {

// ---- prefill -------------------------------------------------------------------------------------------------------

constexpr int kTileTokens = 8;
static_assert(kTileTokens == kLanes, "lane k of a group stores the output of token k");

template <int kStateDim>
struct TokenTile {
  float B[kTileTokens][kStateDim];
  float C[kTileTokens][kStateDim];
  float x[kTileTokens][kMaxHeadDim + 4];
  float delta[kTileTokens];
  float decay[kTileTokens];
};

// A thread's part of a tile on its way from global to shared memory: for some a chunk of B and C, for some a chunk of
// x, for some a dt. The first threads take B and C, the last ones x, those before them dt.
template <int kStateDim>
struct TileLoader {
  static constexpr int kChunks = kStateDim / 8;
  static_assert(kTileTokens * kChunks <= kThreads);

  const ScanParams& params;
  const int64_t first_token;
  const int count, head, state_group;
  const float A, bias;
  // Which token of the tile this thread loads for, kTileTokens if none.
  int vector_token, x_token, step_token;
  int vector_column, x_column;
  Raw<8> b, c, x;
  uint32_t dt;

  __device__ TileLoader(const ScanParams& params, const replayssm_plan_row& row, int head, float A)
      : params(params),
        first_token(row.first_token),
        count(row.count),
        head(head),
        state_group(head / (params.problem.geometry.num_heads / params.problem.geometry.num_groups)),
        A(A),
        bias(params.args.dt_bias.data ? load_scalar(params.args.dt_bias.data, params.args.dt_bias.dtype, head) : 0.0f) {
    const int tid = threadIdx.x, x_chunks = params.problem.geometry.head_dim / 8;
    const int first_x = static_cast<int>(blockDim.x) - kTileTokens * x_chunks, first_step = first_x - kTileTokens;
    vector_token = min(tid / kChunks, kTileTokens);
    vector_column = tid % kChunks * 8;
    x_token = tid < first_x ? kTileTokens : (tid - first_x) / x_chunks;
    x_column = tid < first_x ? 0 : (tid - first_x) % x_chunks * 8;
    step_token = tid < first_step ? kTileTokens : min(tid - first_step, kTileTokens);
  }

  __device__ void fetch(int tile) {
    const replayssm_scan_args& args = params.args;
    const int dtype = params.problem.config.activation;
    const int tokens = min(count - tile, kTileTokens);
    const int64_t start = first_token + tile;
    if (vector_token < tokens) {
      const int64_t token = start + vector_token;
      b = load_raw<8>(args.B.data, dtype, token * args.B.stride[0] + state_group * args.B.stride[1] + vector_column,
                      params.b_aligned);
      c = load_raw<8>(args.C.data, dtype, token * args.C.stride[0] + state_group * args.C.stride[1] + vector_column,
                      params.c_aligned);
    }
    if (x_token < tokens) {
      x = load_raw<8>(args.x.data, dtype, (start + x_token) * args.x.stride[0] + head * args.x.stride[1] + x_column,
                      params.x_aligned);
    }
    if (step_token < tokens) {
      dt = load_bits(args.dt.data, args.dt.dtype, (start + step_token) * args.dt.stride[0] + head * args.dt.stride[1]);
    }
  }

  __device__ void deposit(int tile, TokenTile<kStateDim>& target) const {
    const int tokens = min(count - tile, kTileTokens);
    if (vector_token < tokens) {
      put(b, &target.B[vector_token][vector_column]);
      put(c, &target.C[vector_token][vector_column]);
    }
    if (x_token < tokens) put(x, &target.x[x_token][x_column]);
    if (step_token < tokens) {
      const float delta =
          discretised_step(bits_to_float(dt, params.args.dt.dtype), bias, params.args.dt_min, params.args.dt_max);
      target.delta[step_token] = delta;
      target.decay[step_token] = expf(__fmul_rn(A, delta));
    }
  }

 private:
  __device__ void put(const Raw<8>& raw, float* target) const {
    float value[8];
    unpack_raw(raw, params.problem.config.activation, value);
    *reinterpret_cast<float4*>(target) = make_float4(value[0], value[1], value[2], value[3]);
    *reinterpret_cast<float4*>(target + 4) = make_float4(value[4], value[5], value[6], value[7]);
  }
};

template <int kStateDim>
constexpr size_t prefill_shared_bytes(int window, int head_dim) {
  return std::max(2 * sizeof(TokenTile<kStateDim>), StagedRecords::bytes(window, head_dim, kStateDim));
}

template <int kStateDim>
__global__ __launch_bounds__(kMaxHeadThreads) void prefill_kernel(const __grid_constant__ ScanParams params) {
  extern __shared__ __align__(16) float prefill_shared[];
  const Problem& problem = params.problem;
  const replayssm_scan_args& args = params.args;
  const int P = problem.geometry.head_dim, H = problem.geometry.num_heads;
  const int head = static_cast<int>(blockIdx.x % H), row_index = static_cast<int>(blockIdx.x / H);
  const int p = threadIdx.x / kLanes * kRowsPerGroup, lane = threadIdx.x % kLanes;

  const replayssm_plan_row row = params.planned[row_index];
  if (!admit(row, row_index, args.num_tokens, args.max_count, problem.config.window, false, params.error,
             head == 0 && threadIdx.x == 0) ||
      row.count == 0) {
    return;
  }
  const HeadSlot slot(problem, params.layer, row.slot, head);
  HeadState<kStateDim> state = {};
  if (p < P && !(row.flags & REPLAYSSM_ROW_EMPTY)) load_state<kStateDim>(problem, slot.checkpoint, p, lane, state);
  const float A = decay_rate(args.A_log, head);
  TileLoader<kStateDim> loader(params, row, head, A);
  loader.fetch(0);
  if (row.history > 0) {
    const StagedRecords records(prefill_shared, problem.config.window, P, kStateDim);
    records.stage(problem, slot, ring_position(row.ring_row, -row.history, problem.ring_rows), row.history, A);
    if (p < P) {
      fold_records(state, records.x + p, StagedRecords::x_stride(P), records.B, kStateDim, records.weight,
                   *records.decay, row.history, lane, kStateDim);
    }
    __syncthreads();  // the tiles take the place of the records
  }

  auto* const tiles = reinterpret_cast<TokenTile<kStateDim>*>(prefill_shared);
  const float skip = args.D.data ? load_scalar(args.D.data, args.D.dtype, head) : 0.0f;
  int buffer = 0;
  for (int tile = 0; tile < row.count; tile += kTileTokens, buffer ^= 1) {
    // Nobody reads this buffer any more: everyone has passed the last barrier, behind the work on it.
    loader.deposit(tile, tiles[buffer]);
    __syncthreads();
    if (tile + kTileTokens < row.count) loader.fetch(tile + kTileTokens);
    if (p >= P) continue;

    const TokenTile<kStateDim>& now = tiles[buffer];
    const int tokens = min(row.count - tile, kTileTokens);
    float y[kRowsPerGroup] = {};  // of token `lane`
#pragma unroll 1
    for (int t = 0; t < tokens; ++t) {
      const float delta = now.delta[t], decay = now.decay[t];
      float scaled[kRowsPerGroup], sum[kRowsPerGroup] = {};
#pragma unroll
      for (int i = 0; i < kRowsPerGroup; ++i) scaled[i] = __fmul_rn(delta, now.x[t][p + i]);
#pragma unroll
      for (int c = 0; c < kHeadChunks<kStateDim>; ++c) {
        float b[kHeadVec], q[kHeadVec];
        load_shared<kHeadVec>(&now.B[t][(c * kLanes + lane) * kHeadVec], b);
        load_shared<kHeadVec>(&now.C[t][(c * kLanes + lane) * kHeadVec], q);
#pragma unroll
        for (int i = 0; i < kRowsPerGroup; ++i)
#pragma unroll
          for (int v = 0; v < kHeadVec; ++v) {
            state[i][c][v] = fmaf(scaled[i], b[v], __fmul_rn(decay, state[i][c][v]));
            sum[i] = fmaf(state[i][c][v], q[v], sum[i]);
          }
      }
#pragma unroll
      for (int i = 0; i < kRowsPerGroup; ++i) {
        sum[i] = group_sum(sum[i]);
        if (lane == t) y[i] = sum[i];
      }
    }
    if (lane < tokens) {
      const int64_t target =
          (static_cast<int64_t>(row.first_token) + tile + lane) * args.out.stride[0] + head * args.out.stride[1] + p;
#pragma unroll
      for (int i = 0; i < kRowsPerGroup; ++i) {
        if (args.D.data) y[i] = fmaf(skip, now.x[lane][p + i], y[i]);
        store_scalar(args.out.data, problem.config.activation, target + i, y[i]);
      }
    }
  }

  const replayssm_plan_row& again = params.planned[row_index];  // the loop needs the registers
  const StateOwner owner{problem, params.layer, params.error, head, row_index, again.stream, again.writes};
  store_state<kStateDim>(owner, slot, p, lane, state);
}

// ---- conventional_step and conventional_verify ---------------------------------------------------------------------

// A thread's part of one new token, as raw bits, so that every load is on its way before the first conversion waits.
// kAligned: B and C may be loaded as vectors, known at compile time; else the params say so.
template <int kRows, int kChunks, int kVec, bool kAligned>
struct TokenBits {
  Raw<kVec> b[kChunks], c[kChunks];
  uint32_t x[kRows], dt;

  __device__ void load(const ScanParams& params, int dtype, int64_t token, int head, int state_group, int p, int lane,
                       int N) {
    const replayssm_scan_args& args = params.args;
    const int64_t b_start = token * args.B.stride[0] + state_group * args.B.stride[1] + lane * kVec;
    const int64_t c_start = token * args.C.stride[0] + state_group * args.C.stride[1] + lane * kVec;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (k * kLanes * kVec >= N) break;
      b[k] = load_raw<kVec>(args.B.data, dtype, b_start + k * kLanes * kVec, kAligned || params.b_aligned);
      c[k] = load_raw<kVec>(args.C.data, dtype, c_start + k * kLanes * kVec, kAligned || params.c_aligned);
    }
    const int64_t x_start = token * args.x.stride[0] + head * args.x.stride[1] + p;
#pragma unroll
    for (int i = 0; i < kRows; ++i) x[i] = load_bits(args.x.data, dtype, x_start + i);
    dt = load_bits(args.dt.data, args.dt.dtype, token * args.dt.stride[0] + head * args.dt.stride[1]);
  }
};

// What becomes of the state that a CTA will read before the kernel before has ended: the L2 fetches it, or the CTA
// loads it. Not both: batch 1 lost by that.
enum class Ahead { kNothing, kFetch, kLoad };

// A head's rows are shared out among kParts CTAs. kActivation: the dtype, or -1 where only the config knows it.
// kVerify: conventional_verify, for which `ahead` says nothing, else conventional_step.
template <bool kVerify, int kHeadDim, typename Stored, int kActivation, int kParts>
__global__ __launch_bounds__(kThreads, kHeadDim == 64 ? 4 : 3) void conventional_kernel(
    const __grid_constant__ ScanParams params, const __grid_constant__ replayssm_buffer snapshots, Ahead ahead) {
  let_next_begin();
  using Shape = Tile<kHeadDim>;
  constexpr int kRows = Shape::kRows / kParts, kBlockRows = Shape::kBlockRows / kParts;
  constexpr int kVec = Packed<Stored>::kVec;
  constexpr int kChunks = kMaxStateDim / (kLanes * kVec);
  const Problem& problem = params.problem;
  const replayssm_scan_args& args = params.args;
  const int P = Shape::kTuned ? kHeadDim : problem.geometry.head_dim;
  const int N = Shape::kTuned ? kMaxStateDim : problem.geometry.state_dim;
  const int dtype = kActivation >= 0 ? kActivation : problem.config.activation;
  const int H = problem.geometry.num_heads;
  const int row_index = blockIdx.x / kParts / H, head = blockIdx.x / kParts % H, part = blockIdx.x % kParts;
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const bool reporter = head == 0 && part == 0 && threadIdx.x == 0;

  if (!kVerify && ahead == Ahead::kFetch && threadIdx.x == 0) {
    const int bytes = static_cast<int>(problem.checkpoint_head_bytes) / kParts;
    fetch_head(params, params.layer.checkpoint, problem.checkpoint_head_bytes, blockIdx.x / kParts, part * bytes,
               bytes);
  }
  // A thread's part of the state, `own` being where it begins.
  uint4 raw[kRows][kChunks];
  auto load_state = [&](const Stored* own, bool stored, auto&& load) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        raw[i][c] = make_uint4(0, 0, 0, 0);
        if (c * kLanes * kVec >= N) break;
        if (stored) raw[i][c] = load(reinterpret_cast<const uint4*>(own + i * N + c * kLanes * kVec));
      }
  };
  const int first = part * kBlockRows + group * kRows;
  int32_t loaded = -1;  // the slot whose state is there
  if constexpr (!kVerify && Shape::kTuned) {
    if (ahead == Ahead::kLoad) {
      // One thread looks: past the L1, all warps of a small batch would queue for the same line of the L2.
      __shared__ int32_t peeked;
      if (threadIdx.x == 0) peeked = peek_stored_slot(params.planned[row_index], params.num_slots);
      __syncthreads();
      loaded = peeked;
    }
    if (loaded >= 0) {
      const char* chunk = section_of(params.layer.checkpoint, loaded) + head * problem.checkpoint_head_bytes;
      load_state(reinterpret_cast<const Stored*>(chunk) + first * N + lane * kVec, true,
                 [](const uint4* from) { return __ldcg(from); });
    }
  }
  await_previous();
  const replayssm_plan_row row = params.planned[row_index];
  if (row.slot >= 0 && has_records(row)) {
    if (reporter) report(params.error, REPLAYSSM_ROW_HAS_RECORDS, row_index, row.history, 0);
    return;
  }
  if (!admit(row, row_index, args.num_tokens, args.max_count, problem.config.window, kVerify, params.error, reporter) ||
      row.count == 0) {
    return;
  }
  const HeadSlot slot(problem, params.layer, row.slot, head);
  const int state_group = head / (H / problem.geometry.num_groups);
  const bool empty = row.flags & REPLAYSSM_ROW_EMPTY;
  const int64_t head_size = static_cast<int64_t>(P) * N, state_size = H * head_size;
  Stored* const checkpoint = reinterpret_cast<Stored*>(slot.checkpoint);
  Stored* const snapshot = reinterpret_cast<Stored*>(section_of(snapshots, row.slot)) + head * head_size;
  const Stored* const source =
      kVerify && (row.flags & REPLAYSSM_ROW_SNAPSHOT) ? snapshot + (row.history - 1) * state_size : checkpoint;

  for (int p = first; p < P; p += kParts * kBlockRows) {
    bool finite = true;
    const int own = p * N + lane * kVec;
    if (empty || loaded != row.slot) {
      load_state(source + own, !empty, [](const uint4* from) { return __ldcs(from); });
    }
    TokenBits<kRows, kChunks, kVec, Shape::kTuned> token;
    token.load(params, dtype, row.first_token, head, state_group, p, lane, N);
    const uint32_t rate_bits = load_bits(args.A_log.data, args.A_log.dtype, head);
    const uint32_t bias_bits = args.dt_bias.data ? load_bits(args.dt_bias.data, args.dt_bias.dtype, head) : 0;
    const uint32_t skip_bits = args.D.data ? load_bits(args.D.data, args.D.dtype, head) : 0;

    float state[kRows][kChunks][kVec];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int c = 0; c < kChunks; ++c) Packed<Stored>::unpack(raw[i][c], state[i][c]);
    const float A = -expf(bits_to_float(rate_bits, args.A_log.dtype));
    const float bias = bits_to_float(bias_bits, args.dt_bias.dtype);
    const float skip = bits_to_float(skip_bits, args.D.dtype);

    Stored* target = (kVerify ? snapshot : checkpoint) + own;
#pragma unroll 1
    for (int t = 0; t < row.count; ++t) {
      const float delta = discretised_step(bits_to_float(token.dt, args.dt.dtype), bias, args.dt_min, args.dt_max);
      const float decay = expf(__fmul_rn(A, delta));
      float x[kRows], scaled[kRows], sum[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        x[i] = bits_to_float(token.x[i], dtype);
        scaled[i] = __fmul_rn(delta, x[i]);
        sum[i] = 0.0f;
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (c * kLanes * kVec >= N) break;
        float b[kVec], q[kVec];
        unpack_raw(token.b[c], dtype, b);
        unpack_raw(token.c[c], dtype, q);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int v = 0; v < kVec; ++v) {
            state[i][c][v] = fmaf(scaled[i], b[v], __fmul_rn(decay, state[i][c][v]));
            sum[i] = fmaf(state[i][c][v], q[v], sum[i]);
          }
      }
      // Before anything is stored: loads would queue up behind the stores.
      if (t + 1 < row.count) {
        token.load(params, dtype, static_cast<int64_t>(row.first_token) + t + 1, head, state_group, p, lane, N);
      }
      float y = 0.0f;  // lane i stores row i of the group
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        sum[i] = group_sum(sum[i]);
        if (args.D.data) sum[i] = fmaf(skip, x[i], sum[i]);
        if (lane == i) y = sum[i];
      }
      if (lane < kRows) {
        store_scalar(
            args.out.data, dtype,
            (static_cast<int64_t>(row.first_token) + t) * args.out.stride[0] + head * args.out.stride[1] + p + lane, y);
      }
      if (!kVerify && t + 1 < row.count) continue;
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          if (c * kLanes * kVec >= N) break;
          const uint4 stored = Packed<Stored>::pack(state[i][c]);
          finite = finite && is_finite<Stored>(stored);
          __stcs(reinterpret_cast<uint4*>(target + i * N + c * kLanes * kVec), stored);
        }
      target += state_size;
    }
    if (!finite) report_not_finite(params.error, H, params.layer.layer, kParts);
  }
}

using ConventionalKernel = void(ScanParams, replayssm_buffer, Ahead);

// Parts of a head: as many as leave a thread 8 loads of 16 bytes of the state (80 rows: 20) or, at most, a row.
template <int kHeadDim, typename Stored>
constexpr int kUsualParts = kHeadDim == 64 && sizeof(Stored) == 4 ? 2 : 1;
template <int kHeadDim>
constexpr int kMostParts = Tile<kHeadDim>::kTuned ? Tile<kHeadDim>::kRows : 1;

struct ConventionalChoice {
  ConventionalKernel* kernel;
  int parts;
};

template <bool kVerify, int kHeadDim, typename Stored, int kActivation>
ConventionalChoice choose_parts(bool most) {
  constexpr int kUsual = kUsualParts<kHeadDim, Stored>, kMost = kMostParts<kHeadDim>;
  if (most) return {conventional_kernel<kVerify, kHeadDim, Stored, kActivation, kMost>, kMost};
  return {conventional_kernel<kVerify, kHeadDim, Stored, kActivation, kUsual>, kUsual};
}

template <bool kVerify, typename Stored>
ConventionalChoice choose_conventional(int tuned_head_dim, int activation, bool most_parts) {
  const bool bf16 = activation == REPLAYSSM_BF16;
  switch (tuned_head_dim) {
    case 64:
      return bf16 ? choose_parts<kVerify, 64, Stored, REPLAYSSM_BF16>(most_parts)
                  : choose_parts<kVerify, 64, Stored, REPLAYSSM_FP16>(most_parts);
    case 80:
      return bf16 ? choose_parts<kVerify, 80, Stored, REPLAYSSM_BF16>(most_parts)
                  : choose_parts<kVerify, 80, Stored, REPLAYSSM_FP16>(most_parts);
    default:
      return choose_parts<kVerify, 0, Stored, -1>(most_parts);
  }
}

// Of an SM: CTAs up to which heads are shared out to the most and, all of them being there at once, load the state
// early; and up to which they have the L2 fetch it ahead instead. Later ones find the kernel before ended, and would
// only read the plan twice.
constexpr int kPartsPerSm = 4, kFetchesPerSm = 8;

template <bool kVerify>
replayssm_status launch_conventional(const char* op, const replayssm_exec& exec, const Problem& problem,
                                     const replayssm_layer& layer, const replayssm_table& table, const void* plan,
                                     int32_t rows, const replayssm_scan_args& args, const replayssm_buffer& snapshots) {
  if (rows == 0) return REPLAYSSM_OK;
  const ScanParams params = make_scan_params(problem, layer, table, plan, args, false);
  const int head_dim = tuned_head_dim(params);
  const int64_t heads = static_cast<int64_t>(rows) * problem.geometry.num_heads;
  const int sms = attribute_of_device(cudaDevAttrMultiProcessorCount, 1);
  const ConventionalChoice choice = with_checkpoint(problem.config.checkpoint, [&](auto stored) {
    auto choose = [&](bool most_parts) {
      return choose_conventional<kVerify, decltype(stored)>(head_dim, problem.config.activation, most_parts);
    };
    const ConventionalChoice most = choose(true);
    return heads * most.parts <= kPartsPerSm * sms ? most : choose(false);
  });
  const int64_t ctas = heads * choice.parts;
  const Ahead ahead = ctas <= kPartsPerSm * sms     ? Ahead::kLoad
                      : ctas <= kFetchesPerSm * sms ? Ahead::kFetch
                                                    : Ahead::kNothing;
  return launch_early(op, choice.kernel, ctas, kThreads, 0, exec, params, snapshots, ahead);
}

template <bool kVerify>
cudaError_t load_conventional_kernels(int format, int head_dim, int activation) {
  return with_checkpoint(format, [&](auto stored) {
    auto load = [&](bool most_parts) {
      return load_kernel(choose_conventional<kVerify, decltype(stored)>(head_dim, activation, most_parts).kernel);
    };
    const cudaError_t error = load(false);
    return error != cudaSuccess ? error : load(true);
  });
}

}  // namespace

replayssm_status prefill(const replayssm_exec& exec, const Problem& problem, const replayssm_layer& layer,
                         const replayssm_table& table, const void* plan, int32_t rows,
                         const replayssm_scan_args& args) {
  if (rows == 0) return REPLAYSSM_OK;
  const ScanParams params = make_scan_params(problem, layer, table, plan, args, false);
  if (has_prefill_mma(problem)) return prefill_mma(exec, params, rows);
  const replayssm_geometry& g = problem.geometry;
  const int64_t blocks = static_cast<int64_t>(rows) * g.num_heads;
  const int window = problem.config.window;
  if (g.state_dim == 64) {
    return launch("prefill", prefill_kernel<64>, blocks, head_threads(g), prefill_shared_bytes<64>(window, g.head_dim),
                  exec, params);
  }
  return launch("prefill", prefill_kernel<128>, blocks, head_threads(g), prefill_shared_bytes<128>(window, g.head_dim),
                exec, params);
}

replayssm_status conventional_step(const replayssm_exec& exec, const Problem& problem, const replayssm_layer& layer,
                                   const replayssm_table& table, const void* plan, int32_t rows,
                                   const replayssm_scan_args& args) {
  return launch_conventional<false>("conventional_step", exec, problem, layer, table, plan, rows, args, {nullptr, 0});
}

replayssm_status conventional_verify(const replayssm_exec& exec, const Problem& problem, const replayssm_layer& layer,
                                     const replayssm_table& table, const void* plan, int32_t rows,
                                     const replayssm_scan_args& args, const replayssm_buffer& snapshots) {
  return launch_conventional<true>("conventional_verify", exec, problem, layer, table, plan, rows, args, snapshots);
}

cudaError_t load_scan_kernels() {
  cudaError_t error = load_kernel(prefill_kernel<64>);
  if (error == cudaSuccess) error = load_kernel(prefill_kernel<128>);
  if (error == cudaSuccess) error = load_prefill_mma_kernels();
  for (int format : {REPLAYSSM_CHECKPOINT_FP32, REPLAYSSM_CHECKPOINT_BF16, REPLAYSSM_CHECKPOINT_FP16}) {
    for (int head_dim : {0, 64, 80}) {
      for (int activation : {REPLAYSSM_BF16, REPLAYSSM_FP16}) {
        if (error == cudaSuccess) error = load_conventional_kernels<false>(format, head_dim, activation);
        if (error == cudaSuccess) error = load_conventional_kernels<true>(format, head_dim, activation);
      }
    }
  }
  return error;
}

}  // namespace cuda
}  // namespace replayssm
