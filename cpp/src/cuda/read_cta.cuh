// SPDX-License-Identifier: Apache-2.0
//
// A CTA of the step that reads states on tensor cores (step_read.cu), and its work. It finds its heads by take() or, as
// far as a plan tells that may still change, by find() and peek(). A CTA that steps runs set_up() and run(): begin()
// requests what its heads share, prepare() weighs all records, and each head is read while the next comes. One that
// folds runs set_up() and fold() or fold_kept(), and reads what it has folded in run(), slices of plain checkpoints at
// once. What kinds of CTAs share is written once; constants of the class tell them apart.
#pragma once

#include "head_fold.cuh"
#include "plain_operands.cuh"
#include "plan_rows.cuh"

namespace replayssm {
namespace cuda {
namespace {

template <typename T>
__device__ inline T* beyond(T* pointer, int64_t bytes) {
  return reinterpret_cast<T*>(const_cast<char*>(reinterpret_cast<const char*>(pointer)) + bytes);
}

// A CTA and its work: some heads of a group of one row, which it folds first or not.
template <typename Format, typename Staged, bool kFolds, bool kSingle, bool kWide>
struct ReadCta {
  static constexpr bool kKeeps = kFolds && kWide;    // one head, and what it reads then
  static constexpr bool kPaired = !kFolds && kWide;  // it is one of two halves
  static constexpr int kWarpBits = kKeeps ? kWideWarpBits : cuda::kWarpBits;
  static constexpr int kWarps = 1 << kWarpBits, kThreads = 32 * kWarps;
  static constexpr int kTokenThreads = kThreads / kMaxCtaHeads;  // a thread has every so many-th token
  static constexpr int kHalves = kKeeps ? 1 : 2;                 // of a slice, that a warp folds
  using State = StateOperand<Format>;
  static constexpr bool kPlain = kIsPlain<Format>;
  static constexpr int kSliceBytes = kPlain ? kSliceWidth * kMaxStateDim * static_cast<int>(sizeof(Format)) : 0;
  static constexpr int N = kMaxStateDim;
  static constexpr bool kReadsFolds = kFolds && kPlain && !kWide;  // a slice as soon as it has been folded
  static constexpr int kAtOnce = kSingle && !kFolds ? 2 : 1;       // slices, of a row's only token
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  static constexpr int kSlotArrivals = 1;
  // Blocks take fewer instructions, but longer, above all behind the slices of plain checkpoints.
  static constexpr bool kBlocksOfB = !kFolds && !kWide && !kPlain;
#else
  static constexpr int kSlotArrivals = 32;
  static constexpr bool kBlocksOfB = false;
#endif
  static constexpr int kRowParts = N / 8, kRowsAtOnce = kThreads / kRowParts;  // of 16 bytes, of B and C

  const ReadParams& params;
  const Problem& problem;
  const replayssm_scan_args& args;
  const ReadShared& layout;
  char* const shared;
  int tid, warp, lane, g, t;
  int team_bits, team, member;  // of the warps that share a head, and which of them this is
  int first_slice, own_slices;  // of a head, for this warp
  int x_row, x_column, x_rows;  // of a record's 16 bytes that the lane moves, every x_rows-th from x_row on
  int row_index, group, group_head, heads;
  replayssm_plan_row row;
  int T, h, history;  // tokens; records to stage, and those that outputs see
  bool stored_before;

  __device__ __forceinline__ ReadCta(const ReadParams& params, char* shared, int team_bits)
      : params(params),
        problem(params.scan.problem),
        args(params.scan.args),
        layout(kFolds ? params.folding : params.stepping),
        shared(hide_address(shared + step_half() * layout.bytes)),
        tid(keep(kPaired ? threadIdx.x % kThreads : threadIdx.x)),
        warp(__shfl_sync(~0u, tid / 32, 0)),  // the shuffle tells the compiler that a warp has one index
        lane(tid & 31),
        g(lane >> 2),
        t(lane & 3),
        team_bits(team_bits),
        team(warp >> team_bits),
        member(warp & ((1 << team_bits) - 1)),
        x_rows(params.x_parts(32 << team_bits)) {
    __builtin_assume(tid >= 0);  // so that divisions need not round towards zero
    const int team_lane = member * 32 + lane, parts = params.x_parts.divisor;
    x_row = params.x_parts(team_lane);
    x_column = (team_lane - x_row * parts) * 8;
    if (x_row >= x_rows) x_row = kNever;
    const int share = (params.slices + (1 << team_bits) - 1) >> team_bits;
    first_slice = member * share;
    own_slices = min(share, params.slices - first_slice);
  }

  // ---- places, and which heads a CTA has ----

  // Of the CTA, which half this is.
  __device__ static int step_half() { return kPaired ? static_cast<int>(threadIdx.x) / kThreads : 0; }
  __device__ void synchronise() const {
    if constexpr (kPaired) {
      asm volatile("barrier.sync %0, %1;" ::"r"(1 + step_half()), "n"(kThreads) : "memory");
    } else {
      __syncthreads();
    }
  }

  __device__ float* floats(int offset) const { return reinterpret_cast<float*>(shared + offset); }
  __device__ Staged* staged(int offset) const { return reinterpret_cast<Staged*>(shared + offset); }
  __device__ uint32_t* words(int offset) const { return reinterpret_cast<uint32_t*>(shared + offset); }
  // Records of the team's head: bytes in shared memory; of the history, and of the new tokens.
  __device__ int x_at() const { return layout.x + team * layout.rows * layout.x_stride * 2; }
  __device__ int new_x_at() const { return x_at() + history * layout.x_stride * 2; }
  __device__ Staged* new_b() const { return staged(layout.b) + history * N; }
  // What steps read of the team's head, if it is quantised.
  __device__ int state_at() const {
    return (keeps_copies() ? layout.folded : layout.state) + team * layout.state_bytes;
  }
  // Whether the copies of heads that were folded are in `folded`.
  __device__ bool keeps_copies() const { return kKeeps || (kFolds && !kPlain && layout.keeps); }
  __device__ char* state() const { return shared + state_at(); }
  __device__ Barrier* barrier() const { return reinterpret_cast<Barrier*>(shared + layout.barrier) + team; }
  __device__ Barrier* slot_barrier(int slot) const {
    return reinterpret_cast<Barrier*>(shared + layout.barrier) + warp * kSlots + slot;
  }
  // Of what is folded; else of B.
  __device__ Barrier* fold_barrier() const {
    return reinterpret_cast<Barrier*>(shared + layout.barrier) + kWarps * (kPlain ? kSlots : 1);
  }
  __device__ int head_of(int k) const { return group * params.heads_per_group + group_head + k; }
  __device__ int ring_before(int record) const {  // of the record-th newest
    const int position = row.ring_row - 1 - record;
    return position < 0 ? position + problem.ring_rows : position;
  }
  __device__ int ring_row_of(int staged) const {
    return ring_position(row.ring_row, staged - history, problem.ring_rows);
  }
  // Of staged records, how many come from the ring: the new ones too, if they are there.
  __device__ int from_ring() const { return history + (params.scan.append ? 0 : T); }
  __device__ Staged* b_ring() const {
    return reinterpret_cast<Staged*>(section_of(params.scan.layer.b_ring, row.slot)) + group * problem.ring_rows * N;
  }
  // Index of a ring's row 0 of the k-th head in [G,R,H/G].
  __device__ int record_of(int k) const { return group * problem.ring_rows * params.heads_per_group + group_head + k; }
  __device__ float* delta_ring(int k) const {
    return reinterpret_cast<float*>(section_of(params.scan.layer.delta_ring, row.slot)) + record_of(k);
  }
  __device__ char* checkpoint(int head) const {
    return section_of(params.scan.layer.checkpoint, row.slot) + head * problem.checkpoint_head_bytes;
  }
  __device__ char* read_copy(int head) const {
    return section_of(params.scan.layer.read_copy, row.slot) + head * problem.read_copy_head_bytes;
  }

  // kKeeps: which heads the task-th part of those of the rows to flush are. Returns which of these rows has them.
  __device__ int place(uint32_t task) {
    const int index = params.heads(task), head = task - index * params.heads.divisor;
    group = params.group_heads(head);
    group_head = head - group * params.heads_per_group;
    heads = 1;
    return index;
  }

  // Takes the task-th part of all heads or, if the CTA folds, of those of the rows to flush. False: nothing to do.
  __device__ bool take(uint32_t task, const FlushingRows* flushing = nullptr, int fold_bits = 0) {
    if (kKeeps) {
      row_index = (*flushing)[task];  // as place() has said
    } else if (kFolds) {
      const Quotient& chunks = params.fold_chunks[fold_bits];
      const uint32_t of_group = chunks(task), index = params.groups(of_group);
      row_index = (*flushing)[index];
      group = of_group - index * params.groups.divisor;
      group_head = (task - of_group * chunks.divisor) << fold_bits;
      heads = min(1 << fold_bits, params.heads_per_group - group_head);
    } else {
      find(task);
    }
    row = params.scan.planned[row_index];
    return consider(true);
  }
  // The same of a CTA that steps and has found its task, before await_previous().
  __device__ bool peek_step() {
    row = peek_row(params.scan.planned[row_index]);
    return row.slot < params.scan.num_slots && row.count > 0 && row.history >= 0 && row.first_token >= 0 &&
           row.ring_row >= 0 && row.ring_row < problem.ring_rows &&
           row.history + static_cast<int64_t>(row.count) <= problem.config.window && consider(false);
  }

  // Which heads are the task-th part of all.
  __device__ void find(uint32_t task) {
    const bool halved = task < params.halved_tasks;
    const uint32_t whole = halved ? task / 2 : task - params.halved_tasks / 2;
    row_index = params.ctas(whole);
    const uint32_t rest = whole - row_index * params.ctas.divisor;
    group = params.chunks(rest);
    group_head = (rest - group * params.chunks.divisor) * params.cta_heads;
    heads = min(params.cta_heads, params.heads_per_group - group_head);
    if (halved) {
      const int first = min(params.cta_heads / 2, heads);
      if (task % 2 > 0) {
        group_head += first, heads -= first;
      } else {
        heads = first;
      }
    }
  }

  // Whether the row, which is known, gives the CTA work.
  __device__ bool consider(bool reports) {
    if (!admit(row, row_index, args.num_tokens, args.max_count, problem.config.window, false, params.scan.error,
               reports && (!kFolds || kKeeps) && group == 0 && group_head == 0 && tid == 0) ||
        row.count == 0) {
      return false;
    }
    const bool flagged = row.flags & REPLAYSSM_ROW_FLUSH, flushed = flagged && params.scan.flushed;
    T = kSingle ? 1 : row.count;
    h = flushed ? 0 : row.history;
    history = kFolds ? 0 : h;
    stored_before = !(row.flags & REPLAYSSM_ROW_EMPTY) || flushed;
    return kFolds || !flagged || flushed;  // else a CTA that folds has it
  }

