// SPDX-License-Identifier: Apache-2.0
//
// step on tensor cores from states of 16 bits a value or fewer: state_dim 128, head_dim a multiple of 16, 16-bit
// activations.
//
//     y_s = exp(f_s) [ d S C_s + sum_i v_i (B_i . C_s) x_i ] + sum_{r<=s} u_rs x_r,    u_ss including D
//
// with the symbols of step_mma.cu, but that S is the read copy (FP8, NVFP4, E2M2), or a checkpoint of such a format, or
// of FP16 or BF16. The history, oldest record first, and the new tokens behind it are one run of records; all of it
// comes from the rings, but for new tokens that the step is given as tensors, which it appends.
//
// A CTA owns up to kMaxCtaHeads heads of one group of one row. What they share it does once: B^T C, C in FP16, and the
// weights of all heads, for a thread sums up a head's exponents as cheaply as a warp would. Then each of its four warps
// takes a head by itself, and another after that; in small batches two or four warps share one. A head's state comes by
// one block copy (pipeline.cuh) or, if it is plain, by one a slice of 16 rows, through a ring of slots: what a warp has
// read makes room for what it will read next. Records of x come by asynchronous copies into rows that ldmatrix can read
// without meeting a bank twice. Warps are at different points, so that some wait for memory while others compute. What
// bounds this kernel is the number of instructions: a state of 4 bits a value is little memory. Hence the addresses
// that are kept in registers (keep(), hide_address()), where the compiler would compute them anew.
//  1. S C by mma.m16n8k16 in FP16. A code's bits in the places of FP16's are the code times 2^-14. The order of a
//     product's terms is free: of rows g and g + 8, lane (g, t) = (lane / 4, lane mod 4) takes the t-th 32 columns, two
//     blocks, so that a row's codes are one vector load (FP8: the t-th 16 of either half).
//     Rows of one token: column 2 n of the product has the columns of lanes with t = n alone; all other lanes bring
//     zeros for the query. So a lane gets the sums over its own blocks, and their scales are applied to sums, in
//     float32, which saves a multiplication for each pair of codes.
//     Rows of several: a column a token, eight at a time, for codes that have been multiplied by their scales, which is
//     exact. No sum crosses lanes; two transpositions bring outputs to the lanes that store pairs of them.
//  2. C is brought to FP16 once a CTA, times the power of two that puts its largest value below 2^15: exact for BF16
//     but where values lie 2^28 apart. Column scales are multiplied into it once a head: the one rounding, by 2^-12.
//     The scales of the head, or of rows of FP8, and the powers of two go to the float32 sums.
//  3. The sum over the run is a product too, by mma.m16n8k16 in BF16: x as it lies (FP16 in two parts), weights in two
//     parts, formed once a head in the registers of the lanes that bring them: v and u times their factors of the token
//     whose output it is, zeros for the tokens behind it. With one token and a quantised state they are two columns of
//     a product, so that the sum over the four lanes of a quad is both that over blocks and that over parts, and the
//     token itself is added apart. Zero times x that is not finite is not zero: where sums of several tokens are not
//     finite, they are formed anew without such x of new tokens, which are added apart.
//  4. A plain state's words are the operand, as the second of a product whose first has 8 tokens as rows: no code is
//     decoded, and no sum crosses lanes. States of BF16 take C in BF16, FP16 in two parts. Here memory is what bounds
//     the kernel.
//  5. Rows flagged FLUSH are the work of other CTAs, which come first in the grid or, where states are plain, stand
//     among the first, so that an SM has both kinds. Such a CTA takes as many heads of a group as leave enough of them
//     busy, up to one a warp or eight plain ones. It prepares for all of them at once and folds one after the other
//     into its checkpoint, as step_mma.cu does. Of a plain one a warp reads each slice as soon as it is stored. Others
//     are cast to their read copies (head_fold.cuh), and the CTA goes on as above with what it has stored, or with
//     copies that it has kept. Steps and flushes don't wait for each other.
//  6. In small batches a step takes as long as one row needs to flush, and that is mostly one instruction after the
//     other. Then CTAs have twice the warps. One that folds has one head: two warps share a slice, each has half of its
//     columns, and what is to be stored and read again stays in shared memory. One that steps is two as above, side by
//     side. What can be done before the kernel before has ended is: by the plan as it reads then the first head is
//     fetched and folded, but not stored.
//  7. In large batches CTAs that find nothing to fold step instead. They and whoever else stands on the multiprocessors
//     before the kernel before has ended have loaded the history and their first heads by then. Where rows flush, the
//     last CTAs that step have half of the heads, so that all end at about the same time.
//  8. In the smallest those that step come first in the grid, and stand on the multiprocessors beside those of the
//     kernel before. They have code of their own, which loads before that has ended what steps before have left:
//     read_early.cuh. Of a single row a CTA steps or folds, by the plan as it reads then: CTAs with nothing to fold
//     would hold places that the kernel behind could begin in.
// Every sum's order depends on the row and the config alone, and the bits of token s don't depend on the tokens after
// it. Which CTA and warp has a slice, and how many heads a CTA has, changes no bit. Dead records are never read.
// Layouts and parameters are in read_layout.cuh, operands in read_operands.cuh and plain_operands.cuh, folding and
// casting in head_fold.cuh, rows of plans that may change in plan_rows.cuh, a CTA and its work in read_cta.cuh, early
// steps in read_early.cuh.
#include "read_early.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kCtasPerSm = 4;

