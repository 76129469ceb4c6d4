// SPDX-License-Identifier: Apache-2.0
//
// step of float32 checkpoints in small batches of rows with one token: what step_mma.cu computes, in the same order of
// every sum and hence with the same bits, by code that is run through once. A CTA has one head of one row: a warp for
// each slice, 16 rows of the state, and one more for what the slices share, the products B^T C and the weights.
//
// What such a launch waits for is latency. So all that steps before have left is requested before the kernel before has
// ended (common.cuh): state, records of x and B, and deltas, of which the weights of the history are made. It is
// requested by the plan's row as it reads then; that is read again when the kernel before has ended, together with the
// new token, and should it differ, everything is requested anew.
#include <cstdlib>

#include "slice.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kMaxSlices = kMaxHeadDim / kSliceWidth;
constexpr int kMaxHistory = 32;  // records of a row
constexpr int kRowWords = sizeof(replayssm_plan_row) / 4;

// The shared memory of a CTA; offsets in bytes. Records of B and x are the new token, then the history, newest first.
struct HeadLayout {
  int row;              // the plan's, and the bits of A_log
  int weight, product;  // of the history: as in a flush, and B^T C
  int delta;
  int token;    // 16-bit rows of C, one a warp
  int b;        // records kStride apart
  int slices;   // of each the state, then x [1 + window][16]
  int x, step;  // in a slice; from slice to slice
  int bytes;

  HeadLayout() = default;
  __host__ __device__ constexpr HeadLayout(int window, int num_slices)
      : row(kMaxSlices * 8),
        weight(row + 128),
        product(weight + round_up(window, 32) * 4),
        delta(product + round_up(window, 32) * 4),
        token(round_up(delta + window * 4, 16)),
        b(token + (num_slices + 1) * kMaxStateDim * 2),
        slices(round_up(b + (1 + round_up(window, 8)) * kStride * 2, 128)),
        x(Slice<float>::kBytes),
        step(round_up(x + (1 + round_up(window, 8)) * kSliceWidth * 2, 128)),
        bytes(slices + num_slices * step) {}
};

struct HeadParams {
  ScanParams scan;
  int heads_per_group;
  HeadLayout layout;
  int early;  // CTAs that begin before the kernel before has ended
  bool paired;         // outputs can be stored two at a time
  uint32_t tf32_mask;  // kTf32Mask, hidden from the compiler: see split()
};

// What the warp of the weights leaves for the others.
struct SharedRow {
  uint32_t word[kRowWords + 1];  // a replayssm_plan_row, then A_log as it lies in memory
  float decay;                   // of the history
  float own;                     // B^T C of the new token
  float step, skip, token_decay;  // of the new token: delta, D, decay
};

// 4 or 2 bytes of global memory, past the L1; and nothing.
struct Word {
  const void* place = nullptr;
  bool is_half = false;

  Word() = default;
  __device__ explicit Word(const void* place) : place(place) {}
  __device__ Word(const replayssm_tensor& tensor, int64_t index)
      : place(static_cast<const char*>(tensor.data) + index * (tensor.dtype == REPLAYSSM_FP32 ? 4 : 2)),
        is_half(tensor.dtype != REPLAYSSM_FP32) {
    if (!tensor.data) place = nullptr;
  }
  __device__ uint32_t load() const {
    uint32_t word = 0;
    if (place && !is_half) word = peek(*static_cast<const int32_t*>(place));
    if (place && is_half) {
      uint16_t bits;
      asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(bits) : "l"(place) : "memory");
      word = bits;
    }
    return word;
  }
};

// Computed here, not where it is needed.
template <typename T>
__device__ inline void compute_now(T*& pointer) {
  asm volatile("" : "+l"(pointer)::"memory");
}

