// SPDX-License-Identifier: Apache-2.0
//
// step and flush on tensor cores: state_dim 128, head_dim a multiple of 16, 16-bit activations.
//
//     y_s = exp(f_s) [ d S C_s + sum_i v_i (B_i . C_s) x_i ] + sum_{r<=s} u_rs x_r,    u_ss including D
//
// i runs over the records of history, newest first, r over the row's new tokens; f_s is the sum of the tokens' log
// decays up to s, v_i = delta_i exp(e(i,h)) and d = exp(e(0,h)) are the weights that a flush folds with, and u_rs =
// delta_r exp(e(r,s)) (B_r . C_s). All exponents are sums of terms <= 0 from the newest backwards, never differences.
//
// A CTA owns some heads of one group of one row. It stages B and C of the group, forms B^T C and every head's weights
// once, and from there on its four warps go without a barrier. The unit of work is a slice, 16 rows of one head; the
// warps take the CTA's slices in turn, so that what they read at a time is one run of memory.
//  1. A warp's slices come to shared memory by asynchronous copies of whole lines, asked for as soon as the slice
//  before
//     was read (of 16-bit formats, the one before that); x of the slice's records an item ahead too.
//  2. S C by mma.m16n8k8 in TF32, 8 tokens at a time. Lane (g, t) = (lane / 4, lane mod 4) takes rows 2g and 2g + 1,
//  and
//     of every block of columns the t-th 16 bytes: the order of a product's terms is free, so that what vector loads
//     bring is the operand. A float32 state is split in a high part of 11 bits and the rest: two products, error 2^-22.
//     16-bit states, C, x and B are exact in TF32. The sum over the history is a product too: x exact, weights split.
//  3. The sums over new tokens, a triangle, are not: a later token is skipped, not multiplied by zero, for it may be
//     NaN. The CUDA cores add them to the accumulators.
//  4. A row flagged FLUSH folds its records first. The sum over 8 records is formed on the tensor cores, weights times
//     x split as above, B's columns permuted so that it lies where the state does, and added to the state by one
//     rounding. What is stored is kept: the outputs read what the next step will read.
// Every sum's order depends on the row and the config alone, and the bits of token s don't depend on the tokens after
// it. Which CTA and warp has a slice, and how many heads a CTA has, changes no bit. Dead records are never read.
#include <algorithm>

#include "head_state.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr int kTile = 8;  // tokens in a product

struct MmaParams {
  ScanParams scan;
  int heads_per_group, slices;  // slices a head
  int heads, chunks;            // heads a CTA, CTAs a group
  bool flush_only;              // the flush op: no tokens
  bool paired;                  // outputs can be stored two at a time
  uint32_t tf32_mask;           // kTf32Mask, hidden from the compiler: see split()
};

// Shared memory of a CTA; offsets in bytes, strides in floats. Records of the history are newest first.
struct MmaShared {
  int g_stride, v_stride, u_stride;  // of a record of B^T C and of u; of a head of v; of a head of u
  int b_new, c, query, g, g_new;     // B of the history is at 0
  int delta, step, rate, skip, v, u, decay, token_decay;  // of each head
  int warp, history_rows, x_rows, x, warp_bytes;          // a warp's part: state at 0; x [2][history_rows + tokens][16]
  int bytes;

  __host__ __device__ constexpr MmaShared(int window, int tokens, int heads, int query_stride, int state_bytes)
      : g_stride(round_up(tokens, kTile)),
        v_stride(round_up(window, 32)),
        u_stride(tokens * g_stride),
        b_new(round_up(window, 8) * kStride * 2),
        c(b_new + tokens * kStride * 2),
        query(c + tokens * kStride * 2),
        g(query + tokens * query_stride * 4),
        g_new(g + round_up(window, 16) * g_stride * 4),
        delta(g_new + u_stride * 4),
        step(delta + heads * window * 4),
        rate(step + heads * tokens * 4),
        skip(rate + heads * 4),
        v(skip + heads * 4),
        u(round_up(v + heads * v_stride * 4, 8)),
        decay(u + heads * u_stride * 4),
        token_decay(round_up(decay + heads * 4, 8)),
        warp(round_up(token_decay + heads * g_stride * 4, 16)),
        history_rows(round_up(window, 8)),
        x_rows(history_rows + tokens),
        x(state_bytes),
        warp_bytes(x + 2 * x_rows * kSliceWidth * 2),
        bytes(warp + kWarps * warp_bytes) {}
};

