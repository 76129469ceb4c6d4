// SPDX-License-Identifier: Apache-2.0
//
// step, for what the tensor-core kernels (step_mma.cu, step_read.cu) don't take.
//
// It computes the outputs of a row's T new tokens from the checkpoint S and the records j = 1..h+T (h of history, T
// new), without forming a state:
//
//     y_s = exp(e(0,h+s)) S C_s + sum_{j<=h+s} W[j,s] x_j + D x_s,      W[j,s] = delta_j exp(e(j,h+s)) (B_j . C_s)
//
// One CTA of 128 threads owns a (row, head):
//  1. Records and new tokens go to shared memory in float32, step sizes discretised. New tokens that come as tensors
//     are read there, never in the ring, and are appended to it on the way.
//  2. Thread s sums the exponents e(., h+s) backwards from token h+s. Then groups of 8 lanes make W, a group a record.
//  3. The head is walked in blocks of 32 rows: every thread asks for its part of S, kRows rows by N/8 columns, 16 bytes
//     a load (16-bit formats stay packed until they are used).
//  4. A row flagged FLUSH folds its h records into the registers, stores them, and keeps what it stored: from here on
//     it is a row without history whose checkpoint is the new one, the same bits as if it had been read back.
//  5. A group of 8 lanes owns rows of S and of the output: a lane sums its columns of S C_s, scales them by the decay,
//     adds its share of the records (j = lane mod 8), and three shuffles add the lanes up. Four tokens share each
//     value that is unpacked. Scales of columns, if any, are multiplied into C first.
// Quantised states (a read copy; a checkpoint of FP8 or NVFP4) are folded by fold_kernel before, since their scales are
// reductions over what a CTA here has not at hand; a lane has 16 columns of them at once.
// Every sum's order depends on h, T and the config alone. Dead ring rows are never read.
#include <algorithm>

#include "head_state.cuh"

namespace replayssm {
namespace cuda {
namespace {

// Shared memory of a CTA, for at most `records` records and `tokens` new tokens. Offsets and strides in floats.
struct StepShared {
  int x_stride, b_stride, w_stride;
  int b, c, w, delta, log_decay, fold_weight, decay, fold_decay, bytes;

  __host__ __device__ constexpr StepShared(int P, int N, int records, int tokens)
      : x_stride(P + 4),  // 16 bytes more than a row, so that the records of 8 lanes lie in different banks
        b_stride(N),
        w_stride((tokens + 3) / 4 * 4),
        b(records * x_stride),
        c(b + records * b_stride),
        w(c + tokens * N),
        delta(w + records * w_stride),
        log_decay(delta + records),
        fold_weight(log_decay + records),
        decay(fold_weight + records),
        fold_decay(decay + tokens),
        bytes((fold_decay + 1) * 4) {}
};
constexpr int kMaxRecords = REPLAYSSM_MAX_WINDOW + REPLAYSSM_MAX_STEP_TOKENS;
static_assert(StepShared(128, kMaxStateDim, kMaxRecords, REPLAYSSM_MAX_STEP_TOKENS).bytes <= kSharedLimit);

// Eight elements into shared memory.
__device__ inline void stage_chunk(float* target, const void* source, int32_t dtype, int64_t index, bool aligned) {
  float value[8];
  load_vector<8>(source, dtype, index, aligned, value);
  *reinterpret_cast<float4*>(target) = make_float4(value[0], value[1], value[2], value[3]);
  *reinterpret_cast<float4*>(target + 4) = make_float4(value[4], value[5], value[6], value[7]);
}

// Eight staged elements into a ring, exactly as they came.
__device__ inline void append_chunk(void* ring, int32_t dtype, int64_t index, const float* source) {
  float value[8];
  load_shared<8>(source, value);
  store_vector<8>(ring, dtype, index, true, value);
}

// Where a row's new tokens lie, x of a head or B of a group: in the tensor that brings them or, if there is none, in
// the ring, of which token `wrap` lies in row 0. Indices and strides in elements.
struct NewRecords {
  const void* data;
  int64_t first, stride;  // of token 0, from token to token
  int wrap, ring_rows;

