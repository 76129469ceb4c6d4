// SPDX-License-Identifier: Apache-2.0
//
// step from quantised states on tensor cores: state_dim 128, head_dim a multiple of 16, 16-bit activations.
//
//     y_s = exp(f_s) [ d S C_s + sum_i v_i (B_i . C_s) x_i ] + sum_{r<=s} u_rs x_r,    u_ss including D
//
// with the symbols of step_mma.cu, but that S is the read copy (FP8, NVFP4, E2M2), or a checkpoint of such a format.
//
// A CTA owns up to four heads of one group of one row and asks for all that it reads at once, by asynchronous copies:
// records, new tokens and the heads' chunks, which lie in one run of memory. While the state is on its way the CTA
// forms B^T C and every head's weights. Then its four warps take the slices (16 rows of one head) in turn. The CTAs of
// an SM are at different points, so that some of them wait for memory while others compute.
//  1. S C by mma.m16n8k16 in FP16. A code times its block's scale has at most 6 significant bits, all of them multiples
//     of 2^-24 if the codes are taken times 2^-14, as they are when their bits are put into the places of FP16's:
//     exact. The order of a product's terms is free: lane (g, t) = (lane / 4, lane mod 4) takes rows 2g and 2g + 1, and
//     of their columns the t-th 32 (FP8: the t-th 16 of either half), so that a row's codes are one vector load and two
//     block scales.
//  2. C is brought to FP16 once a CTA, times the power of two that puts its largest value below 2^15: exact for BF16
//     but where values lie 2^28 apart. Column scales are multiplied into it once a head: the one rounding, by 2^-12.
//     The scales of the head, or of rows of FP8, and the powers of two go to the float32 sums.
//  3. Records and new tokens as in step_mma.cu: the history on tensor cores in TF32 with the weights split in two, the
//     triangle of new tokens on the CUDA cores.
// Every sum's order depends on the row and the config alone, and the bits of token s don't depend on the tokens after
// it. Which CTA and warp has a slice, and how many heads a CTA has, changes no bit. Dead records are never read.
#include <algorithm>

#include "head_state.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr int kTile = 8;          // tokens in a product
constexpr int kProducts = 8;      // of 16 columns, for a row of the state
constexpr int kQueryStride = 80;  // words from token to token of C: 320 bytes, so that the loads of two tokens meet no
                                  // bank twice

struct ReadParams {
  ScanParams scan;
  int rows, flush_ctas;
  int heads_per_group, slices;  // slices a head
  int heads, chunks;            // heads a CTA, CTAs a group
  bool paired;                  // outputs can be stored two at a time
  uint32_t tf32_mask;           // kTf32Mask, hidden from the compiler: see split()
};

// ---- formats -------------------------------------------------------------------------------------------------------

// The codes of a head lie in shared memory as in its chunk, but that the halves of the 128-byte lines of every other
// pair of rows are swapped, so that the 8 lanes of a load meet no bank twice. The rest of the chunk lies as it is.

// Two E4M3 codes as FP16, exactly.
__device__ inline __half2 e4m3_halves(uint32_t codes) {
  uint32_t pair;
#ifdef REPLAYSSM_CVT_E4M3
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(codes)));
  return *reinterpret_cast<const __half2*>(&pair);
#else
  // Scales are no NaN. The fields in place, and the exponent's bias corrected by 2^8.
  const uint32_t bytes = __byte_perm(codes, 0, 0x1404);
  pair = (bytes & 0x80008000u) | (bytes & 0x7f007f00u) >> 1;
  return __hmul2(*reinterpret_cast<const __half2*>(&pair), __float2half2_rn(256.0f));
#endif
}

__device__ inline uint32_t bits_of(__half2 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }
__device__ inline __half2 halves_of(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }

// The E2M1 codes kCode and kCode + 4 of a word as FP16, times 2^-14.
template <int kCode>
__device__ inline uint32_t e2m1_pair(uint32_t word) {
  constexpr int kShift = 9 - 4 * kCode;
  const uint32_t magnitude = kShift > 0 ? word << (kShift > 0 ? kShift : 0) : word >> (kShift > 0 ? 0 : -kShift);
  return (word << (12 - 4 * kCode) & 0x80008000u) | (magnitude & 0x0e000e00u);
}

// The operand of rows 2g and 2g + 1 of a slice: kProducts times {row 2g, row 2g + 1, row 2g, row 2g + 1} of pairs of
// columns that query_columns() names. Formats of block scales.
template <typename Format>
struct StateOperand {
  static constexpr bool kColumnScales = Format::kColumnScales;
  static constexpr int kRowBytes = kMaxStateDim / 2;
  static constexpr float kUnit =
      1024.0f;  // what sums are to be multiplied by: codes come times 2^-14, scales times 2^4

  __host__ __device__ static int bytes(int P) { return static_cast<int>(BlockChunk<Format>{P, kMaxStateDim}.bytes()); }
  // The first of the two columns, of word `index` of lane t; the second lies `kColumnStep` behind.
  static constexpr int kColumnStep = 4;
  __device__ static int query_column(int t, int index) { return 32 * t + index / 4 * 8 + index % 4; }

  uint4 codes[2];
  uint32_t low[2];
  __half2 scale[2];  // of the first and the second 16 columns, times 16