// The heads of rows that flush, by wide CTAs, one after the other; the first is begun before the kernel before has
// ended, by what the plan says then. Returns whether there are such rows.
template <typename Cta>
__device__ __forceinline__ bool fold_one_by_one(const ReadParams& params, char* shared, int number) {
  Cta cta(params, shared, Cta::kWarpBits);
  cta.set_up();
  FlushingRows flushing{};
  uint32_t task = number;
  int index = cta.place(task);
  bool known = cta.peek(index), sure = false;
#pragma unroll 1
  while (true) {
    if (!known && !sure) {
      await_previous();
      flushing = FlushingRows::of<true>(params);
    } else if (known && cta.fold_kept(sure, [&] {
                 return [&, row = params.scan.planned[cta.row_index], seen = FlushingRows::see<true>(params)] {
                   flushing = FlushingRows::of<true>(params, seen);
                   return index < flushing.count && flushing[index] == cta.row_index && cta.is_same(row);
                 };
               })) {
      cta.run();
      sure = true;
    }
    if (sure) {
      task += params.flush_ctas;
      index = cta.place(task);
    }
    if (task >= flushing.count * params.heads.divisor) break;
    cta.end();
    cta.set_up();
    known = cta.take(index, &flushing);
    sure = true;
  }
  if (flushing.count == 0) cta.end();
  return flushing.count > 0;
}

// What CTAs of the other kind fold, some heads of a group at a time: as many a task as leave enough tasks.
struct FoldTasks {
  int bits;  // of the heads, as a power of two
  uint32_t count;

  __device__ FoldTasks(const ReadParams& params, int rows) : bits(0) {
    const uint32_t heads = rows * params.heads.divisor;
    while (bits < params.fold_bits && heads >> bits > params.enough_folds) ++bits;
    count = rows * params.groups.divisor * params.fold_chunks[bits].divisor;
  }
};

// Such a CTA. Returns whether there was anything for it.
template <typename Cta>
__device__ __forceinline__ bool fold_together(const ReadParams& params, char* shared, uint32_t number) {
  await_previous();
  const auto flushing = FlushingRows::of<false>(params);
  const FoldTasks tasks(params, flushing.count);
  if (number >= tasks.count) return false;
  const int team_bits = Cta::kReadsFolds ? kWarpBits : kWarpBits - tasks.bits;
#pragma unroll 1
  for (uint32_t task = number; task < tasks.count; task += params.flush_ctas) {
    Cta folding(params, shared, team_bits);
    if (!folding.take(task, &flushing, tasks.bits)) continue;
    folding.set_up();
    folding.fold();
    if constexpr (Cta::kReadsFolds) {
      folding.end();
    } else {
      Cta reading(params, shared, team_bits);  // made anew: what it knows would be in the way of the fold
      reading.take(task, &flushing, tasks.bits);
      reading.run();
      reading.end();
    }
  }
  return true;
}

