// SPDX-License-Identifier: Apache-2.0
//
// step of float32 checkpoints in small batches: what step_mma.cu computes, every sum in the same order and hence with
// the same bits, by code that is run through once. A CTA has one head of one row: a warp for each slice, 16 rows of the
// state, one for the products B^T C and one for the weights.
//
// Latency is what such a launch takes, and instructions that run once are a good part of it. So whatever can be is done
// before the kernel before has ended, by the rules of common.cuh: what steps before have left is loaded (state, records
// of x and B, and deltas), the history is weighed, and a row that flushes folded, if only in shared memory; the new
// tokens' addresses are at hand. All that goes by the plan's row as it reads then. The row is read again together with
// the new tokens, and A_log with it, which the weights are made of. Should either differ, all is done anew. CTAs that
// begin when others have ended wait first and request everything at once, in the order in which it is needed: the
// state, C and, while the product of both is formed, if there is one token and nothing to fold, the records of x.
#include <algorithm>

#include "slice.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kMaxSlices = kMaxHeadDim / kSliceWidth;
constexpr int kMaxHistory = 32;  // records of a row
constexpr int kRowWords = sizeof(replayssm_plan_row) / 4;
// CTAs an SM that begin before the kernel before has ended.
constexpr int kEarlyPerSm = 3;
// A batch is small if all heads find room at once or, where an SM has room for kEnoughPerSm of them, up to so many
// slices an SM, of several tokens fewer; of smaller heads than were measured no more heads than of those, which have
// four slices.
constexpr int kEnoughPerSm = 3, kMostSlicesPerSm = 252, kMostSlicesOfSeveral = 188;

// The shared memory of a CTA, behind the barriers of the slices; offsets in bytes. Records of B and x are the new
// tokens, then the history, newest first.
struct HeadLayout {
  int g_stride;         // of a record of B^T C and of u
  int row;              // SharedRow
  int weight, product;  // of the history: as in a flush, and B^T C; of several tokens this of all records
  int u, token_decay, delta;
  int token;    // rows of C: of one token a copy a warp, else kStride apart
  int b;        // records kStride apart
  int slices;   // of each the state, then x [tokens + window][16]
  int x, step;  // in a slice; from slice to slice
  int bytes;

  HeadLayout() = default;
  __host__ __device__ constexpr HeadLayout(int window, int tokens, int num_slices)
      : g_stride(round_up(tokens, kTile)),
        row(kMaxSlices * 8),
        weight(row + 128),
        product(weight + round_up(window, 32) * 4),
        u(product + (tokens == 1 ? round_up(window, 32) : round_up(tokens + round_up(window, 8), 16) * g_stride) * 4),
        token_decay(u + (tokens == 1 ? 0 : g_stride * g_stride) * 4),
        delta(token_decay + (tokens == 1 ? 0 : g_stride) * 4),
        token(round_up(delta + window * 4, 16)),
        b(token + (tokens == 1 ? (num_slices + 1) * kMaxStateDim : tokens * kStride) * 2),
        slices(round_up(b + (tokens + round_up(window, 8)) * kStride * 2, 128)),
        x(Slice<float>::kBytes),
        step(round_up(x + (tokens + round_up(window, 8)) * kSliceWidth * 2, 128)),
        bytes(slices + num_slices * step) {}
};

// Where something of the new tokens lies, by what a plan's row says. Strides in bytes.
struct Place {
  const char* base;
  int64_t of_slot, of_ring_row, of_token, of_head, of_group;

  __device__ const char* find(int slot, int ring_row, int token, int head, int group) const {
    return base + slot * of_slot + ring_row * of_ring_row + token * of_token + head * of_head + group * of_group;
  }
};
// An element of a vector or of dt.
struct Word {
  const char* base;  // NULL: none, which counts as zero
  int64_t of_token, of_head;
  bool is_half;
};

struct HeadParams {
  ScanParams scan;
  int heads_per_group;
  uint32_t inverse_heads;  // 2^32 divided by the heads of a row, rounded up
  int inverse_per_group;   // 2^20 divided by those of a group
  HeadLayout layout;
  Place places[3];     // of C, B and x
  Word words[4];       // A_log, dt, dt_bias, D
  int early;           // CTAs that don't wait first
  bool paired;         // outputs can be stored two at a time
  uint32_t tf32_mask;  // kTf32Mask, hidden from the compiler: see split()
};