  // kKeeps: takes the index-th row that flushes before await_previous(), by what the plan says then; all threads take
  // the same.
  __device__ bool peek(int index) {
    int32_t* const found = reinterpret_cast<int32_t*>(words(layout.query));  // a row, and which it is
    constexpr int kWords = sizeof(replayssm_plan_row) / 4;
    if (warp == 0) {
      const FlushingRows flushing = FlushingRows::peek(params);
      const int peeked = index < flushing.count ? flushing[index] : -1;
      if (peeked >= 0 && lane < kWords) {
        found[lane] = cuda::peek(reinterpret_cast<const int32_t*>(params.scan.planned + peeked)[lane]);
      }
      if (lane == 0) found[kWords] = peeked;
    }
    synchronise();
    row_index = found[kWords];
    if (row_index < 0) return false;
    row = *reinterpret_cast<const replayssm_plan_row*>(found);
    return row.slot < params.scan.num_slots && row.first_token >= 0 && row.count > 0 && row.history > 0 &&
           row.ring_row >= 0 && row.ring_row < problem.ring_rows && row.flags & REPLAYSSM_ROW_FLUSH && consider(false);
  }
  // Whether the row that is known has these fields from its slot, and from its count on.
  __device__ bool is_row(const uint2& named, const uint4& rest) const {
    const auto is = [](int32_t field, uint32_t read) { return field == static_cast<int32_t>(read); };
    return is(row.slot, named.x) && is(row.first_token, named.y) && is(row.count, rest.x) && is(row.history, rest.y) &&
           is(row.flags, rest.z) && is(row.ring_row, rest.w);
  }
  // Whether a row is the same.
  __device__ bool is_same(const replayssm_plan_row& other) const {
    return other.slot == row.slot && other.first_token == row.first_token && other.count == row.count &&
           other.history == row.history && other.flags == row.flags && other.ring_row == row.ring_row &&
           other.stream == row.stream && other.writes == row.writes;
  }

  // ---- copies ----

  // kKeeps: threads that share what is requested, by turns: what one row takes is little, and each warp has some of it.
  __device__ int turned(int warps) const { return kKeeps ? (tid + 32 * warps) % kThreads : tid; }

  // Of B, what comes from the ring from the first-th staged record on: one run of it or two.
  __device__ void request_b(int first_record, int count) const {
    Staged* const B = staged(layout.b);
    if constexpr (kBlocksOfB) {
      if (warp == kWarps - 1 && elect_lane()) {
        constexpr int kBytes = N * sizeof(Staged);
        const Staged* const ring = b_ring();
        const int first = ring_row_of(0), whole = min(count, problem.ring_rows - first);
        arrive_expecting(fold_barrier(), count * kBytes);
        if (count > 0) request_block(B, ring + first * N, whole * kBytes, fold_barrier());
        if (count > whole) request_block(B + whole * N, ring, (count - whole) * kBytes, fold_barrier());
      }
      return;
    }
    const int column = tid % kRowParts * 8;
    const Staged* const ring = b_ring() + column;
#pragma unroll 1
    for (int i = first_record + turned(1) / kRowParts; i < count; i += kRowsAtOnce) {
      request_16_bytes(B + i * N + column, ring + ring_row_of(i) * N);
    }
  }

  // B of the history and of the tokens, C, and the step sizes of all heads.
  __device__ void request_group(bool early = false) const {
    request_b(0, early ? history : from_ring());
    if (!early) request_tokens_of_group();
    if (!kKeeps) request_delta();  // else it is there
  }
  // C, and B of tokens that come as tensors or are not there yet.
  __device__ void request_tokens_of_group(bool early = false) const {
    const int part_column = tid % kRowParts * 8;
    const int64_t first_token = row.first_token;
#pragma unroll 1
    for (int s = turned(1) / kRowParts; s < T; s += kRowsAtOnce) {
      if (early && !params.scan.append) {
        request_16_bytes(new_b() + s * N + part_column,
                         b_ring() + ring_position(row.ring_row, s, problem.ring_rows) * N + part_column);
      } else if (params.scan.append) {
        request_input(new_b() + s * N + part_column,
                      static_cast<const Staged*>(args.B.data) + (first_token + s) * args.B.stride[0] +
                          group * args.B.stride[1] + part_column,
                      params.scan.b_aligned);
      }
      if (!kKeeps) {
        request_input(staged(layout.c) + s * N + part_column,
                      static_cast<const Staged*>(args.C.data) + (first_token + s) * args.C.stride[0] +
                          group * args.C.stride[1] + part_column,
                      params.scan.c_aligned);
      }
    }
#pragma unroll 1
    for (int s = turned(2) / kRowParts; kKeeps && s < T; s += kRowsAtOnce) {
      request_input(staged(layout.c) + s * N + part_column,
                    static_cast<const Staged*>(args.C.data) + (first_token + s) * args.C.stride[0] +
                        group * args.C.stride[1] + part_column,
                    params.scan.c_aligned);
    }
  }
  __device__ void request_delta() const {
    if constexpr (kFolds) {
      const int k = thread_head();
      if (k >= heads) return;
      const float* const source = delta_ring(k);
#pragma unroll 1
      for (int i = tid / kMaxCtaHeads; i < h; i += kTokenThreads) {
        request_4_bytes(&delta(k, i), source + ring_before(i) * params.heads_per_group);
      }
      return;
    }
    const float* const source = delta_ring(0);
    const int parts = params.delta_parts.divisor;
#pragma unroll 1
    for (int i = tid; i < h * parts; i += kThreads) {
      const int record = params.delta_parts(i), k = (i - record * parts) * params.delta_part;
      if (k >= heads) continue;
      const float* const part = source + ring_row_of(record) * params.heads_per_group + k;
      if (params.delta_part == 4) {
        request_16_bytes(&delta(k, record), part);
      } else {
        request_4_bytes(&delta(k, record), part);
      }
    }
  }

  // Whether a row of one token is read as such, from a quantised state.
  __device__ bool reads_one() const { return !kPlain && (kSingle || T == 1); }
  // The lane's first row of a slice's outputs: it has rows 2t, 2t + 1, 2t + 8, 2t + 9 of token g, or one of the only
  // token, of one slice of kAtOnce.
  __device__ int output_row() const { return reads_one() ? g + t / 2 * 8 + t % kAtOnce * kSliceWidth : 2 * t; }

  // Where the team's head lies in global memory, as a lane sees it.
  struct Head {
    const char* state;    // what steps read
    Staged* ring;         // of x, the lane's columns,
    const Staged* new_x;  // which also are these, of the lane's first token that comes as a tensor
    Staged* out;          // of the first token, in the lane's row of the warp's first slice
    int head;

    Head() = default;
    __device__ Head(const ReadCta& cta, int k) : head(cta.head_of(k)) {
      const replayssm_scan_args& args = cta.args;
      const int64_t first_token = cta.row.first_token;
      state = cta.problem.read_copy_head_bytes > 0 ? cta.read_copy(head) : cta.checkpoint(head);
      ring = reinterpret_cast<Staged*>(section_of(cta.params.scan.layer.x_ring, cta.row.slot)) +
             cta.record_of(k) * cta.problem.geometry.head_dim + cta.x_column;
      new_x = static_cast<const Staged*>(args.x.data);
      if (new_x) {
        new_x += (first_token + (kSingle ? 0 : cta.x_row)) * args.x.stride[0] + head * args.x.stride[1] + cta.x_column;
      }
      out = static_cast<Staged*>(args.out.data) + first_token * args.out.stride[0] + head * args.out.stride[1] +
            cta.first_slice * kSliceWidth + cta.output_row();
    }
    __device__ void advance(const ReadParams& params) {  // where warps have a head each
      state += params.advance.state;
      ring = keep(beyond(ring, params.advance.ring));
      new_x = keep(beyond(new_x, params.advance.new_x));
      out = beyond(out, params.advance.out);
    }
  };

  // Where a lane stages and finds things: bytes in shared memory. None depends on the head.
  struct Places {
    int x, new_x;   // the lane's 16 bytes of its first record and first token
    uint32_t ring;  // where the record comes from, bytes from the ring's row 0 on
    int chunk;      // of quantised states
    int terms;      // of the first head
    int run_x[2];   // the lane's row of a tile's first slice
    int out_x;      // of quantised states: the lane's row of the first slice, of the only token

    Places() = default;
    __device__ explicit Places(const ReadCta& cta) {
      const ReadShared& layout = cta.layout;
      x = keep(cta.x_at() + 2 * (cta.x_row * layout.x_stride + cta.x_column));
      new_x = keep(cta.new_x_at() + 2 * ((kSingle ? 0 : cta.x_row) * layout.x_stride + cta.x_column));
      const int oldest = cta.row.ring_row - cta.history;
      const uint32_t first_row = oldest + (oldest < 0 ? cta.problem.ring_rows : 0) + cta.x_row;
      ring = cta.wrapped(first_row * static_cast<uint32_t>(cta.params.x_ring_stride));
    }
    // What is read of a head that has been requested.
    __device__ void find_inputs(const ReadCta& cta) {
      const ReadShared& layout = cta.layout;
      if (!kPlain) chunk = keep(cta.state_at());
      terms = keep(layout.terms + cta.team * layout.terms_stride * 4);
      run_x[0] = keep(cta.run_at(0)), run_x[1] = keep(cta.run_at(1));
      if (!kPlain) out_x = keep(cta.new_x_at() + 2 * (cta.first_slice * kSliceWidth + cta.output_row()));
    }
  };
  // The same for queries to a quantised state.
  struct QueryPlaces {
    int head_scale;
    int column_scales, query, scaled;  // of the two words of C that the lane scales
    // Of a row's only token:
    int operand;
    int weights, next_weights;  // of the history: of the first head; from head to head
    int part;                   // that the lane takes of them

    QueryPlaces() = default;
    __device__ explicit QueryPlaces(const ReadCta& cta) {
      const ReadShared& layout = cta.layout;
      const int lane = cta.lane;
      const int column = State::query_column(lane / 2 % 4, lane / 8 * 4 + lane % 2 * 2),
                copy = layout.scaled + cta.warp * kQueryStride * 4;
      head_scale = keep(cta.state_at() + cta.params.state_bytes - 16);
      column_scales = keep(head_scale - N + column);
      query = keep(layout.query + 8 * lane);
      scaled = keep(copy + 8 * lane);
      // Zeros where the lane brings none of a product's column.
      operand = keep(cta.g == 2 * cta.t ? (State::kColumnScales ? copy : layout.query) + 16 * cta.t : layout.zeros);
      // Column 0 of a product has the upper halves of weights, column 2 what these leave out, the others zeros.
      const bool brings = cta.g == 0 || cta.g == 2;
      weights = keep((brings ? layout.v : layout.zeros) + 8 * cta.t);
      next_weights = keep(brings ? 4 * layout.delta_stride : 0);
      part = keep(cta.g == 0 ? 0x7632 : 0x5410);
    }
    // Of a tile of the k-th head.
    __device__ uint2 weights_of(const char* shared, int k, int tile) const {
      const char* const at = shared + weights + k * next_weights + (next_weights > 0 || tile < 2 ? 64 * tile : 0);
      const uint2 first = *reinterpret_cast<const uint2*>(at), second = *reinterpret_cast<const uint2*>(at + 32);
      return make_uint2(__byte_perm(first.x, first.y, part), __byte_perm(second.x, second.y, part));
    }
  };

