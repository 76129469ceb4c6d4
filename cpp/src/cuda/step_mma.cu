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
// SMs are not equally fast, so CTAs claim their jobs, the warp of products for all of its CTA, from a counter in the
// plan: a CTA's first is its index, and when the last has been claimed the counter is zero again. Padded rows have no
// jobs. Those that flush take longer; they stand among the others, all of them in the first three quarters. The last
// are halved, so that CTAs end together. Small batches have jobs of single heads, which are shared out in advance, in
// the order of the rows, for a claim and looking the order up would cost more. There the latency of preparation is the
// limit. So a third warp prepares, with the weights of the history; a job's inputs are requested before the job ahead
// of it is prepared; and rows of one token have code without loops over tokens.
//
// A warp that is done with a buffer says so by one lane, after __syncwarp. The assembler drops that instruction where
// the warp has not diverged, and racecheck, which orders the accesses of the lane that arrives at a barrier but not of
// those that it speaks for, reports what the other lanes write or read: docs/performance-log.md.
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
constexpr int kBarrierBytes = round_up((5 * kMaxJobBuffers + 2 * kMaxStages) * 8, 128);

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

// What a launch's jobs are: several heads, claimed; single heads; single heads of rows with one token.
enum class Jobs { kClaimed, kSingleHeads, kSingleTokens };

struct MmaParams {
  ScanParams scan;
  int heads_per_group, slices;  // slices a head
  int heads, chunks;            // heads a job, jobs a group
  const int32_t* row_order;     // the plan's
  int num_jobs, jobs_per_row;   // by row (in that order if they are claimed), group, chunk
  int resident;                 // CTAs
  // If jobs are claimed:
  const replayssm_plan_header* header;
  int32_t* claims;  // how many jobs CTAs have claimed beside their first
  int halved_jobs;  // the last, at most so many
  int half_heads;   // of a job's first half
  // If not:
  int jobs_each, more_jobs;  // jobs of each CTA, CTAs with one more; spares them a division
  Place step;                // from one of its jobs to the next
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

struct Job {
  int row, group, head, heads;  // head: the first, in its group
  replayssm_plan_row plan;

  Job() = default;
  // A single head.
  __device__ Job(const MmaParams& params, const Place& place)
      : row(place.row), group(place.group), head(place.chunk), heads(1), plan(params.scan.planned[row]) {}
  // The heads of a job from `first` up to `end`, if there are so many.
  __device__ Job(const MmaParams& params, int index, int first, int end, int row)
      : row(row),
        group(index / params.chunks % params.scan.problem.geometry.num_groups),
        head(index % params.chunks * params.heads + first),
        heads(min(end - first, params.heads_per_group - head)),
        plan(params.scan.planned[row]) {}

  __device__ bool is_live(const MmaParams& params, bool reporter) const {
    const replayssm_scan_args& args = params.scan.args;
    const int window = params.scan.problem.config.window;
    if (params.flush_only) {  // step refuses and reports a history beyond the window
      return plan.slot >= 0 && (plan.flags & REPLAYSSM_ROW_FLUSH) && plan.history <= window;
    }
    return admit(plan, row, args.num_tokens, args.max_count, window, false, params.scan.error,
                 reporter && group == 0 && head == 0) &&
           plan.count > 0;
  }
};

// What the warps have to know of a live job.
struct JobInfo {
  uint64_t stream;
  int64_t writes;
  int32_t row, slot, first_token, tokens, h, ring_row, first_head, heads;  // h: records of history to stage
  int32_t first_record;                                                    // of ring row 0, in [G,R,H/G]
  int32_t items;                                                           // 0: nothing to do; of claimed jobs: no more
  int32_t group;
  bool appends;  // B of its group
  bool fold, stored_before;