// What the warps share of their row.
struct SharedRow {
  uint32_t word[kRowWords + 1];   // a replayssm_plan_row, then A_log as it lies in memory
  float decay;                    // of the history
  float own;                      // B^T C of the new token
  float step, skip, token_decay;  // of the new token: delta, D, decay
};

// Computed here, not where it is needed.
template <typename T>
__device__ inline void compute_now(T*& pointer) {
  asm volatile("" : "+l"(pointer)::"memory");
}

// 2 or 4 bytes, past the L1; 0 of no place. Into a register each: else the second load would wait for the first.
__device__ inline uint32_t peek_bits(const char* place, bool is_half) {
  uint32_t word = 0, half = 0;
  if (place && !is_half) word = peek(*reinterpret_cast<const int32_t*>(place));
  if (place && is_half) {
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=r"(half) : "l"(place) : "memory");
  }
  return word | half;
}

template <typename Staged, bool kOneToken>
class HeadStep {
 public:
  __device__ HeadStep(const HeadParams& params, char* shared)
      : params_(params),
        layout_(params.layout),
        shared_(shared),
        row_(*reinterpret_cast<SharedRow*>(shared + params.layout.row)),
        plan_(reinterpret_cast<const replayssm_plan_row&>(row_)),
        warp_(__shfl_sync(~0u, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32),
        slices_(params.scan.problem.geometry.head_dim / kSliceWidth),
        row_index_(static_cast<int>(uint64_t{blockIdx.x} * params.inverse_heads >> 32)),
        head_(blockIdx.x - row_index_ * params.scan.problem.geometry.num_heads),
        group_(head_ * params.inverse_per_group >> 20) {}

  __device__ void run() {
    if (warp_ < slices_ && lane_ == 0) init_barrier(full(), 1);
    bool early = static_cast<int>(blockIdx.x) < params_.early;
    if (!early) await_previous();
    if (warp_ == 0 && lane_ <= kRowWords) row_.word[lane_] = load(find_word(false));
    __syncthreads();
    take_row();
    bool requests = may_load_early();
    if (!early && !requests) {
      if (!is_live()) return;
      requests = true;
    }
    Loaded loaded{};
    bool finite;  // what the lane has folded
#pragma unroll 1
    for (;;) {
      finite = true;
      if (requests) {
        const float delta = request_history();
        if (!early) loaded = request_tokens(find_token(), warp_ > slices_ ? find_word(true) : nullptr);
        request_old_x();
        if (warp_ > slices_) weigh(delta);
        if (folds()) {
          await_requests();
          __syncthreads();
          if (warp_ < slices_) finite = fold(), loaded = {};  // which the last warp needs: a register less in the fold
          if (std::is_same_v<Staged, __half>) take_row();     // so that the fold, which needs more, has these as well
        }
      }
      if (!early) break;
      const char *token = nullptr, *place = find_word(requests);
      if (kOneToken && requests) token = find_token();
      compute_now(token), compute_now(place);
      await_previous();
      if (requests) {
        loaded = request_tokens(token, place);
      } else {
        loaded.word = load(place);
      }
      const bool same = lane_ > kRowWords || loaded.word == row_.word[lane_];
      if (requests && __all_sync(~0u, same)) break;
      await_requests();
      if (requests && warp_ < slices_) {
        await(full(), 0);
        __syncwarp();
        if (lane_ == 0) end_barrier(full()), init_barrier(full(), 1);
        finish_stores_before_blocks();  // of a fold that was for nothing
      }
      __syncthreads();
      if (warp_ == 0 && lane_ <= kRowWords) row_.word[lane_] = loaded.word;
      __syncthreads();
      take_row();
      if (!is_live()) return;
      requests = true, early = false;
    }
    if constexpr (kOneToken) {
      if (warp_ < slices_) {
        compute(finite);
      } else if (warp_ == slices_) {
        multiply_records_by_token();
      } else {
        discretise(loaded.word);
      }
    } else {
      await_requests();
      __syncthreads();
      if (warp_ < slices_) {
        compute_tokens(finite);
      } else if (warp_ == slices_) {
        multiply_records_by_tokens();
      } else {
        discretise_tokens(loaded);
      }
    }
  }

 private:
  using State = Slice<float>;
  static constexpr int N = kMaxStateDim;

  const HeadParams& params_;
  const HeadLayout& layout_;
  char* const shared_;
  SharedRow& row_;
  const replayssm_plan_row& plan_;
  const int warp_, lane_, slices_, row_index_, head_, group_;
  int slot_ = 0, first_token_ = 0, count_ = 0, history_ = 0, flags_ = 0, ring_row_ = 0;  // of the row

  // What a lane loads: a word of the plan's row or another of load()'s; and of several tokens one's dt.
  struct Loaded {
    uint32_t word, dt;
  };

  __device__ Barrier* full() const { return reinterpret_cast<Barrier*>(shared_) + warp_; }
  __device__ float* floats(int offset) const { return reinterpret_cast<float*>(shared_ + offset); }
  __device__ Staged* staged(int offset) const { return reinterpret_cast<Staged*>(shared_ + offset); }
  __device__ char* slice() const { return shared_ + layout_.slices + warp_ * layout_.step; }
  __device__ Staged* slice_x() const { return reinterpret_cast<Staged*>(slice() + layout_.x); }
  __device__ Staged* token() const { return staged(layout_.token) + warp_ * N; }

  __device__ void take_row() {
    const int2 first = *reinterpret_cast<const int2*>(&plan_.slot);
    const int4 second = *reinterpret_cast<const int4*>(&plan_.count);
    slot_ = first.x, first_token_ = first.y;
    count_ = second.x, history_ = second.y, flags_ = second.z, ring_row_ = second.w;
  }

  // Of a lane: a word of the plan's row, A_log, or, in the last warp if the row is known, one of dt, dt_bias and D.
  __device__ const char* find_word(bool known) const {
    const char* place = reinterpret_cast<const char*>(params_.scan.planned + row_index_) + lane_ * 4;
    if (lane_ >= kRowWords) {
      place = nullptr;
      if (lane_ == kRowWords || (known && warp_ > slices_ && lane_ < kRowWords + 4)) {
        const Word& word = params_.words[lane_ - kRowWords];
        if (word.base) place = word.base + first_token_ * word.of_token + head_ * word.of_head;
      }
    }
    return place;
  }
  __device__ uint32_t load(const char* place) const {
    return peek_bits(place, lane_ >= kRowWords && params_.words[lane_ % 4].is_half);
  }
  __device__ bool is_live() const {
    const replayssm_scan_args& args = params_.scan.args;
    return admit(plan_, row_index_, args.num_tokens, args.max_count, params_.scan.problem.config.window, false,
                 params_.scan.error, head_ == 0 && threadIdx.x == 0) &&
           count_ > 0;
  }
  // Whether the row, which may be anything, is one whose history can be loaded before the kernel before has ended.
  __device__ bool may_load_early() const {
    const Problem& problem = params_.scan.problem;
    return below(slot_, params_.scan.num_slots) & below(history_, problem.config.window + 1) &
           below(ring_row_, problem.ring_rows) & below(count_ - 1, params_.scan.args.max_count) & (first_token_ >= 0) &
           (first_token_ + int64_t{tokens()} <= params_.scan.args.num_tokens) & !(flags_ & REPLAYSSM_ROW_SNAPSHOT) &
           !((flags_ & REPLAYSSM_ROW_FLUSH) && params_.scan.flushed);
  }
  __device__ static bool below(int value, int limit) {
    return static_cast<uint32_t>(value) < static_cast<uint32_t>(limit);
  }
  __device__ int records() const { return (flags_ & REPLAYSSM_ROW_FLUSH) && params_.scan.flushed ? 0 : history_; }
  __device__ bool stored_before() const {
    return !(flags_ & REPLAYSSM_ROW_EMPTY) || ((flags_ & REPLAYSSM_ROW_FLUSH) && params_.scan.flushed);
  }
  __device__ bool folds() const { return (flags_ & REPLAYSSM_ROW_FLUSH) && !params_.scan.flushed; }

  __device__ int tokens() const { return kOneToken ? 1 : count_; }
  __device__ float rate() const { return -expf(bits_to_float(row_.word[kRowWords], params_.scan.args.A_log.dtype)); }

  __device__ float* checkpoint() const {
    return reinterpret_cast<float*>(section_of(params_.scan.layer.checkpoint, slot_)) +
           (head_ * slices_ + warp_) * static_cast<int64_t>(kSliceWidth * N);
  }
  // Ring rows of the head's group: of the new tokens' records, and of the history's, newest first.
  __device__ int new_row(int token) const {
    const int row = ring_row_ + token, rows = params_.scan.problem.ring_rows;
    return row < rows ? row : row - rows;
  }
  __device__ int old_row(int record) const {
    const int row = ring_row_ - 1 - record;
    return row < 0 ? row + params_.scan.problem.ring_rows : row;
  }
  __device__ int first_record() const {  // index of ring row 0 of the head, in [G,R,H/G]
    return group_ * params_.scan.problem.ring_rows * params_.heads_per_group + head_ - group_ * params_.heads_per_group;
  }
  __device__ Staged* x_ring() const {
    return reinterpret_cast<Staged*>(section_of(params_.scan.layer.x_ring, slot_)) +
           (first_record() * slices_ + warp_) * kSliceWidth;
  }
  __device__ int x_stride() const { return params_.heads_per_group * slices_ * kSliceWidth; }
  __device__ Staged* b_ring() const {
    return reinterpret_cast<Staged*>(section_of(params_.scan.layer.b_ring, slot_)) +
           group_ * params_.scan.problem.ring_rows * N;
  }
  __device__ float* delta_ring() const {
    return reinterpret_cast<float*>(section_of(params_.scan.layer.delta_ring, slot_)) + first_record();
  }

  // What steps before have left; the last warp's lanes get the deltas.
  __device__ float request_history() {
    const int h = records(), padded = round_up(h, 8);
    if (warp_ < slices_) {
      const bool stored = stored_before();
      if (stored) State{slice(), lane_}.request(checkpoint(), full());
      if (elect_lane()) arrive_expecting(full(), stored ? kSliceWidth * State::kRowBytes : 0);
    }
    if (warp_ == slices_) {
      const Staged* const ring = b_ring() + lane_ % 16 * 8;
      Staged* const B = staged(layout_.b) + tokens() * kStride + lane_ % 16 * 8;
#pragma unroll 1
      for (int i = lane_ / 16; i < padded; i += 2) {
        request_16_bytes(B + i * kStride, ring + (i < h ? old_row(i) : 0) * N, i < h);
      }
    }
    if (warp_ > slices_ && lane_ < h) {
      const int32_t* const ring = reinterpret_cast<const int32_t*>(delta_ring());
      return __int_as_float(peek(ring[old_row(lane_) * params_.heads_per_group]));
    }
    return 0.0f;
  }

  // And a slice's x.
  __device__ void request_old_x() const {
    if (warp_ >= slices_) return;
    const int h = records(), padded = round_up(h, 8);
    const Staged* const ring = x_ring() + lane_ % 2 * 8;
    Staged* const x = slice_x() + tokens() * kSliceWidth + lane_ % 2 * 8;
#pragma unroll 1
    for (int i = lane_ / 2; i < padded; i += 16) {
      request_16_bytes(x + i * kSliceWidth, ring + (i < h ? old_row(i) : 0) * x_stride(), i < h);
    }
  }

  // The weights of the history; own_delta: of the lane's record.
  __device__ void weigh(float own_delta) const {
    const int h = records();
    float* const delta = floats(layout_.delta);
    if (lane_ < h) delta[lane_] = own_delta;
    __syncwarp();
    const float decay = weigh_history(delta, rate(), h, lane_, floats(layout_.weight));
    if (lane_ == 0) row_.decay = decay;
    __syncwarp();
  }

  // Of a lane: 16 bytes of the new token's C, x of a slice or B, if any.
  __device__ const char* find_token() const {
    const int parts = warp_ < slices_ ? 18 : warp_ == slices_ ? 32 : 0;
    if (lane_ >= parts) return nullptr;
    const int which = lane_ < 16 ? 0 : warp_ == slices_ ? 1 : 2;
    return params_.places[which].find(slot_, ring_row_, first_token_, head_, group_) + lane_ % 16 * 16 +
           (which == 2 ? warp_ * (kSliceWidth * 2) : 0);
  }
  // Requests it, or all of several tokens, and returns the lane's word.
  __device__ Loaded request_tokens(const char* token, const char* word) const {
    Loaded loaded{};
    if constexpr (kOneToken) {
      char* const target = lane_ < 16         ? reinterpret_cast<char*>(this->token())
                           : warp_ == slices_ ? reinterpret_cast<char*>(staged(layout_.b))
                                              : reinterpret_cast<char*>(slice_x());
      if (token) request_16_bytes(target + lane_ % 16 * 16, token);
      close_group();
    } else {
      const int T = tokens(), part = lane_ % 16 * 8;
#pragma unroll 1
      for (int i = threadIdx.x / 16; i < T; i += blockDim.x / 16) {
        request_16_bytes(staged(layout_.token) + i * kStride + part,
                         params_.places[0].find(slot_, 0, first_token_ + i, head_, group_) + part * 2);
      }
      if (warp_ < slices_) {
        const int i = lane_ / 2, half = lane_ % 2 * 8;
        if (i < T) {
          request_16_bytes(slice_x() + i * kSliceWidth + half,
                           params_.places[2].find(slot_, new_row(i), first_token_ + i, head_, group_) +
                               (warp_ * kSliceWidth + half) * 2);
        }
      } else if (warp_ == slices_) {
#pragma unroll 1
        for (int i = lane_ / 16; i < T; i += 2) {
          request_16_bytes(staged(layout_.b) + i * kStride + part,
                           params_.places[1].find(slot_, new_row(i), first_token_ + i, head_, group_) + part * 2);
        }
      } else {
        const replayssm_tensor& dt = params_.scan.args.dt;
        if (lane_ < T) {
          loaded.dt =
              load_bits(dt.data, dt.dtype, (first_token_ + int64_t{lane_}) * dt.stride[0] + head_ * dt.stride[1]);
        }
        float* const u = floats(layout_.u);  // zero where a token would come before its record
#pragma unroll 1
        for (int i = 4 * lane_; i < layout_.g_stride * layout_.g_stride; i += 128) {
          *reinterpret_cast<float4*>(u + i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
      }
    }
    loaded.word = load(word);
    return loaded;
  }

  // For the slices: what the new token and the history have to do with the new token, by B^T C.
  __device__ void multiply_records_by_token() const {
    const int g = lane_ / 4, t = lane_ % 4, history = folds() ? 0 : records(), padded = round_up(history, 8);
    const Staged* const B = staged(layout_.b);
    float* const product = floats(layout_.product);
    if (lane_ == 0 && history < padded) product[padded - 1] = 0.0f;  // the rest comes with the records
    await_requests();
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first <= history; first += 16) {
      float sum[2][4] = {};
      multiply_records(B, first, 1 + history, token(), 0, 1, g, t, sum);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int record = first + g + 8 * half - 1;
        const float value = sum[0][2 * half] + sum[1][2 * half];
        if (t != 0 || record >= padded) continue;
        if (record < 0) {
          row_.own = value;
        } else {
          product[record] = record < history ? value : 0.0f;
        }
      }
    }
    __syncthreads();
    if (params_.scan.append && head_ % params_.heads_per_group == 0 && lane_ >= 16) {
      const int part = lane_ % 16 * 8;
      *reinterpret_cast<uint4*>(b_ring() + ring_row_ * N + part) = *reinterpret_cast<const uint4*>(B + part);
    }
  }

  // For the slices: the new token's delta.
  __device__ void discretise(uint32_t word) const {
    const replayssm_scan_args& args = params_.scan.args;
    const float dt = bits_to_float(__shfl_sync(~0u, word, kRowWords + 1), args.dt.dtype);
    const float bias = bits_to_float(__shfl_sync(~0u, word, kRowWords + 2), args.dt_bias.dtype);
    const float skip = bits_to_float(__shfl_sync(~0u, word, kRowWords + 3), args.D.dtype);
    const float step = discretised_step(dt, bias, args.dt_min, args.dt_max);
    if (lane_ == 0) {
      row_.token_decay = expf(__fmul_rn(rate(), step));
      row_.step = step, row_.skip = skip;
    }
    __syncthreads();
    if (lane_ == 0) delta_ring()[ring_row_ * params_.heads_per_group] = step;
  }

  // Both for several tokens. The barriers: B^T C is there; the weights are.
  __device__ void multiply_records_by_tokens() const {
    const int T = tokens(), history = folds() ? 0 : records(), part = lane_ % 16 * 8;
    const Staged* const B = staged(layout_.b);
    multiply_all_records(B, T + history, T + round_up(history, 8), staged(layout_.token), T, layout_.g_stride, lane_,
                         floats(layout_.product));
    __syncthreads();
    if (params_.scan.append && head_ % params_.heads_per_group == 0) {
#pragma unroll 1
      for (int i = lane_ / 16; i < T; i += 2) {
        *reinterpret_cast<uint4*>(b_ring() + new_row(i) * N + part) =
            *reinterpret_cast<const uint4*>(B + i * kStride + part);
      }
    }
    __syncthreads();
  }
  __device__ void discretise_tokens(const Loaded& loaded) const {
    const replayssm_scan_args& args = params_.scan.args;
    const float bias = bits_to_float(__shfl_sync(~0u, loaded.word, kRowWords + 2), args.dt_bias.dtype);
    const float skip = bits_to_float(__shfl_sync(~0u, loaded.word, kRowWords + 3), args.D.dtype);
    const int T = tokens();
    const bool exists = lane_ < T;
    const float step =
        exists ? discretised_step(bits_to_float(loaded.dt, args.dt.dtype), bias, args.dt_min, args.dt_max) : 0.0f;
    if (exists) delta_ring()[new_row(lane_) * params_.heads_per_group] = step;
    weigh_tokens(rate(), skip, step, exists, lane_ % 16, T, layout_.g_stride, floats(layout_.token_decay),
                 floats(layout_.product), floats(layout_.u), [] { __syncthreads(); });
    __syncthreads();
  }

  // Folds the history into a slice, in shared memory. Returns whether the lane's part is finite.
  __device__ bool fold() const {
    const State state{slice(), lane_};
    const Staged* const x = slice_x() + tokens() * kSliceWidth + State::first_row(lane_);
    await(full(), 0);
    if (!stored_before()) state.clear();
    const bool finite = state.fold(owner(), warp_ * kSliceWidth, x, staged(layout_.b) + tokens() * kStride,
                                   floats(layout_.weight), row_.decay, records(), params_.tf32_mask);
    __syncwarp();
    return finite;
  }
  __device__ StateOwner owner() const {
    const ScanParams& scan = params_.scan;
    return {scan.problem, scan.layer, scan.error, head_, row_index_, plan_.stream, plan_.writes};
  }

  // A slice's outputs.
  __device__ void compute(bool finite_fold) const {
    const ScanParams& scan = params_.scan;
    const replayssm_scan_args& args = scan.args;
    const int t = lane_ % 4, own_row = State::first_row(lane_), h = records();
    const bool fold = folds();
    const State state{slice(), lane_};
    const Staged* const x = slice_x() + own_row;
    float y[4] = {};
    Staged* out = static_cast<Staged*>(args.out.data) + static_cast<int64_t>(first_token_) * args.out.stride[0] +
                  head_ * args.out.stride[1] + warp_ * kSliceWidth + own_row;
    compute_now(out);
    close_group();  // of what was requested behind C
    await(full(), 0);
    if (fold) {
      if (!finite_fold) owner().report_not_finite();
      state.store(checkpoint());
    }
    await_groups<1>();  // C is there
    __syncwarp();
    if (fold || stored_before()) state.multiply(token(), params_.tf32_mask, y);
    await_requests();
    if (scan.append && lane_ >= 16 && lane_ < 18) {
      const int part = lane_ % 16 * 8;
      *reinterpret_cast<uint4*>(x_ring() + ring_row_ * x_stride() + part) =
          *reinterpret_cast<const uint4*>(slice_x() + part);
    }
    __syncthreads();  // the weights are there
    const float since = row_.token_decay, u = fmaf(row_.step, row_.own, row_.skip);
    const uint32_t word = *reinterpret_cast<const uint32_t*>(x);
    if (!fold) {
      const float decay = row_.decay;
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] = __fmul_rn(y[i], decay);
    }
    const float *const product = floats(layout_.product) + t, *const weights = floats(layout_.weight) + t;
#pragma unroll 1
    for (int i = 0; i < (fold ? 0 : h); i += 8) {
      const Staged* const record = x + (1 + i + t) * kSliceWidth;
      const float2 x0 = unpack_pair<Staged>(*reinterpret_cast<const uint32_t*>(record));
      const float2 x1 = unpack_pair<Staged>(*reinterpret_cast<const uint32_t*>(record + 4 * kSliceWidth));
      const float values[4] = {x0.x, x0.y, x1.x, x1.y},
                  weight[2] = {weights[i] * product[i], weights[i + 4] * product[i + 4]};
      add_weighed(y, values, weight, params_.tf32_mask);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] *= since;
    const bool finite = is_finite<Staged>(word), own = t == 0;
    const float2 pair = unpack_pair<Staged>(word);
    const float values[4] = {own && finite ? pair.x : 0.0f, own && finite ? pair.y : 0.0f, 0.0f, 0.0f};
    const float weight[2] = {own ? u : 0.0f, 0.0f};
    add_weighed(y, values, weight, params_.tf32_mask);
    if (!finite) y[0] = fmaf(u, pair.x, y[0]), y[2] = fmaf(u, pair.y, y[2]);
    store_outputs(out, 2 * t, y);
    if (fold) state.await_stored();
  }