  __device__ StateOperand(const char* chunk, int P, int slice, int g, int t) {
    const BlockChunk<Format> layout{P, kMaxStateDim};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = slice * kSliceWidth + 2 * g + i;
      codes[i] = *reinterpret_cast<const uint4*>(chunk + (row - i + (i ^ g & 1)) * kRowBytes + t * 16);
      const uint16_t scales =
          *reinterpret_cast<const uint16_t*>(chunk + layout.block_scales() + row * (kMaxStateDim / kBlock) + 2 * t);
      scale[i] = __hmul2(e4m3_halves(scales), __float2half2_rn(16.0f));
      low[i] = 0;
      if constexpr (Format::kLowBits) {
        low[i] = *reinterpret_cast<const uint32_t*>(chunk + layout.low_bits() + row * (kMaxStateDim / 8) + 4 * t);
      }
    }
  }

  // Code kCode and kCode + 4 of word kWord, times their scale.
  template <int kWord, int kCode>
  __device__ uint32_t pair(int i) const {
    const uint32_t word = kWord == 0 ? codes[i].x : kWord == 1 ? codes[i].y : kWord == 2 ? codes[i].z : codes[i].w;
    uint32_t value = e2m1_pair<kCode>(word);
    if constexpr (Format::kLowBits) {
      const uint32_t byte = low[i] >> 8 * kWord & 0xffu;
      value |= (byte | byte << 12) << (8 - kCode) & 0x01000100u;
    }
    return bits_of(__hmul2(halves_of(value), kWord < 2 ? __low2half2(scale[i]) : __high2half2(scale[i])));
  }
  template <int kProduct>
  __device__ void get(uint32_t (&a)[4]) const {
    constexpr int kWord = kProduct / 2, kCode = kProduct % 2 * 2;
    a[0] = pair<kWord, kCode>(0), a[1] = pair<kWord, kCode>(1);
    a[2] = pair<kWord, kCode + 1>(0), a[3] = pair<kWord, kCode + 1>(1);
  }

  // sum *= the scales that are not in the operands
  __device__ static void scale_sums(const char* chunk, int P, int, int, float (&sum)[4]) {
    const float head = *reinterpret_cast<const float*>(chunk + BlockChunk<Format>{P, kMaxStateDim}.head_scale());
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] *= head;
  }
};

struct Fp8 {};  // E4M3 with row scales
template <>
struct StateOperand<Fp8> {
  static constexpr bool kColumnScales = false;
  static constexpr int kRowBytes = kMaxStateDim;
  static constexpr float kUnit = 1.0f;

  __host__ __device__ static int bytes(int P) { return static_cast<int>(Fp8Chunk{P, kMaxStateDim}.bytes()); }
  static constexpr int kColumnStep = 1;
  __device__ static int query_column(int t, int index) { return index / 8 * 64 + 16 * t + index % 8 * 2; }

  uint4 codes[2][2];  // of a row's first and second half

  __device__ StateOperand(const char* chunk, int, int slice, int g, int t) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes[i][half] = *reinterpret_cast<const uint4*>(chunk + (slice * kSliceWidth + 2 * g + i) * kRowBytes +
                                                         (half ^ g & 1) * 64 + t * 16);
      }
  }

  template <int kProduct>
  __device__ void get(uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4& piece = codes[i][kProduct / 4];
      const uint32_t word = kProduct % 4 == 0   ? piece.x
                            : kProduct % 4 == 1 ? piece.y
                            : kProduct % 4 == 2 ? piece.z
                                                : piece.w;
      a[i] = bits_of(e4m3_halves(word & 0xffffu));
      a[2 + i] = bits_of(e4m3_halves(word >> 16));
    }
  }

  __device__ static void scale_sums(const char* chunk, int P, int slice, int g, float (&sum)[4]) {
    const float2 rows = *reinterpret_cast<const float2*>(chunk + Fp8Chunk{P, kMaxStateDim}.row_scales() +
                                                         (slice * kSliceWidth + 2 * g) * 4);
    sum[0] *= rows.x, sum[1] *= rows.x, sum[2] *= rows.y, sum[3] *= rows.y;
  }
};

// d += a b of 16x16 and 16x8 values of 16 bits, a pair of neighbours in k a register, the rest as multiply_tf32 has it.
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

// The operand of 8 tokens, of which `token`, a row of C in FP16, is the g-th. `columns`: the head's column scales.
template <typename Format>
struct QueryOperand {
  uint32_t word[2 * kProducts];

  __device__ void load(const uint32_t* token, const char* columns, int t) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 v = *reinterpret_cast<const uint4*>(token + j * 16 + t * 4);
      word[4 * j] = v.x, word[4 * j + 1] = v.y, word[4 * j + 2] = v.z, word[4 * j + 3] = v.w;
    }
    if constexpr (StateOperand<Format>::kColumnScales) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 v = *reinterpret_cast<const uint4*>(columns + t * 32 + half * 16);
        const uint32_t codes[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {  // word w / 2 of the half, its pairs w % 2 * 2 and the next
          const uint32_t pairs = __byte_perm(codes[w / 2 * 2], codes[w / 2 * 2 + 1], w % 2 == 0 ? 0x5140 : 0x7362);
          uint32_t& first = word[half * 8 + 2 * w];
          uint32_t& second = word[half * 8 + 2 * w + 1];
          first = bits_of(__hmul2(halves_of(first), e4m3_halves(pairs & 0xffffu)));
          second = bits_of(__hmul2(halves_of(second), e4m3_halves(pairs >> 16)));
        }
      }
    }
  }
};

template <int kProduct, typename Format>
__device__ inline void multiply_from(const StateOperand<Format>& state, const QueryOperand<Format>& query,
                                     float (&even)[4], float (&odd)[4]) {
  if constexpr (kProduct < kProducts) {
    uint32_t a[4];
    state.template get<kProduct>(a);
    multiply_pairs<__half>(kProduct % 2 == 0 ? even : odd, a[0], a[1], a[2], a[3], query.word[2 * kProduct],
                           query.word[2 * kProduct + 1]);
    multiply_from<kProduct + 1>(state, query, even, odd);
  }
}

// ---- shared memory -------------------------------------------------------------------------------------------------