  // index: of the head or group in the tensor. ring: its records in the row's slot, ring_stride apart.
  __device__ NewRecords(const replayssm_tensor& tensor, const replayssm_plan_row& row, int index, const void* ring,
                        int ring_stride, int rows)
      : data(tensor.data ? tensor.data : ring),
        first(tensor.data ? row.first_token * tensor.stride[0] + index * tensor.stride[1]
                          : static_cast<int64_t>(row.ring_row) * ring_stride),
        stride(tensor.data ? tensor.stride[0] : ring_stride),
        wrap(tensor.data ? INT32_MAX : rows - row.ring_row),
        ring_rows(rows) {}

  __device__ int64_t at(int token) const { return first + (token - (token >= wrap ? ring_rows : 0)) * stride; }
};

// What a thread reads of a row of the state at a time: 16 bytes of a plain format, the codes of 16 columns of a
// quantised one and what they stand for.
template <typename Stored>
struct StatePart : Packed<Stored> {
  static constexpr bool kQuantised = false;
  using Raw = uint4;
};

struct QuantisedPart {
  static constexpr bool kQuantised = true;
  static constexpr int kVec = 16;
  static_assert(kLanes * kVec == kMaxStateDim && kVec == kBlock);
};

struct Fp8 {};  // E4M3 with row scales
template <>
struct StatePart<Fp8> : QuantisedPart {
  struct Raw {
    uint4 codes;
    float scale;
  };

  __device__ static Raw load(const char* chunk, int P, int N, int row, int column) {
    return {__ldcs(reinterpret_cast<const uint4*>(chunk + row * N + column)),
            reinterpret_cast<const float*>(chunk + Fp8Chunk{P, N}.row_scales())[row]};
  }

  __device__ static void unpack(const Raw& raw, float (&value)[kVec]) {
    const uint32_t word[4] = {raw.codes.x, raw.codes.y, raw.codes.z, raw.codes.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float part[4];
      load_e4m3(word[w], part);
#pragma unroll
      for (int v = 0; v < 4; ++v) value[4 * w + v] = mul_rn(part[v], raw.scale);
    }
  }
};

template <typename Format>  // one of block scales; column scales go to C
struct BlockPart : QuantisedPart {
  struct Raw {
    uint2 codes;
    uint32_t low_bits;
    float step;
  };

  __device__ static Raw load(const char* chunk, int P, int N, int row, int column) {
    const BlockChunk<Format> layout{P, N};
    const int index = row * N + column;
    Raw raw{};
    raw.codes = __ldcs(reinterpret_cast<const uint2*>(chunk + index / 2));
    if constexpr (Format::kLowBits) {
      raw.low_bits = reinterpret_cast<const uint16_t*>(chunk + layout.low_bits())[index / kBlock];
    }
    raw.step = block_step((chunk + layout.block_scales())[index / kBlock],
                          *reinterpret_cast<const float*>(chunk + layout.head_scale()));
    return raw;
  }

  __device__ static void unpack(const Raw& raw, float (&value)[kVec]) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t codes = (w < 2 ? raw.codes.x : raw.codes.y) >> w % 2 * 16;
      float part[4];
      if constexpr (Format::kLowBits) {
        load_e2m2(codes, raw.low_bits >> 4 * w, part);
      } else {
        load_e2m1(codes, part);
      }
#pragma unroll
      for (int v = 0; v < 4; ++v) value[4 * w + v] = mul_rn(part[v], raw.step);
    }
  }
};
template <>
struct StatePart<Nvfp4Amax> : BlockPart<Nvfp4Amax> {};
template <>
struct StatePart<Nvfp4> : BlockPart<Nvfp4> {};
template <>
struct StatePart<E2m2> : BlockPart<E2m2> {};

// What the output loop reads: pointers into shared memory, at the first record and the first token that count.
struct OutputView {
  const float* x;       // [records][x_stride], at the group's first row
  const float* weight;  // [records][w_stride]
  const float* C;       // [tokens][N]
  const float* decay;   // [tokens]
  int x_stride, w_stride, N;
  int history;  // records before the first new token
  bool has_state;
};

// y[u][i]: output of token first + u, row i of the group, without the skip connection; the same in all 8 lanes.
template <int kTokens, int kRows, int kChunks, typename Stored>
__device__ inline void evaluate(const typename StatePart<Stored>::Raw (&state)[kRows][kChunks], const OutputView& view,
                                int first, int lane, float (&y)[kTokens][kRows]) {
  constexpr int kVec = StatePart<Stored>::kVec;
#pragma unroll
  for (int u = 0; u < kTokens; ++u)
#pragma unroll
    for (int i = 0; i < kRows; ++i) y[u][i] = 0.0f;

  if (view.has_state) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = (c * kLanes + lane) * kVec;
      if (column >= view.N) break;
      float s[kRows][kVec];
#pragma unroll
      for (int i = 0; i < kRows; ++i) StatePart<Stored>::unpack(state[i][c], s[i]);
#pragma unroll
      for (int u = 0; u < kTokens; ++u) {
        float q[kVec];
        load_shared<kVec>(view.C + (first + u) * view.N + column, q);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int v = 0; v < kVec; ++v) y[u][i] = fmaf(s[i][v], q[v], y[u][i]);
      }
    }
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      const float decay = view.decay[first + u];
#pragma unroll
      for (int i = 0; i < kRows; ++i) y[u][i] = __fmul_rn(decay, y[u][i]);
    }
  }

  for (int j = lane; j < view.history + first + kTokens; j += kLanes) {
    float x[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) x[i] = view.x[j * view.x_stride + i];
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      if (j > view.history + first + u) continue;  // a later token is skipped, not multiplied by zero: it may be NaN
      const float weight = view.weight[j * view.w_stride + first + u];
#pragma unroll
      for (int i = 0; i < kRows; ++i) y[u][i] = fmaf(weight, x[i], y[u][i]);
    }
  }