  // A slice's outputs of several tokens.
  __device__ void compute_tokens(bool finite_fold) const {
    const ScanParams& scan = params_.scan;
    const replayssm_scan_args& args = scan.args;
    const int T = tokens(), g = lane_ / 4, t = lane_ % 4, own_row = State::first_row(lane_);
    const bool fold = folds(), reads = fold || stored_before();
    const State state{slice(), lane_};
    const TokenSums<Staged> sums{slice_x() + own_row,
                                 floats(layout_.weight),
                                 floats(layout_.product),
                                 floats(layout_.u),
                                 floats(layout_.token_decay),
                                 T,
                                 layout_.g_stride,
                                 lane_,
                                 params_.tf32_mask};
    Staged* const out = static_cast<Staged*>(args.out.data) + static_cast<int64_t>(first_token_) * args.out.stride[0] +
                        head_ * args.out.stride[1] + warp_ * kSliceWidth + own_row;
    await(full(), 0);
    if (fold) {
      if (!finite_fold) owner().report_not_finite();
      state.store(checkpoint());
    }
    if (scan.append && lane_ < 2 * T) {
      const int half = lane_ % 2 * 8;
      *reinterpret_cast<uint4*>(x_ring() + new_row(lane_ / 2) * x_stride() + half) =
          *reinterpret_cast<const uint4*>(slice_x() + lane_ / 2 * kSliceWidth + half);
    }
#pragma unroll 1
    for (int first = 0; first < T; first += kTile) {
      float y[4] = {};
      if (reads) state.multiply(staged(layout_.token) + min(first + g, T - 1) * kStride, params_.tf32_mask, y);
      if (first == 0) __syncthreads();
      if (!fold) {
        const float decay = row_.decay;
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = __fmul_rn(y[i], decay);
      }
      sums.add_history(first, fold ? 0 : records(), y);
      if (first == 0) __syncthreads();
      sums.add_tokens(first, y);
      store_outputs(out, first + 2 * t, y);
    }
    if (fold) state.await_stored();
  }
  // Of tokens s and s + 1, as far as they exist. out: of token 0, the lane's rows.
  __device__ void store_outputs(Staged* out, int s, const float (&y)[4]) const {
#pragma unroll
    for (int i = 0; i < (kOneToken ? 1 : 2); ++i) {
      if (s + i >= tokens()) continue;
      Staged* const target = out + (s + i) * params_.scan.args.out.stride[0];
      if (params_.paired) {
        *reinterpret_cast<uint32_t*>(target) = pack_pair<Staged>(y[i], y[2 + i]);
      } else {
        store_scalar(target, kDtypeOf<Staged>, 0, y[i]);
        store_scalar(target, kDtypeOf<Staged>, 1, y[2 + i]);
      }
    }
  }
};