// Of a CTA; offsets in bytes, strides in elements. Records of the history are newest first, zeros up to a multiple of 8
// of them.
struct ReadShared {
  int g_stride, v_stride, u_stride, x_stride;  // of a record of B^T C and of u; of a head of v; of a head of u; of a
                                               // record of x
  int x_rows, new_x_row;                       // of a head; where new tokens begin
  int b_new, c, query, query_scale, g, g_new;  // B of the history is at 0
  int delta, step, rate, skip, v, u, decay, token_decay;  // of each head
  int x, state;                                           // of each head
  int folded, inverse, warp_max;                          // of CTAs that fold: [P][N], [N], [kWarps]
  int state_bytes, bytes;

  __host__ __device__ ReadShared(int P, int window, int tokens, int heads, int chunk_bytes, bool folds)
      : g_stride(round_up(tokens, kTile)),
        v_stride(round_up(window, 32)),
        u_stride(tokens * g_stride),
        x_stride(P / kSliceWidth % 2 == 0 ? P + 16 : P),  // so that records of four lanes lie in different banks
        x_rows(round_up(window, 8) + tokens),
        new_x_row(round_up(window, 8)),
        b_new(round_up(window, 8) * kStride * 2),
        c(b_new + tokens * kStride * 2),
        query(c + tokens * kStride * 2),
        query_scale(query + tokens * kQueryStride * 4),
        g(round_up(query_scale + tokens * 4, 8)),
        g_new(g + round_up(window, 16) * g_stride * 4),
        delta(g_new + u_stride * 4),
        step(delta + heads * window * 4),
        rate(step + heads * tokens * 4),
        skip(rate + heads * 4),
        v(skip + heads * 4),
        u(round_up(v + heads * v_stride * 4, 8)),
        decay(u + heads * u_stride * 4),
        token_decay(round_up(decay + heads * 4, 8)),
        x(round_up(token_decay + heads * g_stride * 4, 16)),
        state(round_up(x + heads * x_rows * x_stride * 2, 128)),
        folded(state + heads * round_up(chunk_bytes, 128)),
        inverse(folded + (folds ? P * kMaxStateDim * 4 : 0)),
        warp_max(inverse + (folds ? kMaxStateDim * 4 : 0)),
        state_bytes(round_up(chunk_bytes, 128)),
        bytes(warp_max + (folds ? kWarps * 4 : 0)) {}
};

// ---- instructions --------------------------------------------------------------------------------------------------

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

// ---- flush ---------------------------------------------------------------------------------------------------------

// The head that a CTA folds, in float32 in shared memory, in pieces of 4 columns. They are permuted among the 8 of a
// 128-byte run, so that neither the lanes of a product nor those that have a block of 16 columns each meet a bank
// twice.
__device__ inline int folded_piece(int row, int piece) {
  return row * (kMaxStateDim / 4) + (piece ^ (piece >> 3 & 3) ^ (row >> 1 & 1));
}

// Where a piece of 16 bytes of a 16-bit checkpoint lies while it waits to be folded: behind all that is folded by then.
__device__ inline int waiting_piece(int P, int row, int piece) {
  return P * (kMaxStateDim / 8) + row * (kMaxStateDim / 8) + (piece ^ (row >> 1 & 1) * 4);
}

template <typename Stored>
__device__ inline void request_checkpoint(const Stored* source, int P, uint4* folded) {
  constexpr int kRowPieces = kMaxStateDim * sizeof(Stored) / 16;
#pragma unroll 4
  for (int i = threadIdx.x; i < P * kRowPieces; i += kThreads) {
    const int row = i / kRowPieces, piece = i % kRowPieces;
    request_16_bytes(folded + (sizeof(Stored) == 4 ? folded_piece(row, piece) : waiting_piece(P, row, piece)),
                     source + i * (16 / sizeof(Stored)));
  }
}

// Folds h records into the head at `folded`, which holds what request_checkpoint brought, and stores the checkpoint. x:
// record 0 of the head. As Slice::fold of step_mma.cu has it: the same records give the same bits.
template <typename Stored, typename Staged>
__device__ inline void fold_head(const StateOwner& owner, bool has_state, Stored* checkpoint, uint4* folded,
                                 const Staged* x, int x_stride, const Staged* B, const float* weight, float decay,
                                 int h, uint32_t mask) {
  constexpr int kVec = Packed<Stored>::kVec, kBlocks = kMaxStateDim / (4 * kVec);
  constexpr bool kWide = sizeof(Stored) == 4;
  const int P = owner.problem.geometry.head_dim, slices = P / kSliceWidth;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const RoundingKey key = owner.key();
  bool finite = true;
#pragma unroll 1
  for (int first = 0; first < slices; first += kWarps) {
    const int slice = first + warp, row = slice * kSliceWidth + 2 * g;
    uint4 packed[2][kWide ? 1 : kBlocks] = {};
    if (!kWide) {  // what is folded takes the place of what waited
      if (has_state && slice < slices) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int b = 0; b < (kWide ? 1 : kBlocks); ++b) {
            packed[i][b] = folded[waiting_piece(P, row + i, b * 4 + t)];
          }
      }
      __syncthreads();
    }
    if (slice >= slices) continue;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float state[2][1][kVec];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint4 raw = packed[i][kWide ? 0 : b];
        if (kWide && has_state) raw = folded[folded_piece(row + i, b * 4 + t)];
        Packed<Stored>::unpack(raw, state[i][0]);
      }
      add_records(state, x + slice * kSliceWidth + 2 * g, B + b * 4 * kVec, weight, decay, h, lane, mask, x_stride);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = (b * 4 + t) * kVec;
        const float (&value)[kVec] = state[i][0];
        const uint4 stored = pack_plain<Stored>(owner, key, row + i, column, value);
        finite = finite && is_finite<Stored>(stored);
        *reinterpret_cast<uint4*>(checkpoint + (row + i) * kMaxStateDim + column) = stored;
