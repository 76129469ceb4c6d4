// SPDX-License-Identifier: Apache-2.0
//
// step and flush of plain checkpoints on tensor cores: state_dim 128, head_dim a multiple of 16, 16-bit activations, no
// read copy. Of 16-bit checkpoints step_read.cu takes the steps of pools that flush seldom, of float32 ones
// step_head.cu those of small batches.
//
//     y_s = exp(f_s) [ d S C_s + sum_i v_i (B_i . C_s) x_i ] + sum_{r<=s} u_rs x_r,    u_ss including D
//
// i runs over the records of history, newest first, r over the row's new tokens; f_s is the sum of the tokens' log
// decays up to s, v_i = delta_i exp(e(i,h)) and d = exp(e(0,h)) are the weights that a flush folds with, and u_rs =
// delta_r exp(e(r,s)) (B_r . C_s). All exponents are sums of terms <= 0 from the newest backwards, never differences.
//
// The unit of work is a slice, 16 rows of one head; a job is some heads of one group of one row. Two CTAs an SM go from
// job to job, so that state comes without a pause, and their warps hand each other buffers (pipeline.cuh):
//  1. One copies: job after job, slice after slice, the state and its records of x into a ring of stages. x and B of
//     the new tokens come from the rings, too, if conv_step has stored them there; else from tensors, and are appended.
//  2. One prepares products: it stages B and C of the job's group and forms B^T C. One prepares weights: v, d, u and f
//     of the job's heads. Both are a job or more ahead of the slices.
//  3. The others consume: each takes every n-th stage.
// A job that flushes takes longer, so these come first in the order and are dealt out evenly; a CTA takes them in turns
// with others. The CTAs share the first seven eighths of the jobs; the rest goes two by two to CTAs that begin when one
// of these has ended, for SMs are not equally fast. Small batches have jobs of single heads, which are not dealt: all
// are shared, in the order of the rows, for a late start and looking the order up would cost more. There the latency of
// preparation is the limit. So a third warp prepares, with the weights of the history; a job's inputs are requested
// before the job ahead of it is prepared; and rows of one token have code without loops over tokens.
//
// A warp that is done with a buffer says so by one lane, after __syncwarp. The assembler drops that instruction where
// the warp has not diverged, and racecheck, which orders the accesses of the lane that arrives at a barrier but not of
// those that it speaks for, reports what the other lanes write or read: docs/performance.md.
//
// A consumer's work:
//  1. S C by mma.m16n8k8 in TF32, 8 tokens at a time. Lane (g, t) = (lane / 4, lane mod 4) takes a pair of rows,
//     and of every block of columns the t-th 16 bytes: the order of a product's terms is free, so that what vector
//     loads bring is the operand. A float32 state is split in a high part of 11 bits and the rest, of which the tensor
//     cores take 11 more: two products. 16-bit states, C, x and B are exact in TF32.
//  2. The sums over the history and over the new tokens are products too: x exact, weights split. A new token must not
//     touch those before it, even if it is a NaN, of which zero times is one: x that is not finite is left out of the
//     product, and added by the CUDA cores to the tokens that it belongs to.
//  3. A row flagged FLUSH folds its records first, as mma.cuh has it: a tile's sum is formed on the tensor cores, B's
//     columns permuted so that it lies where the state does, and added to the state by one rounding. What is stored is
//     kept: the outputs read what the next step will read. It goes to memory in blocks, as it came.
// Every sum's order depends on the row and the config alone, and the bits of token s don't depend on the tokens after
// it. Which CTA and warp has a slice, and how many heads a job has, changes no bit. Dead records are never read.
#include <algorithm>

#include "slice.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kConsumers = 7;
constexpr int kStepThreads = 32 * (3 + kConsumers);
#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
constexpr int kCtasPerSm = 2;
#else
constexpr int kCtasPerSm = 1;
#endif
constexpr int kMaxHeads = 4;
constexpr int kMaxJobBuffers = 4, kMaxStages = 32;
constexpr int kTailJobs = 2;  // of a CTA that begins late
constexpr int kBarrierBytes = round_up((4 * kMaxJobBuffers + 2 * kMaxStages) * 8, 128);

// The shared memory of a job; offsets in bytes, strides in floats. The records of B and B^T C are the row's new tokens,
// then its history, newest first.
struct JobLayout {
  int g_stride, v_stride, u_stride;     // of a record of B^T C and of u; of a head of v; of a head of u
  int b, c, query, g;                   // the info is at 0
  int delta, v, u, decay, token_decay;  // of each head
  int bytes;

  JobLayout() = default;
  __host__ __device__ constexpr JobLayout(int window, int tokens, int heads, int query_stride)
      : g_stride(round_up(tokens, kTile)),
        v_stride(round_up(window, 32)),
        u_stride(g_stride * g_stride),
        b(80),
        c(b + (tokens + round_up(window, 8)) * kStride * 2),
        query(c + tokens * kStride * 2),
        g(query + tokens * query_stride * 4),
        delta(g + round_up(tokens + round_up(window, 8), 16) * g_stride * 4),
        v(delta + heads * window * 4),
        u(round_up(v + heads * v_stride * 4, 16)),
        decay(u + heads * u_stride * 4),
        token_decay(round_up(decay + heads * 4, 8)),
        bytes(round_up(token_decay + heads * g_stride * 4, 16)) {}
};

// Of a stage: a slice of the state at 0, and x [tokens + window][16] of its rows, records in the order of a job's.
struct StageLayout {
  int x, bytes;