#pragma unroll
  for (int u = 0; u < kTokens; ++u)
#pragma unroll
    for (int i = 0; i < kRows; ++i) y[u][i] = group_sum(y[u][i]);
}

template <typename Stored>
__global__ __launch_bounds__(kThreads,
                             Tile<0>::kCtasPerSm) void step_kernel(const __grid_constant__ ScanParams params) {
  using Shape = Tile<0>;
  constexpr int kRows = Shape::kRows;
  constexpr int kVec = StatePart<Stored>::kVec;
  constexpr int kChunks = kMaxStateDim / (kLanes * kVec);
  const Problem& problem = params.problem;
  const replayssm_scan_args& args = params.args;
  const int P = problem.geometry.head_dim, N = problem.geometry.state_dim, H = problem.geometry.num_heads;
  const int dtype = problem.config.activation;
  const int row_index = blockIdx.x / H, head = blockIdx.x % H;
  const int tid = threadIdx.x, group = tid / kLanes, lane = tid % kLanes;

  const replayssm_plan_row row = params.planned[row_index];
  if (!admit(row, row_index, args.num_tokens, args.max_count, problem.config.window, false, params.error,
             head == 0 && tid == 0) ||
      row.count == 0) {
    return;
  }
  const int T = row.count;
  const bool flagged = row.flags & REPLAYSSM_ROW_FLUSH;
  const bool fold = flagged && !params.flushed;
  const int h = flagged && params.flushed ? 0 : row.history;  // staged records of history
  const bool stored_before = !(row.flags & REPLAYSSM_ROW_EMPTY) || (flagged && params.flushed);
  const HeadSlot slot(problem, params.layer, row.slot, head);

  uint8_t column_scale = 0;  // of column tid
  if constexpr (std::is_same_v<Stored, Nvfp4>) {
    static_assert(kMaxStateDim <= kThreads);
    if (stored_before && tid < N) column_scale = (slot.read_copy + BlockChunk<Nvfp4>{P, N}.column_scales())[tid];
  }

  // 1. Records and new tokens.
  extern __shared__ __align__(16) float shared[];
  const StepShared layout(P, N, problem.config.window + args.max_count, args.max_count);
  float* const x = shared;
  float* const B = shared + layout.b;
  float* const C = shared + layout.c;
  float* const weight = shared + layout.w;
  float* const delta = shared + layout.delta;
  float* const log_decay = shared + layout.log_decay;
  float* const fold_weight = shared + layout.fold_weight;
  float* const decay = shared + layout.decay;
  float* const fold_decay = shared + layout.fold_decay;

  const int heads_per_group = H / problem.geometry.num_groups;
  const int state_group = head / heads_per_group;
  const int oldest = ring_position(row.ring_row, -h, problem.ring_rows);
  const int x_chunks = P / 8, n_chunks = N / 8;
  const NewRecords new_x(args.x, row, head, slot.x_ring, slot.x_stride, problem.ring_rows);
  const NewRecords new_b(args.B, row, state_group, slot.b_ring, N, problem.ring_rows);
  const int64_t c_start = row.first_token * args.C.stride[0] + state_group * args.C.stride[1];
#pragma unroll 1
  for (int item = tid; item < (h + T) * x_chunks; item += kThreads) {
    const int j = item / x_chunks, column = item % x_chunks * 8;
    float* const target = x + j * layout.x_stride + column;
    if (j < h) {
      stage_chunk(target, slot.x_ring, dtype, ring_position(oldest, j, problem.ring_rows) * slot.x_stride + column,
                  true);
    } else {
      stage_chunk(target, new_x.data, dtype, new_x.at(j - h) + column, params.x_aligned);
    }
  }
#pragma unroll 1
  for (int item = tid; item < (h + T) * n_chunks; item += kThreads) {
    const int j = item / n_chunks, column = item % n_chunks * 8;
    float* const target = B + j * layout.b_stride + column;
    if (j < h) {
      stage_chunk(target, slot.b_ring, dtype, ring_position(oldest, j, problem.ring_rows) * N + column, true);
    } else {
      stage_chunk(target, new_b.data, dtype, new_b.at(j - h) + column, params.b_aligned);
    }
  }
  // Step sizes: raw bits before C is converted, so that their loads overlap too.
  const bool has_record = tid < h + T, has_token = has_record && tid >= h;
  const uint32_t rate_bits = load_bits(args.A_log.data, args.A_log.dtype, head);
  float step = 0.0f;
  uint32_t dt_bits = 0, bias_bits = 0;
  if (has_token) {
    const int64_t token = static_cast<int64_t>(row.first_token) + tid - h;
    dt_bits = load_bits(args.dt.data, args.dt.dtype, token * args.dt.stride[0] + head * args.dt.stride[1]);
    if (args.dt_bias.data) bias_bits = load_bits(args.dt_bias.data, args.dt_bias.dtype, head);
  } else if (has_record) {
    step = slot.delta_ring[ring_position(oldest, tid, problem.ring_rows) * slot.delta_stride];
  }
#pragma unroll 1
  for (int item = tid; item < T * n_chunks; item += kThreads) {
    const int s = item / n_chunks, column = item % n_chunks * 8;
    stage_chunk(C + s * N + column, args.C.data, dtype, c_start + s * args.C.stride[0] + column, params.c_aligned);
  }
  if (has_token) {
    step = discretised_step(bits_to_float(dt_bits, args.dt.dtype), bits_to_float(bias_bits, args.dt_bias.dtype),
                            args.dt_min, args.dt_max);
    slot.delta_ring[ring_position(row.ring_row, tid - h, problem.ring_rows) * slot.delta_stride] = step;
  }
  if (has_record) {
    delta[tid] = step;
    log_decay[tid] = __fmul_rn(-expf(bits_to_float(rate_bits, args.A_log.dtype)), step);
  }
  __syncthreads();

#pragma unroll 1
  for (int item = tid; params.append && item < T * x_chunks; item += kThreads) {
    const int s = item / x_chunks, column = item % x_chunks * 8;
    append_chunk(slot.x_ring, dtype, ring_position(row.ring_row, s, problem.ring_rows) * slot.x_stride + column,
                 x + (h + s) * layout.x_stride + column);
  }
  if (params.append && head % heads_per_group == 0) {
#pragma unroll 1
    for (int item = tid; item < T * n_chunks; item += kThreads) {
      const int s = item / n_chunks, column = item % n_chunks * 8;
      append_chunk(slot.b_ring, dtype, ring_position(row.ring_row, s, problem.ring_rows) * N + column,
                   B + (h + s) * layout.b_stride + column);
    }
  }

  // 2. Weights. The records that outputs see start at `first`: a row that folds has no history afterwards.
  const int first = fold ? h : 0;
  const int history = h - first;
  float* const output_weight = weight + first * layout.w_stride;
  if (tid < T) {
    decay[tid] = sum_exponents_backwards(log_decay + first, history + tid + 1, layout.w_stride, output_weight + tid);
  } else if (fold && tid == 32) {  // another warp than the threads above
    *fold_decay = sum_exponents_backwards(log_decay, h, 1, fold_weight);
  }
  __syncthreads();

  if (fold && tid < h) fold_weight[tid] = record_weight(delta[tid], fold_weight[tid]);
  for (int j = group; j < history + T; j += kGroups) {
    float b[kMaxStateDim / 32][4];
#pragma unroll
    for (int c = 0; c < kMaxStateDim / 32; ++c) {
      if (c * 32 < N) load_shared<4>(B + (first + j) * layout.b_stride + c * 32 + lane * 4, b[c]);
    }
    for (int block = 0; block < T; block += kLanes) {  // lane k keeps the product with token block + k
      const int end = min(block + kLanes, T);
      float product = 0.0f;
      for (int s = max(block, j - history); s < end; ++s) {
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < kMaxStateDim / 32; ++c) {
          if (c * 32 >= N) break;
          float q[4];
          load_shared<4>(C + s * N + c * 32 + lane * 4, q);
#pragma unroll
          for (int v = 0; v < 4; ++v) sum = fmaf(b[c][v], q[v], sum);
        }
        sum = group_sum(sum);
        if (s - block == lane) product = sum;
      }
      const int s = block + lane;
      if (s < end && j <= history + s) {
        float* const w = output_weight + j * layout.w_stride + s;
        *w = __fmul_rn(record_weight(delta[first + j], *w), product);
      }
    }
  }
  __syncthreads();
  if constexpr (std::is_same_v<Stored, Nvfp4>) {  // nobody but the sums over S reads C any more
    const float scale = e4m3_to_float(column_scale);
    for (int s = 0; s < T && tid < N; ++s) C[s * N + tid] = __fmul_rn(scale, C[s * N + tid]);
    __syncthreads();
  }

  const float skip = args.D.data ? load_scalar(args.D.data, args.D.dtype, head) : 0.0f;
  for (int first_row = 0; first_row < P; first_row += Shape::kBlockRows) {
    const int p = first_row + group * kRows;
    if (p >= P) break;

    // 3. The state.
    typename StatePart<Stored>::Raw state[kRows][kChunks];
    Stored* const checkpoint = reinterpret_cast<Stored*>(slot.checkpoint) + p * N + lane * kVec;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        state[i][c] = {};
        if (!stored_before || (c * kLanes + lane) * kVec >= N) continue;
        // Read once and by this thread only: leaves the L2 to the records.
        if constexpr (StatePart<Stored>::kQuantised) {
          const char* const chunk = problem.read_copy_head_bytes > 0 ? slot.read_copy : slot.checkpoint;
          state[i][c] = StatePart<Stored>::load(chunk, P, N, p + i, lane * kVec);
        } else {
          state[i][c] = __ldcs(reinterpret_cast<const uint4*>(checkpoint + i * N + c * kLanes * kVec));
        }
      }

    // 4. Flush.
    if constexpr (!StatePart<Stored>::kQuantised) {
      if (fold) {
        float folded[kRows][kChunks][kVec];
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int c = 0; c < kChunks; ++c) Packed<Stored>::unpack(state[i][c], folded[i][c]);
        fold_records(folded, x + p, layout.x_stride, B, layout.b_stride, fold_weight, *fold_decay, h, lane, N);
        const StateOwner owner{problem, params.layer, params.error, head, row_index, row.stream, row.writes};
        const PlainRounding rounding(owner);
        bool finite = true;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          if (c * kLanes * kVec >= N) break;
          uint4 packed[kRows];
          rounding.pack<Stored>(p, (c * kLanes + lane) * kVec, folded, c, packed, finite);
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            state[i][c] = packed[i];
            *reinterpret_cast<uint4*>(checkpoint + i * N + c * kLanes * kVec) = packed[i];
          }
        }
        if (!finite) report_not_finite(params.error, H, params.layer.layer);
      }
    }

    // 5. Outputs. Lane i stores row i of the group: the lanes of a warp fill one run of rows.
    const OutputView view{x + first * layout.x_stride + p,
                          output_weight,
                          C,
                          decay,
                          layout.x_stride,
                          layout.w_stride,
                          N,
                          history,
                          stored_before || fold};
    auto store_output = [&](int s, const float (&y)[kRows]) {
      float value = 0.0f;
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        if (lane == i) value = y[i];
      if (lane >= kRows) return;
      if (args.D.data) value = fmaf(skip, x[(h + s) * layout.x_stride + p + lane], value);
      store_scalar(
          args.out.data, dtype,
          (static_cast<int64_t>(row.first_token) + s) * args.out.stride[0] + head * args.out.stride[1] + p + lane,
          value);
    };
    int s = 0;
    for (; s + 4 <= T; s += 4) {
      float y[4][kRows];
      evaluate<4, kRows, kChunks, Stored>(state, view, s, lane, y);
#pragma unroll
      for (int u = 0; u < 4; ++u) store_output(s + u, y[u]);
    }
    for (; s < T; ++s) {
      float y[1][kRows];
      evaluate<1, kRows, kChunks, Stored>(state, view, s, lane, y);
      store_output(s, y[0]);
    }
  }
}