  // ---- a head's state and x ----

  // Whether what steps read has been stored.
  __device__ bool has_state() const { return kFolds || stored_before; }

  // `bytes`, but not before what was loaded last from where a block is to go has come: of each load a part of `loaded`.
  // Nothing else orders them. Loads stand in line behind other warps' stores, and blocks don't.
  __device__ int after(uint32_t loaded, int bytes) const { return bytes + (loaded & params.nothing); }

  // What the team's head takes: its state and x.
  __device__ void request_head(const Head& head, const Places& places, uint32_t loaded = 0, bool early = false) const {
    // Else it is zero, there, or comes slice by slice.
    if (!kPlain && has_state() && !keeps_copies()) request_state(head.state, loaded);
    if (kKeeps) return;  // x is there
    if (early) {
      request_x(head, places, 0, history);
    } else {
      request_x(head, places);
    }
  }
  // The lane's records of x, from the first-th on.
  __device__ void request_x(const Head& head, const Places& places, int first, int end) const {
    Staged* target = staged(places.x);
    uint32_t from = places.ring;
#pragma unroll 1
    for (int i = x_row; i < end; i += x_rows) {
      if (i >= first) request_16_bytes(target, beyond(head.ring, from));
      target += x_rows * layout.x_stride;
      from = wrapped(from + x_rows * params.x_ring_stride);
    }
  }
  // x of all records, or of the tokens.
  __device__ void request_x(const Head& head, const Places& places, int first = 0) const {
    request_x(head, places, first, from_ring());
    if (!params.scan.append) return;
    Staged* target = staged(places.new_x);
    const Staged* source = head.new_x;
#pragma unroll 1
    for (int s = x_row; s < T; s += x_rows, source += x_rows * args.x.stride[0]) {
      request_input(target, source, params.scan.x_aligned);
      if (kSingle) break;
      target += x_rows * layout.x_stride;
    }
  }
  // A place in the ring of x that may be one round too far.
  __device__ uint32_t wrapped(uint32_t bytes) const { return min(bytes, bytes - params.x_ring_bytes); }

  __device__ void request_state(const char* source, uint32_t loaded) const {
    const int bytes = after(loaded, params.state_bytes);
#if __CUDA_ARCH__ >= 900
    if (member == 0 && elect_lane()) {
      arrive_expecting(barrier(), bytes);
      request_block(state(), source, bytes, barrier());
    }
#else
#pragma unroll 4
    for (int i = (member * 32 + lane) * 16; i < bytes; i += 512 << team_bits) {
      request_16_bytes(state() + i, source + i);
    }
#endif
  }
  // Until the team's head is there, for what this thread requested and for blocks. parity: of the heads before it.
  __device__ void await_head(int parity) const {
    await_groups<0>();
#if __CUDA_ARCH__ >= 900
    if (!kPlain && has_state() && !keeps_copies()) await(barrier(), parity);
#endif
  }

  // The slices of a plain checkpoint that a warp reads, head after head, through a ring of slots: what has been read
  // makes room for the next.
  struct Slices {
    const char* next;      // to request
    int gap;               // bytes between the warp's slices of two heads
    int left, of_head;     // to request: in all; of the head of `next`
    int own;               // of a head
    int places, barriers;  // of the slots, bytes in shared memory
    int slot;              // to be read
    uint32_t parity;       // of how often it was read