  StageLayout() = default;
  __host__ __device__ constexpr StageLayout(int window, int tokens, int state_bytes)
      : x(state_bytes), bytes(round_up(x + (tokens + round_up(window, 8)) * kSliceWidth * 2, 128)) {}
};

// n / d for n and d below 1024, where a division would keep all warps waiting.
constexpr int inverse_of(int d) { return ((1 << 20) + d - 1) / d; }
__device__ inline int quotient(int n, int inverse) { return n * inverse >> 20; }

// Where a job's heads are: chunk by chunk, group by group, row by row.
struct Place {
  int row, group, chunk;
};

// What a launch's jobs are: several heads, dealt out; single heads; single heads of rows with one token.
enum class Jobs { kDealt, kSingleHeads, kSingleTokens };

struct MmaParams {
  ScanParams scan;
  int heads_per_group, slices;  // slices a head
  int heads, chunks;            // heads a job, jobs a group
  const replayssm_plan_header* header;
  const int32_t* row_order;    // the plan's
  int num_jobs, jobs_per_row;  // by row (in that order if they are dealt), group, chunk
  int resident, shared_jobs;   // CTAs that share jobs evenly, and these jobs
  int jobs_each, more_jobs;    // not dealt: jobs of each CTA, CTAs with one more; spares them a division
  Place step;                  // from one of its jobs to the next
  int inverse_chunks, inverse_groups;
  int max_tokens;                      // of a row
  int stages, consumers, job_buffers;  // consumers <= stages
  int fetches;                         // CTAs that have the L2 fetch states ahead
  int ahead;                           // jobs whose inputs are requested before the next is prepared: 0 or 1
  JobLayout job;
  StageLayout stage;
  bool flush_only;     // the flush op: no tokens
  bool paired;         // outputs can be stored two at a time
  uint32_t tf32_mask;  // kTf32Mask, hidden from the compiler: see split()
};

// ---- the kernel ----------------------------------------------------------------------------------------------------

// What the consumers have to know of a job.
struct JobInfo {
  uint64_t stream;
  int64_t writes;
  int32_t row, slot, first_token, tokens, h, ring_row, first_head;
  int32_t first_record;  // of ring row 0, in [G,R,H/G]
  int32_t items;         // 0: nothing to do
  int32_t b_append;      // the group whose B is appended; -1: none
  bool fold, stored_before;
};

struct Job {
  int row, group, chunk;
  replayssm_plan_row plan;

  Job() = default;
  // A single head.
  __device__ Job(const MmaParams& params, const Place& place)
      : row(place.row), group(place.group), chunk(place.chunk), plan(params.scan.planned[row]) {}
  __device__ Job(const MmaParams& params, int index, int row)
      : row(row),
        group(index / params.chunks % params.scan.problem.geometry.num_groups),
        chunk(index % params.chunks),
        plan(params.scan.planned[row]) {}

  __device__ bool is_live(const MmaParams& params, bool reporter) const {
    const replayssm_scan_args& args = params.scan.args;
    const int window = params.scan.problem.config.window;
    if (params.flush_only) {  // step refuses and reports a history beyond the window
      return plan.slot >= 0 && (plan.flags & REPLAYSSM_ROW_FLUSH) && plan.history <= window;
    }
    return admit(plan, row, args.num_tokens, args.max_count, window, false, params.scan.error,
                 reporter && group == 0 && chunk == 0) &&
           plan.count > 0;
  }
  __device__ int tokens(const MmaParams& params) const { return params.flush_only ? 0 : plan.count; }
  // Records of history to stage.
  __device__ int records(const MmaParams& params) const {
    return (plan.flags & REPLAYSSM_ROW_FLUSH) && params.scan.flushed ? 0 : plan.history;
  }
  __device__ bool stored_before(const MmaParams& params) const {
    return !(plan.flags & REPLAYSSM_ROW_EMPTY) || ((plan.flags & REPLAYSSM_ROW_FLUSH) && params.scan.flushed);
  }
  // Index of ring row 0 of the first head in [G,R,H/G].
  __device__ int first_record(const MmaParams& params) const {
    return group * params.scan.problem.ring_rows * params.heads_per_group + chunk * params.heads;
  }
  __device__ int first_head(const MmaParams& params) const {
    return group * params.heads_per_group + chunk * params.heads;
  }
  __device__ int heads(const MmaParams& params) const {
    return min(params.heads, params.heads_per_group - chunk * params.heads);
  }
};

// A CTA's shared memory and jobs.
template <typename Stored, typename Staged, Jobs kJobs>
struct Cta {
  static constexpr bool kDealt = kJobs == Jobs::kDealt;
  static constexpr bool kOneToken = kJobs == Jobs::kSingleTokens;
  using State = Slice<Stored>;
  static constexpr int N = kMaxStateDim;
  static constexpr int kParts = N / 8;  // 16-byte parts of a row of B or C
  static constexpr int kRowsAtOnce = 32 / kParts;
  static constexpr int kPreparing = kDealt ? 2 : 3;           // warps that prepare
  static constexpr int kPasses = kDealt ? kMaxHeads / 2 : 1;  // of two heads each; single heads: of one

  const MmaParams& params;
  const JobLayout& layout;
  const StageLayout& stage_layout;
  char *job_buffers, *stages;
  Barrier *known, *multiplied, *ready, *released;  // of each job buffer
  Barrier *full, *empty;                           // of each stage
  int lane;
  int first_job, job_step, jobs, flushing_jobs;
  Place first_place;