#pragma unroll
        for (int j = 0; j < kVec / 4; ++j) {
          folded[folded_piece(row + i, column / 4 + j)] =
              make_uint4(float_bits(value[4 * j]), float_bits(value[4 * j + 1]), float_bits(value[4 * j + 2]),
                         float_bits(value[4 * j + 3]));
        }
      }
    }
  }
  if (!finite) owner.report_not_finite();
}

// Division of many values by one that is not negative, with the results of scaled_down.
class Divisor {
 public:
  __device__ explicit Divisor(float divisor) : divisor_(divisor), inverse_(inverse_of(divisor)) {}

  __device__ void operator()(float (&value)[kBlock]) const {
    uint32_t least = ~0u;  // of the magnitudes above 0, minus 1
#pragma unroll
    for (int i = 0; i < kBlock; ++i) least = min(least, magnitude_bits(value[i]) - 1u);
    // Where the remainders below are exact, the last step rounds as division does. (A zero may change its sign.)
    const bool exact = divisor_ > 0x1p-40f && divisor_ < 0x1p40f && least >= float_bits(0x1p-80f);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      if (exact) {
        float quotient = mul_rn(value[i], inverse_);
        quotient = fmaf(fmaf(-divisor_, quotient, value[i]), inverse_, quotient);
        value[i] = fmaf(fmaf(-divisor_, quotient, value[i]), inverse_, quotient);
      } else {
        value[i] = scaled_down(value[i], divisor_);
      }
    }
  }

 private:
  float divisor_, inverse_;
};

__device__ inline void load_block(const uint4* folded, int row, int block, float (&value)[kBlock]) {
#pragma unroll
  for (int j = 0; j < kBlock / 4; ++j) {
    const uint4 v = folded[folded_piece(row, block * 4 + j)];
    value[4 * j] = bits_float(v.x), value[4 * j + 1] = bits_float(v.y);
    value[4 * j + 2] = bits_float(v.z), value[4 * j + 3] = bits_float(v.w);
  }
}

__device__ inline uint32_t amax_of_block(const float (&value)[kBlock]) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) amax = max(amax, magnitude_bits(value[i]));
  return amax;
}

template <typename Format>
__device__ inline uint8_t best_block_scale(const float (&u)[kBlock], float head_scale, int candidates) {
  const uint32_t amax = amax_of_block(u);
  uint8_t best = 0;
  float least = 0.0f;
#pragma unroll
  for (int candidate = 0; candidate < kCandidates; ++candidate) {
    if (candidate >= candidates) break;
    const uint8_t code = searched_scale<Format>(amax, head_scale, candidate);
    const float scale = e4m3_to_float(code), inverse = inverse_of(scale);
    float sum[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float quad[4] = {u[4 * j], u[4 * j + 1], u[4 * j + 2], u[4 * j + 3]};
      sum[j] = squared_distance<Format>(quad, inverse);
    }
    const float error = mul_rn(mul_rn(add_rn(add_rn(sum[0], sum[1]), add_rn(sum[2], sum[3])), scale), scale);
    if (candidate == 0 || error < least) best = code, least = error;
  }
  return best;
}

// Where a CTA that casts keeps what its threads share.
struct CastScratch {
  float* inverse;      // [N], of column scales
  uint32_t* warp_max;  // [kWarps]
};

// Casts the head at `folded` to a chunk of a read copy, in memory and as StateOperand reads it in shared memory. A
// thread has a block of 16 columns of every 16th row.
template <typename Format>
__device__ inline void cast_head(const uint4* folded, int P, char* chunk, char* staged, const CastScratch& scratch) {
  constexpr int N = kMaxStateDim;
  const BlockChunk<Format> layout{P, N};
  const int tid = threadIdx.x, block = tid % (N / kBlock);
  uint32_t amax = 0;  // of a column, or of the thread's blocks
  if constexpr (Format::kColumnScales) {
    const float* const values = reinterpret_cast<const float*>(folded);
#pragma unroll 8
    for (int row = 0; row < P; ++row) {
      amax = max(amax, magnitude_bits(values[folded_piece(row, tid / 4) * 4 + tid % 4]));
    }
  } else {
#pragma unroll 1
    for (int row = tid / (N / kBlock); row < P; row += kThreads / (N / kBlock)) {
      float value[kBlock];
      load_block(folded, row, block, value);
      amax = max(amax, amax_of_block(value));
    }
  }
  const uint32_t of_warp = __reduce_max_sync(~0u, amax);
  if (tid % 32 == 0) scratch.warp_max[tid / 32] = of_warp;
  __syncthreads();
  uint32_t head_amax = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) head_amax = max(head_amax, scratch.warp_max[warp]);
  const float head_scale = Format::head_scale(head_amax);
  if (tid == 0) {  // and the zeros behind it
    const uint4 last = make_uint4(float_bits(head_scale), 0, 0, 0);
    *reinterpret_cast<uint4*>(chunk + layout.head_scale()) = last;
    *reinterpret_cast<uint4*>(staged + layout.head_scale()) = last;
  }
  if constexpr (Format::kColumnScales) {
    static_assert(N == kThreads);
    const uint8_t scale = column_scale(amax, head_amax, head_scale);
    chunk[layout.column_scales() + tid] = staged[layout.column_scales() + tid] = static_cast<char>(scale);
    scratch.inverse[tid] = inverse_of(e4m3_to_float(scale));
    __syncthreads();
  }

  const Divisor by_head(head_scale);