// ---- instructions --------------------------------------------------------------------------------------------------

// The same of 16x16 and 16x8 values of 16 bits, a pair of neighbours in k a register.
template <typename T>
__device__ inline void multiply_pairs(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                      uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// 16 bytes to shared memory, asynchronously. The rest of the line, which is wanted next, comes to the L2.
__device__ inline void request_16_bytes(void* target, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(target))),
               "l"(source)
               : "memory");
}
__device__ inline void request_4_bytes(void* target, const void* source) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(target))),
      "l"(source)
      : "memory");
}
// Requests are awaited in groups, in order: all but the last kLater.
__device__ inline void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLater>
__device__ inline void await_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
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

// ---- a slice of the state ------------------------------------------------------------------------------------------

// A slice of a checkpoint format in shared memory, as a lane sees it. It lies as in the checkpoint, but that the halves
// of the 128-byte lines of every other pair of rows are swapped, so that the 8 lanes of a load meet no bank twice.
template <typename Stored>
struct Slice {
  static constexpr int kVec = Packed<Stored>::kVec;
  static constexpr int kRowBytes = kMaxStateDim * sizeof(Stored);
  static constexpr int kBytes = kSliceWidth * kRowBytes;
  static constexpr int kBlocks = kRowBytes / 64;              // of 4 lanes' 16 bytes
  static constexpr int kDepth = sizeof(Stored) == 4 ? 1 : 2;  // slices of a warp on their way at a time
  // Floats from token to token of C, so that the loads of multiply() meet no bank twice.
  static constexpr int kQueryStride = kMaxStateDim + (kVec == 4 ? 16 : 4);

  char* base;
  int lane;

  // 16 bytes of block `block`, of row 2g + `row`.
  __device__ uint4& piece(int block, int row) const {
    const int g = lane / 4, swap = g % 2 * 64;
    return *reinterpret_cast<uint4*>(base + (2 * g + row) * kRowBytes + lane % 4 * 16 + block * 64 +
                                     (block % 2 ? -swap : swap));
  }