  __device__ Cta(const MmaParams& params, char* shared)
      : params(params),
        layout(params.job),
        stage_layout(params.stage),
        job_buffers(shared + kBarrierBytes),
        stages(job_buffers + params.job_buffers * layout.bytes),
        known(reinterpret_cast<Barrier*>(shared)),
        multiplied(known + kMaxJobBuffers),
        ready(multiplied + kMaxJobBuffers),
        released(ready + kMaxJobBuffers),
        full(released + kMaxJobBuffers),
        empty(full + kMaxStages),
        lane(threadIdx.x % 32) {}

  // Single heads: before the plan may be read.
  __device__ void find_heads() {
    const int block = blockIdx.x, groups = quotient(block, params.inverse_chunks);
    jobs = params.jobs_each + (block < params.more_jobs ? 1 : 0);
    first_place.row = quotient(groups, params.inverse_groups);
    first_place.group = groups - first_place.row * params.scan.problem.geometry.num_groups;
    first_place.chunk = block - groups * params.chunks;
  }
  // Others: once it may be.
  __device__ void find_jobs() {
    const int block = blockIdx.x;
    const bool shares = block < params.resident;
    first_job = shares ? block : params.shared_jobs + (block - params.resident) * kTailJobs;
    job_step = shares ? params.resident : 1;
    const int end = shares ? params.shared_jobs : min(first_job + kTailJobs, params.num_jobs);
    auto jobs_before = [&](int index) { return index > first_job ? (index - first_job + job_step - 1) / job_step : 0; };
    jobs = jobs_before(end);
    flushing_jobs = jobs_before(min(end, params.header->num_flush * params.jobs_per_row));
  }

  // Walks through the CTA's jobs. If they are dealt, those that flush, its first, take turns with the others: evenly,
  // and not in all CTAs at the same time; and ahead of a job its plan is loaded, ahead of that its row.
  class Walk {
   public:
    __device__ explicit Walk(const Cta& cta) : cta(cta) {
      if constexpr (kDealt) {
        share = blockIdx.x * 37 % cta.jobs;
        look_up();
        next = Job(cta.params, index, row);
        look_up();
      } else {
        place = cta.first_place;
      }
    }
    __device__ Job take() {
      if constexpr (kDealt) {
        const Job job = next;
        next = Job(cta.params, index, row);
        look_up();
        return job;
      } else {
        const Job job(cta.params, place);
        place.row += cta.params.step.row, place.group += cta.params.step.group, place.chunk += cta.params.step.chunk;
        if (place.chunk >= cta.params.chunks) place.chunk -= cta.params.chunks, ++place.group;
        const int groups = cta.params.scan.problem.geometry.num_groups;
        if (place.group >= groups) place.group -= groups, ++place.row;
        return job;
      }
    }

   private:
    const Cta& cta;
    int flushed = 0, others = 0, share;
    int index, row;  // of the job after the next; past the end, of some job
    Job next;
    Place place;  // not dealt: of the next

    __device__ void look_up() {
      share += cta.flushing_jobs;
      const bool flushes = share >= cta.jobs;
      if (flushes) share -= cta.jobs;
      const int turn = flushes ? flushed++ : cta.flushing_jobs + others++;
      index = min(cta.first_job + turn * cta.job_step, cta.params.num_jobs - 1);
      row = cta.params.row_order[index / cta.params.jobs_per_row];
    }
  };

  __device__ void init_barriers(int warp) const {
    auto init = [&](Barrier* barriers, int count, int arrivals) {
#pragma unroll 1
      for (int i = warp; i < count; i += kStepThreads / 32) {
        if (lane == 0) init_barrier(barriers + i, arrivals);
      }
    };
    init(known, params.job_buffers, 1);
    init(multiplied, params.job_buffers, 1);
    init(ready, params.job_buffers, kPreparing - 1);
    init(released, params.job_buffers, params.consumers);
    init(full, params.stages, 33);
    init(empty, params.stages, 1);
  }

  __device__ float* floats(int buffer, int offset) const {
    return reinterpret_cast<float*>(job_buffers + buffer * layout.bytes + offset);
  }
  __device__ Staged* staged(int buffer, int offset) const {
    return reinterpret_cast<Staged*>(job_buffers + buffer * layout.bytes + offset);
  }
  __device__ JobInfo& info(int buffer) const {
    return *reinterpret_cast<JobInfo*>(job_buffers + buffer * layout.bytes);
  }

  // T of a row with so many tokens.
  __device__ static int tokens_of(int count) { return kOneToken ? 1 : count; }
  // The ring row of a job's record: of its new tokens, then of its history, newest first.
  __device__ int ring_row_of(const Job& job, int record, int T) const {
    return ring_position(job.plan.ring_row, record < T ? record : T - 1 - record, params.scan.problem.ring_rows);
  }