template <typename Staged>
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
        row_index_(blockIdx.x / params.scan.problem.geometry.num_heads),
        head_(blockIdx.x - row_index_ * params.scan.problem.geometry.num_heads),
        group_(head_ / params.heads_per_group) {}

  __device__ void run() {
    if (warp_ < slices_ && lane_ == 0) init_barrier(full(), 1);
    bool early = static_cast<int>(blockIdx.x) < params_.early;
    if (!early) await_previous();
    if (warp_ == 0 && lane_ <= kRowWords) row_.word[lane_] = word_of_lane(false).load();
    __syncthreads();
    bool requests = early ? may_load_early() : is_live();
    if (!early && !requests) return;
    uint32_t phase = 0, now = 0;
    bool finite = true;
#pragma unroll 1
    for (;;) {
      finite = true;
      if (requests) {
        const float delta = request_history();
        if (!early) {
          const Token token = find_token();
          now = token.request();
        }
        await_requests();
        __syncthreads();
        if (warp_ > slices_) weigh(delta);
        if (folds()) {
          __syncthreads();
          if (warp_ < slices_) finite = fold(phase);
        }
      }
      if (!early) break;
      Token token{};
      if (requests) {
        token = find_token();
      } else {
        token.word = word_of_lane(false);
      }
      await_previous();
      now = token.request();
      const bool same = lane_ > kRowWords || now == row_.word[lane_];
      if (requests && __all_sync(~0u, same)) {
        await_requests();
        __syncwarp();
        break;
      }
      if (requests) {
        await_requests();
        if (warp_ < slices_) await(full(), phase);
        phase = 1;
      }
      __syncthreads();
      if (warp_ == 0 && lane_ <= kRowWords) row_.word[lane_] = now;
      __syncthreads();
      if (!is_live()) return;
      requests = true, early = false;
    }
    if (warp_ < slices_) {
      compute(phase, finite);
    } else if (warp_ == slices_) {
      multiply_records_by_token();
    } else {
      discretise(now);
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
  __device__ Barrier* full() const { return reinterpret_cast<Barrier*>(shared_) + warp_; }
  __device__ float* floats(int offset) const { return reinterpret_cast<float*>(shared_ + offset); }
  __device__ Staged* staged(int offset) const { return reinterpret_cast<Staged*>(shared_ + offset); }
  __device__ char* slice() const { return shared_ + layout_.slices + warp_ * layout_.step; }
  __device__ Staged* slice_x() const { return reinterpret_cast<Staged*>(slice() + layout_.x); }
  __device__ Staged* token() const { return staged(layout_.token) + warp_ * N; }

  // The words of the plan's row, then A_log, dt if the row is known, dt_bias and D.
  __device__ Word word_of_lane(bool known) const {
    const replayssm_scan_args& args = params_.scan.args;
    if (lane_ < kRowWords) return Word(reinterpret_cast<const int32_t*>(params_.scan.planned + row_index_) + lane_);
    if (lane_ == kRowWords) return Word(args.A_log, head_);
    if (warp_ <= slices_) return Word();
    if (lane_ == kRowWords + 1 && known) {
      return Word(args.dt, plan_.first_token * args.dt.stride[0] + head_ * args.dt.stride[1]);
    }
    if (lane_ == kRowWords + 2) return Word(args.dt_bias, head_);
    return lane_ == kRowWords + 3 ? Word(args.D, head_) : Word();
  }
  __device__ bool is_live() const {
    const replayssm_scan_args& args = params_.scan.args;
    return admit(plan_, row_index_, args.num_tokens, args.max_count, params_.scan.problem.config.window, false,
                 params_.scan.error, head_ == 0 && threadIdx.x == 0) &&
           plan_.count > 0;
  }
  // Whether the row, which may be anything, is one whose history can be loaded before the kernel before has ended.
  __device__ bool may_load_early() const {
    const Problem& problem = params_.scan.problem;
    return plan_.slot >= 0 && plan_.slot < params_.scan.num_slots && plan_.count == 1 && plan_.history >= 0 &&
           plan_.history <= problem.config.window && plan_.ring_row >= 0 && plan_.ring_row < problem.ring_rows &&
           plan_.first_token >= 0 && plan_.first_token < params_.scan.args.num_tokens &&
           !(plan_.flags & REPLAYSSM_ROW_SNAPSHOT) && !((plan_.flags & REPLAYSSM_ROW_FLUSH) && params_.scan.flushed);
  }
  __device__ int records() const {
    return (plan_.flags & REPLAYSSM_ROW_FLUSH) && params_.scan.flushed ? 0 : plan_.history;
  }
  __device__ bool stored_before() const {
    return !(plan_.flags & REPLAYSSM_ROW_EMPTY) || ((plan_.flags & REPLAYSSM_ROW_FLUSH) && params_.scan.flushed);
  }
  __device__ bool folds() const { return (plan_.flags & REPLAYSSM_ROW_FLUSH) && !params_.scan.flushed; }

  __device__ float rate() const {
    return -expf(bits_to_float(row_.word[kRowWords], params_.scan.args.A_log.dtype));
  }

  __device__ float* checkpoint() const {
    return reinterpret_cast<float*>(section_of(params_.scan.layer.checkpoint, plan_.slot)) +
           (head_ * slices_ + warp_) * static_cast<int64_t>(kSliceWidth * N);
  }
  // Ring rows of the head's group: the new token's with record 0, the history's from record 1 on, newest first.
  __device__ int ring_row(int record) const {
    return ring_position(plan_.ring_row, -record, params_.scan.problem.ring_rows);
  }
  __device__ int first_record() const {  // index of ring row 0 of the head, in [G,R,H/G]
    return group_ * params_.scan.problem.ring_rows * params_.heads_per_group + head_ - group_ * params_.heads_per_group;
  }
  __device__ Staged* x_ring() const {
    return reinterpret_cast<Staged*>(section_of(params_.scan.layer.x_ring, plan_.slot)) +
           (first_record() * slices_ + warp_) * kSliceWidth;
  }
  __device__ int x_stride() const { return params_.heads_per_group * slices_ * kSliceWidth; }
  __device__ Staged* b_ring() const {
    return reinterpret_cast<Staged*>(section_of(params_.scan.layer.b_ring, plan_.slot)) +
           group_ * params_.scan.problem.ring_rows * N;
  }
  __device__ float* delta_ring() const {
    return reinterpret_cast<float*>(section_of(params_.scan.layer.delta_ring, plan_.slot)) + first_record();
  }

  // What steps before have left; the last warp's lanes get the deltas.
  __device__ float request_history() {
    const int h = records(), padded = round_up(h, 8);
    if (warp_ < slices_) {
      const bool stored = stored_before();
      finish_stores_before_blocks();  // of a fold that was for nothing
      __syncwarp();
      if (stored) State{slice(), lane_}.request(checkpoint(), full());
      const Staged* const ring = x_ring() + lane_ % 2 * 8;
      Staged* const x = slice_x() + lane_ % 2 * 8;
#pragma unroll 1
      for (int i = 1 + lane_ / 2; i <= padded; i += 16) {
        request_16_bytes(x + i * kSliceWidth, ring + (i <= h ? ring_row(i) : 0) * x_stride(), i <= h);
      }
      if (elect_lane()) arrive_expecting(full(), stored ? kSliceWidth * State::kRowBytes : 0);
    }
    const Staged* const ring = b_ring() + threadIdx.x % 16 * 8;
    Staged* const B = staged(layout_.b) + threadIdx.x % 16 * 8;
#pragma unroll 1
    for (int i = 1 + threadIdx.x / 16; i <= padded; i += blockDim.x / 16) {
      request_16_bytes(B + i * kStride, ring + (i <= h ? ring_row(i) : 0) * N, i <= h);
    }
    if (warp_ > slices_) {
      const int32_t* const ring = reinterpret_cast<const int32_t*>(delta_ring());
      if (lane_ < h) return __int_as_float(peek(ring[ring_row(1 + lane_) * params_.heads_per_group]));
    }
    return 0.0f;
  }

  // The weights of the history.
  __device__ void weigh(float own_delta) const {
    const int h = records();
    float* const delta = floats(layout_.delta);
    if (lane_ < h) delta[lane_] = own_delta;
    __syncwarp();
    const float decay = weigh_history(delta, rate(), h, lane_, floats(layout_.weight));
    if (lane_ == 0) row_.decay = decay;
    __syncwarp();
  }

  // What a lane loads of the new token: a part of C, x of a slice or B, and its word.
  struct Token {
    const Staged* source;
    Staged* target;
    Word word;

    // Returns the word.
    __device__ uint32_t request() const {
      if (source) request_16_bytes(target, source);
      return word.load();
    }
  };
  __device__ Token find_token() const {
    const ScanParams& scan = params_.scan;
    const replayssm_scan_args& args = scan.args;
    const int part = lane_ % 16 * 8;
    const int64_t first_token = plan_.first_token;
    Token token{nullptr, nullptr, word_of_lane(true)};
    if (warp_ > slices_) {
    } else if (lane_ < 16) {
      token.source =
          static_cast<const Staged*>(args.C.data) + first_token * args.C.stride[0] + group_ * args.C.stride[1] + part;
      token.target = this->token() + part;
    } else if (warp_ == slices_) {
      token.source = (scan.append ? static_cast<const Staged*>(args.B.data) + first_token * args.B.stride[0] +
                                        group_ * args.B.stride[1]
                                  : b_ring() + plan_.ring_row * N) +
                     part;
      token.target = staged(layout_.b) + part;
    } else if (lane_ < 18) {
      token.source = (scan.append ? static_cast<const Staged*>(args.x.data) + first_token * args.x.stride[0] +
                                        head_ * args.x.stride[1] + warp_ * kSliceWidth
                                  : x_ring() + plan_.ring_row * x_stride()) +
                     part;
      token.target = slice_x() + part;
    }
    compute_now(token.source), compute_now(token.target), compute_now(token.word.place);
    return token;
  }

  // For the slices: what the new token and the history have to do with the new token, by B^T C.
  __device__ void multiply_records_by_token() const {
    const int g = lane_ / 4, t = lane_ % 4, history = folds() ? 0 : records(), padded = round_up(history, 8);
    const Staged* const B = staged(layout_.b);
    float* const product = floats(layout_.product);
#pragma unroll 1
    for (int first = 0; first < 1 + padded; first += 16) {
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
      *reinterpret_cast<uint4*>(b_ring() + plan_.ring_row * N + part) = *reinterpret_cast<const uint4*>(B + part);
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
    if (lane_ == 0) delta_ring()[plan_.ring_row * params_.heads_per_group] = step;
  }

  // S <- S with the records folded, for a slice.
  __device__ bool fold(uint32_t phase) const {
    const State state{slice(), lane_};
    const Staged* const x = slice_x() + State::first_row(lane_);
    await(full(), phase);
    if (!stored_before()) state.clear();
    const bool finite = state.fold(owner(), warp_ * kSliceWidth, x + kSliceWidth, staged(layout_.b) + kStride,
                                   floats(layout_.weight), row_.decay, records(), params_.tf32_mask);
    __syncwarp();
    return finite;
  }
  __device__ StateOwner owner() const {
    const ScanParams& scan = params_.scan;
    return {scan.problem, scan.layer, scan.error, head_, row_index_, plan_.stream, plan_.writes};
  }

  // A slice's outputs.
  __device__ void compute(uint32_t phase, bool finite_fold) const {
    const ScanParams& scan = params_.scan;
    const replayssm_scan_args& args = scan.args;
    const int t = lane_ % 4, own_row = State::first_row(lane_), h = records();
    const bool fold = folds();
    const State state{slice(), lane_};
    const Staged* const x = slice_x() + own_row;
    float y[4] = {};
    await(full(), phase);
    if (fold) {
      if (!finite_fold) owner().report_not_finite();
      state.store(checkpoint());
    }
    if (fold || stored_before()) state.multiply(token(), params_.tf32_mask, y);
    if (!fold) {
      const float decay = row_.decay;
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] = __fmul_rn(y[i], decay);
    }
    if (scan.append && lane_ >= 16 && lane_ < 18) {
      const int part = lane_ % 16 * 8;
      *reinterpret_cast<uint4*>(x_ring() + plan_.ring_row * x_stride() + part) =
          *reinterpret_cast<const uint4*>(slice_x() + part);
    }
    __syncthreads();  // the weights are there
    const float *const product = floats(layout_.product) + t, *const weights = floats(layout_.weight) + t;
#pragma unroll 1
    for (int i = 0; i < (fold ? 0 : h); i += 8) {
      const Staged* const record = x + (1 + i + t) * kSliceWidth;
      const float2 x0 = unpack_pair<Staged>(*reinterpret_cast<const uint32_t*>(record));
      const float2 x1 = unpack_pair<Staged>(*reinterpret_cast<const uint32_t*>(record + 4 * kSliceWidth));
      const float values[4] = {x0.x, x0.y, x1.x, x1.y}, weight[2] = {weights[i] * product[i], weights[i + 4] * product[i + 4]};
      add_weighed(y, values, weight, params_.tf32_mask);
    }
    const float since = row_.token_decay, u = fmaf(row_.step, row_.own, row_.skip);
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] *= since;
    const uint32_t word = *reinterpret_cast<const uint32_t*>(x);
    const bool finite = is_finite<Staged>(word), own = t == 0;
    const float2 pair = unpack_pair<Staged>(word);
    const float values[4] = {own && finite ? pair.x : 0.0f, own && finite ? pair.y : 0.0f, 0.0f, 0.0f};
    const float weight[2] = {own ? u : 0.0f, 0.0f};
    add_weighed(y, values, weight, params_.tf32_mask);
    if (!finite) y[0] = fmaf(u, pair.x, y[0]), y[2] = fmaf(u, pair.y, y[2]);
    if (own) {
      Staged* const target = static_cast<Staged*>(args.out.data) +
                             static_cast<int64_t>(plan_.first_token) * args.out.stride[0] +
                             head_ * args.out.stride[1] + warp_ * kSliceWidth + own_row;
      if (params_.paired) {
        *reinterpret_cast<uint32_t*>(target) = pack_pair<Staged>(y[0], y[2]);
      } else {
        store_scalar(target, kDtypeOf<Staged>, 0, y[0]);
        store_scalar(target, kDtypeOf<Staged>, 1, y[2]);
      }
    }
    if (fold) state.await_stored();
  }
};