template <typename Staged, bool kOneToken>
__global__ __launch_bounds__(32 * (kMaxSlices + 2),
                             3) void step_head_kernel(const __grid_constant__ HeadParams params) {
  extern __shared__ __align__(128) char shared[];
  let_next_begin();
  HeadStep<Staged, kOneToken>(params, shared).run();
}

using HeadKernel = void(HeadParams);

template <bool kOneToken>
HeadKernel* choose_head(int activation) {
  return activation == REPLAYSSM_BF16 ? step_head_kernel<__nv_bfloat16, kOneToken>
                                      : step_head_kernel<__half, kOneToken>;
}
HeadKernel* choose_head(int activation, bool one_token) {
  return one_token ? choose_head<true>(activation) : choose_head<false>(activation);
}

}  // namespace

bool has_step_head(const ScanParams& params, int32_t rows) {
  const Problem& problem = params.problem;
  const int heads = problem.geometry.num_heads, sms = attribute_of_device(cudaDevAttrMultiProcessorCount, 1);
  const HeadLayout layout(problem.config.window, params.args.max_count, problem.geometry.head_dim / kSliceWidth);
  const int of_sm = attribute_of_device(cudaDevAttrMaxSharedMemoryPerMultiprocessor, kSharedLimit);
  const int per_sm = of_sm / (layout.bytes + 1024);  // a CTA takes 1 KB more
  const int slices = problem.geometry.head_dim / kSliceWidth;
  const int most_slices = params.args.max_count == 1 ? kMostSlicesPerSm : kMostSlicesOfSeveral;
  const int most = std::max(per_sm, per_sm < kEnoughPerSm ? 0 : most_slices / std::max(slices, 4));
  return problem.config.checkpoint == REPLAYSSM_CHECKPOINT_FP32 && problem.config.window <= kMaxHistory && heads >= 2 &&
         heads < 1024 && params.x_aligned && params.b_aligned && params.c_aligned && layout.bytes <= kSharedLimit &&
         static_cast<int64_t>(rows) * heads <= most * sms;
}