  // ---- the producer: slices of the state and their records of x, in the order of the jobs ----
  __device__ void produce() const {
    const Problem& problem = params.scan.problem;
    const replayssm_scan_args& args = params.scan.args;
    const int P = problem.geometry.head_dim, record_stride = params.heads_per_group * P;
    const int half_slice = lane % 2 * 8, record = lane / 2;  // and every 16th from there on
    int stage = 0;
    uint32_t phase = 0;
    Walk walk(*this);
#pragma unroll 1
    for (int n = 0; n < jobs; ++n) {
      const Job job = walk.take();
      if (!job.is_live(params, false)) continue;
      const int T = tokens_of(job.tokens(params)), first_head = job.first_head(params);
      const int present = T + job.records(params), staged = T + round_up(job.records(params), 8);
      const bool stored_before = job.stored_before(params);
      const Stored* checkpoint =
          reinterpret_cast<const Stored*>(section_of(params.scan.layer.checkpoint, job.plan.slot)) +
          static_cast<int64_t>(first_head) * P * N;
      const Staged* ring = reinterpret_cast<const Staged*>(section_of(params.scan.layer.x_ring, job.plan.slot)) +
                           job.first_record(params) * P + half_slice;
      auto offset_of = [&](int i) { return i < present ? ring_row_of(job, i, T) * record_stride : 0; };
      const int offset_16 = offset_of(record + 16);
      const Staged* own = ring + offset_of(record);
      int64_t own_head_stride = P;
      const bool from_tensor = record < T && params.scan.append, slowly = from_tensor && !params.scan.x_aligned;
      if (from_tensor) {
        own = static_cast<const Staged*>(args.x.data) +
              (static_cast<int64_t>(job.plan.first_token) + record) * args.x.stride[0] + first_head * args.x.stride[1] +
              half_slice;
        own_head_stride = args.x.stride[1];
      }
      const int heads = job.heads(params);
#pragma unroll 1
      for (int head = 0; head < heads; ++head, ring += P, own += own_head_stride) {
#pragma unroll 1
        for (int slice = 0; slice < params.slices; ++slice, checkpoint += kSliceWidth * N) {
          await(empty + stage, phase ^ 1);
          char* const target = stages + stage * stage_layout.bytes;
          if (stored_before) State{target, lane}.request(checkpoint, full + stage);
          Staged* const x = reinterpret_cast<Staged*>(target + stage_layout.x) + record * kSliceWidth + half_slice;
          if (slowly) {
            request_input(x, own + slice * kSliceWidth, false);
          } else if (record < staged) {
            request_16_bytes(x, own + slice * kSliceWidth, record < present);
          }
          if (staged > 16) {
            const Staged* const source = ring + slice * kSliceWidth;
            if (record + 16 < staged) {
              request_16_bytes(x + 16 * kSliceWidth, source + offset_16, record + 16 < present);
            }
#pragma unroll 1
            for (int i = record + 32; i < staged; i += 16) {
              request_16_bytes(x + (i - record) * kSliceWidth, source + offset_of(i), i < present);
            }
          }
          arrive_with_requests(full + stage);
          __syncwarp();
          if (lane == 0) arrive_expecting(full + stage, stored_before ? kSliceWidth * State::kRowBytes : 0);
          if (++stage == params.stages) stage = 0, phase ^= 1;
        }
      }
    }
  }

  // ---- preparation: everything of a job but state and x; one warp has the products, one or two the weights ----

  // Calls request(job, live, buffer) and finish(buffer, phase, newest) for every job. With enough buffers a job's
  // inputs are requested before the job ahead of it is finished; newest: it is the last that was requested.
  template <typename Request, typename Finish>
  __device__ void prepare(bool reporter, Request&& request, Finish&& finish) const {
    const int ahead = kDealt ? 0 : params.ahead;
    int buffer = 0, finished = 0;
    uint32_t phase = 0, finished_phase = 0;
    Walk walk(*this);
#pragma unroll 1
    for (int n = 0; n < jobs + ahead; ++n) {
      if (n < jobs) {
        const Job job = walk.take();
        const bool live = job.is_live(params, reporter && lane == 0);
        await(released + buffer, phase ^ 1);
        __syncwarp();
        request(job, live, buffer);
        if (++buffer == params.job_buffers) buffer = 0, phase ^= 1;
      }
      close_group();
      if (n < ahead) continue;
      if (ahead) {
        await_groups<1>();
      } else {
        await_groups<0>();
      }
      __syncwarp();
      finish(finished, finished_phase, !ahead || n >= jobs);
      if (++finished == params.job_buffers) finished = 0, finished_phase ^= 1;
    }
  }

  __device__ void request_products(const Job& job, bool live, int buffer) const {
    if (!live) {
      if (lane == 0) info(buffer).items = 0;
      return;
    }
    const replayssm_scan_args& args = params.scan.args;
    const int T = tokens_of(job.tokens(params)), h = job.records(params);
    const int part_row = lane / kParts, part_column = lane % kParts * 8;
    const int64_t first_token = job.plan.first_token;
    Staged* const B = staged(buffer, layout.b) + part_column;
    Staged* const C = staged(buffer, layout.c) + part_column;
    const Staged* const b_ring = reinterpret_cast<const Staged*>(section_of(params.scan.layer.b_ring, job.plan.slot)) +
                                 job.group * params.scan.problem.ring_rows * N + part_column;
#pragma unroll 1
    for (int i = part_row; i < T; i += kRowsAtOnce) {
      request_input(C + i * kStride,
                    static_cast<const Staged*>(args.C.data) + (first_token + i) * args.C.stride[0] +
                        job.group * args.C.stride[1] + part_column,
                    params.scan.c_aligned);
    }
    int first = part_row;
    if (params.scan.append) {
#pragma unroll 1
      for (; first < T; first += kRowsAtOnce) {
        request_input(B + first * kStride,
                      static_cast<const Staged*>(args.B.data) + (first_token + first) * args.B.stride[0] +
                          job.group * args.B.stride[1] + part_column,
                      params.scan.b_aligned);
      }
    }
#pragma unroll 4
    for (int i = first; i < T + round_up(h, 8); i += kRowsAtOnce) {
      const bool exists = i < T + h;
      request_16_bytes(B + i * kStride, b_ring + (exists ? ring_row_of(job, i, T) : 0) * N, exists);
    }
    if (lane == 0) {
      info(buffer) = JobInfo{job.plan.stream,
                             job.plan.writes,
                             job.row,
                             job.plan.slot,
                             job.plan.first_token,
                             T,
                             h,
                             job.plan.ring_row,
                             job.first_head(params),
                             job.first_record(params),
                             job.heads(params) * params.slices,
                             job.chunk == 0 && params.scan.append ? job.group : -1,
                             (job.plan.flags & REPLAYSSM_ROW_FLUSH) && !params.scan.flushed,
                             job.stored_before(params)};
    }
  }