__device__ inline int peek_flushing(const ReadParams& params) {
  return peek((reinterpret_cast<const replayssm_plan_header*>(params.scan.planned) - 1)->num_flush);
}

// A CTA that steps or, false, has to fold. Of the tasks of steps, the first have the numbers of CTAs that may fold, and
// are theirs if there is nothing to fold for them; else the last CTAs have them. early: it begins before the kernel
// before has ended, by the plan as it reads then.
template <typename Cta>
__device__ __forceinline__ bool step_once(const ReadParams& params, char* shared, bool early) {
  const int number = blockIdx.x;
  const bool may_fold = number < params.flush_ctas;
  const int task = may_fold ? number : params.step_tasks - 1 - (number - params.flush_ctas);
  Cta cta(params, shared, params.team_bits);
  cta.find(task);
  const replayssm_plan_row& planned = params.scan.planned[cta.row_index];
  const auto count = [&] { return task < params.flush_ctas ? peek_flushing(params) : 0; };
  const auto is_own = [&](int flushing) {
    return task >= params.flush_ctas || may_fold == (task >= FoldTasks(params, flushing).count);
  };
#pragma unroll 1
  while (true) {
    bool known = true;
    if (early) {
      cta.set_up();
      known = __syncthreads_and(cta.peek_step());
    } else {
      await_previous();
      const int flushing = count();
      cta.row = peek_row(planned, [&] { cta.set_up(); });
      if (!is_own(flushing)) {
        cta.undo(false);
        return !may_fold;
      }
      if (!cta.consider(true)) return true;
    }
    if (known && cta.run(early, [&] {
          const int flushing = count();
          const uint2 named = load_early(reinterpret_cast<const uint2*>(&planned.slot));
          const uint4 rest = load_early(reinterpret_cast<const uint4*>(&planned.count));
          return cta.is_row(named, rest) && is_own(flushing);
        })) {
      return true;
    }
    cta.undo(known);
    early = false;
  }
}

// kSingle: rows have one token at most. That changes no bit: the same operations, but for the loops around them. Nor do
// wide CTAs.
template <typename Format, typename Staged, bool kSingle, bool kWide>
__global__ __launch_bounds__(kWide ? 2 * kThreads : kThreads,
                             kWide ? kCtasPerSm / 2
                                   : kCtasPerSm) void step_read_kernel(const __grid_constant__ ReadParams params) {
  extern __shared__ __align__(128) char shared[];
  let_next_begin();
  if constexpr (kWide) {
    // What the CTAs that step will begin with. Which of them fetches what does not matter to the L2.
    const int fetches = 2 * blockIdx.x + threadIdx.x / kThreads, fetched = threadIdx.x % kThreads - (kThreads - 32);
    if (fetches < params.fetches && fetched >= 0 && fetched < params.cta_heads) {
      const Problem& problem = params.scan.problem;
      const bool copy = problem.read_copy_head_bytes > 0;
      fetch_head(params.scan, copy ? params.scan.layer.read_copy : params.scan.layer.checkpoint,
                 copy ? problem.read_copy_head_bytes : problem.checkpoint_head_bytes,
                 fetches * params.cta_heads + fetched, 0, params.state_bytes);
    }
  }
  if constexpr (kWide || !kIsPlain<Format>) fetch_parameters(params);
  if constexpr (!kWide && !kIsPlain<Format>) {
    const bool may_fold = blockIdx.x < params.flush_ctas;
    bool early = blockIdx.x < params.early_ctas;
    bool folds = may_fold && __syncthreads_and(blockIdx.x < FoldTasks(params, peek_flushing(params)).count);
#pragma unroll 1
    while (true) {  // once, unless the plan was another
      if (!folds && step_once<ReadCta<Format, Staged, false, kSingle, false>>(params, shared, early)) return;
      if (fold_together<ReadCta<Format, Staged, true, kSingle, false>>(params, shared, blockIdx.x)) return;
      folds = early = false;
    }
  }
  // Of the first CTAs some fold, the others step: an SM has both, for what either waits for.
  const int spacing = params.flush_spacing, before = blockIdx.x >> spacing;  // that many CTAs fold
  const bool among = before < params.flush_ctas;
  if (!among || before << spacing != blockIdx.x) {
    using Cta = ReadCta<Format, Staged, false, kSingle, kWide>;
    const int task = blockIdx.x - (among ? before + 1 : params.flush_ctas) + Cta::step_half() * params.step_ctas;
    if (kWide && task >= params.step_tasks) return;
    Cta cta(params, shared, params.team_bits);
    cta.set_up();
    await_previous();
    if (cta.take(task)) cta.run();
    return;
  }
  using Cta = ReadCta<Format, Staged, true, kSingle, kWide>;
  if constexpr (kWide) {
    fold_one_by_one<Cta>(params, shared, before);
  } else {
    fold_together<Cta>(params, shared, before);
  }
}