  JobInfo() = default;
  __device__ JobInfo(const MmaParams& params, const Job& job)
      : stream(job.plan.stream),
        writes(job.plan.writes),
        row(job.row),
        slot(job.plan.slot),
        first_token(job.plan.first_token),
        tokens(params.flush_only ? 0 : job.plan.count),
        h((job.plan.flags & REPLAYSSM_ROW_FLUSH) && params.scan.flushed ? 0 : job.plan.history),
        ring_row(job.plan.ring_row),
        first_head(job.group * params.heads_per_group + job.head),
        heads(job.heads),
        first_record(job.group * params.scan.problem.ring_rows * params.heads_per_group + job.head),
        items(job.heads * params.slices),
        group(job.group),
        appends(job.head == 0 && params.scan.append),
        fold((job.plan.flags & REPLAYSSM_ROW_FLUSH) && !params.scan.flushed),
        stored_before(!(job.plan.flags & REPLAYSSM_ROW_EMPTY) ||
                      ((job.plan.flags & REPLAYSSM_ROW_FLUSH) && params.scan.flushed)) {}
};

static_assert(sizeof(JobInfo) <= JobLayout(1, 1, 1, 1).b);

// A CTA's shared memory and jobs.
template <typename Stored, typename Staged, Jobs kJobs>
struct Cta {
  static constexpr bool kClaims = kJobs == Jobs::kClaimed;
  static constexpr bool kOneToken = kJobs == Jobs::kSingleTokens;
  using State = Slice<Stored>;
  static constexpr int N = kMaxStateDim;
  static constexpr int kParts = N / 8;  // 16-byte parts of a row of B or C
  static constexpr int kRowsAtOnce = 32 / kParts;
  static constexpr int kPreparing = kClaims ? 2 : 3;           // warps that prepare
  static constexpr int kPasses = kClaims ? kMaxHeads / 2 : 1;  // of two heads each; single heads: of one

  const MmaParams& params;
  const JobLayout& layout;
  const StageLayout& stage_layout;
  char *job_buffers, *stages;
  Barrier *claimed, *known, *multiplied, *ready, *released;  // of each job buffer
  Barrier *full, *empty;                                     // of each stage
  int lane;
  int jobs;  // single heads
  Place first_place;

  __device__ Cta(const MmaParams& params, char* shared)
      : params(params),
        layout(params.job),
        stage_layout(params.stage),
        job_buffers(shared + kBarrierBytes),
        stages(job_buffers + params.job_buffers * layout.bytes),
        claimed(reinterpret_cast<Barrier*>(shared)),
        known(claimed + kMaxJobBuffers),
        multiplied(known + kMaxJobBuffers),
        ready(multiplied + kMaxJobBuffers),
        released(ready + kMaxJobBuffers),
        full(released + kMaxJobBuffers),
        empty(full + kMaxStages),
        lane(threadIdx.x % 32) {}

  // ---- single heads ----

  // Before the plan may be read.
  __device__ void find_heads() {
    const int block = blockIdx.x, groups = quotient(block, params.inverse_chunks);
    jobs = params.jobs_each + (block < params.more_jobs ? 1 : 0);
    first_place.row = quotient(groups, params.inverse_groups);
    first_place.group = groups - first_place.row * params.scan.problem.geometry.num_groups;
    first_place.chunk = block - groups * params.chunks;
  }

  // Walks through the CTA's.
  class Walk {
   public:
    __device__ explicit Walk(const Cta& cta) : cta(cta), place(cta.first_place) {}
    __device__ Job take() {
      const Job job(cta.params, place);
      place.row += cta.params.step.row, place.group += cta.params.step.group, place.chunk += cta.params.step.chunk;
      if (place.chunk >= cta.params.chunks) place.chunk -= cta.params.chunks, ++place.group;
      const int groups = cta.params.scan.problem.geometry.num_groups;
      if (place.group >= groups) place.group -= groups, ++place.row;
      return job;
    }

   private:
    const Cta& cta;
    Place place;  // of the next
  };

  // ---- claimed jobs: for one warp ----

  // The job at place `claim` of the order in which so many are claimed, the last of them halved.
  __device__ Job job_at(int claim, int live, int halved) const {
    const int whole = live - halved, halves = max(claim - whole, 0);
    const int place = min(claim, whole) + halves / 2;
    const bool first = claim < whole || halves % 2 == 0, last = claim < whole || !first;
    // Of the plan's order those that flush are the first, the others the last. Over the first places they are spread
    // evenly.
    const int flushing = params.header->num_flush * params.jobs_per_row, spread = max(live / 4 * 3, flushing);
    auto flushing_before = [&](int place) {
      return place < spread ? static_cast<int>(static_cast<int64_t>(place) * flushing / spread) : flushing;
    };
    const int flushed = flushing_before(place);
    const int index =
        flushing_before(place + 1) > flushed ? flushed : params.num_jobs - (live - flushing) + place - flushed;
    return Job(params, index, first ? 0 : params.half_heads, last ? params.heads : params.half_heads,
               params.row_order[index / params.jobs_per_row]);
  }