  __device__ void finish_products(int buffer, uint32_t phase) const {
    const JobInfo job = info(buffer);
    if (job.items == 0) {
      if (lane == 0) arrive(multiplied + buffer);
      await(ready + buffer, phase);
      if (lane == 0) arrive(known + buffer);
      return;
    }
    const int R = params.scan.problem.ring_rows;
    const int T = tokens_of(job.tokens), history = job.fold ? 0 : job.h;
    const int part_row = lane / kParts, part_column = lane % kParts * 8;
    Staged* const B = staged(buffer, layout.b);
    Staged* const C = staged(buffer, layout.c);
    float* const query = floats(buffer, layout.query);
    float* const products = floats(buffer, layout.g);

    // The query in float32; the CTA of the group's first heads appends B to the ring, if it isn't there.
#pragma unroll 1
    for (int i = part_row; i < T; i += kRowsAtOnce) {
      float value[8];
      load_shared<8>(C + i * kStride + part_column, value);
      store_vector<8>(query, REPLAYSSM_FP32, i * State::kQueryStride + part_column, true, value);
      if (job.b_append >= 0) {
        Staged* const b_ring =
            reinterpret_cast<Staged*>(section_of(params.scan.layer.b_ring, job.slot)) + job.b_append * R * N;
        *reinterpret_cast<uint4*>(b_ring + ring_position(job.ring_row, i, R) * N + part_column) =
            *reinterpret_cast<const uint4*>(B + i * kStride + part_column);
      }
    }
    __syncwarp();
    if (lane == 0) arrive(known + buffer);

    multiply_all_records(B, T + history, T + round_up(history, 8), C, T, layout.g_stride, lane, products);
    __syncwarp();
    if (lane == 0) arrive(multiplied + buffer);
  }

  // What a lane has of a job's inputs, as it lies in memory: half a warp has a head's tokens, a lane a head's rate.
  struct WeightInputs {
    uint32_t dt[kPasses], bias[kPasses], rate, skip;
    float* delta_ring;
    int tokens, records, heads, ring_row;  // heads 0: nothing to do
  };