    Slices() = default;
    __device__ Slices(const ReadCta& cta, const Head& head) : own(keep(max(cta.own_slices, 0))), slot(0), parity(0) {
      next = head.state + cta.first_slice * kSliceBytes;
      gap = keep(static_cast<int>(cta.params.advance.state) - own * kSliceBytes);
      const int heads = cta.team >= cta.heads ? 0
                        : cta.team_bits > 0   ? 1
                                              : (cta.heads - cta.team + kWarps - 1) / kWarps;
      left = cta.has_state() && !cta.kKeeps ? heads * own : 0;
      of_head = own;
      places = keep(cta.kKeeps ? cta.layout.folded + cta.first_slice * kSliceBytes
                               : cta.layout.state + cta.warp * kSlots * kSliceBytes);
      barriers = keep(cta.layout.barrier + cta.warp * kSlots * 8);
    }
  };
  __device__ char* slot_of(const Slices& slices, int index) const {
    return shared + slices.places + index * kSliceBytes;
  }
  __device__ Barrier* barrier_of(const Slices& slices, int index) const {
    return reinterpret_cast<Barrier*>(shared + slices.barriers) + index;
  }
  __device__ void request_slice(Slices& slices, int index, uint32_t loaded = 0) const {
    if (slices.left == 0) return;
    char* const target = slot_of(slices, index);
    Barrier* const barrier = barrier_of(slices, index);
#if __CUDA_ARCH__ >= 900
    if (elect_lane()) {
      const int bytes = after(loaded, kSliceBytes);
      arrive_expecting(barrier, bytes);
      request_block(target, slices.next, bytes, barrier);
    }
#else
#pragma unroll
    for (int i = 0; i < kSliceBytes; i += 512) request_16_bytes(target + i + 16 * lane, slices.next + i + 16 * lane);
    arrive_with_requests(barrier);
#endif
    slices.next += kSliceBytes, --slices.left;
    if (--slices.of_head == 0) slices.of_head = slices.own, slices.next += slices.gap;
  }
  __device__ void begin_slices(Slices& slices) const {
    if (!has_state()) {
      for (int i = 16 * lane; i < kSlots * kSliceBytes; i += 512) {
        *reinterpret_cast<uint4*>(slot_of(slices, 0) + i) = make_uint4(0, 0, 0, 0);
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) request_slice(slices, i);
  }
  // For a whole warp: the next slice, in registers.
  template <typename Places>
  __device__ State take_slice(Slices& slices, const Places& places) const {
    if (has_state() && !kKeeps) await(barrier_of(slices, slices.slot), slices.parity);
    const State state(slot_of(slices, slices.slot), places);
    __syncwarp();
    request_slice(slices, slices.slot, state.loaded());
    if (++slices.slot == kSlots && !kKeeps) slices.slot = 0, slices.parity ^= 1;
    return state;
  }

  // The new x into the ring, if it is not there.
  __device__ void append_x(const Head& head, const Places& places) const {
    if (!params.scan.append) return;
#pragma unroll 1
    for (int s = x_row; s < T; s += x_rows) {
      const int position = kSingle ? row.ring_row : ring_position(row.ring_row, s, problem.ring_rows);
      *reinterpret_cast<uint4*>(beyond(head.ring, position * params.x_ring_stride)) =
          *reinterpret_cast<const uint4*>(staged(places.new_x) + (s - x_row) * layout.x_stride);
      if (kSingle) break;
    }
  }

  // ---- what all heads share ----

  // C in FP16, or in BF16 for states of this type, by warps from the last on.
  __device__ void form_query() const {
#pragma unroll 1
    for (int s = kWarps - 1 - warp; s < T; s += kWarps) {
      const Staged* const token = staged(layout.c) + s * N;
      float value[4];
      load_shared<4>(token + lane * 4, value);
      uint32_t* const query = words(layout.query) + s * kQueryStride;
      if constexpr (std::is_same_v<Format, __nv_bfloat16>) {
        if (lane == 0) floats(layout.query_scale)[s] = 1.0f;
#pragma unroll
        for (int part = 0; part < State::template kQueryParts<Staged>; ++part) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            query[part * layout.tokens * kQueryStride + State::query_word(2 * lane + i)] =
                take_part(value[2 * i], value[2 * i + 1]);
          }
        }
        continue;
      }
      uint32_t amax = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) amax = max(amax, magnitude_bits(value[i]));
      // 2^14 for the largest value; below 2^-100 the scale stays.
      const uint32_t exponent = max(__reduce_max_sync(~0u, amax) >> 23, 27u);
      const float scale = bits_float((268 - exponent) << 23);
      if (lane == 0) floats(layout.query_scale)[s] = bits_float((exponent - 14) << 23) * State::kUnit;
      if constexpr (kPlain) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          query[State::query_word(2 * lane + i)] = pack_pair<__half>(value[2 * i] * scale, value[2 * i + 1] * scale);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int owner = lane / 8, index = lane % 8 * 2 + i, column = State::query_column(owner, index);
          query[index / 4 * 16 + owner * 4 + index % 4] =
              pack_pair<__half>(static_cast<float>(token[column]) * scale,
                                static_cast<float>(token[column + State::kColumnStep]) * scale);
        }
      }
    }
  }

  // B^T C, 16 records by 8 tokens at a time; rows and columns beyond the last repeat it. Behind the history its part
  // has zeros.
  __device__ void form_products() const {
    constexpr int kTile = 8;
    const int count = history + T;
#pragma unroll 1
    for (int first = 16 * warp; first < count; first += 16 * kWarps) {
#pragma unroll 1
      for (int token = 0; token < T; token += kTile) {
        float sum[2][4] = {};
        multiply_records<N>(staged(layout.b), first, count, staged(layout.c), token, T, g, t, sum);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int record = first + g + i / 2 * 8, s = token + 2 * t + i % 2;
          const float product = sum[0][i] + sum[1][i];
          if (s >= T) continue;
          if (!kFolds) floats(layout.g)[s * layout.g_stride + record] = record < history ? product : 0.0f;
          if (record >= history && record < count) {
            floats(layout.g_new)[(record - history) * layout.tokens + s] = product;
          }
        }
      }
    }
  }

  // ---- the weights of all heads ----

  // A thread's head and its first token. Threads of the third warp begin, which has least to do.
  __device__ int thread_head() const { return tid % kMaxCtaHeads; }
  __device__ int thread_token() const { return (tid / kMaxCtaHeads + kTokenThreads / 2) % kTokenThreads; }
  static constexpr int kThreadTokens = kSingle ? 1 : (REPLAYSSM_MAX_STEP_TOKENS + kTokenThreads - 1) / kTokenThreads;

  // The inputs of the thread's tokens.
  struct TokenInputs {
    uint32_t dt[kThreadTokens] = {}, bias = 0, rate = 0, skip = 0;
  };
  __device__ TokenInputs load_tokens() const {
    TokenInputs inputs;
    const int head = head_of(thread_head());
    if (thread_head() >= heads || thread_token() >= T) return inputs;
#pragma unroll
    for (int i = 0; i < kThreadTokens; ++i) {
      const int64_t s = thread_token() + i * kTokenThreads;
      if (s >= T) continue;
      inputs.dt[i] =
          load_bits(args.dt.data, args.dt.dtype, (row.first_token + s) * args.dt.stride[0] + head * args.dt.stride[1]);
    }
    if (args.dt_bias.data) inputs.bias = load_bits(args.dt_bias.data, args.dt_bias.dtype, head);
    if (args.D.data) inputs.skip = load_bits(args.D.data, args.D.dtype, head);
    inputs.rate = load_bits(args.A_log.data, args.A_log.dtype, head);
    return inputs;
  }

  // Step sizes.
  __device__ void discretise_tokens(const TokenInputs& inputs) const {
    const int k = thread_head();
    if (k >= heads) return;
#pragma unroll
    for (int i = 0; i < kThreadTokens; ++i) {
      const int s = thread_token() + i * kTokenThreads;
      if (s >= T) continue;
      const float step = discretised_step(bits_to_float(inputs.dt[i], args.dt.dtype),
                                          bits_to_float(inputs.bias, args.dt_bias.dtype), args.dt_min, args.dt_max);
      delta(k, h + s) = step;
      delta_ring(k)[ring_position(row.ring_row, s, problem.ring_rows) * params.heads_per_group] = step;
    }
  }
  // The same, and decay rates and e(i,h), whose sums begin with the newest record; d.
  __device__ void discretise(const TokenInputs& inputs) const {
    discretise_tokens(inputs);
    const int k = thread_head();
    if (k >= heads || thread_token() > 0) return;
    const float rate = -expf(bits_to_float(inputs.rate, args.A_log.dtype));
    floats(layout.rate)[k] = rate;
    float* const exponents = floats(layout.v) + k * layout.delta_stride;
    float sum = 0.0f;
#pragma unroll 4
    for (int i = history - 1; i >= 0; --i) {
      exponents[i] = sum;
      sum = __fadd_rn(sum, __fmul_rn(rate, delta(k, i)));
    }
    floats(layout.decay)[k] = expf(sum);
  }

  // exp(f_s) and u.
  __device__ void weigh_tokens(const TokenInputs& inputs) const {
    const int k = thread_head(), stride = layout.tokens;
    if (k >= heads) return;
    const float rate = floats(layout.rate)[k], skip = bits_to_float(inputs.skip, args.D.dtype);
    float* const since = floats(layout.terms) + k * layout.terms_stride;
    float* const u = since + stride;
#pragma unroll 1
    for (int s = thread_token(); s < T; s += kTokenThreads) {
      float exponent = 0.0f;
#pragma unroll 1
      for (int r = s; r >= 0; --r) {
        const float product = floats(layout.g_new)[r * stride + s];
        u[r * stride + s] = fmaf(record_weight(delta(k, h + r), exponent), product, r == s ? skip : 0.0f);
        exponent = __fadd_rn(exponent, __fmul_rn(rate, delta(k, h + r)));
      }
      since[s] = expf(exponent);
    }
    // Beside the two terms of an only token what else its sums are multiplied by.
    if (kSingle && !kPlain && thread_token() == 0) {
      since[2] = kFolds ? 1.0f : floats(layout.decay)[k];
      since[3] = *floats(layout.query_scale);
    }
  }

  // A weight times B^T C in two parts of BF16: the upper half, and what this leaves out.
  __device__ static float weight_in_parts(float weight, float product) {
    const uint32_t bits = float_bits(__fmul_rn(weight, product)), upper = bits & 0xffff0000u;
    const float rest = __fsub_rn(bits_float(bits), bits_float(upper));
    return bits_float(upper | pack_pair<__nv_bfloat16>(rest, 0.0f));
  }

  // v in the place of the exponents, and zeros up to a multiple of 16. A row's only token, to a quantised state, takes
  // v times B^T C instead, in parts.
  __device__ void weigh_records() const {
    constexpr int kTile = 16, kHeads = kThreads / kTile;
#pragma unroll 1
    for (int k = tid / kTile; k < heads; k += kHeads) {
      float* const v = floats(layout.v) + k * layout.delta_stride;
#pragma unroll 1
      for (int i = tid % kTile; i < round_up(history, kTile); i += kTile) {
        const float weight = i < history ? record_weight(delta(k, i), v[i]) : 0.0f;
        if (reads_one()) {
          v[i] = weight_in_parts(weight, floats(layout.g)[i]);
        } else {
          v[i] = weight;
        }
      }
    }
  }

  // The same where weigh_records() has not been told of B^T C.
  __device__ void take_parts_of_weights() const {
    constexpr int kTile = 16, kHeads = kThreads / kTile;
#pragma unroll 1
    for (int k = tid / kTile; k < heads; k += kHeads) {
#pragma unroll 1
      for (int i = tid % kTile; i < history; i += kTile) {
        float& v = floats(layout.v)[k * layout.delta_stride + i];
        v = weight_in_parts(v, floats(layout.g)[i]);
      }
    }
  }

  // Of the k-th head, the history's and behind it the tokens'.
  __device__ float& delta(int k, int record) const {
    return floats(layout.delta)[kFolds ? k * layout.delta_stride + record : record * params.cta_heads + k];
  }

  // Of the k-th head that is folded: weights of its records, and behind them the decay.
  __device__ float* fold_weights(int k) const { return floats(layout.v) + (kKeeps ? warp : k) * layout.delta_stride; }

  // All that precedes the heads. The first heads of all teams have been requested, and before them the group. In wide
  // CTAs that fold the history has been weighed.
  __device__ void prepare(const TokenInputs& inputs) const {
    if (kKeeps) {
      await_requests();
    } else {
      await_groups<1>();
    }
    synchronise();
    if (kBlocksOfB) await(fold_barrier(), 0);
    append_b();
    form_products();
    form_query();
    discretise(inputs);
    synchronise();
    if (!kFolds) {
      weigh_records();
    } else if (!kKeeps) {
#pragma unroll 1
      for (int k = warp; k < heads; k += kWarps) {
        const float decay = weigh_history(floats(layout.delta) + k * layout.delta_stride, floats(layout.rate)[k], h,
                                          lane, fold_weights(k));
        if (lane == 0) fold_weights(k)[layout.delta_stride - 1] = decay;
      }
    }
    weigh_tokens(inputs);
    if (!kFolds && team_bits > 0 && team < heads) await_head(0);
    synchronise();
  }
  // The new B into the ring, if it is not there.
  __device__ void append_b() const {
    if (params.scan.append && group_head == 0) {
      const int part_column = tid % kRowParts * 8;
#pragma unroll 1
      for (int s = tid / kRowParts; s < T; s += kRowsAtOnce) {
        *reinterpret_cast<uint4*>(b_ring() + ring_position(row.ring_row, s, problem.ring_rows) * N + part_column) =
            *reinterpret_cast<const uint4*>(new_b() + s * N + part_column);
      }
    }
  }

  // ---- folding ----

  // A head's checkpoint and its records of x, oldest first, before which lie zeros.
  __device__ Staged* folded_x() const { return staged(layout.folded_x) + kZeroRows * problem.geometry.head_dim; }
  __device__ void request_fold(int head) const {
    const int P = problem.geometry.head_dim, bytes = stored_before ? problem.checkpoint_head_bytes : 0;
    const Staged* const ring =
        reinterpret_cast<Staged*>(section_of(params.scan.layer.x_ring, row.slot)) + record_of(head - head_of(0)) * P;
#if __CUDA_ARCH__ >= 900
    if (warp == (kKeeps ? 5 : 0) && elect_lane()) {
      arrive_expecting(fold_barrier(), bytes);
      if (bytes > 0) request_block(shared + layout.checkpoint, checkpoint(head), bytes, fold_barrier());
    }
#else
    const char* const source = checkpoint(head);
#pragma unroll 4
    for (int i = tid * 16; i < bytes; i += kThreads * 16) request_16_bytes(shared + layout.checkpoint + i, source + i);
#endif
    int record = params.x_parts(tid);
    const int column = (tid - record * params.x_parts.divisor) * 8;
    if (record >= params.fold_rows) record = h;
    int position = ring_before(record);
    Staged* target = folded_x() + (h - 1 - record) * P + column;
#pragma unroll 1
    for (; record < h; record += params.fold_rows) {
      request_16_bytes(target, beyond(ring + column, position * params.x_ring_stride));
      target -= params.fold_rows * P;
      position -= params.fold_rows;
      if (position < 0) position += problem.ring_rows;
    }
    if constexpr (kReadsFolds) {
      for_new_x(head - head_of(0), [&](Staged* target, const Staged* in_ring, const Staged* given) {
        if (params.scan.append) {
          request_input(target, given, params.scan.x_aligned);
        } else {
          request_16_bytes(target, in_ring);
        }
      });
    }
#if __CUDA_ARCH__ >= 900
    arrive_with_requests(fold_barrier());
#endif
  }
  // kReadsFolds: where x of the new tokens of the k-th head lies, which comes with its checkpoint; two heads' have
  // room.
  __device__ int folded_new_x(int k) const { return layout.x + k % 2 * layout.tokens * layout.x_stride * 2; }
  // Calls move() with where the 16 bytes of it that the thread has lie: in shared memory, in the ring, in the tensor.
  template <typename Move>
  __device__ void for_new_x(int k, Move&& move) const {
    const int P = problem.geometry.head_dim, first = params.x_parts(tid);
    const int column = (tid - first * params.x_parts.divisor) * 8;
    Staged* const ring =
        reinterpret_cast<Staged*>(section_of(params.scan.layer.x_ring, row.slot)) + record_of(k) * P + column;
    const Staged* const given = static_cast<const Staged*>(args.x.data) + head_of(k) * args.x.stride[1] + column;
#pragma unroll 1
    for (int s = first < params.fold_rows ? first : T; s < T; s += params.fold_rows) {
      move(staged(folded_new_x(k)) + s * layout.x_stride + column,
           beyond(ring, ring_position(row.ring_row, s, problem.ring_rows) * params.x_ring_stride),
           given + (static_cast<int64_t>(row.first_token) + s) * args.x.stride[0]);
    }
  }
  __device__ void await_fold(int parity) const {
#if __CUDA_ARCH__ >= 900
    await(fold_barrier(), parity);
#else
    await_requests();
    synchronise();
#endif
  }

  // B of the history as operands, and zeros to a multiple of 16 records, by 16 records at a time.
  static constexpr bool kInParts = std::is_same_v<Staged, __nv_bfloat16>;
  static constexpr int kWideners = kThreads / (4 * kRowParts);  // threads that have a share of other records
  using RawHistory = uint4[4];
  __device__ void load_history(int first, RawHistory& raw) const {
    const int t = tid / kRowParts % 4, part = tid % kRowParts;
    const Staged* const ring = b_ring() + part * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int record = 16 * first + 8 * (i / 2) + (kInParts ? 2 * t + i % 2 : 4 * (i % 2) + t);
      raw[i] = make_uint4(0, 0, 0, 0);
      if (record >= h) continue;
      const auto* const from = reinterpret_cast<const uint4*>(ring + ring_before(record) * N);
      raw[i] = kKeeps ? load_early(from) : *from;
    }
  }
  __device__ int first_widened() const { return tid / (4 * kRowParts); }
  __device__ void widen_history(RawHistory& raw) const {  // with what first_widened() has loaded
    const int t = tid / kRowParts % 4, part = tid % kRowParts;
#pragma unroll 1
    for (int first = first_widened(); 16 * first < h;) {
      float* const target = floats(0) + (kOperandRows<Staged> * first + t) * kPairStride + 16 * part;
      if constexpr (kInParts) {
        const auto& word = reinterpret_cast<const uint32_t (&)[4][4]>(raw);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          reinterpret_cast<uint4*>(target)[j] =
              make_uint4(__byte_perm(word[0][j], word[1][j], 0x5410), __byte_perm(word[2][j], word[3][j], 0x5410),
                         __byte_perm(word[0][j], word[1][j], 0x7632), __byte_perm(word[2][j], word[3][j], 0x7632));
        }
      } else {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          float value[2][8];
          for (int i = 0; i < 2; ++i) Packed<Staged>::unpack(raw[2 * n + i], value[i]);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            reinterpret_cast<float4*>(target + n * 4 * kPairStride)[j] =
                make_float4(value[0][2 * j], value[1][2 * j], value[0][2 * j + 1], value[1][2 * j + 1]);
          }
        }
      }
      first += kWideners;
      if (16 * first < h) load_history(first, raw);
    }
  }

  // The first of the warp's halves of slices, and which of kSlicesAtOnce slices it folds.
  __device__ int fold_half() const { return kHalves == 1 ? warp / kSlicesAtOnce : 0; }
  __device__ int fold_index() const { return warp % kSlicesAtOnce; }

  __device__ void load_stored(int slice, SlicePart<kHalves>& state) const {
    const char* const slices = shared + layout.checkpoint;
    const int at = slice * kSliceWidth * N + fold_half() * (N / 2);
    if constexpr (kPlain) {
      load_slice(reinterpret_cast<const Format*>(slices) + at, lane, state);
    } else if (problem.config.checkpoint == REPLAYSSM_CHECKPOINT_FP32) {
      load_slice(reinterpret_cast<const float*>(slices) + at, lane, state);
    } else if (problem.config.checkpoint == REPLAYSSM_CHECKPOINT_BF16) {
      load_slice(reinterpret_cast<const __nv_bfloat16*>(slices) + at, lane, state);
    } else {
      load_slice(reinterpret_cast<const __half*>(slices) + at, lane, state);
    }
  }

  // Of the lane-th head.
  __device__ RoundingKey fold_keys() const {
    const StateOwner owner{problem,   params.scan.layer, params.scan.error, head_of(min(lane, heads - 1)),
                           row_index, row.stream,        row.writes};
    return owner.key();
  }

  // The state of a slice of the k-th head.
  __device__ __forceinline__ void form_slice(int k, int slice, SlicePart<kHalves>& state) const {
    if (stored_before) {
      load_stored(slice, state);
    } else {
#pragma unroll
      for (float& value : reinterpret_cast<float (&)[2 * kHalves * kBlock]>(state)) value = 0.0f;
    }
    const int P = problem.geometry.head_dim;
    fold_slice<kHalves>(state, folded_x() + (h - 1) * P + slice * kSliceWidth + 2 * g, -P, floats(0) + fold_half() * N,
                        fold_weights(k), fold_weights(k)[layout.delta_stride - 1], h, lane, params.tf32_mask);
  }

  // What one warp has put where `folded` is, to global memory.
  __device__ void send_folded(char* target, int offset, int bytes) const {
    finish_stores_before_blocks();
    __syncwarp();
#if __CUDA_ARCH__ >= 900
    if (elect_lane()) send_block(target + offset, shared + layout.folded + offset, bytes);
#else
    for (int i = offset + lane * 16; i < offset + bytes; i += 512) {
      *reinterpret_cast<uint4*>(target + i) = *reinterpret_cast<const uint4*>(shared + layout.folded + i);
    }
#endif
  }
  __device__ void await_folded_read() const {
    if (elect_lane()) await_blocks_read();
    __syncwarp();
  }

  // Plain checkpoints, of which steps read what is stored.
  template <typename Ask>
  __device__ __forceinline__ bool fold_plain_heads(RoundingKey keys, const Ask& ask) const {
    const bool together = params.slices <= kSlicesAtOnce;  // a head's slices are in registers all at once
    const bool stochastic = problem.config.checkpoint == REPLAYSSM_CHECKPOINT_FP16_SR;
#pragma unroll 1
    for (int k = 0; k < heads; ++k) {
      const int head = head_of(k);
      const RoundingKey key{{__shfl_sync(~0u, keys.word[0], k), __shfl_sync(~0u, keys.word[1], k)}};
      bool finite = true;
      await_fold(k % 2);
      if (kReadsFolds && params.scan.append) {
        for_new_x(k, [](const Staged* from, Staged* in_ring, const Staged*) {
          *reinterpret_cast<uint4*>(in_ring) = *reinterpret_cast<const uint4*>(from);
        });
        synchronise();  // other threads may have stored x
      }
      // A warp that has none forms the last one too, but stores it only where all is sent at once, after a barrier:
      // elsewhere another warp may be sending it by then.
      const bool stores = kKeeps || fold_index() < params.slices;
      const int first_slice = min(fold_index(), params.slices - 1);
      int slice = first_slice;
      while (true) {
        SlicePart<kHalves> state;
        form_slice(k, slice, state);
        if (kKeeps && slice == first_slice && !ask()) return false;
        if (!kKeeps) await_folded_read();
        if (!kKeeps && together && heads > 1) {
          synchronise();  // all have read the checkpoint and x that the next head's replace
          if (k + 1 < heads) request_fold(head + 1);
        }
        if (stores) {
          const int p = slice * kSliceWidth + 2 * g;
          const int column = column_of(lane, fold_half());
          Format* const target = reinterpret_cast<Format*>(shared + layout.folded) + p * N + column;
          const float amax = slice_amax<kHalves>(state);
          if (std::is_same_v<Format, __half> && stochastic) {
            const bool moderate = amax < 65472.0f;
            if constexpr (std::is_same_v<Format, __half>) {
              store_stochastic<kHalves>(state, key, row.writes, p, column, target, moderate);
              if (!moderate) finite = finite && is_stored_finite<kHalves>(target);
            }
          } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) store_nearest<Format, kHalves>(state[i], target + i * N);
            finite = finite && float_bits(amax) < infinite_from(problem.config.checkpoint);
          }
        }
        if (!kKeeps && stores) {
          send_folded(checkpoint(head), slice * kSliceBytes, kSliceBytes);
          read_folded(k, slice);
        }
        slice += kSlicesAtOnce;
        if (slice >= params.slices) break;
      }
      report_if(!finite, head);
      if (!together && k + 1 < heads) {
        synchronise();
        request_fold(head + 1);
      }
    }
    return true;
  }

  // A lane's part of a slice into a plain checkpoint, to nearest. stored: its first column.
  __device__ __forceinline__ static void store_nearest_slice(int format, const SlicePart<kHalves>& state,
                                                             char* stored) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (format == REPLAYSSM_CHECKPOINT_FP32) {
        store_nearest<float, kHalves>(state[i], reinterpret_cast<float*>(stored) + i * N);
      } else if (format == REPLAYSSM_CHECKPOINT_BF16) {
        store_nearest<__nv_bfloat16, kHalves>(state[i], reinterpret_cast<__nv_bfloat16*>(stored) + i * N);
      } else {
        store_nearest<__half, kHalves>(state[i], reinterpret_cast<__half*>(stored) + i * N);
      }
    }
  }

  // The lane's second row of a slice in the place of its first.
  __device__ static void take_second_row(SlicePart<kHalves>& state) {
#pragma unroll
    for (int b = 0; b < kHalves; ++b)
#pragma unroll
      for (int j = 0; j < kBlock; ++j) state[0][b][j] = state[1][b][j];
  }

  // Reports a state that was stored and is not finite.
  __device__ __forceinline__ void report_if(bool not_finite, int head) const {
    if (!not_finite) return;
    const StateOwner owner{problem, params.scan.layer, params.scan.error, head, row_index, row.stream, row.writes};
    owner.report_not_finite();
  }

  // With a read copy, of which steps read what is cast.
  template <typename Ask>
  __device__ __forceinline__ bool fold_heads(RoundingKey keys, const Ask& ask) const {
    const int P = problem.geometry.head_dim, checkpoint_format = problem.config.checkpoint;
    const int stored_size = checkpoint_format == REPLAYSSM_CHECKPOINT_FP32 ? 4 : 2;
    // A warp that has none of its own does the last one too: the same bits, to the same places. (A path on which
    // nothing is formed would keep registers for it.)
    const int first_slice = min(fold_index(), params.slices - 1);
    const int more = (params.slices - 1 - first_slice) / kSlicesAtOnce;  // slices of the warp but its first
    if (!kKeeps && warp == 0 && lane < heads) {  // out of the registers, to where nothing is needed any more
      words(layout.rate)[lane] = keys.word[0], words(layout.decay)[lane] = keys.word[1];
    }
#pragma unroll 1
    for (int k = 0; k < heads; ++k) {
      const int head = head_of(k);
      await_fold(k % 2);
      char* const copy = keeps_copies() ? shared + layout.folded + k * layout.state_bytes : read_copy(head);
      HeadCast cast{copy, P, 0, 0.0f, floats(layout.inverse) + fold_half() * (N / 2)};
      SlicePart<kHalves> state;
      float of_lane_amax = 0.0f;
      BlockMaxima<kHalves> block_amax;
      bool finite = true;
      // The warp's slices down to the first, for their maxima, and from there on again, to be stored. One loop, for the
      // instruction cache: what several slices need must not lie in the way of one.
      for (int visit = -more;; ++visit) {
        const int slice = first_slice + abs(visit) * kSlicesAtOnce;
        form_slice(k, slice, state);
        if constexpr (!State::kColumnScales) find_block_maxima<kHalves>(state, block_amax);
        if (visit <= 0) {
          if constexpr (State::kColumnScales) {
            of_lane_amax = column_maxima(
                state, lane, reinterpret_cast<float4*>(shared + layout.scratch + warp * layout.scratch_stride),
                visit > -more);
          } else {
            of_lane_amax = larger_magnitude(of_lane_amax, largest<kHalves>(block_amax));
          }
          if (visit < 0) continue;
          const uint32_t of_warp = __reduce_max_sync(~0u, float_bits(of_lane_amax));
          if (lane == 0) words(layout.warp_max)[warp] = of_warp;
          if (kKeeps) {
            if (!ask()) return false;
          } else {
            synchronise();
          }
#pragma unroll
          for (int i = 0; i < kWarps; ++i) cast.amax = max(cast.amax, words(layout.warp_max)[i]);
          cast.scale = store_scales(copy, cast.amax);
          if (!kKeeps) {
            finish_stores_before_blocks();
            if constexpr (State::kColumnScales) synchronise();
          }
        }
        if (!kKeeps && visit == more && k + 1 < heads) {
          if (params.slices > kSlicesAtOnce) synchronise();  // others may form theirs once more
          request_fold(head + 1);
        }
        const int p = slice * kSliceWidth + 2 * g;
        const int column = column_of(lane, fold_half());
        char* stored = checkpoint(head) + (p * N + column) * stored_size;
        const bool stochastic = checkpoint_format == REPLAYSSM_CHECKPOINT_FP16_SR;
        if (stochastic) {
          const RoundingKey key = kKeeps ? keys : RoundingKey{{words(layout.rate)[k], words(layout.decay)[k]}};
          const bool moderate = cast.amax < float_bits(65472.0f);
          __half* const target = reinterpret_cast<__half*>(stored);
          store_stochastic<kHalves>(state, key, row.writes, p, column, target, moderate);
          if (!moderate) finite = finite && is_stored_finite<kHalves>(target);
        }
        if (kKeeps && State::kColumnScales && visit == 0) synchronise();  // only now are these needed
        if constexpr (std::is_same_v<Format, Nvfp4Amax>) {
          if (!stochastic) store_nearest_slice(checkpoint_format, state, stored);
          cast_slice<kHalves>(state, block_amax, p, fold_half(), lane, cast, AmaxHead(cast.scale));
        } else {
#pragma unroll 1
          for (int i = 0; i < 2; ++i) {  // a loop, for the instruction cache
            if (stochastic) {
              // stored above
            } else if (checkpoint_format == REPLAYSSM_CHECKPOINT_FP32) {
              store_nearest<float, kHalves>(state[0], reinterpret_cast<float*>(stored));
            } else if (checkpoint_format == REPLAYSSM_CHECKPOINT_BF16) {
              store_nearest<__nv_bfloat16, kHalves>(state[0], reinterpret_cast<__nv_bfloat16*>(stored));
            } else {
              store_nearest<__half, kHalves>(state[0], reinterpret_cast<__half*>(stored));
            }
            cast_row<Format>(state[0], p + i, fold_half(), lane, cast);
            if (i > 0) break;
            stored += N * stored_size;
            take_second_row(state);
          }
        }
        if (visit == more) break;
      }
      report_if(!finite || cast.amax >= infinite_from(checkpoint_format), head);
    }
    return true;
  }

  // The scale of the head, and of columns: to the copy, what columns are multiplied by to shared memory.
  __device__ __forceinline__ float store_scales(char* copy, uint32_t head_amax) const {
    if constexpr (std::is_same_v<Format, Fp8>) {
      return 0.0f;
    } else {
      const BlockChunk<Format> chunk{problem.geometry.head_dim, N};
      const float head_scale = Format::head_scale(head_amax);
      if (tid == 0) {  // and the zeros behind it
        *reinterpret_cast<uint4*>(copy + chunk.head_scale()) = make_uint4(float_bits(head_scale), 0, 0, 0);
      }
      if constexpr (Format::kColumnScales) {
        static_assert(kThreads >= N);
        if (tid < N) {
          // What warps have put into their scratch: of all columns or, twice, of a half.
          float amax = 0.0f;
#pragma unroll
          for (int i = 0; i < kWarps; ++i) {
            const int of_half = kHalves == 1 ? tid / 64 * kSlicesAtOnce + i % kSlicesAtOnce : i;
            const int index = kHalves == 1 ? tid % 64 + i / kSlicesAtOnce * 64 : tid;
            amax = larger_magnitude(amax, floats(layout.scratch + of_half * layout.scratch_stride)[index]);
          }
          copy[chunk.column_scales() + tid] =
              static_cast<char>(scale_column(amax, head_amax, head_scale, floats(layout.inverse)[tid]));
        }
      }
      return head_scale;
    }
  }

  // ---- outputs ----

  // v times B^T C of token s and records 2t, 2t + 1, 2t + 8, 2t + 9 of a tile.
  __device__ float4 weights_of(int k, int s, int tile) const {
    const float* const v = floats(layout.v) + k * layout.delta_stride + 16 * tile + 2 * t;
    const float* const product = floats(layout.g) + s * layout.g_stride + 16 * tile + 2 * t;
    const float2 v0 = *reinterpret_cast<const float2*>(v), v1 = *reinterpret_cast<const float2*>(v + 8);
    const float2 product0 = *reinterpret_cast<const float2*>(product),
                 product1 = *reinterpret_cast<const float2*>(product + 8);
    return make_float4(__fmul_rn(v0.x, product0.x), __fmul_rn(v0.y, product0.y), __fmul_rn(v1.x, product1.x),
                       __fmul_rn(v1.y, product1.y));
  }
  // As two rounded parts of BF16, for products: high and low of a pair, high and low of the other.
  __device__ static uint4 split_weights(const float4& weights) {
    auto low = [](float first, float second, uint32_t high) {
      const float2 taken = unpack_pair<__nv_bfloat16>(high);
      return pack_pair<__nv_bfloat16>(__fsub_rn(first, taken.x), __fsub_rn(second, taken.y));
    };
    const uint32_t upper = pack_pair<__nv_bfloat16>(weights.x, weights.y),
                   lower = pack_pair<__nv_bfloat16>(weights.z, weights.w);
    return make_uint4(upper, low(weights.x, weights.y, upper), lower, low(weights.z, weights.w, lower));
  }
  // The same of the history and of the new tokens up to s, which count from exp(f_s) S C_s on.
  __device__ float4 weights_of_run(int k, int s, int tile, const float* terms) const {
    float4 weights = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if constexpr (!kFolds) {
      const float4 before = weights_of(k, s, tile);
      const float since = terms[s];
      weights = make_float4(__fmul_rn(before.x, since), __fmul_rn(before.y, since), __fmul_rn(before.z, since),
                            __fmul_rn(before.w, since));
    }
    if (16 * tile + 16 > history) {
      const float* const u = terms + layout.tokens + s;
      auto of = [&](int record, float before) {
        const int r = record + 16 * tile + 2 * t - history;
        const float of_new = kSingle ? *u : u[max(min(r, s), 0) * layout.tokens];  // no branches: lanes differ
        return r < 0 ? before : r <= s ? of_new : 0.0f;
      };
      weights = make_float4(of(0, weights.x), of(1, weights.y), of(8, weights.z), of(9, weights.w));
    }
    return weights;
  }
  // Records that a product over them takes; a row's only token is added apart, unless the state is plain.
  __device__ int run_length() const { return reads_one() ? history : history + T; }
  // The lane's row of a tile of these, for ldmatrix; zeros where there is no record.
  __device__ int run_at(int tile) const { return run_at(tile, x_at()); }
  __device__ int run_at(int tile, int x) const {  // x: where the head's records begin
    const int record = 16 * tile + (kPlain ? lane / 8 % 2 : lane / 16) * 8 + lane % 8;
    return (record < run_length() ? x + record * layout.x_stride * 2 : layout.zeros) +
           2 * (first_slice * kSliceWidth + (kPlain ? lane / 16 : lane / 8 % 2) * 8);
  }

  // Zero times x that is not finite would reach tokens before it. So where sums of several tokens are not finite, they
  // are formed anew without such x of new tokens: these words of a tile,
  __device__ void leave_out(int tile, uint32_t (&x)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int record = 16 * tile + 2 * t + (kPlain ? i % 2 : i / 2) * 8;
      const uint32_t finite = finite_of<Staged>(x[i]);
      if (record >= history) x[i] = x[i] & 0xffff0000u | finite & 0xffffu;
      if (record + 1 >= history) x[i] = x[i] & 0xffffu | finite & 0xffff0000u;
    }
  }
  // and these are added: to sums of two tokens, and of the head's row p and those behind it that a lane has.
  __device__ void add_left_out(const float* terms, int first, int second, int x_at, int p, float (&value)[4]) const {
    const Staged* x = staged(x_at) + history * layout.x_stride + p;
#pragma unroll 1
    for (int r = 0; r < T; ++r, x += layout.x_stride) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int s = i % 2 == 0 ? first : second;
        const float left_out = static_cast<float>(x[i / 2 * 8 + (kPlain ? i % 2 : 0)]);
        if (r <= s && !isfinite(left_out)) {
          value[i] = fmaf(terms[layout.tokens + r * layout.tokens + s], left_out, value[i]);
        }
      }
    }
  }

  // The head's column scales in FP16, times C if it is one token's; for a whole warp, which has a copy of its own.
  template <bool kTimesQuery>
  __device__ void scale_columns(const QueryPlaces& places) const {
    if constexpr (State::kColumnScales) {
      const char* const scales = shared + places.column_scales;
      const uint32_t pairs = __byte_perm(*reinterpret_cast<const uint16_t*>(scales),
                                         *reinterpret_cast<const uint16_t*>(scales + State::kColumnStep), 0x5140);
      __half2 first = e4m3_halves(pairs & 0xffffu), second = e4m3_halves(pairs >> 16);
      if constexpr (kTimesQuery) {
        const uint2 v = *reinterpret_cast<const uint2*>(shared + places.query);
        first = __hmul2(halves_of(v.x), first), second = __hmul2(halves_of(v.y), second);
      }
      *reinterpret_cast<uint2*>(shared + places.scaled) = make_uint2(bits_of(first), bits_of(second));
      __syncwarp();
    }
  }

  // Once the last that is needed of a head is in registers: the warp's next takes its place.
  __device__ __forceinline__ void take_next(Head& head, const Places& places, bool last, uint32_t loaded = 0) const {
    if (last) return;
    head.advance(params);
    __syncwarp();
    request_head(head, places, loaded);
    close_group();
  }

  // The output of a row's only token from a quantised head, which is there; for a whole warp, which takes the slices
  // that are its own. last: it reads no other after that.
  __device__ __forceinline__ void read_token(int k, const Places& places, const QueryPlaces& of_query, int terms_at,
                                             Head& head, bool last) const {
    const int tiles = (history + 15) / 16;
    scale_columns<true>(of_query);
    const float* const terms = floats(terms_at);
    float4 of_token;  // exp(f), u, d, the scale of the query
    if constexpr (kSingle) {
      of_token = *reinterpret_cast<const float4*>(terms);
    } else {
      of_token = make_float4(terms[0], terms[layout.tokens], kFolds ? 1.0f : floats(layout.decay)[k],
                             *floats(layout.query_scale));
    }
    const float factor = State::head_scale(shared + of_query.head_scale) * of_token.z * of_token.w;
    uint4 query[kProducts / 2];
    uint2 weights[2] = {};
#pragma unroll
    for (int i = 0; i < kProducts / 2; ++i) {
      query[i] = *reinterpret_cast<const uint4*>(shared + of_query.operand + 64 * i);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i < tiles) weights[i] = of_query.weights_of(shared, k, i);
    }
    int run_x[2] = {places.run_x[0], places.run_x[1]};
    const Staged* new_x = staged(places.out_x);
    typename State::Source source(shared + places.chunk, problem.geometry.head_dim, first_slice, lane);
    Staged* out = head.out;