replayssm_status step_head(const replayssm_exec& exec, const ScanParams& scan, int32_t rows) {
  const Problem& problem = scan.problem;
  const replayssm_tensor& out = scan.args.out;
  HeadParams params{};
  params.scan = scan;
  params.heads_per_group = problem.geometry.num_heads / problem.geometry.num_groups;
  const int slices = problem.geometry.head_dim / kSliceWidth;
  params.inverse_heads = 0xffffffffu / problem.geometry.num_heads + 1;
  params.inverse_per_group = ((1 << 20) + params.heads_per_group - 1) / params.heads_per_group;
  const replayssm_scan_args& args = scan.args;
  const int row_bytes = problem.geometry.head_dim * 2, ring_rows = problem.ring_rows;
  params.places[0] = {static_cast<const char*>(args.C.data), 0, 0, args.C.stride[0] * 2, 0, args.C.stride[1] * 2};
  if (scan.append) {
    params.places[1] = {static_cast<const char*>(args.B.data), 0, 0, args.B.stride[0] * 2, 0, args.B.stride[1] * 2};
    params.places[2] = {static_cast<const char*>(args.x.data), 0, 0, args.x.stride[0] * 2, args.x.stride[1] * 2, 0};
  } else {
    params.places[1] = {static_cast<const char*>(scan.layer.b_ring.base),
                        scan.layer.b_ring.slot_stride,
                        kMaxStateDim * 2,
                        0,
                        0,
                        ring_rows * kMaxStateDim * 2};
    params.places[2] = {static_cast<const char*>(scan.layer.x_ring.base),
                        scan.layer.x_ring.slot_stride,
                        params.heads_per_group * row_bytes,
                        0,
                        row_bytes,
                        (ring_rows - 1) * params.heads_per_group * row_bytes};
  }
  auto word_of = [](const replayssm_tensor& tensor, int64_t of_token, int64_t of_head) {
    const int size = tensor.dtype == REPLAYSSM_FP32 ? 4 : 2;
    return Word{static_cast<const char*>(tensor.data), of_token * size, of_head * size, size == 2};
  };
  params.words[0] = word_of(args.A_log, 0, 1);
  params.words[1] = word_of(args.dt, args.dt.stride[0], args.dt.stride[1]);
  params.words[2] = word_of(args.dt_bias, 0, 1);
  params.words[3] = word_of(args.D, 0, 1);
  params.layout = HeadLayout(problem.config.window, args.max_count, slices);
  params.paired = reinterpret_cast<uintptr_t>(out.data) % 4 == 0 && out.stride[0] % 2 == 0 && out.stride[1] % 2 == 0;
  params.tf32_mask = kTf32Mask;
  params.early = kEarlyPerSm * attribute_of_device(cudaDevAttrMultiProcessorCount, 1);
  return launch_early("step", choose_head(problem.config.activation, args.max_count == 1),
                      static_cast<int64_t>(rows) * problem.geometry.num_heads, 32 * (slices + 2), params.layout.bytes,
                      exec, params);
}

cudaError_t load_step_head_kernels() {
  for (int activation : {REPLAYSSM_BF16, REPLAYSSM_FP16}) {
    for (bool one_token : {true, false}) {
      const cudaError_t error = load_kernel(choose_head(activation, one_token), kSharedLimit);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