  template <bool kHistory, bool kTokens>
  __device__ void request_weights(const Job& job, bool live, int buffer, WeightInputs& inputs) const {
    inputs = WeightInputs{};
    if (!live) return;
    const Problem& problem = params.scan.problem;
    const replayssm_scan_args& args = params.scan.args;
    const int T = tokens_of(job.tokens(params)), h = job.records(params), heads = job.heads(params);
    const int first_head = job.first_head(params), s = lane % 16;
    const int64_t first_token = job.plan.first_token;
    float* const delta = floats(buffer, layout.delta);
    float* const u = floats(buffer, layout.u);  // zero where a token would come before its record
    inputs.tokens = T, inputs.records = h, inputs.heads = heads, inputs.ring_row = job.plan.ring_row;
    inputs.delta_ring =
        reinterpret_cast<float*>(section_of(params.scan.layer.delta_ring, job.plan.slot)) + job.first_record(params);
#pragma unroll 1
    for (int k = 0; k < (kHistory ? heads : 0); ++k) {
#pragma unroll 1
      for (int i = lane; i < h; i += 32) {
        request_4_bytes(delta + k * problem.config.window + i,
                        inputs.delta_ring + ring_row_of(job, T + i, T) * params.heads_per_group + k);
      }
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int k = 2 * pass + lane / 16;
      if (!kTokens || k >= heads || s >= T) continue;
      inputs.dt[pass] = load_bits(args.dt.data, args.dt.dtype,
                                  (first_token + s) * args.dt.stride[0] + (first_head + k) * args.dt.stride[1]);
      if (args.dt_bias.data) inputs.bias[pass] = load_bits(args.dt_bias.data, args.dt_bias.dtype, first_head + k);
    }
    if (lane < heads) {
      inputs.rate = load_bits(args.A_log.data, args.A_log.dtype, first_head + lane);
      if (kTokens && args.D.data) inputs.skip = load_bits(args.D.data, args.D.dtype, first_head + lane);
    }
#pragma unroll 1
    for (int i = 4 * lane; i < (kTokens ? heads * layout.u_stride : 0); i += 128) {
      *reinterpret_cast<float4*>(u + i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }

  template <bool kHistory, bool kTokens>
  __device__ void finish_weights(const WeightInputs inputs, int buffer, uint32_t phase) const {
    const int heads = inputs.heads;
    if (heads == 0) {
      if (lane == 0) arrive(ready + buffer);
      return;
    }
    const replayssm_scan_args& args = params.scan.args;
    const int R = params.scan.problem.ring_rows, window = params.scan.problem.config.window;
    const int T = tokens_of(inputs.tokens), h = inputs.records, s = lane % 16;
    const float* const products = floats(buffer, layout.g);
    float* const delta = floats(buffer, layout.delta);
    float* const u = floats(buffer, layout.u);
    const float rate = -expf(bits_to_float(inputs.rate, args.A_log.dtype));
    const float skip = bits_to_float(inputs.skip, args.D.dtype);
    __syncwarp();
#pragma unroll 1
    for (int k = 0; k < (kHistory ? heads : 0); ++k) {
      const float decay = weigh_history(delta + k * window, __shfl_sync(~0u, rate, k), h, lane,
                                        floats(buffer, layout.v) + k * layout.v_stride);
      if (lane == 0) floats(buffer, layout.decay)[k] = decay;
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (!kTokens || 2 * pass >= heads) break;
      const int k = 2 * pass + lane / 16;
      const bool exists = k < heads && s < T;
      const float A = __shfl_sync(~0u, rate, k), D = __shfl_sync(~0u, skip, k);
      const float bias = args.dt_bias.data ? bits_to_float(inputs.bias[pass], args.dt_bias.dtype) : 0.0f;
      float step = 0.0f;
      if (exists) {
        step = discretised_step(bits_to_float(inputs.dt[pass], args.dt.dtype), bias, args.dt_min, args.dt_max);
        inputs.delta_ring[ring_position(inputs.ring_row, s, R) * params.heads_per_group + k] = step;
      }
      weigh_tokens(A, D, step, exists, s, T, layout.g_stride, floats(buffer, layout.token_decay) + k * layout.g_stride,
                   products, u + k * layout.u_stride, [&] {
                     if (pass == 0) await(multiplied + buffer, phase);
                   });
    }
    __syncwarp();
    if (lane == 0) arrive(ready + buffer);
  }

  template <bool kHistory, bool kTokens>
  __device__ void prepare_weights() const {
    WeightInputs last{}, before{};
    prepare(
        false,
        [&](const Job& job, bool live, int buffer) {
          before = last;
          request_weights<kHistory, kTokens>(job, live, buffer, last);
        },
        [&](int buffer, uint32_t phase, bool newest) {
          if (newest) before = last;
          finish_weights<kHistory, kTokens>(before, buffer, phase);
        });
  }

  // ---- consumers: slice after slice ----
  __device__ void consume(int warp) const {
    const Problem& problem = params.scan.problem;
    const replayssm_scan_args& args = params.scan.args;
    const int P = problem.geometry.head_dim, R = problem.ring_rows;
    const int g = lane / 4, t = lane % 4, half_slice = lane % 2 * 8, own_row = State::first_row(lane);
    int item = warp, stage = warp, buffer = 0;  // the next item, counted from the job's first
    uint32_t phase = 0, job_phase = 0;
    while (stage >= params.stages) stage -= params.stages, phase ^= 1;

#pragma unroll 1
    for (int n = 0; n < jobs; ++n) {
      await(known + buffer, job_phase);
      const JobInfo job = info(buffer);
      if (item < job.items) {
        const int T = tokens_of(job.tokens), history = job.fold ? 0 : job.h;
        const float* const query = floats(buffer, layout.query);
        const float* const products = floats(buffer, layout.g);
        int local_head = kDealt ? item / params.slices : 0, slice = item - local_head * params.slices;
        Staged* const x_append =
            reinterpret_cast<Staged*>(section_of(params.scan.layer.x_ring, job.slot)) +
            (job.first_record + ring_position(job.ring_row, lane / 2, R) * params.heads_per_group) * P + half_slice;
        Staged* const out = static_cast<Staged*>(args.out.data) +
                            static_cast<int64_t>(job.first_token) * args.out.stride[0] +
                            job.first_head * args.out.stride[1] + own_row;
#pragma unroll 1
        for (; item < job.items; item += params.consumers) {
          char* const source = stages + stage * stage_layout.bytes;
          const Staged* const new_x = reinterpret_cast<const Staged*>(source + stage_layout.x) + own_row;
          const Staged* const old_x = new_x + T * kSliceWidth;
          const State state{source, lane};
          const float* const weights = floats(buffer, layout.v) + local_head * layout.v_stride;
          const TokenSums<Staged> sums{new_x,
                                       weights,
                                       products,
                                       floats(buffer, layout.u) + local_head * layout.u_stride,
                                       floats(buffer, layout.token_decay) + local_head * layout.g_stride,
                                       T,
                                       layout.g_stride,
                                       lane,
                                       params.tf32_mask};
          await(empty + stage, phase ^ 1);  // else the next could take an earlier round for this one
          await(full + stage, phase);
          if (lane < 2 * T && params.scan.append) {
            *reinterpret_cast<uint4*>(x_append + local_head * P + slice * kSliceWidth) =
                *reinterpret_cast<const uint4*>(new_x - own_row + lane / 2 * kSliceWidth + half_slice);
          }
          if (job.fold) {
            await(ready + buffer, job_phase);
            if (!job.stored_before) state.clear();
            const int head = job.first_head + local_head;
            const StateOwner owner{problem, params.scan.layer, params.scan.error, head,
                                   job.row, job.stream,        job.writes};
            Stored* const checkpoint = reinterpret_cast<Stored*>(section_of(params.scan.layer.checkpoint, job.slot)) +
                                       (static_cast<int64_t>(head) * P + slice * kSliceWidth) * N;
            const bool finite = state.fold(owner, slice * kSliceWidth, old_x, staged(buffer, layout.b) + T * kStride,
                                           weights, floats(buffer, layout.decay)[local_head], job.h, params.tf32_mask);
            if (!finite) owner.report_not_finite();
            state.store(checkpoint);
          }
#pragma unroll 1
          for (int first = 0; first < T; first += kTile) {
            float y[4] = {};
            if (job.stored_before || job.fold) {
              state.multiply(query + min(first + g, T - 1) * State::kQueryStride, params.tf32_mask, y);
            }
            await(ready + buffer, job_phase);
            if (!job.fold) {
              const float decay = floats(buffer, layout.decay)[local_head];
#pragma unroll
              for (int i = 0; i < 4; ++i) y[i] = __fmul_rn(y[i], decay);
            }
            sums.add_history(first, history, y);
            sums.add_tokens(first, y);
            const int s = first + 2 * t;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if (s + i >= T) continue;
              Staged* const target =
                  out + (s + i) * args.out.stride[0] + local_head * args.out.stride[1] + slice * kSliceWidth;
              if (params.paired) {
                *reinterpret_cast<uint32_t*>(target) = pack_pair<Staged>(y[i], y[2 + i]);
              } else {
                store_scalar(target, kDtypeOf<Staged>, 0, y[i]);
                store_scalar(target, kDtypeOf<Staged>, 1, y[2 + i]);
              }
            }
          }
          if (job.fold) state.await_stored();
          __syncwarp();
          if (lane == 0) arrive(empty + stage);
          stage += params.consumers;
          while (stage >= params.stages) stage -= params.stages, phase ^= 1;
          slice += params.consumers;
          if constexpr (kDealt) {
            while (slice >= params.slices) slice -= params.slices, ++local_head;
          }
        }
      }
      item -= job.items;
      __syncwarp();
      if (lane == 0) arrive(released + buffer);
      if (++buffer == params.job_buffers) buffer = 0, job_phase ^= 1;
    }
  }
};

// Before the kernel before has ended, for a thread that has time: some of what the CTAs will begin with. Which of them
// has which job does not matter to the L2; dealt jobs that don't flush begin with the last row.
constexpr int kFetched = 16 * 1024;  // bytes
template <bool kDealt>
__device__ inline void fetch_ahead(const MmaParams& params) {
  const int H = params.scan.problem.geometry.num_heads, first = blockIdx.x * params.heads, head = first % H;
  const int rows = params.num_jobs / params.jobs_per_row;
  const int index = kDealt ? (rows - 1 - first / H) * H + head : first;
  for (const replayssm_tensor* vector : {&params.scan.args.A_log, &params.scan.args.dt_bias, &params.scan.args.D}) {
    fetch_to_l2(*vector, head);
  }
  const int64_t head_bytes = params.scan.problem.checkpoint_head_bytes;
  fetch_head(params.scan, params.scan.layer.checkpoint, head_bytes, index, 0,
             static_cast<int>(min(head_bytes, int64_t{kFetched})));
}

template <typename Stored, typename Staged, Jobs kJobs>
__global__ __launch_bounds__(kStepThreads, kCtasPerSm) void step_mma_kernel(const __grid_constant__ MmaParams params) {
  extern __shared__ __align__(16) char shared[];
  using Warps = Cta<Stored, Staged, kJobs>;
  constexpr bool kDealt = Warps::kDealt;
  Warps cta(params, shared);
  // The shuffle tells the compiler that a warp has one index.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  let_next_begin();
  cta.init_barriers(warp);
  __syncthreads();
  if (threadIdx.x == kStepThreads - 1 && blockIdx.x < params.fetches) fetch_ahead<kDealt>(params);
  if constexpr (!kDealt) cta.find_heads();
  await_previous();
  if constexpr (kDealt) cta.find_jobs();
  if (warp == 0) {
    cta.produce();
  } else if (warp == 1) {
    cta.prepare(
        true, [&](const Job& job, bool live, int buffer) { cta.request_products(job, live, buffer); },
        [&](int buffer, uint32_t phase, bool) { cta.finish_products(buffer, phase); });
  } else if (warp == 2) {
    cta.template prepare_weights<Warps::kPreparing == 2, true>();
  } else if (Warps::kPreparing == 3 && warp == 3) {
    cta.template prepare_weights<true, false>();
  } else if (warp - 1 - Warps::kPreparing < params.consumers) {
    cta.consume(warp - 1 - Warps::kPreparing);
  }
}

// ---- launch --------------------------------------------------------------------------------------------------------

using MmaKernel = void(MmaParams);

template <typename Stored, Jobs kJobs>
MmaKernel* choose_mma(int activation) {
  return activation == REPLAYSSM_BF16 ? step_mma_kernel<Stored, __nv_bfloat16, kJobs>
                                      : step_mma_kernel<Stored, __half, kJobs>;
}
template <typename Stored>
MmaKernel* choose_mma(int activation, Jobs jobs) {
  return jobs == Jobs::kDealt          ? choose_mma<Stored, Jobs::kDealt>(activation)
         : jobs == Jobs::kSingleTokens ? choose_mma<Stored, Jobs::kSingleTokens>(activation)
                                       : choose_mma<Stored, Jobs::kSingleHeads>(activation);
}

// Shared memory of a CTA that leaves room for kCtasPerSm, each of which takes 1 KB more; at least kSharedLimit.
int shared_limit() {
  const int of_sm = attribute_of_device(cudaDevAttrMaxSharedMemoryPerMultiprocessor, kSharedLimit);
  return std::max(kSharedLimit, of_sm / kCtasPerSm - 1024);
}

// A job has as many heads as its buffers leave room for kEnoughStages and every CTA gets kEnoughJobs.
constexpr int kEnoughStages = 6, kEnoughJobs = 8;
static_assert(kBarrierBytes +
                  JobLayout(REPLAYSSM_MAX_WINDOW, REPLAYSSM_MAX_STEP_TOKENS, 1, Slice<float>::kQueryStride).bytes +
                  StageLayout(REPLAYSSM_MAX_WINDOW, REPLAYSSM_MAX_STEP_TOKENS, Slice<float>::kBytes).bytes <=
              kSharedLimit);

replayssm_status launch_mma(const char* op, const replayssm_exec& exec, int32_t rows, const ScanParams& scan,
                            bool flush_only) {
  const Problem& problem = scan.problem;
  const replayssm_tensor& out = scan.args.out;
  MmaParams params{};
  params.scan = scan;
  params.heads_per_group = problem.geometry.num_heads / problem.geometry.num_groups;
  params.slices = problem.geometry.head_dim / kSliceWidth;
  params.flush_only = flush_only;
  params.max_tokens = flush_only ? 0 : scan.args.max_count;
  params.paired = reinterpret_cast<uintptr_t>(out.data) % 4 == 0 && out.stride[0] % 2 == 0 && out.stride[1] % 2 == 0;
  params.tf32_mask = kTf32Mask;
  params.header = reinterpret_cast<const replayssm_plan_header*>(scan.planned) - 1;
  return with_checkpoint(problem.config.checkpoint, [&](auto stored) {
    using State = Slice<decltype(stored)>;
    const int window = problem.config.window, limit = shared_limit();
    const int ctas = kCtasPerSm * attribute_of_device(cudaDevAttrMultiProcessorCount, 1);
    const int64_t groups = static_cast<int64_t>(rows) * problem.geometry.num_groups;
    params.stage = StageLayout(window, params.max_tokens, State::kBytes);
    auto stages_beside = [&](int buffers) {
      return (limit - kBarrierBytes - buffers * params.job.bytes) / params.stage.bytes;
    };
    for (int heads = std::min(params.heads_per_group, kMaxHeads);; heads = (heads + 1) / 2) {
      params.heads = heads;
      params.chunks = (params.heads_per_group + heads - 1) / heads;
      params.job = JobLayout(window, params.max_tokens, heads, State::kQueryStride);
      const int64_t jobs = groups * params.chunks;
      if (heads == 1 || (jobs >= kEnoughJobs * ctas && stages_beside(2) >= kEnoughStages)) break;
    }
    if (groups * params.chunks > INT32_MAX) {
      return fail(REPLAYSSM_UNSUPPORTED, "%s: %d rows are too many", op, rows);
    }
    params.num_jobs = static_cast<int>(groups * params.chunks);
    params.row_order = reinterpret_cast<const int32_t*>(scan.planned + rows);
    params.jobs_per_row = problem.geometry.num_groups * params.chunks;
    params.job_buffers = params.heads == 1 ? kMaxJobBuffers : 2;
    while (params.job_buffers > 1 && stages_beside(params.job_buffers) < kEnoughStages) --params.job_buffers;
    params.ahead = params.job_buffers > 2 ? 1 : 0;
    params.stages = std::min(stages_beside(params.job_buffers), kMaxStages);
    params.consumers = std::min(params.stages, kConsumers - (params.heads == 1 ? 1 : 0));
    params.resident = std::min(params.num_jobs, ctas);
    const int64_t row_heads = static_cast<int64_t>(rows) * problem.geometry.num_heads;
    params.fetches = flush_only ? 0 : static_cast<int>(std::min<int64_t>(params.resident, row_heads / params.heads));
    const int rounds = params.num_jobs / params.resident;
    params.jobs_each = rounds;
    params.more_jobs = params.num_jobs % params.resident;
    const int group_step = params.resident / params.chunks, num_groups = problem.geometry.num_groups;
    params.inverse_chunks = inverse_of(params.chunks), params.inverse_groups = inverse_of(num_groups);
    params.step = {group_step / num_groups, group_step % num_groups, params.resident % params.chunks};
    const bool dealt = params.heads > 1;  // then there are kEnoughJobs rounds
    params.shared_jobs = dealt ? (rounds - rounds / 8) * params.resident : params.num_jobs;
    const int late = (params.num_jobs - params.shared_jobs + kTailJobs - 1) / kTailJobs;
    const int shared = kBarrierBytes + params.job_buffers * params.job.bytes + params.stages * params.stage.bytes;
    return launch(
        op, true, limit,
        choose_mma<decltype(stored)>(problem.config.activation, dealt                    ? Jobs::kDealt
                                                                : params.max_tokens == 1 ? Jobs::kSingleTokens
                                                                                         : Jobs::kSingleHeads),
        params.resident + late, kStepThreads, shared, exec, params);
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
      for (Jobs jobs : {Jobs::kDealt, Jobs::kSingleHeads, Jobs::kSingleTokens}) {
        MmaKernel* const kernel =
            with_checkpoint(format, [&](auto stored) { return choose_mma<decltype(stored)>(activation, jobs); });
        cudaError_t error = load_kernel(kernel);
        if (error == cudaSuccess) {
          error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_limit());
        }
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