// Launches whose CTAs that step are there at once, before those that fold.
template <typename Format, typename Staged, bool kSingle>
__global__ __launch_bounds__(2 * kThreads,
                             kCtasPerSm / 2) void step_early_kernel(const __grid_constant__ ReadParams params) {
  extern __shared__ __align__(128) char shared[];
  let_next_begin();
  fetch_parameters(params);
  const int number = blockIdx.x - params.step_ctas;
  if (number < 0) {
    const int task = blockIdx.x + ReadCta<Format, Staged, false, kSingle, true>::step_half() * params.step_ctas;
    if (task < params.step_tasks) EarlyStep<Format, Staged, kSingle>(params, shared).run(task);
  } else {
    fold_one_by_one<ReadCta<Format, Staged, true, kSingle, true>>(params, shared, number);
  }
}

// The same of one row, which CTAs step or fold. What has been begun by a plan that was another is done as in other
// launches.
template <typename Format, typename Staged, bool kSingle>
__global__ __launch_bounds__(2 * kThreads,
                             kCtasPerSm / 2) void step_row_kernel(const __grid_constant__ ReadParams params) {
  extern __shared__ __align__(128) char shared[];
  let_next_begin();
  fetch_parameters(params);
  using Step = EarlyStep<Format, Staged, kSingle>;
  const int task = blockIdx.x + Step::Cta::step_half() * params.step_ctas;
  const bool has_task = task < params.step_tasks;
  Step step(params, shared);
  bool folds = __syncthreads_or(has_task && step.find(task));
  if (!folds) {
    if (has_task && step.run()) return;  // then the row doesn't flush, and the other half does not either
    await_previous();
    folds = FlushingRows::of<true>(params).count > 0;
    if (folds) __syncthreads();  // the other half may still await what it has requested, where a fold puts other things
  }
  if (folds && fold_one_by_one<ReadCta<Format, Staged, true, kSingle, true>>(params, shared, blockIdx.x)) return;
  if (!has_task) return;
  typename Step::Cta cta(params, shared, params.team_bits);
  cta.set_up();
  if (cta.take(task)) cta.run();
}

// ---- launch --------------------------------------------------------------------------------------------------------

using ReadKernel = void(ReadParams);

// How a launch's CTAs work: alone, or wide, and then with steps that load early, of several rows or one.
enum class Way { kNarrow, kWide, kEarly, kRow };

// FP8 has scales of rows, which two warps would have to share.
template <typename Format>
constexpr bool kCanBeWide = !std::is_same_v<Format, Fp8>;

template <typename Format, typename Staged, bool kSingle>
ReadKernel* choose_read(Way way) {
  if constexpr (kCanBeWide<Format>) {
    if (way == Way::kRow) return step_row_kernel<Format, Staged, kSingle>;
    if (way == Way::kEarly) return step_early_kernel<Format, Staged, kSingle>;
    if (way == Way::kWide) return step_read_kernel<Format, Staged, kSingle, true>;
  }
  return step_read_kernel<Format, Staged, kSingle, false>;
}