#pragma unroll 1
  for (int row = tid / (N / kBlock); row < P; row += kThreads / (N / kBlock)) {
    float value[kBlock];
    load_block(folded, row, block, value);
    uint8_t block_scale;
    if constexpr (std::is_same_v<Format, Nvfp4Amax>) {
      block_scale = Format::block_scale(amax_of_block(value), head_scale);
      Divisor(block_step(block_scale, head_scale))(value);
    } else {
      by_head(value);
      if constexpr (Format::kColumnScales) {
#pragma unroll
        for (int j = 0; j < kBlock; j += 4) {
          float inverse[4];
          load_shared<4>(scratch.inverse + block * kBlock + j, inverse);
#pragma unroll
          for (int i = 0; i < 4; ++i) value[j + i] = mul_rn(value[j + i], inverse[i]);
        }
      }
      block_scale = best_block_scale<Format>(value, head_scale, candidates_of(head_amax));
      const float inverse = inverse_of(e4m3_to_float(block_scale));
#pragma unroll
      for (int i = 0; i < kBlock; ++i) value[i] = mul_rn(value[i], inverse);
    }
    uint32_t codes[4], low = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float quad[4] = {value[4 * j], value[4 * j + 1], value[4 * j + 2], value[4 * j + 3]};
      codes[j] = Format::kLowBits ? pack_e2m2(quad) : pack_e2m1(quad);
      low |= codes[j] >> 16 << 4 * j;
    }
    const uint2 words = make_uint2(__byte_perm(codes[0], codes[1], 0x5410), __byte_perm(codes[2], codes[3], 0x5410));
    const int index = row * (N / kBlock) + block;
    *reinterpret_cast<uint2*>(chunk + index * 8) = words;
    *reinterpret_cast<uint2*>(staged + (index ^ (row >> 1 & 1) * (N / kBlock)) * 8) = words;
    chunk[layout.block_scales() + index] = staged[layout.block_scales() + index] = static_cast<char>(block_scale);
    if constexpr (Format::kLowBits) {
      *reinterpret_cast<uint16_t*>(chunk + layout.low_bits() + 2 * index) = static_cast<uint16_t>(low);
      *reinterpret_cast<uint16_t*>(staged + layout.low_bits() + 2 * index) = static_cast<uint16_t>(low);
    }
  }
}