#pragma unroll 1
    for (int slice = 0; slice < own_slices; slice += kAtOnce) {
      const bool stores = kAtOnce == 1 ? t % 2 == 0 : slice + t % 2 < own_slices;
      State state[kAtOnce];
      uint32_t loaded = 0;
      float y[kAtOnce][4] = {};
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (slice + j >= own_slices) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (i >= tiles) continue;
          const HistoryOperand<Staged> x(staged(run_x[i] + 2 * j * kSliceWidth));
          x.multiply(weights[i].x, weights[i].y, y[j]);
        }
#pragma unroll 1
        for (int i = 2; i < tiles; ++i) {
          const uint2 of_tile = of_query.weights_of(shared, k, i);
          const HistoryOperand<Staged> x(staged(run_at(i)) + (slice + j) * kSliceWidth);
          x.multiply(of_tile.x, of_tile.y, y[j]);
        }
        state[j] = State(source, j);
        if constexpr (!kFolds) loaded |= state[j].loaded();
      }
      const float own_x = stores ? static_cast<float>(*new_x) : 0.0f;
      if (slice + kAtOnce >= own_slices) take_next(head, places, last, loaded);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (slice + j >= own_slices) continue;
        float sum[2][4] = {};
        multiply_blocks(state[j], query, sum);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          y[j][2 * i] = fmaf(state[j].scale(i, sum[0][2 * i], sum[1][2 * i]), factor, y[j][2 * i]);
        }
      }
      source.advance(kAtOnce);
      const float value = fmaf(of_token.y, own_x, __fmul_rn(sum_over_quad(y, t), of_token.x));
      if (stores) store_scalar(out, kDtypeOf<Staged>, 0, value);
      run_x[0] += 2 * kAtOnce * kSliceWidth, run_x[1] += 2 * kAtOnce * kSliceWidth;
      new_x += kAtOnce * kSliceWidth, out += kAtOnce * kSliceWidth;
    }
  }

  // The same of several tokens, eight at a time. A lane gets rows g and g + 8 of tokens 2t and 2t + 1, and exchanges
  // them for those that it stores.
  __device__ __forceinline__ void read_tokens(int k, const Places& places, const QueryPlaces& of_query, int terms_at,
                                              Head& head, bool last) const {
    constexpr int kTokens = 8;
    scale_columns<false>(of_query);
    Staged* const head_out = head.out;
    const int tiles = (history + T + 15) / 16;
    const float* const terms = floats(terms_at);
    const float scale = State::head_scale(shared + of_query.head_scale) * (kFolds ? 1.0f : floats(layout.decay)[k]);
#pragma unroll 1
    for (int first = 0; first < T; first += kTokens) {
      const int own = min(first + g, T - 1);
      uint4 query[kProducts / 2], weights[2] = {};
#pragma unroll
      for (int i = 0; i < kProducts / 2; ++i) {
        const int at = layout.query + own * kQueryStride * 4 + 64 * i + 16 * t;
        query[i] = *reinterpret_cast<const uint4*>(shared + at);
        if constexpr (State::kColumnScales) {
          const int columns = layout.scaled + warp * kQueryStride * 4 + 64 * i + 16 * t;
          const uint4 factor = *reinterpret_cast<const uint4*>(shared + columns);
          query[i] = make_uint4(multiply_halves(query[i].x, factor.x), multiply_halves(query[i].y, factor.y),
                                multiply_halves(query[i].z, factor.z), multiply_halves(query[i].w, factor.w));
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i < tiles) weights[i] = split_weights(weights_of_run(k, own, i, terms));
      }
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int s = min(first + 2 * t + i, T - 1);
        factor[i] = __fmul_rn(scale * floats(layout.query_scale)[s], terms[s]);
      }
      auto add = [&](const HistoryOperand<Staged>& x, const uint4& weight, float (&sum)[4]) {
        x.multiply(weight.y, weight.w, sum);
        x.multiply(weight.x, weight.z, sum);
      };
      int run_x[2] = {places.run_x[0], places.run_x[1]};
      Staged* out = head_out + own * args.out.stride[0];
      typename State::Source source(shared + places.chunk, problem.geometry.head_dim, first_slice, lane);

#pragma unroll 1
      for (int slice = 0; slice < own_slices; ++slice) {
        float value[4] = {}, sum[2][4] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (i < tiles) add(HistoryOperand<Staged>(staged(run_x[i])), weights[i], value);
        }
#pragma unroll 1
        for (int i = 2; i < tiles; ++i) {
          add(HistoryOperand<Staged>(staged(run_at(i)) + slice * kSliceWidth),
              split_weights(weights_of_run(k, own, i, terms)), value);
        }
        bool finite = true;
#pragma unroll
        for (int i = 0; i < 4; ++i) finite = finite && isfinite(value[i]);
        if (!__all_sync(~0u, finite)) {
#pragma unroll
          for (int i = 0; i < 4; ++i) value[i] = 0.0f;
#pragma unroll 1
          for (int i = 0; i < tiles; ++i) {
            uint32_t x[4];
            load_transposed(x, staged(run_at(i)) + slice * kSliceWidth);
            leave_out(i, x);
            add(HistoryOperand<Staged>(x), split_weights(weights_of_run(k, own, i, terms)), value);
          }
          add_left_out(terms, min(first + 2 * t, T - 1), min(first + 2 * t + 1, T - 1), x_at(),
                       (first_slice + slice) * kSliceWidth + g, value);
        }
        const State codes(source);
        if (slice + 1 == own_slices && first + kTokens >= T) take_next(head, places, last, kFolds ? 0 : codes.loaded());
        multiply_scaled(codes, typename State::Factors(codes), query, sum);
        uint32_t stored[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          auto output = [&](int j) { return fmaf(codes.scaled_sum(sum, j), factor[j % 2], value[j]); };
          stored[i] = transpose_pairs(pack_pair<Staged>(output(2 * i), output(2 * i + 1)));
        }
        if (first + g < T) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (params.paired) {
              *reinterpret_cast<uint32_t*>(out + 8 * i) = stored[i];
            } else {
              reinterpret_cast<uint16_t*>(out)[8 * i] = static_cast<uint16_t>(stored[i]);
              reinterpret_cast<uint16_t*>(out)[8 * i + 1] = static_cast<uint16_t>(stored[i] >> 16);
            }
          }
        }
        source.advance();
        run_x[0] += 2 * kSliceWidth, run_x[1] += 2 * kSliceWidth;
        out += kSliceWidth;
      }
    }
  }

  // The same of a plain head, slice by slice, of rows of up to kPlainTokens: a lane has four rows of token g.
  struct PlainReader {
    static constexpr int kRows = 4, kQueryParts = State::template kQueryParts<Staged>;
    const ReadCta& cta;
    int k, x, tiles, own;  // x: where the head's records begin, bytes in shared memory; own: the lane's token
    const float* terms;
    // What all slices take, of the lane's token. Rows 0 to 7 of a product's first operand are the tokens' first parts
    // of weights, rows 8 to 15 their second.
    uint4 query[kQueryParts][State::kQueries], weights[2];
    float factor;

    __device__ __forceinline__ PlainReader(const ReadCta& cta, int k, int terms_at, int x)
        : cta(cta),
          k(k),
          x(x),
          tiles(kFolds ? 1 : (cta.history + cta.T + 15) / 16),
          own(kSingle ? 0 : min(cta.g, cta.T - 1)),
          terms(cta.floats(terms_at)),
          weights{} {
      const ReadShared& layout = cta.layout;
#pragma unroll
      for (int part = 0; part < kQueryParts; ++part)
#pragma unroll
        for (int i = 0; i < State::kQueries; ++i) {
          const int at = layout.query + (part * layout.tokens + own) * kQueryStride * 4;
          query[part][i] = *reinterpret_cast<const uint4*>(cta.shared + at + 64 * i + 16 * cta.t);
        }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i < tiles) weights[i] = split_weights(cta.weights_of_run(k, own, i, terms));
      }
      const float decay = kFolds ? 1.0f : cta.floats(layout.decay)[k];
      factor = __fmul_rn(decay * cta.floats(layout.query_scale)[own], terms[own]);
    }

    __device__ static void add(const HistoryOperand<Staged>& x, const uint4& weight, float (&sum)[2][4]) {
#pragma unroll
      for (int part = HistoryOperand<Staged>::kParts - 1; part >= 0; --part)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          multiply_pairs<__nv_bfloat16>(sum[half], weight.x, weight.y, weight.z, weight.w, x.part[part][2 * half],
                                        x.part[part][2 * half + 1]);
        }
    }

    // slice: which it is, counted from the warp's first; run_x: x of its first two tiles; out: of the lane's token.
    __device__ __forceinline__ void read(const State& state, int slice, const int (&run_x)[2], Staged* out) const {
      float of_run[2][4] = {}, value[kRows];
      typename State::Sums sum = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i < tiles) add(HistoryOperand<Staged>(cta.staged(run_x[i])), weights[i], of_run);
      }