  __device__ void clear() const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) piece(b, 0) = piece(b, 1) = make_uint4(0, 0, 0, 0);
  }

  // `source` is the slice in the checkpoint.
  __device__ void request(const Stored* source) const {
#pragma unroll
    for (int k = 0; k < kBytes / 512; ++k) {
      const bool swap = k * 512 / (2 * kRowBytes) % 2;
      request_16_bytes(base + k * 512 + (swap ? lane ^ 4 : lane) * 16,
                       reinterpret_cast<const char*>(source) + k * 512 + lane * 16);
    }
  }

  // sum = S C for the 8 tokens of which `token`, a row of C in float32, is the g-th. Lane (g, t) gets tokens 2t, 2t + 1
  // of row 2g, then of row 2g + 1.
  __device__ void multiply(const float* token, uint32_t mask, float (&sum)[4]) const {
    const int t = lane % 4;
    float high[2][4] = {}, low[2][4] = {};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float upper[kVec], lower[kVec], c[kVec];
      Packed<Stored>::unpack(piece(b, 0), upper);
      Packed<Stored>::unpack(piece(b, 1), lower);
      load_shared<kVec>(token + b * 4 * kVec + t * kVec, c);
#pragma unroll
      for (int i = 0; i < kVec; i += 2) {
        const float state[4] = {upper[i], lower[i], upper[i + 1], lower[i + 1]}, q[2] = {c[i], c[i + 1]};
        if constexpr (sizeof(Stored) == 2) {
          multiply_tf32(high[i / 2 % 2], state, q);
        } else {
          float state_high[4], state_low[4];
          split(state, mask, state_high, state_low);
          multiply_tf32(high[i / 2 % 2], state_high, q);
          multiply_tf32(low[i / 2 % 2], state_low, q);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = __fadd_rn(__fadd_rn(high[0][i], high[1][i]), __fadd_rn(low[0][i], low[1][i]));
  }

  // S <- decay S + sum_i weight_i x_i (outer) B_i over h records, here and in the checkpoint at `target`. p: the
  // slice's first row; x: the lane's rows of record 0; B: record 0. From record h to a multiple of 8 all three hold
  // zeros.
  template <typename Staged>
  __device__ void fold(const StateOwner& owner, int p, Stored* target, const Staged* x, const Staged* B,
                       const float* weight, float decay, int h, uint32_t mask) const {
    constexpr int kPart = sizeof(Stored) == 4 ? 2 : 1;  // blocks at a time
    const int g = lane / 4, t = lane % 4;
    const RoundingKey key = owner.key();
    bool finite = true;
#pragma unroll
    for (int part = 0; part < kBlocks; part += kPart) {
      float state[2][kPart][kVec];
#pragma unroll
      for (int b = 0; b < kPart; ++b)
#pragma unroll
        for (int i = 0; i < 2; ++i) Packed<Stored>::unpack(piece(part + b, i), state[i][b]);
      add_records(state, x, B + part * 4 * kVec, weight, decay, h, lane, mask);
#pragma unroll
      for (int b = 0; b < kPart; ++b)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = 2 * g + i, column = ((part + b) * 4 + t) * kVec;
          const uint4 folded = pack_plain<Stored>(owner, key, p + row, column, state[i][b]);
          finite = finite && is_finite<Stored>(folded);
          piece(part + b, i) = folded;
          *reinterpret_cast<uint4*>(target + row * kMaxStateDim + column) = folded;
        }
    }
    if (!finite) owner.report_not_finite();
  }
};

static_assert(MmaShared(REPLAYSSM_MAX_WINDOW, REPLAYSSM_MAX_STEP_TOKENS, 1, Slice<float>::kQueryStride,
                        Slice<float>::kDepth* Slice<float>::kBytes)
                  .bytes <= kSharedLimit);

// ---- the kernel ----------------------------------------------------------------------------------------------------