template <typename Format>
ReadKernel* choose_read(int activation, bool single, Way way) {
  if (activation == REPLAYSSM_BF16) {
    return single ? choose_read<Format, __nv_bfloat16, true>(way) : choose_read<Format, __nv_bfloat16, false>(way);
  }
  return single ? choose_read<Format, __half, true>(way) : choose_read<Format, __half, false>(way);
}

// Whether steps read a plain checkpoint of 16 bits a value. (Those that flush more often are faster in step_mma.cu.)
bool is_plain(const replayssm_config& config) {
  return config.read_copy == REPLAYSSM_READ_COPY_NONE && config.checkpoint > REPLAYSSM_CHECKPOINT_FP32 &&
         config.checkpoint <= REPLAYSSM_CHECKPOINT_FP16_SR && config.max_step_tokens <= kPlainTokens &&
         4 * config.max_step_tokens <= config.window;
}

// Calls f with a value of the format that steps read: of the read copy, if there is one.
template <typename F>
auto with_read_format(const replayssm_config& config, F&& f) {
  if (is_plain(config)) {
    return config.checkpoint == REPLAYSSM_CHECKPOINT_BF16 ? f(__nv_bfloat16()) : f(__half());
  }
  if (config.read_copy == REPLAYSSM_READ_COPY_NVFP4) return f(Nvfp4());
  if (config.read_copy == REPLAYSSM_READ_COPY_E2M2) return f(E2m2());
  if (config.read_copy == REPLAYSSM_READ_COPY_NVFP4_AMAX) return f(Nvfp4Amax());
  if (config.read_copy == REPLAYSSM_READ_COPY_NONE && config.checkpoint == REPLAYSSM_CHECKPOINT_NVFP4) {
    return f(Nvfp4Amax());
  }
  return f(Fp8());
}

// A CTA has more heads than it has warps where that leaves room for two others in an SM.
constexpr int kManyHeadsShared = 74 * 1024;
constexpr int kManyFoldedShared = 56 * 1024;  // for three others
int multiprocessors() { return attribute_of_device(cudaDevAttrMultiProcessorCount, 1); }
// CTAs are wide in batches so small that one row's flush takes as long as all others' steps. Of one token fewer rows
// flush, and of few rows their folds begin early.
int few_heads(const replayssm_config& config, int32_t rows, bool single) {
  return is_plain(config) ? 2048 : single && rows <= FlushingRows::kFewRows ? 4224 : 2304;
}
// CTAs that fold, of a grid that has more than those. The steps of small batches find room beside them at once.
int most_flush_ctas(const replayssm_config& config, int64_t row_heads, bool wide) {
  const int each = wide ? 1 : row_heads < (is_plain(config) ? 32768 : 8192) ? 2 : 4;
  return each * multiprocessors();
}
// Tasks that are enough for them: where there would be more, a task is of more heads, which are prepared for at once.
// Fewer than one for each CTA are enough where steps last longer than a task of four heads, as timed with read copies
// and one token.
int enough_folds(const replayssm_config& config, int64_t row_heads, int flush_ctas, bool single) {
  return !is_plain(config) && single && row_heads >= 12288 ? 2 * multiprocessors() : flush_ctas;
}
// Steps load early where a multiprocessor needs no more than a CTA of them, beside one of the kernel before: two halves
// with a head for each warp at most.
int most_early_heads() { return 2 * kWarps * multiprocessors(); }
// A head has more than one warp where CTAs that step would be fewer than enough, and a CTA more heads than it has warps
// as long as that leaves so many. Of the halves of wide ones that read a copy for one token fewer do: all shall find
// room beside CTAs that fold, if that takes no more than eight heads of each.
constexpr int64_t kEnoughCtas = 512;
int64_t enough_ctas(bool wide_copies, int64_t row_heads) {
  return !wide_copies || row_heads <= most_early_heads() ? kEnoughCtas
         : row_heads <= 16 * multiprocessors()           ? 192
                                                         : 448;
}
bool can_be_wide(const replayssm_config& config) {
  return with_read_format(config, [](auto format) { return kCanBeWide<decltype(format)>; });
}