#pragma unroll 1
      for (int i = 2; i < tiles; ++i) {
        add(HistoryOperand<Staged>(cta.staged(cta.run_at(i, x)) + slice * kSliceWidth),
            split_weights(cta.weights_of_run(k, own, i, terms)), of_run);
      }
      auto take_values = [&] {
#pragma unroll
        for (int i = 0; i < kRows; ++i) value[i] = __fadd_rn(of_run[i / 2][i % 2], of_run[i / 2][2 + i % 2]);
      };
#pragma unroll
      for (int part = kQueryParts - 1; part >= 0; --part) {
        state.multiply([&](int i) { return query[part][i]; }, sum);
      }
      take_values();
      if (!kSingle && cta.T > 1) {
        bool finite = true;
#pragma unroll
        for (int i = 0; i < kRows; ++i) finite = finite && isfinite(value[i]);
        if (!__all_sync(~0u, finite)) {
#pragma unroll
          for (int i = 0; i < 8; ++i) of_run[i / 4][i % 4] = 0.0f;
#pragma unroll 1
          for (int i = 0; i < tiles; ++i) {
            uint32_t of_tile[4];
            load_transposed(of_tile, cta.staged(cta.run_at(i, x)) + slice * kSliceWidth);
            cta.leave_out(i, of_tile);
            add(HistoryOperand<Staged>(of_tile), split_weights(cta.weights_of_run(k, own, i, terms)), of_run);
          }
          take_values();
          cta.add_left_out(terms, own, own, x, (cta.first_slice + slice) * kSliceWidth + 2 * cta.t, value);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) value[i] = fmaf(State::value(sum, i), factor, value[i]);
      if (cta.g < cta.T) {
        if (cta.params.paired) {
          *reinterpret_cast<uint32_t*>(out) = pack_pair<Staged>(value[0], value[1]);
          *reinterpret_cast<uint32_t*>(out + 8) = pack_pair<Staged>(value[2], value[3]);
        } else {
#pragma unroll
          for (int i = 0; i < kRows; ++i) store_scalar(out, kDtypeOf<Staged>, i / 2 * 8 + i % 2, value[i]);
        }
      }
    }
  };

  // Outputs of the warp's slices of a head that come through its ring.
  __device__ __forceinline__ void read_plain(int k, const Places& places, int terms_at, Staged* head_out,
                                             Slices& slices) const {
    const typename State::Places of_state(lane);
    const PlainReader reader(*this, k, terms_at, x_at());
    int run_x[2] = {places.run_x[0], places.run_x[1]};
    Staged* out = head_out + reader.own * args.out.stride[0];
#pragma unroll 1
    for (int slice = 0; slice < slices.own; ++slice) {
      const State state = take_slice(slices, of_state);
      reader.read(state, slice, run_x, out);
      run_x[0] += 2 * kSliceWidth, run_x[1] += 2 * kSliceWidth;
      out += kSliceWidth;
    }
  }

  // kReadsFolds: outputs of a slice that the warp has folded.
  __device__ __forceinline__ void read_folded(int k, int slice) const {
    const State state(shared + layout.folded + slice * kSliceBytes, typename State::Places(lane));
    const int x = folded_new_x(k), of_first = slice - first_slice;
    const PlainReader reader(*this, k, layout.terms + k * layout.terms_stride * 4, x);
    const int run_x[2] = {run_at(0, x) + 2 * of_first * kSliceWidth, 0};
    reader.read(state, of_first, run_x,
                static_cast<Staged*>(args.out.data) + (row.first_token + reader.own) * args.out.stride[0] +
                    head_of(k) * args.out.stride[1] + slice * kSliceWidth + output_row());
  }

  // ---- the work ----

  // What can be done before anything is known.
  __device__ __forceinline__ void set_up() const {
    if (tid * 16 < kZeroBytes) *reinterpret_cast<uint4*>(shared + layout.zeros + tid * 16) = make_uint4(0, 0, 0, 0);
    if (kPlain && !kFolds && lane < kSlots) init_barrier(slot_barrier(lane), kSlotArrivals);
    if (!kPlain && member == 0 && lane == 0) init_barrier(barrier(), 1);
    if (kFolds && tid == 0) init_barrier(fold_barrier(), 1 + kThreads);
    if (kBlocksOfB && warp == kWarps - 1 && lane == 0) init_barrier(fold_barrier(), 1);
    finish_stores_before_blocks();
    if (kFolds) {
      synchronise();  // all threads arrive at fold_barrier()
    } else {
      __syncwarp();
    }
  }

  // Of a CTA that folds, when it has done so: the next task makes anew what set_up() has made.
  __device__ __forceinline__ void end() const {
    synchronise();
    if (member == 0 && lane == 0) {
      if (!kPlain) end_barrier(barrier());
      if (team == 0) end_barrier(fold_barrier());
    }
    synchronise();
  }

  // What precedes a group's heads.
  __device__ __forceinline__ void begin(bool early = false) const {
    if (!kFolds && !kPlain && !stored_before) {
      for (int i = tid * 16; i < kWarps * layout.state_bytes >> team_bits; i += kThreads * 16) {
        *reinterpret_cast<uint4*>(shared + layout.state + i) = make_uint4(0, 0, 0, 0);
      }
    }
    if constexpr (kFolds) request_fold(head_of(0));
    request_group(early);
    close_group();
  }

  __device__ void clear_before_x() const {
    for (int i = tid * 16; i < kZeroRows * problem.geometry.head_dim * 2; i += kThreads * 16) {
      *reinterpret_cast<uint4*>(shared + layout.folded_x + i) = make_uint4(0, 0, 0, 0);
    }
  }

  // All of it, up to the state of the heads.
  __device__ __forceinline__ void fold() const {
    RawHistory raw;
    load_history(first_widened(), raw);
    begin();
    clear_before_x();
    close_group();
    const TokenInputs inputs = load_tokens();
    widen_history(raw);
    prepare(inputs);
    const RoundingKey keys = fold_keys();
    auto ask = [] { return true; };
    if constexpr (kPlain) {
      fold_plain_heads(keys, ask);
    } else {
      fold_heads(keys, ask);
    }
    if constexpr (kReadsFolds) {
      await_folded_read();
      return;
    }
    if (keeps_copies()) {
      finish_stores_before_blocks();
    } else {
      finish_writes_before_blocks();
    }
    synchronise();
    if (keeps_copies()) send_copies();
  }
  // Folded heads' copies that are kept, each by a warp.
  __device__ void send_copies() const {
    const int k = kWarps - 1 - warp, offset = k * params.state_bytes;
    if (k < heads) send_folded(read_copy(head_of(k)) - offset, offset, params.state_bytes);
  }

  // kKeeps: the same, the state formed before await_previous(), unless the row is sure, by what peek() has found. False
  // if it is another row then; then nothing has been stored, and nothing is under way. look() loads what tells, and
  // returns what says whether the row is the same.
  template <typename Look>
  __device__ __forceinline__ bool fold_kept(bool sure, const Look& look) const {
    RawHistory raw;
    load_history(first_widened(), raw);
    request_fold(head_of(0));
    if (warp == 4) {
#pragma unroll 1
      for (int i = lane; i < h; i += 32) {
        delta(0, i) = load_early(delta_ring(0) + ring_before(i) * params.heads_per_group);
      }
    }
    const uint32_t rate_bits = load_bits(args.A_log.data, args.A_log.dtype, head_of(0));
    clear_before_x();
    const RoundingKey keys = fold_keys();
    widen_history(raw);
    synchronise();
    const float rate = -expf(bits_to_float(rate_bits, args.A_log.dtype));  // each warp weighs the history for itself
    const float decay = weigh_history(floats(layout.delta), rate, h, lane, fold_weights(0));
    if (lane == 0) fold_weights(0)[layout.delta_stride - 1] = decay;
    __syncwarp();
    TokenInputs inputs;
    auto ask = [&] {  // for what tokens bring, behind the state that is formed
      if (!sure) await_previous();
      const auto holds = look();
      request_group();
      request_x(Head(*this, 0), Places(*this));
      inputs = load_tokens();
      if (__syncthreads_and(holds())) return true;
      await_requests();
      return false;
    };
    const bool folded = [&] {
      if constexpr (kPlain) {
        return fold_plain_heads(keys, ask);
      } else {
        return fold_heads(keys, ask);
      }
    }();
    if (!folded) return false;
    prepare(inputs);
    finish_stores_before_blocks();
    synchronise();
    if (!kPlain) {
      send_copies();
    } else if (warp == kWarps - 1) {
      send_folded(checkpoint(head_of(0)), 0, problem.checkpoint_head_bytes);
    }
    return true;
  }

  // Of a CTA that steps: takes back what set_up() has made, and waits for what has been begun.
  __device__ __forceinline__ void undo(bool begun) const {
#if __CUDA_ARCH__ >= 900
    if (begun && member == 0 && team < heads && has_state()) await(barrier(), 0);
    if (begun && kBlocksOfB && warp == kWarps - 1) await(fold_barrier(), 0);
#endif
    synchronise();
    if (member == 0 && lane == 0) end_barrier(barrier());
    if (kBlocksOfB && warp == kWarps - 1 && lane == 0) end_barrier(fold_barrier());
    synchronise();
  }

  // All of it or, if the CTA folds, what is left to do.
  __device__ __forceinline__ void run() const {
    run(false, [] { return true; });
  }
  // early, of a CTA that steps from a read copy: by what peek_step() has found, and what steps before have left is
  // asked for before await_previous(). False if look() says then, to any thread, that it was wrong; undo() has to
  // follow.
  template <typename Look>
  __device__ __forceinline__ bool run(bool early, const Look& look) const {
    if (!kFolds) begin(early);
    Head head(*this, team);
    Places places(*this);
    Slices slices;
    if constexpr (kPlain) {
      slices = Slices(*this, head);
      begin_slices(slices);
    }
    if (team < heads) request_head(head, places, 0, early);
    close_group();
    places.find_inputs(*this);
    QueryPlaces of_query;
    if constexpr (!kPlain) of_query = QueryPlaces(*this);
    if constexpr (!kFolds) {
      if (early) {
        await_previous();
        request_tokens_of_group(true);
        if (team < heads) request_x(head, places, history);
        close_group();
      }
      const TokenInputs inputs = load_tokens();
      if (early) {
        const bool holds = look();
        await_requests();
        if (!__syncthreads_and(holds)) return false;
      }
      prepare(inputs);
    } else if (team_bits > 0 && !kKeeps) {
      if (team < heads) await_head(0);
      synchronise();
    }
    int parity = 0, terms = places.terms;
#pragma unroll 1
    for (int k = team; k < heads; k += kWarps) {  // once, if teams are of more warps
      const bool last = kFolds || team_bits > 0 || k + kWarps >= heads;
      if (team_bits == 0) {
        await_head(parity);
        __syncwarp();
      }
      append_x(head, places);
      if constexpr (kPlain) {
        read_plain(k, places, terms, head.out, slices);
        take_next(head, places, last);
      } else if (reads_one()) {
        read_token(k, places, of_query, terms, head, last);
      } else {
        read_tokens(k, places, of_query, terms, head, last);
      }
      if (last) break;
      terms += kWarps * 4 * layout.terms_stride;
      parity ^= 1;
    }
    if (keeps_copies() && elect_lane()) await_blocks_read();
    return true;
  }
};

}  // namespace
}  // namespace cuda
}  // namespace replayssm