template <typename Stored, typename Staged>
__global__ __launch_bounds__(kThreads, 4) void step_mma_kernel(const __grid_constant__ MmaParams params) {
  using State = Slice<Stored>;
  const Problem& problem = params.scan.problem;
  const replayssm_scan_args& args = params.scan.args;
  constexpr int N = kMaxStateDim;
  const int P = problem.geometry.head_dim, R = problem.ring_rows, window = problem.config.window;
  // The shuffle tells the compiler that a warp has one index, so that it sees no divergence in the loop over its items.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int chunk = blockIdx.x % params.chunks;
  const int state_group = blockIdx.x / params.chunks % problem.geometry.num_groups;
  const int row_index = blockIdx.x / params.chunks / problem.geometry.num_groups;

  const replayssm_plan_row row = params.scan.planned[row_index];
  const bool flagged = row.flags & REPLAYSSM_ROW_FLUSH;
  if (params.flush_only) {
    if (row.slot < 0 || !flagged || row.history > window) return;  // step refuses and reports the last
  } else if (!admit(row, row_index, args.num_tokens, args.max_count, window, false, params.scan.error,
                    state_group == 0 && chunk == 0 && threadIdx.x == 0) ||
             row.count == 0) {
    return;
  }
  const int T = params.flush_only ? 0 : row.count, max_tokens = params.flush_only ? 0 : args.max_count;
  const bool fold = flagged && !params.scan.flushed;
  const int h = flagged && params.scan.flushed ? 0 : row.history;  // records of history to stage
  const int history = fold ? 0 : h;                                // that outputs see
  const bool stored_before = !(row.flags & REPLAYSSM_ROW_EMPTY) || (flagged && params.scan.flushed);

  const int first_head = state_group * params.heads_per_group + chunk * params.heads;
  const int heads = min(params.heads, params.heads_per_group - chunk * params.heads);
  const int items = heads * params.slices;  // of the CTA; this warp's are warp, warp + kWarps, ...

  extern __shared__ __align__(16) char shared[];
  const MmaShared layout(window, max_tokens, params.heads, State::kQueryStride, State::kDepth * State::kBytes);
  auto floats_at = [&](int offset) { return reinterpret_cast<float*>(shared + offset); };
  Staged* const B = reinterpret_cast<Staged*>(shared);
  Staged* const new_B = reinterpret_cast<Staged*>(shared + layout.b_new);
  Staged* const C = reinterpret_cast<Staged*>(shared + layout.c);
  float* const query = floats_at(layout.query);               // C in float32
  float* const products = floats_at(layout.g);                // B^T C of the history, [h][g_stride]
  float* const new_products = floats_at(layout.g_new);        // of the new tokens
  float* const delta = floats_at(layout.delta);               // [heads][window]
  float* const steps = floats_at(layout.step);                // [heads][tokens]
  float* const rates = floats_at(layout.rate);                // [heads]
  float* const skips = floats_at(layout.skip);                // [heads]
  float* const v = floats_at(layout.v);                       // [heads][v_stride]
  float* const u = floats_at(layout.u);                       // [heads][tokens][g_stride]
  float* const decays = floats_at(layout.decay);              // [heads]
  float* const token_decays = floats_at(layout.token_decay);  // [heads][g_stride]
  char* const own = shared + layout.warp + warp * layout.warp_bytes;
  Staged* const x = reinterpret_cast<Staged*>(own + layout.x);

  // 1. What the first items need from memory, the longest first, then what the CTA needs. Lane 2s + k moves half k of
  // token s of x.
  Stored* checkpoint = reinterpret_cast<Stored*>(section_of(params.scan.layer.checkpoint, row.slot)) +
                       (static_cast<int64_t>(first_head) * P + warp * kSliceWidth) * N;
  auto state_of = [&](int turn) { return State{own + turn % State::kDepth * State::kBytes, lane}; };
  auto request_state = [&](int ahead, int turn, int item) {
    if (stored_before && item + ahead * kWarps < items) {
      state_of(turn + ahead).request(checkpoint + ahead * kWarps * kSliceWidth * N);
    }
    close_group();
  };
  if (!stored_before) {
    for (int turn = 0; turn < State::kDepth; ++turn) state_of(turn).clear();
  }
  request_state(0, 0, warp);

  const int64_t first_token = row.first_token;
  const int token_bits = T > 1 ? 32 - __clz(T - 1) : 0, num_steps = T > 0 ? heads << token_bits : 0;
  auto load_step = [&](int i) {
    const int s = i & ((1 << token_bits) - 1);
    if (i >= num_steps || s >= T) return 0u;
    return load_bits(args.dt.data, args.dt.dtype,
                     (first_token + s) * args.dt.stride[0] + (first_head + (i >> token_bits)) * args.dt.stride[1]);
  };
  const bool has_head = static_cast<int>(threadIdx.x) < heads;
  uint32_t dt_bits = load_step(threadIdx.x), rate_bits = 0, skip_bits = 0;
  if (has_head) {
    rate_bits = load_bits(args.A_log.data, args.A_log.dtype, first_head + threadIdx.x);
    if (args.D.data) skip_bits = load_bits(args.D.data, args.D.dtype, first_head + threadIdx.x);
  }

  const bool moves_token = lane < 2 * T;
  const int half_slice = lane % 2 * 8;
  Staged* const x_ring = reinterpret_cast<Staged*>(section_of(params.scan.layer.x_ring, row.slot)) + half_slice;
  const Staged* const x_in =
      static_cast<const Staged*>(args.x.data) + (first_token + lane / 2) * args.x.stride[0] + half_slice;
  auto request_x = [&](int head, int slice, int buffer) {
    Staged* const target = x + (buffer * layout.x_rows + lane / 2) * kSliceWidth + half_slice;
    const Staged* const ring = x_ring + head * R * P + slice * kSliceWidth;
#pragma unroll 1
    for (int i = 0; i + lane / 2 < h; i += 16) {
      int position = row.ring_row - 1 - i - lane / 2;
      if (position < 0) position += R;
      request_16_bytes(target + i * kSliceWidth, ring + position * P);
    }
    if (moves_token) {
      request_input(target + layout.history_rows * kSliceWidth, x_in + head * args.x.stride[1] + slice * kSliceWidth,
                    params.scan.x_aligned);
    }
  };
  int local_head = warp / params.slices, slice = warp % params.slices;
  if (warp < items) request_x(first_head + local_head, slice, 0);

  Staged* const b_ring =
      reinterpret_cast<Staged*>(section_of(params.scan.layer.b_ring, row.slot)) + state_group * R * N;
  constexpr int kParts = N / 8, kRowsAtOnce = kThreads / kParts;
  const int part_row = threadIdx.x / kParts, part_column = threadIdx.x % kParts * 8;
#pragma unroll 1
  for (int i = part_row; i < h; i += kRowsAtOnce) {
    int position = row.ring_row - 1 - i;
    if (position < 0) position += R;
    request_16_bytes(B + i * kStride + part_column, b_ring + position * N + part_column);
  }
#pragma unroll 1
  for (int s = part_row; s < T; s += kRowsAtOnce) {
    request_input(new_B + s * kStride + part_column,
                  static_cast<const Staged*>(args.B.data) + (first_token + s) * args.B.stride[0] +
                      state_group * args.B.stride[1] + part_column,
                  params.scan.b_aligned);
    request_input(C + s * kStride + part_column,
                  static_cast<const Staged*>(args.C.data) + (first_token + s) * args.C.stride[0] +
                      state_group * args.C.stride[1] + part_column,
                  params.scan.c_aligned);
  }
  float* const delta_ring =
      reinterpret_cast<float*>(section_of(params.scan.layer.delta_ring, row.slot)) + first_head * R;
#pragma unroll 1
  for (int k = warp; k < heads; k += kWarps) {
#pragma unroll 1
    for (int i = lane; i < h; i += 32) {
      int position = row.ring_row - 1 - i;
      if (position < 0) position += R;
      request_4_bytes(delta + k * window + i, delta_ring + k * R + position);
    }
  }
  close_group();
#pragma unroll
  for (int ahead = 1; ahead < State::kDepth; ++ahead) request_state(ahead, 0, warp);

  if (has_head) {
    rates[threadIdx.x] = -expf(bits_to_float(rate_bits, args.A_log.dtype));
    skips[threadIdx.x] = bits_to_float(skip_bits, args.D.dtype);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < num_steps; i += kThreads) {
    const int k = i >> token_bits, s = i & ((1 << token_bits) - 1);
    if (i >= kThreads) dt_bits = load_step(i);
    if (s >= T) continue;
    const float bias = args.dt_bias.data ? load_scalar(args.dt_bias.data, args.dt_bias.dtype, first_head + k) : 0.0f;
    const float step = discretised_step(bits_to_float(dt_bits, args.dt.dtype), bias, args.dt_min, args.dt_max);
    steps[k * max_tokens + s] = step;
    delta_ring[k * R + ring_position(row.ring_row, s, R)] = step;
  }
  // Rows of zeros up to a multiple of 8 records.
  const int padding = round_up(h, 8) - h;
  if (part_row < padding) {
    *reinterpret_cast<uint4*>(B + (h + part_row) * kStride + part_column) = make_uint4(0, 0, 0, 0);
  }
  if (lane < 4 * padding) {
    const int buffer = lane / 2 % 2, i = h + lane / 4;
    *reinterpret_cast<uint4*>(x + (buffer * layout.x_rows + i) * kSliceWidth + half_slice) = make_uint4(0, 0, 0, 0);
  }
  await_groups<State::kDepth - 1>();
  __syncthreads();

  // 2. The CTA of the group's first heads appends B to the ring. B^T C, 16 records by 8 tokens at a time; rows and
  // columns beyond the last repeat it. The weights of a head, but for the products in u.
#pragma unroll 1
  for (int s = part_row; s < T; s += kRowsAtOnce) {
    float value[8];
    load_shared<8>(C + s * kStride + part_column, value);
    store_vector<8>(query, REPLAYSSM_FP32, s * State::kQueryStride + part_column, true, value);
    if (chunk == 0) {
      *reinterpret_cast<uint4*>(b_ring + ring_position(row.ring_row, s, R) * N + part_column) =
          *reinterpret_cast<const uint4*>(new_B + s * kStride + part_column);
    }
  }
  const int history_tiles = (history + 15) / 16;
#pragma unroll 1
  for (int tile = warp; tile < history_tiles + 1; tile += kWarps) {
    const bool is_new = tile == history_tiles;
    const int first = is_new ? 0 : tile * 16, count = is_new ? T : history;
    const Staged* const records = is_new ? new_B : B;
#pragma unroll 1
    for (int token = 0; token < T; token += kTile) {
      const uint4* const upper = reinterpret_cast<const uint4*>(records + min(first + g, count - 1) * kStride) + t;
      const uint4* const lower = reinterpret_cast<const uint4*>(records + min(first + g + 8, count - 1) * kStride) + t;
      const uint4* const tokens = reinterpret_cast<const uint4*>(C + min(token + g, T - 1) * kStride) + t;
      float sum[2][4] = {};
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const uint4 k0 = upper[b * 4], k1 = lower[b * 4], q = tokens[b * 4];
        multiply_pairs<Staged>(sum[0], k0.x, k1.x, k0.y, k1.y, q.x, q.y);
        multiply_pairs<Staged>(sum[1], k0.z, k1.z, k0.w, k1.w, q.z, q.w);
      }
      float* const target = (is_new ? new_products : products) + (first + g) * layout.g_stride + token + 2 * t;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool live = first + g + 8 * half < count;
        if (is_new && !live) continue;
        *reinterpret_cast<float2*>(target + 8 * half * layout.g_stride) =
            live ? make_float2(sum[0][2 * half] + sum[1][2 * half], sum[0][2 * half + 1] + sum[1][2 * half + 1])
                 : make_float2(0.0f, 0.0f);
      }
    }
  }