template <>
__device__ inline void cast_head<Fp8>(const uint4* folded, int P, char* chunk, char* staged, const CastScratch&) {
  constexpr int N = kMaxStateDim;
  const Fp8Chunk layout{P, N};
  const int tid = threadIdx.x, block = tid % (N / kBlock);
#pragma unroll 1
  for (int row = tid / (N / kBlock); row < P; row += kThreads / (N / kBlock)) {
    float value[kBlock];
    load_block(folded, row, block, value);
    uint32_t amax = amax_of_block(value);
#pragma unroll
    for (int distance = 1; distance < N / kBlock; distance *= 2) amax = larger_of_both(amax, distance);
    const float scale = fp8_row_scale(amax);
    if (block == 0) {
      reinterpret_cast<float*>(chunk + layout.row_scales())[row] = scale;
      reinterpret_cast<float*>(staged + layout.row_scales())[row] = scale;
    }
    Divisor{scale}(value);
    uint32_t codes[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float quad[4] = {value[4 * j], value[4 * j + 1], value[4 * j + 2], value[4 * j + 3]};
      codes[j] = pack_e4m3(quad);
    }
    const uint4 words = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    const int index = row * (N / kBlock) + block;
    reinterpret_cast<uint4*>(chunk)[index] = words;
    reinterpret_cast<uint4*>(staged)[index ^ (row >> 1 & 1) * 4] = words;
  }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

template <typename Format, typename Staged>
__global__ __launch_bounds__(kThreads, 4) void step_read_kernel(const __grid_constant__ ReadParams params) {
  using State = StateOperand<Format>;
  const Problem& problem = params.scan.problem;
  const replayssm_scan_args& args = params.scan.args;
  constexpr int N = kMaxStateDim;
  const int P = problem.geometry.head_dim, R = problem.ring_rows, window = problem.config.window;
  // The shuffle tells the compiler that a warp has one index, so that it sees no divergence in the loop over its items.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int tid = threadIdx.x, lane = tid % 32, g = lane / 4, t = lane % 4;
  extern __shared__ __align__(128) char shared[];

  const bool folds = blockIdx.x < params.flush_ctas;
  int64_t task = folds ? blockIdx.x : blockIdx.x - params.flush_ctas, end = task + 1;
  if (folds) {
    const auto* header = reinterpret_cast<const replayssm_plan_header*>(params.scan.planned) - 1;
    end = static_cast<int64_t>(header->num_flush) * problem.geometry.num_heads;
  }
#pragma unroll 1
  for (; task < end; task += params.flush_ctas) {
    int chunk = 0, heads = 1, row_index, first_head;
    if (folds) {
      const int H = problem.geometry.num_heads;
      row_index = reinterpret_cast<const int32_t*>(params.scan.planned + params.rows)[task / H];
      first_head = static_cast<int>(task % H);
      chunk = first_head % params.heads_per_group;
    } else {
      chunk = static_cast<int>(task % params.chunks);
      const int group = static_cast<int>(task / params.chunks);
      row_index = group / problem.geometry.num_groups;
      first_head = group % problem.geometry.num_groups * params.heads_per_group + chunk * params.heads;
      heads = min(params.heads, params.heads_per_group - chunk * params.heads);
    }
    const int state_group = first_head / params.heads_per_group;

    const replayssm_plan_row row = params.scan.planned[row_index];
    if (!admit(row, row_index, args.num_tokens, args.max_count, window, false, params.scan.error,
               !folds && first_head == 0 && tid == 0) ||
        row.count == 0) {
      continue;
    }
    const bool flagged = row.flags & REPLAYSSM_ROW_FLUSH;
    if (flagged && !params.scan.flushed && !folds) continue;  // a CTA that folds has it
    const int T = row.count, max_tokens = args.max_count;
    const int h = flagged && params.scan.flushed ? 0 : row.history;  // records of history to stage
    const int history = folds ? 0 : h;                               // that outputs see
    const bool stored_before = !(row.flags & REPLAYSSM_ROW_EMPTY) || (flagged && params.scan.flushed);

    const ReadShared layout(P, window, max_tokens, folds ? 1 : params.heads, State::bytes(P), folds);
    auto floats_at = [&](int offset) { return reinterpret_cast<float*>(shared + offset); };
    Staged* const B = reinterpret_cast<Staged*>(shared);
    Staged* const new_B = reinterpret_cast<Staged*>(shared + layout.b_new);
    Staged* const C = reinterpret_cast<Staged*>(shared + layout.c);
    uint32_t* const query = reinterpret_cast<uint32_t*>(shared + layout.query);  // C in FP16, a lane's pairs together
    float* const query_scale = floats_at(layout.query_scale);                    // [tokens]
    float* const products = floats_at(layout.g);                                 // B^T C of the history, [h][g_stride]
    float* const new_products = floats_at(layout.g_new);                         // of the new tokens
    float* const delta = floats_at(layout.delta);                                // [heads][window]
    float* const steps = floats_at(layout.step);                                 // [heads][tokens]
    float* const rates = floats_at(layout.rate);                                 // [heads]
    float* const skips = floats_at(layout.skip);                                 // [heads]
    float* const v = floats_at(layout.v);                                        // [heads][v_stride]
    float* const u = floats_at(layout.u);                                        // [heads][tokens][g_stride]
    float* const decays = floats_at(layout.decay);                               // [heads]
    float* const token_decays = floats_at(layout.token_decay);                   // [heads][g_stride]
    Staged* const x = reinterpret_cast<Staged*>(shared + layout.x);              // [heads][x_rows][x_stride]
    char* const states = shared + layout.state;                                  // [heads]

    // 1. All that the CTA reads: first what weights and products take, then x and the state.
    const int64_t first_token = row.first_token;
    Staged* const b_ring =
        reinterpret_cast<Staged*>(section_of(params.scan.layer.b_ring, row.slot)) + state_group * R * N;
    constexpr int kParts = N / 8, kRowsAtOnce = kThreads / kParts;
    const int part_row = tid / kParts, part_column = tid % kParts * 8;
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
    char* const checkpoint =
        section_of(params.scan.layer.checkpoint, row.slot) + first_head * problem.checkpoint_head_bytes;
    char* const copy = section_of(params.scan.layer.read_copy, row.slot) + first_head * problem.read_copy_head_bytes;
    uint4* const folded = reinterpret_cast<uint4*>(shared + layout.folded);
    if (folds && stored_before) {
      if (problem.config.checkpoint == REPLAYSSM_CHECKPOINT_FP32) {
        request_checkpoint(reinterpret_cast<const float*>(checkpoint), P, folded);
      } else {
        request_checkpoint(reinterpret_cast<const __half*>(checkpoint), P, folded);
      }
    } else if (stored_before) {
      const char* const source = problem.read_copy_head_bytes > 0 ? copy : checkpoint;
      const int pieces = State::bytes(P) / 16, code_pieces = P * State::kRowBytes / 16;
#pragma unroll 1
      for (int k = 0; k < heads; ++k) {
#pragma unroll 4
        for (int i = tid; i < pieces; i += kThreads) {
          const int swap = i < code_pieces ? i / (2 * State::kRowBytes / 16) % 2 * 4 : 0;
          request_16_bytes(states + k * layout.state_bytes + (i ^ swap) * 16, source + k * State::bytes(P) + i * 16);
        }
      }
    }
    const int x_parts = P / 8, x_rows_at_once = kThreads / x_parts;
    const int x_row = tid / x_parts, x_column = tid % x_parts * 8;
    Staged* const x_ring =
        reinterpret_cast<Staged*>(section_of(params.scan.layer.x_ring, row.slot)) + first_head * R * P + x_column;
    const Staged* const x_in = static_cast<const Staged*>(args.x.data) + first_head * args.x.stride[1] + x_column;
    const int padding = round_up(h, 8) - h;
    if (x_row < x_rows_at_once) {
#pragma unroll 1
      for (int k = 0; k < heads; ++k) {
        Staged* const target = x + k * layout.x_rows * layout.x_stride + x_column;
#pragma unroll 1
        for (int i = x_row; i < h; i += x_rows_at_once) {
          int position = row.ring_row - 1 - i;
          if (position < 0) position += R;
          request_16_bytes(target + i * layout.x_stride, x_ring + (k * R + position) * P);
        }
#pragma unroll 1
        for (int s = x_row; s < T; s += x_rows_at_once) {
          request_input(target + (layout.new_x_row + s) * layout.x_stride,
                        x_in + (first_token + s) * args.x.stride[0] + k * args.x.stride[1], params.scan.x_aligned);
        }
#pragma unroll 1
        for (int i = x_row; i < padding; i += x_rows_at_once) {
          *reinterpret_cast<uint4*>(target + (h + i) * layout.x_stride) = make_uint4(0, 0, 0, 0);
        }
      }
    }
    close_group();

    if (part_row < padding) {
      *reinterpret_cast<uint4*>(B + (h + part_row) * kStride + part_column) = make_uint4(0, 0, 0, 0);
    }
    if (tid < heads) {
      rates[tid] = -expf(load_scalar(args.A_log.data, args.A_log.dtype, first_head + tid));
      skips[tid] = args.D.data ? load_scalar(args.D.data, args.D.dtype, first_head + tid) : 0.0f;
    }
    const int token_bits = T > 1 ? 32 - __clz(T - 1) : 0;
#pragma unroll 1
    for (int i = tid; i < heads << token_bits; i += kThreads) {
      const int k = i >> token_bits, s = i & ((1 << token_bits) - 1), head = first_head + k;
      if (s >= T) continue;
      const float dt =
          load_scalar(args.dt.data, args.dt.dtype, (first_token + s) * args.dt.stride[0] + head * args.dt.stride[1]);
      const float bias = args.dt_bias.data ? load_scalar(args.dt_bias.data, args.dt_bias.dtype, head) : 0.0f;
      const float step = discretised_step(dt, bias, args.dt_min, args.dt_max);
      steps[k * max_tokens + s] = step;
      delta_ring[k * R + ring_position(row.ring_row, s, R)] = step;
    }
    await_groups<1>();
    __syncthreads();

    // 2. The CTA of the group's first heads appends B to the ring. C in FP16. B^T C, 16 records by 8 tokens at a time;
    // rows and columns beyond the last repeat it. The weights of a head, but for the products in u.
    if (chunk == 0) {
#pragma unroll 1
      for (int s = part_row; s < T; s += kRowsAtOnce) {
        *reinterpret_cast<uint4*>(b_ring + ring_position(row.ring_row, s, R) * N + part_column) =
            *reinterpret_cast<const uint4*>(new_B + s * kStride + part_column);
      }
    }
#pragma unroll 1
    for (int s = kWarps - 1 - warp; s < T; s += kWarps) {
      const Staged* const token = C + s * kStride;
      float value[4];
      load_shared<4>(token + lane * 4, value);
      uint32_t amax = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) amax = max(amax, magnitude_bits(value[i]));
      // 2^14 for the largest value; below 2^-100 the scale stays.
      const uint32_t exponent = max(__reduce_max_sync(~0u, amax) >> 23, 27u);
      const float scale = __uint_as_float((268 - exponent) << 23);
      if (lane == 0) query_scale[s] = __uint_as_float((exponent - 14) << 23) * State::kUnit;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int owner = lane / 8, index = lane % 8 * 2 + i, column = State::query_column(owner, index);
        query[s * kQueryStride + index / 4 * 16 + owner * 4 + index % 4] = pack_pair<__half>(
            static_cast<float>(token[column]) * scale, static_cast<float>(token[column + State::kColumnStep]) * scale);
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
        const uint4* const lower =
            reinterpret_cast<const uint4*>(records + min(first + g + 8, count - 1) * kStride) + t;
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
    await_groups<0>();
    __syncthreads();
    if (folds) {
      const StateOwner owner{problem,   params.scan.layer, params.scan.error, first_head,
                             row_index, row.stream,        row.writes};
      auto fold_as = [&](auto stored) {
        fold_head(owner, stored_before, reinterpret_cast<decltype(stored)*>(checkpoint), folded, x, layout.x_stride, B,
                  v, decays[0], h, params.tf32_mask);
      };
      if (problem.config.checkpoint == REPLAYSSM_CHECKPOINT_FP32) {
        fold_as(float());
      } else if (problem.config.checkpoint == REPLAYSSM_CHECKPOINT_BF16) {
        fold_as(__nv_bfloat16());
      } else {
        fold_as(__half());
      }
      __syncthreads();
      const CastScratch scratch{floats_at(layout.inverse), reinterpret_cast<uint32_t*>(shared + layout.warp_max)};
      cast_head<Format>(folded, P, copy, states, scratch);
    }
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
    if (x_row < x_rows_at_once) {
#pragma unroll 1
      for (int k = 0; k < heads; ++k) {
#pragma unroll 1
        for (int s = x_row; s < T; s += x_rows_at_once) {
          *reinterpret_cast<uint4*>(x_ring + (k * R + ring_position(row.ring_row, s, R)) * P) =
              *reinterpret_cast<const uint4*>(x + (k * layout.x_rows + layout.new_x_row + s) * layout.x_stride +
                                              x_column);
        }
      }
    }
    __syncthreads();

    // 3. Slice after slice.
    const int items = heads * params.slices, share = (items + kWarps - 1) / kWarps;
    int k = warp * share / params.slices, slice = warp * share % params.slices;
    QueryOperand<Format> operand;
#pragma unroll 1
    for (int item = warp * share; item < min(items, (warp + 1) * share); ++item) {
      const int head = first_head + k;
      const char* const state = states + k * layout.state_bytes;
      const char* const columns = state + State::bytes(P) - 16 - N;  // before the head's scale
      const Staged* const old_x = x + k * layout.x_rows * layout.x_stride + slice * kSliceWidth + 2 * g;
      const Staged* const new_x = old_x + layout.new_x_row * layout.x_stride;
      const float* const weights = v + k * layout.v_stride + t;
#pragma unroll 1
      for (int first = 0; first < T; first += kTile) {
        const int s = first + 2 * t;
        float y[4] = {};
        if (stored_before || folds) {
          if (T > kTile || slice == 0 || item == warp * share) {
            operand.load(query + min(first + g, T - 1) * kQueryStride, columns, t);
          }
          float other[4] = {};
          multiply_from<0>(State(state, P, slice, g, t), operand, y, other);
#pragma unroll
          for (int i = 0; i < 4; ++i) y[i] = __fadd_rn(y[i], other[i]);
          State::scale_sums(state, P, slice, g, y);
          const float decay = folds ? 1.0f : decays[k], scale0 = query_scale[min(s, T - 1)],
                      scale1 = query_scale[min(s + 1, T - 1)];
          y[0] = y[0] * scale0 * decay, y[1] = y[1] * scale1 * decay;
          y[2] = y[2] * scale0 * decay, y[3] = y[3] * scale1 * decay;
        }
        const float* const product = products + t * layout.g_stride + first + g;
#pragma unroll 1
        for (int i = 0; i < history; i += 8) {
          const float2 x0 = unpack_pair<Staged>(*reinterpret_cast<const uint32_t*>(old_x + (i + t) * layout.x_stride));
          const float2 x1 =
              unpack_pair<Staged>(*reinterpret_cast<const uint32_t*>(old_x + (i + 4 + t) * layout.x_stride));
          const float values[4] = {x0.x, x0.y, x1.x, x1.y};
          const float weight[2] = {weights[i] * product[i * layout.g_stride],
                                   weights[i + 4] * product[(i + 4) * layout.g_stride]};
          float high[2], low[2];
          split(weight, params.tf32_mask, high, low);
          multiply_tf32(y, values, low);
          multiply_tf32(y, values, high);
        }

        const float2 since = *reinterpret_cast<const float2*>(token_decays + k * layout.g_stride + s);
        y[0] *= since.x, y[1] *= since.y, y[2] *= since.x, y[3] *= since.y;
        const float* const new_weights = u + k * layout.u_stride + s;
#pragma unroll 2
        for (int r = 0; r < min(first + kTile, T); ++r) {
          const float2 pair = unpack_pair<Staged>(*reinterpret_cast<const uint32_t*>(new_x + r * layout.x_stride));
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
      if (++slice == params.slices) slice = 0, ++k;
    }
    if (folds) __syncthreads();  // before the next head is staged
  }
}

// ---- launch --------------------------------------------------------------------------------------------------------

using ReadKernel = void(ReadParams);

template <typename Format>
ReadKernel* choose_read(int activation) {
  return activation == REPLAYSSM_BF16 ? step_read_kernel<Format, __nv_bfloat16> : step_read_kernel<Format, __half>;
}

// Calls f with a value of the format that steps read: of the read copy, if there is one.
template <typename F>
auto with_quantised(const replayssm_config& config, F&& f) {
  if (config.read_copy == REPLAYSSM_READ_COPY_NVFP4) return f(Nvfp4());
  if (config.read_copy == REPLAYSSM_READ_COPY_E2M2) return f(E2m2());
  if (config.read_copy == REPLAYSSM_READ_COPY_NVFP4_AMAX) return f(Nvfp4Amax());
  if (config.read_copy == REPLAYSSM_READ_COPY_NONE && config.checkpoint == REPLAYSSM_CHECKPOINT_NVFP4) {
    return f(Nvfp4Amax());
  }
  return f(Fp8());
}

// A CTA takes more heads only as long as that leaves kEnoughCtas.
constexpr int kMaxHeads = 4;
constexpr int64_t kEnoughCtas = 512;

// CTAs that fold, of a grid that has more than those.
constexpr int kFlushCtas = 264;

int shared_bytes(const Problem& problem, int tokens, int heads, bool folds) {
  const int P = problem.geometry.head_dim;
  const int chunk =
      with_quantised(problem.config, [P](auto format) { return StateOperand<decltype(format)>::bytes(P); });
  return ReadShared(P, problem.config.window, tokens, heads, chunk, folds).bytes;
}

}  // namespace

bool has_step_read(const Problem& problem) {
  const bool plain = problem.config.checkpoint <= REPLAYSSM_CHECKPOINT_FP16_SR;
  return has_mma_fold(problem) && (problem.read_copy_head_bytes > 0 || !plain) &&
         shared_bytes(problem, problem.config.max_step_tokens, 1, plain) <= kSharedLimit;
}

replayssm_status step_read(const replayssm_exec& exec, const ScanParams& scan, int32_t rows) {
  const Problem& problem = scan.problem;
  const replayssm_tensor& out = scan.args.out;
  const bool folds = has_fused_step_read(problem) && !scan.flushed;
  ReadParams params{};
  params.scan = scan;
  params.rows = rows;
  params.flush_ctas =
      folds ? static_cast<int>(std::min<int64_t>(kFlushCtas, static_cast<int64_t>(rows) * problem.geometry.num_heads))
            : 0;
  params.heads_per_group = problem.geometry.num_heads / problem.geometry.num_groups;
  params.slices = problem.geometry.head_dim / kSliceWidth;
  params.paired = reinterpret_cast<uintptr_t>(out.data) % 4 == 0 && out.stride[0] % 2 == 0 && out.stride[1] % 2 == 0;
  params.tf32_mask = kTf32Mask;
  const int64_t groups = static_cast<int64_t>(rows) * problem.geometry.num_groups;
  int shared = 0;
  for (int heads = std::min(params.heads_per_group, kMaxHeads);; heads = (heads + 1) / 2) {
    params.heads = heads;
    params.chunks = (params.heads_per_group + heads - 1) / heads;
    shared = shared_bytes(problem, scan.args.max_count, heads, false);
    if (heads == 1 || (shared <= kSharedLimit && groups * params.chunks >= kEnoughCtas)) break;
  }
  if (folds) shared = std::max(shared, shared_bytes(problem, scan.args.max_count, 1, true));
  return with_quantised(problem.config, [&](auto format) {
    return launch("step", choose_read<decltype(format)>(problem.config.activation),
                  params.flush_ctas + groups * params.chunks, kThreads, shared, exec, params);
  });
}

cudaError_t load_step_read_kernels() {
  replayssm_config config{};
  for (int read_copy :
       {REPLAYSSM_READ_COPY_FP8, REPLAYSSM_READ_COPY_NVFP4, REPLAYSSM_READ_COPY_NVFP4_AMAX, REPLAYSSM_READ_COPY_E2M2}) {
    for (int activation : {REPLAYSSM_BF16, REPLAYSSM_FP16}) {
      config.read_copy = read_copy;
      ReadKernel* const kernel =
          with_quantised(config, [&](auto format) { return choose_read<decltype(format)>(activation); });
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