// Of steps from read copies so many tasks have half of the heads. They come last, so that CTAs end at about the same
// time, but for those that CTAs with nothing to fold take. Not where most CTAs find room at once: there it would only
// be more of them.
constexpr int kHalvedTasks = 198;
bool has_halved_tasks(const ReadParams& params, int64_t ctas) {
  return params.team_bits == 0 && params.cta_heads >= 2 * kWarps && ctas >= kHalvedTasks &&
         2 * ctas >= 3 * kCtasPerSm * multiprocessors();
}

// Of so many of the first CTAs one folds, as a power of two. Steps from plain checkpoints wait for memory, those from
// read copies for instructions, as folds do.
int most_flush_spacing(const replayssm_config& config) { return is_plain(config) ? 2 : 0; }

ReadShared lay_out(const Problem& problem, bool wide, int tokens, int heads, int teams, bool folds,
                   bool keeps = false) {
  return with_read_format(problem.config, [&](auto format) {
    using Format = decltype(format);
    const int size = !folds ? 0 : problem.config.checkpoint == REPLAYSSM_CHECKPOINT_FP32 ? 4 : 2;
    const int P = problem.geometry.head_dim, window = problem.config.window;
    return problem.config.activation == REPLAYSSM_BF16
               ? ReadShared::of<Format, __nv_bfloat16>(wide, wide || keeps, P, window, tokens, heads, teams, size)
               : ReadShared::of<Format, __half>(wide, wide || keeps, P, window, tokens, heads, teams, size);
  });
}

}  // namespace

bool has_step_read(const Problem& problem) {
  const bool quantised = problem.read_copy_head_bytes > 0 || problem.config.checkpoint > REPLAYSSM_CHECKPOINT_FP16_SR;
  return has_mma_fold(problem) && (quantised || is_plain(problem.config)) &&
         lay_out(problem, false, problem.config.max_step_tokens, 1, 1, false).bytes <= kSharedLimit;
}

bool has_fused_step_read(const Problem& problem) {
  return has_step_read(problem) && problem.config.checkpoint <= REPLAYSSM_CHECKPOINT_FP16_SR &&
         lay_out(problem, false, problem.config.max_step_tokens, 1, 1, true).bytes <= kSharedLimit;
}