#pragma unroll 1
  for (int k = warp; k < heads; k += kWarps) {
    const float A = rates[k];
    const float decay = weigh_history(delta + k * window, A, h, lane, v + k * layout.v_stride);
    if (lane == 0) decays[k] = decay;
    const float step = lane < T ? steps[k * max_tokens + lane] : 0.0f;
    const float log_decay = __fmul_rn(A, step);
    const float token_decay = expf(T == 1 ? log_decay : sum_up_to_lane(log_decay, lane));
    if (lane < T) token_decays[k * layout.g_stride + lane] = token_decay;
    float exponent = 0.0f;
#pragma unroll 1
    for (int back = 0; back < T; ++back) {
      const float step_r = __shfl_up_sync(~0u, step, back), log_decay_r = __shfl_up_sync(~0u, log_decay, back);
      if (lane >= back && lane < T) {
        u[k * layout.u_stride + (lane - back) * layout.g_stride + lane] = __fmul_rn(step_r, expf(exponent));
        exponent = __fadd_rn(exponent, log_decay_r);
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int k = warp; k < heads; k += kWarps) {
#pragma unroll 1
    for (int r = lane / 16; r < T; r += 2) {
      const int s = lane % 16, entry = r * layout.g_stride + s;
      if (s < r || s >= T) continue;
      float& weight = u[k * layout.u_stride + entry];
      weight = fmaf(weight, new_products[entry], r == s ? skips[k] : 0.0f);
    }
  }
  __syncthreads();

  // 3. Slice after slice.
  const int x_append = ring_position(row.ring_row, lane / 2, R) * P;
  int turn = 0;
#pragma unroll 1
  for (int item = warp; item < items; item += kWarps, ++turn) {
    const int head = first_head + local_head, buffer = turn % 2;
    int next_head = local_head, next_slice = slice + kWarps;
    while (next_slice >= params.slices) next_slice -= params.slices, ++next_head;
    __syncwarp();  // x of the item before was read
    if (item + kWarps < items) request_x(first_head + next_head, next_slice, buffer ^ 1);
    close_group();
    await_groups<State::kDepth>();
    __syncwarp();  // the copies of all lanes have come

    const Staged* const old_x = x + buffer * layout.x_rows * kSliceWidth + 2 * g;
    const Staged* const new_x = old_x + layout.history_rows * kSliceWidth;
    if (moves_token) {
      *reinterpret_cast<uint4*>(x_ring + head * R * P + slice * kSliceWidth + x_append) =
          *reinterpret_cast<const uint4*>(new_x - 2 * g + lane / 2 * kSliceWidth + half_slice);
    }
    const State state = state_of(turn);
    const float* const weights = v + local_head * layout.v_stride + t;
    if (fold) {
      if (!stored_before) state.clear();
      const StateOwner owner{problem, params.scan.layer, params.scan.error, head, row_index, row.stream, row.writes};
      state.fold(owner, slice * kSliceWidth, checkpoint, old_x, B, weights - t, decays[local_head], h,
                 params.tf32_mask);
    }
#pragma unroll 1
    for (int first = 0; first < T; first += kTile) {
      float y[4] = {};
      if (stored_before || fold) {
        state.multiply(query + min(first + g, T - 1) * State::kQueryStride, params.tf32_mask, y);
        if (!fold) {
          const float decay = decays[local_head];
#pragma unroll
          for (int i = 0; i < 4; ++i) y[i] *= decay;
        }
      }
      if (first + kTile >= T) {
        __syncwarp();  // the state was read
        request_state(State::kDepth, turn, item);
      }
      const float* const product = products + t * layout.g_stride + first + g;
#pragma unroll 1
      for (int i = 0; i < history; i += 8) {
        const float2 x0 = unpack_pair<Staged>(*reinterpret_cast<const uint32_t*>(old_x + (i + t) * kSliceWidth));
        const float2 x1 = unpack_pair<Staged>(*reinterpret_cast<const uint32_t*>(old_x + (i + 4 + t) * kSliceWidth));
        const float values[4] = {x0.x, x0.y, x1.x, x1.y};
        const float weight[2] = {weights[i] * product[i * layout.g_stride],
                                 weights[i + 4] * product[(i + 4) * layout.g_stride]};
        float high[2], low[2];
        split(weight, params.tf32_mask, high, low);
        multiply_tf32(y, values, low);
        multiply_tf32(y, values, high);
      }

      const int s = first + 2 * t;
      const float2 since = *reinterpret_cast<const float2*>(token_decays + local_head * layout.g_stride + s);
      y[0] *= since.x, y[1] *= since.y, y[2] *= since.x, y[3] *= since.y;
      const float* const new_weights = u + local_head * layout.u_stride + s;
#pragma unroll 2
      for (int r = 0; r < min(first + kTile, T); ++r) {
        const float2 pair = unpack_pair<Staged>(*reinterpret_cast<const uint32_t*>(new_x + r * kSliceWidth));
        const float2 weight = *reinterpret_cast<const float2*>(new_weights + r * layout.g_stride);
        if (r <= s) y[0] = fmaf(weight.x, pair.x, y[0]), y[2] = fmaf(weight.x, pair.y, y[2]);
        if (r <= s + 1) y[1] = fmaf(weight.y, pair.x, y[1]), y[3] = fmaf(weight.y, pair.y, y[3]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (s + i >= T) continue;
        Staged* const target = static_cast<Staged*>(args.out.data) + (first_token + s + i) * args.out.stride[0] +
                               head * args.out.stride[1] + slice * kSliceWidth + 2 * g;
        if (params.paired) {
          *reinterpret_cast<uint32_t*>(target) = pack_pair<Staged>(y[i], y[2 + i]);
        } else {
          store_scalar(target, kDtypeOf<Staged>, 0, y[i]);
          store_scalar(target, kDtypeOf<Staged>, 1, y[2 + i]);
        }
      }
    }
    if (T == 0) {
      __syncwarp();
      request_state(State::kDepth, turn, item);
    }
    checkpoint += kWarps * kSliceWidth * N;
    local_head = next_head, slice = next_slice;
  }
}

// ---- launch --------------------------------------------------------------------------------------------------------

using MmaKernel = void(MmaParams);

template <typename Stored>
MmaKernel* choose_mma(int activation) {
  return activation == REPLAYSSM_BF16 ? step_mma_kernel<Stored, __nv_bfloat16> : step_mma_kernel<Stored, __half>;
}

// A CTA takes more heads only as long as that leaves kEnoughCtas.
constexpr int kMaxHeads = 4;
constexpr int64_t kEnoughCtas = 512;

replayssm_status launch_mma(const char* op, const replayssm_exec& exec, int32_t rows, const ScanParams& scan,
                            bool flush_only) {
  const Problem& problem = scan.problem;
  const replayssm_tensor& out = scan.args.out;
  MmaParams params{};
  params.scan = scan;
  params.heads_per_group = problem.geometry.num_heads / problem.geometry.num_groups;
  params.slices = problem.geometry.head_dim / kSliceWidth;
  params.flush_only = flush_only;
  params.paired = reinterpret_cast<uintptr_t>(out.data) % 4 == 0 && out.stride[0] % 2 == 0 && out.stride[1] % 2 == 0;
  params.tf32_mask = kTf32Mask;
  return with_checkpoint(problem.config.checkpoint, [&](auto stored) {
    using State = Slice<decltype(stored)>;
    const int64_t groups = static_cast<int64_t>(rows) * problem.geometry.num_groups;
    int shared = 0;
    for (int heads = std::min(params.heads_per_group, kMaxHeads);; heads = (heads + 1) / 2) {
      params.heads = heads;
      params.chunks = (params.heads_per_group + heads - 1) / heads;
      shared = MmaShared(problem.config.window, flush_only ? 0 : scan.args.max_count, heads, State::kQueryStride,
                         State::kDepth * State::kBytes)
                   .bytes;
      if (heads == 1 || (shared <= kSharedLimit && groups * params.chunks >= kEnoughCtas)) break;
    }
    return launch(op, choose_mma<decltype(stored)>(problem.config.activation), groups * params.chunks, kThreads, shared,
                  exec, params);
  });
}

}  // namespace

replayssm_status step_mma(const replayssm_exec& exec, const ScanParams& params, int32_t rows) {
  return launch_mma("step", exec, rows, params, false);
}

replayssm_status flush_mma(const replayssm_exec& exec, const Problem& problem, const replayssm_layer& layer,
                           const replayssm_table& table, const void* plan, int32_t rows,
                           const replayssm_tensor& A_log) {
  replayssm_scan_args args{};
  args.A_log = A_log;
  return launch_mma("flush", exec, rows, make_scan_params(problem, layer, table, plan, args, false), true);
}

cudaError_t load_step_mma_kernels() {
  for (int format : {REPLAYSSM_CHECKPOINT_FP32, REPLAYSSM_CHECKPOINT_BF16, REPLAYSSM_CHECKPOINT_FP16}) {
    for (int activation : {REPLAYSSM_BF16, REPLAYSSM_FP16}) {
      MmaKernel* const kernel =
          with_checkpoint(format, [&](auto stored) { return choose_mma<decltype(stored)>(activation); });
      cudaError_t error = load_kernel(kernel);
      if (error == cudaSuccess) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedLimit);
      }
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