template <typename Staged>
__global__ __launch_bounds__(32 * (kMaxSlices + 2), 3) void step_head_kernel(const __grid_constant__ HeadParams params) {
  extern __shared__ __align__(128) char shared[];
  let_next_begin();
  HeadStep<Staged>(params, shared).run();
}

using HeadKernel = void(HeadParams);

HeadKernel* choose_head(int activation) {
  return activation == REPLAYSSM_BF16 ? step_head_kernel<__nv_bfloat16> : step_head_kernel<__half>;
}

}  // namespace

bool has_step_head(const ScanParams& params, int32_t rows) {
  const Problem& problem = params.problem;
  const replayssm_scan_args& args = params.args;
  const int most = [] {
    const char* given = getenv("RS_HEAD");
    return given ? atoi(given) : 2;
  }();
  const int64_t ctas = static_cast<int64_t>(rows) * problem.geometry.num_heads;
  return problem.config.checkpoint == REPLAYSSM_CHECKPOINT_FP32 && args.max_count == 1 &&
         problem.config.window <= kMaxHistory && params.x_aligned && params.b_aligned && params.c_aligned &&
         HeadLayout(problem.config.window, problem.geometry.head_dim / kSliceWidth).bytes <= kSharedLimit &&
         ctas <= most * attribute_of_device(cudaDevAttrMultiProcessorCount, 1);
}