replayssm_status step_read(const replayssm_exec& exec, const ScanParams& scan, int32_t rows) {
  const Problem& problem = scan.problem;
  const replayssm_geometry& g = problem.geometry;
  const bool folds = has_fused_step_read(problem) && !scan.flushed;
  const int64_t row_heads = static_cast<int64_t>(rows) * g.num_heads;
  ReadParams params{};
  params.scan = scan;
  params.rows = rows;
  params.heads_per_group = g.num_heads / g.num_groups;
  params.slices = g.head_dim / kSliceWidth;
  params.x_ring_stride = 2 * params.heads_per_group * g.head_dim;
  params.x_ring_bytes = problem.ring_rows * params.x_ring_stride;
  params.heads = Quotient(g.num_heads);
  params.group_heads = Quotient(params.heads_per_group);
  params.groups = Quotient(g.num_groups);
  for (int bits = 0; bits <= kPlainFoldBits; ++bits) {
    params.fold_chunks[bits] = Quotient((params.heads_per_group + (1 << bits) - 1) >> bits);
  }
  params.x_parts = Quotient(g.head_dim / 8);
  params.advance = {
      kWarps * (problem.read_copy_head_bytes > 0 ? problem.read_copy_head_bytes : problem.checkpoint_head_bytes),
      int64_t{2 * kWarps} * g.head_dim, 2 * kWarps * scan.args.x.stride[1], 2 * kWarps * scan.args.out.stride[1]};
  params.state_bytes =
      with_read_format(problem.config, [&](auto format) { return StateOperand<decltype(format)>::bytes(g.head_dim); });
  const replayssm_tensor& out = scan.args.out;
  params.paired = reinterpret_cast<uintptr_t>(out.data) % 4 == 0 && out.stride[0] % 2 == 0 && out.stride[1] % 2 == 0;
  params.tf32_mask = kTf32Mask;
  int64_t ctas = 0;
  auto bytes = [&](int heads) { return lay_out(problem, false, scan.args.max_count, heads, kWarps, false).bytes; };
  // Plain checkpoints, most of which is slices, are read by CTAs of many heads where these leave room for but one
  // other.
  const bool fits = bytes(std::min(kMaxCtaHeads, round_up(params.heads_per_group, kWarps))) <= kManyHeadsShared;
  const int limit = is_plain(problem.config) && !fits ? kSharedLimit : kManyHeadsShared;
  auto share = [&](int heads, int bits) {
    const int chunks = (params.heads_per_group + heads - 1) / heads;
    params.team_bits = bits;
    params.cta_heads = heads;
    params.chunks = Quotient(chunks);
    params.ctas = Quotient(g.num_groups * chunks);
    params.delta_part = heads % 4 == 0 && params.heads_per_group % 4 == 0 ? 4 : 1;
    params.delta_parts = Quotient(heads / params.delta_part);
    params.stepping = lay_out(problem, false, scan.args.max_count, heads, kWarps >> bits, false);
    ctas = static_cast<int64_t>(rows) * g.num_groups * chunks;
  };
  const bool single = scan.args.max_count == 1;
  const ReadShared wide_folding = lay_out(problem, true, scan.args.max_count, 1, 1, folds);
  const bool may_be_wide = folds && row_heads < few_heads(problem.config, rows, single) &&
                           can_be_wide(problem.config) && wide_folding.bytes <= kSharedLimit;
  auto share_among = [&](int64_t enough) {
    for (int bits = 0; bits <= kWarpBits; ++bits) {
      share(kWarps >> bits, bits);
      if (params.stepping.bytes <= kSharedLimit && ctas >= enough && params.cta_heads <= params.heads_per_group) {
        break;
      }
    }
    while (params.team_bits == 0 && params.cta_heads < params.heads_per_group && 2 * params.cta_heads <= kMaxCtaHeads &&
           ctas >= 2 * enough && bytes(2 * params.cta_heads) <= limit) {
      share(2 * params.cta_heads, 0);
    }
  };
  share_among(enough_ctas(may_be_wide && single && !is_plain(problem.config), row_heads));
  if (may_be_wide && 2 * params.stepping.bytes > kSharedLimit) share_among(kEnoughCtas);  // two halves shall have room
  params.folding = lay_out(problem, false, scan.args.max_count, 1, 1, folds);
  const int most_fold_bits = is_plain(problem.config) ? kPlainFoldBits : kWarpBits;
  while (folds && params.fold_bits < most_fold_bits && 1 << params.fold_bits < params.heads_per_group) {
    const int heads = 2 << params.fold_bits;
    const ReadShared more = lay_out(problem, false, scan.args.max_count, heads, heads, true);
    const bool fits = more.bytes <= std::max(kManyFoldedShared, params.stepping.bytes);
    if (more.bytes > kSharedLimit || (!fits && (params.folding.bytes <= kManyFoldedShared || heads > kWarps))) break;
    ++params.fold_bits;
    params.folding = more;
  }
  if (folds && problem.read_copy_head_bytes > 0) {
    const int heads = 1 << params.fold_bits;
    const ReadShared keeping = lay_out(problem, false, scan.args.max_count, heads, heads, true, true);
    if (keeping.bytes <= std::max(kManyFoldedShared, params.stepping.bytes)) params.folding = keeping;
  }
  const bool wide = may_be_wide && 2 * params.stepping.bytes <= kSharedLimit;
  bool early = wide && problem.config.window <= kEarlyWindow && scan.x_aligned && scan.b_aligned && scan.c_aligned &&
               row_heads <= most_early_heads();
  if (early) {
    const ReadParams others = params;
    const int64_t others_ctas = ctas;
    int bits = kWarpBits;
    while (bits > 0 && row_heads > int64_t{2 << (kWarpBits - bits)} * multiprocessors()) --bits;
    share(kWarps >> bits, bits);
    params.stepping.part(params.cta_heads);
    if (2 * params.stepping.bytes > kSharedLimit) early = false, params = others, ctas = others_ctas;
  }
  const bool large = !wide && !is_plain(problem.config);  // with steps from read copies
  if (large && has_halved_tasks(params, ctas)) {
    params.halved_tasks = kHalvedTasks;
    ctas += kHalvedTasks / 2;
  }
  params.step_tasks = static_cast<int>(std::min<int64_t>(ctas, INT32_MAX));
  if (wide) {
    params.folding = wide_folding;
    // A half has a multiprocessor for itself as long as there is one.
    ctas = std::max((ctas + 1) / 2, std::min<int64_t>(ctas, multiprocessors()));
  }
  params.step_ctas = static_cast<int>(std::min<int64_t>(ctas, INT32_MAX));
  if (folds) {
    params.flush_ctas =
        static_cast<int>(std::min<int64_t>(most_flush_ctas(problem.config, row_heads, wide), row_heads));
    params.enough_folds = enough_folds(problem.config, row_heads, params.flush_ctas, single);
  }
  if (large) {
    params.flush_ctas = std::min(params.flush_ctas, params.step_tasks);
    if (folds && params.delta_part == 4) params.early_ctas = kCtasPerSm * multiprocessors();
  }
  const bool one_row = early && rows == 1;
  if (one_row) params.flush_ctas = params.step_ctas;
  while (params.flush_spacing < most_flush_spacing(problem.config) &&
         static_cast<int64_t>(params.flush_ctas) << (params.flush_spacing + 1) <= params.flush_ctas + ctas) {
    ++params.flush_spacing;
  }
  const int halves = wide ? 2 : 1;
  params.fold_rows = halves * kThreads / params.x_parts.divisor;
  const int shared = std::max(halves * params.stepping.bytes, params.folding.bytes);
  // In larger batches fetching is worth less than what it delays.
  params.fetches = wide ? static_cast<int>(row_heads / params.cta_heads) : 0;
  return with_read_format(problem.config, [&](auto format) {
    using Format = decltype(format);
    const Way way = one_row ? Way::kRow : early ? Way::kEarly : wide ? Way::kWide : Way::kNarrow;
    return launch_early("step", choose_read<Format>(problem.config.activation, single, way),
                        row_heads > INT32_MAX ? row_heads : ctas + (one_row ? 0 : params.flush_ctas), halves * kThreads,
                        shared, exec, params);
  });
}