// Calls f with a value of the type of StatePart that steps read: of the read copy if there is one.
template <typename F>
auto with_read_format(const replayssm_config& config, F&& f) {
  switch (config.read_copy) {
    case REPLAYSSM_READ_COPY_FP8:
      return f(Fp8());
    case REPLAYSSM_READ_COPY_NVFP4:
      return f(Nvfp4());
    case REPLAYSSM_READ_COPY_NVFP4_AMAX:
      return f(Nvfp4Amax());
    case REPLAYSSM_READ_COPY_E2M2:
      return f(E2m2());
  }
  if (config.checkpoint == REPLAYSSM_CHECKPOINT_NVFP4) return f(Nvfp4Amax());
  if (config.checkpoint == REPLAYSSM_CHECKPOINT_FP8_SR) return f(Fp8());
  return with_checkpoint(config.checkpoint, f);
}

}  // namespace

replayssm_status step(const replayssm_exec& exec, const Problem& problem, const replayssm_layer& layer,
                      const replayssm_table& table, const void* plan, int32_t rows, const replayssm_scan_args& args,
                      bool flushed) {
  if (rows == 0) return REPLAYSSM_OK;
  if (has_fused_step_read(problem)) {
    return step_read(exec, make_scan_params(problem, layer, table, plan, args, flushed), rows);
  }
  if (has_step_mma(problem)) {
    const ScanParams params = make_scan_params(problem, layer, table, plan, args, flushed);
    return has_step_head(params, rows) ? step_head(exec, params, rows) : step_mma(exec, params, rows);
  }
  // A head's scales need all of it, which fold_kernel has in one CTA: quantised states are flushed by a launch of their
  // own, and the rows that flushed read what it left in the L2. So are those that step_read.cu has no room to fold.
  const bool apart = has_step_read(problem) || with_read_format(problem.config, [](auto stored) {
                       return StatePart<decltype(stored)>::kQuantised;
                     });
  if (apart && !flushed) {
    const replayssm_status status = launch_fold(
        "step", exec, flush_params(problem, layer, table, args.A_log, plan, rows, args.max_count, args.num_tokens));
    if (status != REPLAYSSM_OK) return status;
  }
  const ScanParams params = make_scan_params(problem, layer, table, plan, args, flushed || apart);
  if (has_step_read(problem)) return step_read(exec, params, rows);
  const StepShared shared(problem.geometry.head_dim, problem.geometry.state_dim, problem.config.window + args.max_count,
                          args.max_count);
  return with_read_format(problem.config, [&](auto stored) {
    return launch("step", step_kernel<decltype(stored)>, static_cast<int64_t>(rows) * problem.geometry.num_heads,
                  kThreads, shared.bytes, exec, params);
  });
}

cudaError_t load_step_kernels() {
  cudaError_t error = load_step_mma_kernels();
  if (error == cudaSuccess) error = load_step_head_kernels();
  if (error == cudaSuccess) error = load_step_read_kernels();
  replayssm_config config{};
  for (int read_copy : {REPLAYSSM_READ_COPY_NONE, REPLAYSSM_READ_COPY_FP8, REPLAYSSM_READ_COPY_NVFP4,
                        REPLAYSSM_READ_COPY_NVFP4_AMAX, REPLAYSSM_READ_COPY_E2M2}) {
    for (int checkpoint : {REPLAYSSM_CHECKPOINT_FP32, REPLAYSSM_CHECKPOINT_BF16, REPLAYSSM_CHECKPOINT_FP16}) {
      config.read_copy = read_copy, config.checkpoint = checkpoint;
      if (error != cudaSuccess) return error;
      error = with_read_format(config,
                               [](auto stored) { return load_kernel(step_kernel<decltype(stored)>, kSharedLimit); });
    }
  }
  return error;
}

}  // namespace cuda
}  // namespace replayssm