replayssm_status step_head(const replayssm_exec& exec, const ScanParams& scan, int32_t rows) {
  const Problem& problem = scan.problem;
  const replayssm_tensor& out = scan.args.out;
  HeadParams params{};
  params.scan = scan;
  params.heads_per_group = problem.geometry.num_heads / problem.geometry.num_groups;
  const int slices = problem.geometry.head_dim / kSliceWidth;
  params.layout = HeadLayout(problem.config.window, slices);
  params.paired = reinterpret_cast<uintptr_t>(out.data) % 4 == 0 && out.stride[0] % 2 == 0 && out.stride[1] % 2 == 0;
  params.tf32_mask = kTf32Mask;
  const int of_sm = attribute_of_device(cudaDevAttrMaxSharedMemoryPerMultiprocessor, kSharedLimit);
  const char* given = getenv("RS_EARLY");
  params.early = (given ? atoi(given) : of_sm / (params.layout.bytes + 1024)) * attribute_of_device(cudaDevAttrMultiProcessorCount, 1);
  return launch_early("step", choose_head(problem.config.activation),
                      static_cast<int64_t>(rows) * problem.geometry.num_heads, 32 * (slices + 2), params.layout.bytes,
                      exec, params);
}

cudaError_t load_step_head_kernels() {
  for (int activation : {REPLAYSSM_BF16, REPLAYSSM_FP16}) {
    HeadKernel* const kernel = choose_head(activation);
    cudaError_t error = load_kernel(kernel);
    if (error == cudaSuccess) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedLimit);
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