cudaError_t load_step_read_kernels() {
  replayssm_config config{};
  const int32_t formats[][2] = {{REPLAYSSM_CHECKPOINT_BF16, REPLAYSSM_READ_COPY_NONE},
                                {REPLAYSSM_CHECKPOINT_FP16, REPLAYSSM_READ_COPY_NONE},
                                {REPLAYSSM_CHECKPOINT_FP32, REPLAYSSM_READ_COPY_FP8},
                                {REPLAYSSM_CHECKPOINT_FP32, REPLAYSSM_READ_COPY_NVFP4},
                                {REPLAYSSM_CHECKPOINT_FP32, REPLAYSSM_READ_COPY_NVFP4_AMAX},
                                {REPLAYSSM_CHECKPOINT_FP32, REPLAYSSM_READ_COPY_E2M2}};
  for (const auto& format : formats) {
    for (int activation : {REPLAYSSM_BF16, REPLAYSSM_FP16}) {
      for (Way way : {Way::kNarrow, Way::kWide, Way::kEarly, Way::kRow}) {
        for (bool single : {false, true}) {
          config.checkpoint = format[0], config.read_copy = format[1];
          ReadKernel* const kernel = with_read_format(
              config, [&](auto format) { return choose_read<decltype(format)>(activation, single, way); });
          const cudaError_t error = load_kernel(kernel, kSharedLimit);
          if (error != cudaSuccess) return error;
        }
      }
    }
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