  // Claims the next job that has something to do; false: there is none. `claim`: the CTA's last.
  __device__ bool next_job(int& claim, Job& job) const {
    // The flush op's jobs are the first.
    const int rows = params.flush_only ? params.header->num_flush : params.header->num_live;
    const int live = rows * params.jobs_per_row, halved = min(params.halved_jobs, live), claims = live + halved;
    while (true) {
      if (claim < 0) {
        claim = blockIdx.x;
      } else {
        int claimed_before = 0;
        if (lane == 0) {
          claimed_before = atomicAdd(params.claims, 1);
          // Every CTA that has a job claims until there is none: this one, the last, leaves the counter as it was.
          if (claimed_before == claims - 1) *params.claims = 0;
        }
        claim = params.resident + __shfl_sync(~0u, claimed_before, 0);
      }
      if (claim >= claims) return false;
      job = job_at(claim, live, halved);
      if (job.heads > 0 && job.is_live(params, lane == 0)) return true;
    }
  }

  __device__ void init_barriers(int warp) const {
    auto init = [&](Barrier* barriers, int count, int arrivals) {
#pragma unroll 1
      for (int i = warp; i < count; i += kStepThreads / 32) {
        if (lane == 0) init_barrier(barriers + i, arrivals);
      }
    };
    if constexpr (kClaims) init(claimed, params.job_buffers, 1);
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
  __device__ int ring_row_of(const JobInfo& job, int record, int T) const {
    return ring_position(job.ring_row, record < T ? record : T - 1 - record, params.scan.problem.ring_rows);
  }

  // Calls work(job, buffer, phase) for every job that the CTA's warp of products has claimed. Who works must have done
  // so before the consumers are done with a job.
  template <typename Work>
  __device__ void for_claimed_jobs(Work&& work) const {
    int buffer = 0;
    uint32_t phase = 0;
#pragma unroll 1
    while (true) {
      await(claimed + buffer, phase);
      const JobInfo job = info(buffer);
      if (job.items == 0) return;
      work(job, buffer, phase);
      if (++buffer == params.job_buffers) buffer = 0, phase ^= 1;
    }
  }

  // ---- the producer: slices of the state and their records of x, in the order of the jobs ----
  __device__ void produce() const {
    const Problem& problem = params.scan.problem;
    const replayssm_scan_args& args = params.scan.args;
    const int P = problem.geometry.head_dim, record_stride = params.heads_per_group * P;
    const int half_slice = lane % 2 * 8, record = lane / 2;  // and every 16th from there on
    int stage = 0;
    uint32_t phase = 0;
    auto produce_job = [&](const JobInfo& job) {
      const int T = tokens_of(job.tokens), present = T + job.h, staged = T + round_up(job.h, 8);
      const Stored* checkpoint = reinterpret_cast<const Stored*>(section_of(params.scan.layer.checkpoint, job.slot)) +
                                 static_cast<int64_t>(job.first_head) * P * N;
      const Staged* ring = reinterpret_cast<const Staged*>(section_of(params.scan.layer.x_ring, job.slot)) +
                           job.first_record * P + half_slice;
      auto offset_of = [&](int i) { return i < present ? ring_row_of(job, i, T) * record_stride : 0; };
      const int offset_16 = offset_of(record + 16);
      const Staged* own = ring + offset_of(record);
      int64_t own_head_stride = P;
      const bool from_tensor = record < T && params.scan.append, slowly = from_tensor && !params.scan.x_aligned;
      if (from_tensor) {
        own = static_cast<const Staged*>(args.x.data) +
              (static_cast<int64_t>(job.first_token) + record) * args.x.stride[0] + job.first_head * args.x.stride[1] +
              half_slice;
        own_head_stride = args.x.stride[1];
      }
#pragma unroll 1
      for (int head = 0; head < job.heads; ++head, ring += P, own += own_head_stride) {
#pragma unroll 1
        for (int slice = 0; slice < params.slices; ++slice, checkpoint += kSliceWidth * N) {
          await(empty + stage, phase ^ 1);
          char* const target = stages + stage * stage_layout.bytes;
          if (job.stored_before) State{target, lane}.request(checkpoint, full + stage);
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
          if (lane == 0) arrive_expecting(full + stage, job.stored_before ? kSliceWidth * State::kRowBytes : 0);
          if (++stage == params.stages) stage = 0, phase ^= 1;
        }
      }
    };
    if constexpr (kClaims) {
      for_claimed_jobs([&](const JobInfo& job, int, uint32_t) { produce_job(job); });
    } else {
      Walk walk(*this);
#pragma unroll 1
      for (int n = 0; n < jobs; ++n) {
        const Job job = walk.take();
        if (job.is_live(params, false)) produce_job(JobInfo(params, job));
      }
    }
  }

  // ---- preparation: everything of a job but state and x; one warp has the products, one or two the weights ----

  // Calls request(job, buffer), or omit(buffer) if there is nothing to do, and finish(buffer, phase, newest) for every
  // single head. With enough buffers a job's inputs are requested before the job ahead of it is finished; newest: it is
  // the last that was requested.
  template <typename Request, typename Omit, typename Finish>
  __device__ void prepare(bool reporter, Request&& request, Omit&& omit, Finish&& finish) const {
    const int ahead = params.ahead;
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
        if (live) {
          request(JobInfo(params, job), buffer);
        } else {
          omit(buffer);
        }
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

  __device__ void request_products(const JobInfo& job, int buffer) const {
    const replayssm_scan_args& args = params.scan.args;
    const int T = tokens_of(job.tokens), h = job.h;
    const int part_row = lane / kParts, part_column = lane % kParts * 8;
    const int64_t first_token = job.first_token;
    Staged* const B = staged(buffer, layout.b) + part_column;
    Staged* const C = staged(buffer, layout.c) + part_column;
    const Staged* const b_ring = reinterpret_cast<const Staged*>(section_of(params.scan.layer.b_ring, job.slot)) +
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
    if (lane == 0) info(buffer) = job;
  }

  __device__ void omit_products(int buffer) const {
    if (lane == 0) info(buffer).items = 0;
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
      if (job.appends) {
        Staged* const b_ring =
            reinterpret_cast<Staged*>(section_of(params.scan.layer.b_ring, job.slot)) + job.group * R * N;
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
  __device__ void request_weights(const JobInfo& job, int buffer, WeightInputs& inputs) const {
    inputs = WeightInputs{};
    const Problem& problem = params.scan.problem;
    const replayssm_scan_args& args = params.scan.args;
    const int T = tokens_of(job.tokens), h = job.h, heads = job.heads, first_head = job.first_head, s = lane % 16;
    const int64_t first_token = job.first_token;
    float* const delta = floats(buffer, layout.delta);
    float* const u = floats(buffer, layout.u);  // zero where a token would come before its record
    inputs.tokens = T, inputs.records = h, inputs.heads = heads, inputs.ring_row = job.ring_row;
    inputs.delta_ring = reinterpret_cast<float*>(section_of(params.scan.layer.delta_ring, job.slot)) + job.first_record;
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
        [&](const JobInfo& job, int buffer) {
          before = last;
          request_weights<kHistory, kTokens>(job, buffer, last);
        },
        [&](int) {
          before = last;
          last = WeightInputs{};
        },
        [&](int buffer, uint32_t phase, bool newest) {
          if (newest) before = last;
          finish_weights<kHistory, kTokens>(before, buffer, phase);
        });
  }

  // Of claimed jobs one warp claims and has the products, one has the weights.
  __device__ void prepare_claimed_products() const {
    int buffer = 0, claim = -1;
    uint32_t phase = 0;
    Job job;
#pragma unroll 1
    while (next_job(claim, job)) {
      await(released + buffer, phase ^ 1);
      __syncwarp();
      request_products(JobInfo(params, job), buffer);
      __syncwarp();
      if (lane == 0) arrive(claimed + buffer);
      close_group();
      await_groups<0>();
      __syncwarp();
      finish_products(buffer, phase);
      if (++buffer == params.job_buffers) buffer = 0, phase ^= 1;
    }
    await(released + buffer, phase ^ 1);
    __syncwarp();
    if (lane == 0) {
      info(buffer).items = 0;
      arrive(claimed + buffer);
      arrive(known + buffer);
    }
  }

  __device__ void prepare_claimed_weights() const {
    for_claimed_jobs([&](const JobInfo& job, int buffer, uint32_t phase) {
      WeightInputs inputs;
      request_weights<true, true>(job, buffer, inputs);
      close_group();
      await_groups<0>();
      __syncwarp();
      finish_weights<true, true>(inputs, buffer, phase);
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
    for (int n = 0; kClaims || n < jobs; ++n) {
      await(known + buffer, job_phase);
      const JobInfo job = info(buffer);
      if (kClaims && job.items == 0) return;
      if (item < job.items) {
        const int T = tokens_of(job.tokens), history = job.fold ? 0 : job.h;
        const float* const query = floats(buffer, layout.query);
        const float* const products = floats(buffer, layout.g);
        int local_head = kClaims ? item / params.slices : 0, slice = item - local_head * params.slices;
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
          if constexpr (kClaims) {
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
// has which job does not matter to the L2; claimed jobs that don't flush begin with the last row.
constexpr int kFetched = 16 * 1024;  // bytes
template <bool kClaims>
__device__ inline void fetch_ahead(const MmaParams& params) {
  const int H = params.scan.problem.geometry.num_heads, first = blockIdx.x * params.heads, head = first % H;
  const int rows = params.num_jobs / params.jobs_per_row;
  const int index = kClaims ? (rows - 1 - first / H) * H + head : first;
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
  constexpr bool kClaims = Warps::kClaims;
  Warps cta(params, shared);
  // The shuffle tells the compiler that a warp has one index.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  let_next_begin();
  cta.init_barriers(warp);
  __syncthreads();
  if (threadIdx.x == kStepThreads - 1 && blockIdx.x < params.fetches) fetch_ahead<kClaims>(params);
  if constexpr (!kClaims) cta.find_heads();
  await_previous();
  if (warp == 0) {
    cta.produce();
  } else if (kClaims && warp == 1) {
    cta.prepare_claimed_products();
  } else if (kClaims && warp == 2) {
    cta.prepare_claimed_weights();
  } else if (warp == 1) {
    cta.prepare(
        true, [&](const JobInfo& job, int buffer) { cta.request_products(job, buffer); },
        [&](int buffer) { cta.omit_products(buffer); },
        [&](int buffer, uint32_t phase, bool) { cta.finish_products(buffer, phase); });
  } else if (warp == 2) {
    cta.template prepare_weights<false, true>();
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
  return jobs == Jobs::kClaimed        ? choose_mma<Stored, Jobs::kClaimed>(activation)
         : jobs == Jobs::kSingleTokens ? choose_mma<Stored, Jobs::kSingleTokens>(activation)
                                       : choose_mma<Stored, Jobs::kSingleHeads>(activation);
}

// Shared memory of a CTA that leaves room for kCtasPerSm, each of which takes 1 KB more; at least kSharedLimit.
int shared_limit() {
  const int of_sm = attribute_of_device(cudaDevAttrMaxSharedMemoryPerMultiprocessor, kSharedLimit);
  return std::max(kSharedLimit, of_sm / kCtasPerSm - 1024);
}

// A job has as many heads as its buffers leave room for kEnoughStages and every CTA gets kEnoughJobs, of which the last
// kHalved are halved.
constexpr int kEnoughStages = 6, kEnoughJobs = 8, kHalved = 2;
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
    if (groups * params.chunks > INT32_MAX / 2) {
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
    const bool claims = params.heads > 1;
    params.header = reinterpret_cast<const replayssm_plan_header*>(scan.planned) - 1;
    // The plan's claims are its own, zero before and after.
    params.claims = const_cast<int32_t*>(params.header->claims) + scan.layer.layer % REPLAYSSM_PLAN_CLAIMS;
    params.halved_jobs = flush_only ? 0 : kHalved * params.resident;
    params.half_heads = (params.heads + 1) / 2;
    const int shared = kBarrierBytes + params.job_buffers * params.job.bytes + params.stages * params.stage.bytes;
    return launch(
        op, true, limit,
        choose_mma<decltype(stored)>(problem.config.activation, claims                   ? Jobs::kClaimed
                                                                : params.max_tokens == 1 ? Jobs::kSingleTokens
                                                                                         : Jobs::kSingleHeads),
        params.resident, kStepThreads, shared, exec, params);
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
      for (Jobs jobs : {Jobs::kClaimed, Jobs::kSingleHeads, Jobs::kSingleTokens}) {
        MmaKernel* const kernel =
            with_checkpoint(format, [&](auto stored) { return choose_mma<decltype(stored)>(activation, jobs); });
        const cudaError_t error = load_kernel(kernel, shared_limit());
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
