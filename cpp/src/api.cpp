// SPDX-License-Identifier: Apache-2.0
//
// The C ABI: checks every argument that can be checked without reading device memory, then dispatches to host:: or
// cuda::. Nothing is launched before all checks have passed.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "layout.h"

namespace replayssm {
namespace {

thread_local char last_error[512] = "";

// A table in one buffer: error word | counters | cursors | restored.
constexpr int64_t kCountersOffset = 64, kCursorsOffset = 128;
static_assert(sizeof(replayssm_error) <= kCountersOffset &&
              sizeof(int64_t) * REPLAYSSM_NUM_COUNTERS <= kCursorsOffset - kCountersOffset);

#define REPLAYSSM_RETURN_IF_ERROR(expression)      \
  do {                                             \
    const replayssm_status status_ = (expression); \
    if (status_ != REPLAYSSM_OK) return status_;   \
  } while (0)

#define REPLAYSSM_REQUIRE_POINTER(pointer)                                                     \
  do {                                                                                         \
    if (!(pointer)) return fail(REPLAYSSM_INVALID_ARGUMENT, "%s: must not be NULL", #pointer); \
  } while (0)

replayssm_status check_exec(const replayssm_exec* exec) {
  REPLAYSSM_REQUIRE_POINTER(exec);
  if (exec->device == REPLAYSSM_HOST) return REPLAYSSM_OK;
  if (exec->device != REPLAYSSM_CUDA)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "device: expected %d (host) or %d (CUDA), got %d", REPLAYSSM_HOST,
                REPLAYSSM_CUDA, exec->device);
#ifdef REPLAYSSM_WITH_CUDA
  return REPLAYSSM_OK;
#else
  return fail(REPLAYSSM_UNSUPPORTED, "this build of libreplayssm has no CUDA ops: it was built without nvcc");
#endif
}

replayssm_status check_table(const replayssm_table* table) {
  REPLAYSSM_REQUIRE_POINTER(table);
  REPLAYSSM_REQUIRE_POINTER(table->cursors);
  REPLAYSSM_REQUIRE_POINTER(table->error);
  REPLAYSSM_REQUIRE_POINTER(table->counters);
  if (table->num_slots < 1)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "num_slots: expected >= 1, got %d", table->num_slots);
  if (table->num_layers < 0)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "num_layers: expected >= 0, got %d", table->num_layers);
  return REPLAYSSM_OK;
}

replayssm_status check_rows(int32_t rows) {
  if (rows < 0) return fail(REPLAYSSM_INVALID_ARGUMENT, "rows: expected >= 0, got %d", rows);
  return REPLAYSSM_OK;
}

replayssm_status check_use(int32_t use) {
  if (use < REPLAYSSM_STEPPED || use > REPLAYSSM_SNAPSHOTTED)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "use: expected %d (stepped), %d (folded) or %d (snapshotted), got %d",
                REPLAYSSM_STEPPED, REPLAYSSM_FOLDED, REPLAYSSM_SNAPSHOTTED, use);
  return REPLAYSSM_OK;
}

replayssm_status check_dtype(const char* name, const replayssm_tensor& tensor) {
  if (tensor.dtype < REPLAYSSM_FP32 || tensor.dtype > REPLAYSSM_FP16)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "%s: unknown dtype code %d", name, tensor.dtype);
  return REPLAYSSM_OK;
}

replayssm_status check_activation(const char* name, const replayssm_tensor& tensor, int32_t activation,
                                  const char* whose = "the config's activation") {
  if (!tensor.data) return fail(REPLAYSSM_INVALID_ARGUMENT, "%s: must not be NULL", name);
  if (tensor.dtype != activation)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "%s: expected %s dtype (code %d), got code %d", name, whose, activation,
                tensor.dtype);
  return REPLAYSSM_OK;
}

replayssm_status make_problem(const replayssm_geometry* geometry, const replayssm_config* config, Problem* problem) {
  REPLAYSSM_REQUIRE_POINTER(geometry);
  REPLAYSSM_REQUIRE_POINTER(config);
  REPLAYSSM_RETURN_IF_ERROR(check_geometry(*geometry));
  REPLAYSSM_RETURN_IF_ERROR(check_config(*config));
  const replayssm_layout layout = make_layout(*geometry, *config);
  *problem = {*geometry,
              *config,
              layout.ring_rows,
              layout.conv_rows,
              layout.conv_channels,
              layout.checkpoint_head_bytes,
              layout.read_copy_head_bytes};
  return REPLAYSSM_OK;
}

replayssm_status check_layer_op(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                const replayssm_config* config, const replayssm_layer* layer,
                                const replayssm_table* table, int32_t rows, Problem* problem) {
  REPLAYSSM_RETURN_IF_ERROR(check_exec(exec));
  REPLAYSSM_RETURN_IF_ERROR(make_problem(geometry, config, problem));
  REPLAYSSM_REQUIRE_POINTER(layer);
  REPLAYSSM_RETURN_IF_ERROR(check_table(table));
  if (layer->layer < 0 || layer->layer >= table->num_layers)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "layer: expected 0..%d, got %d", table->num_layers - 1, layer->layer);
  if (layer->first_head < 0)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "first_head: expected >= 0, got %d", layer->first_head);
  if (problem->read_copy_head_bytes > 0 && !layer->read_copy.base)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "layer: expected a read_copy buffer for read_copy='%s', got NULL",
                replayssm_read_copy_name(config->read_copy));
  return check_rows(rows);
}

// An op that reads or writes states.
replayssm_status check_state_op(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                const replayssm_config* config, const replayssm_layer* layer,
                                const replayssm_table* table, int32_t rows, Problem* problem) {
  REPLAYSSM_RETURN_IF_ERROR(check_layer_op(exec, geometry, config, layer, table, rows, problem));
  const replayssm_buffer& checkpoint = layer->checkpoint;
  if (!checkpoint.base) return fail(REPLAYSSM_INVALID_ARGUMENT, "layer: expected a checkpoint buffer, got NULL");
  if (reinterpret_cast<uintptr_t>(checkpoint.base) % 16 != 0 || checkpoint.slot_stride % 16 != 0)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "checkpoint: expected multiples of 16 bytes, got base %p, slot stride %lld",
                checkpoint.base, (long long)checkpoint.slot_stride);
  return REPLAYSSM_OK;
}

replayssm_status check_conv_ring(const replayssm_layer& layer) {
  if (layer.conv_ring.base) return REPLAYSSM_OK;
  return fail(REPLAYSSM_INVALID_ARGUMENT, "layer: expected a conv_ring buffer, got NULL: the convolution is another's");
}

replayssm_status check_token_counts(int64_t num_tokens, int32_t max_count) {
  if (num_tokens < 0)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "num_tokens: expected >= 0, got %lld", (long long)num_tokens);
  if (max_count < 0) return fail(REPLAYSSM_INVALID_ARGUMENT, "max_count: expected >= 0, got %d", max_count);
  return REPLAYSSM_OK;
}

// records: x and B may be those of the tokens' records.
replayssm_status check_scan_args(const Problem& problem, const replayssm_scan_args* args, bool records = false) {
  REPLAYSSM_REQUIRE_POINTER(args);
  REPLAYSSM_RETURN_IF_ERROR(check_token_counts(args->num_tokens, args->max_count));
  if (args->num_tokens == 0) return REPLAYSSM_OK;  // then the op only refuses rows that bring tokens
  const int32_t activation = problem.config.activation;
  if (!records || args->x.data || args->B.data) {
    REPLAYSSM_RETURN_IF_ERROR(check_activation("x", args->x, activation));
    REPLAYSSM_RETURN_IF_ERROR(check_activation("B", args->B, activation));
  }
  REPLAYSSM_RETURN_IF_ERROR(check_activation("C", args->C, activation));
  REPLAYSSM_RETURN_IF_ERROR(check_activation("out", args->out, activation));
  REPLAYSSM_REQUIRE_POINTER(args->dt.data);
  REPLAYSSM_REQUIRE_POINTER(args->A_log.data);
  REPLAYSSM_RETURN_IF_ERROR(check_dtype("dt", args->dt));
  REPLAYSSM_RETURN_IF_ERROR(check_dtype("A_log", args->A_log));
  REPLAYSSM_RETURN_IF_ERROR(check_dtype("D", args->D));
  REPLAYSSM_RETURN_IF_ERROR(check_dtype("dt_bias", args->dt_bias));
  if (!(args->dt_min >= 0 && args->dt_min <= args->dt_max))
    return fail(REPLAYSSM_INVALID_ARGUMENT, "dt_limit: expected 0 <= lower <= upper, got (%g, %g)", args->dt_min,
                args->dt_max);
  return REPLAYSSM_OK;
}

replayssm_status check_step_count(const Problem& problem, int32_t max_count) {
  const int32_t limit = problem.config.max_step_tokens;
  if (max_count <= limit) return REPLAYSSM_OK;
  return fail(REPLAYSSM_INVALID_ARGUMENT, "max_count: a step takes at most max_step_tokens=%d tokens a row, got %d",
              limit, max_count);
}

// The arguments of an op whose rows bring at most max_step_tokens.
replayssm_status check_step_args(const Problem& problem, const replayssm_scan_args* args, bool records = false) {
  REPLAYSSM_RETURN_IF_ERROR(check_scan_args(problem, args, records));
  return check_step_count(problem, args->max_count);
}

// The baselines keep the state as engines do: in one plain format.
replayssm_status check_conventional(const char* op, const Problem& problem) {
  const replayssm_config& c = problem.config;
  if (c.checkpoint > REPLAYSSM_CHECKPOINT_FP16 || c.read_copy != REPLAYSSM_READ_COPY_NONE)
    return fail(REPLAYSSM_UNSUPPORTED,
                "%s: expected checkpoint='fp32', 'bf16' or 'fp16' and read_copy='none', got checkpoint='%s', "
                "read_copy='%s'",
                op, replayssm_checkpoint_name(c.checkpoint), replayssm_read_copy_name(c.read_copy));
  return REPLAYSSM_OK;
}

replayssm_status check_norm(const replayssm_norm_args& args) {
  if (args.rows < 0) return fail(REPLAYSSM_INVALID_ARGUMENT, "rows: expected >= 0, got %lld", (long long)args.rows);
  if (args.groups < 1) return fail(REPLAYSSM_INVALID_ARGUMENT, "groups: expected >= 1, got %d", args.groups);
  if (args.width < 1 || args.width % (int64_t{8} * args.groups) != 0)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "width: expected a multiple of 8 for each of %d groups, got %d",
                args.groups, args.width);
  if (args.width / args.groups > REPLAYSSM_MAX_NORM_WIDTH)
    return fail(REPLAYSSM_UNSUPPORTED, "width: expected at most %d a group, got %d", REPLAYSSM_MAX_NORM_WIDTH,
                args.width / args.groups);
  if (!(args.eps >= 0)) return fail(REPLAYSSM_INVALID_ARGUMENT, "eps: expected >= 0, got %g", args.eps);
  if (args.addend.data && args.gate.data) return fail(REPLAYSSM_INVALID_ARGUMENT, "gate: expected NULL with an addend");
  if (args.addend.data && args.addends < 1)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "addend: expected one at least, got %d", args.addends);
  if (args.rows == 0) return REPLAYSSM_OK;
  REPLAYSSM_REQUIRE_POINTER(args.x.data);
  REPLAYSSM_REQUIRE_POINTER(args.weight.data);
  REPLAYSSM_REQUIRE_POINTER(args.out.data);
  if (args.addend.data && args.rows > 1 && std::llabs(args.x.stride[0]) < args.width)
    return fail(REPLAYSSM_INVALID_ARGUMENT,
                "x: expected rows that do not overlap, as sums are stored there, got stride %lld",
                (long long)args.x.stride[0]);
  REPLAYSSM_RETURN_IF_ERROR(check_dtype("x", args.x));
  REPLAYSSM_RETURN_IF_ERROR(check_dtype("addend", args.addend));
  REPLAYSSM_RETURN_IF_ERROR(check_dtype("gate", args.gate));
  REPLAYSSM_RETURN_IF_ERROR(check_dtype("weight", args.weight));
  return check_dtype("out", args.out);
}

replayssm_status check_attend(const replayssm_attend_args& args) {
  REPLAYSSM_RETURN_IF_ERROR(check_rows(args.rows));
  if (args.width < 1) return fail(REPLAYSSM_INVALID_ARGUMENT, "width: expected >= 1, got %d", args.width);
  if (args.kv_heads < 1 || args.heads < 1 || args.heads % args.kv_heads != 0)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "heads: expected a multiple of kv_heads, got %d and %d", args.heads,
                args.kv_heads);
  if (args.head_dim < 8 || args.head_dim % 8 != 0)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "head_dim: expected a multiple of 8, got %d", args.head_dim);
  if (static_cast<int64_t>(args.heads / args.kv_heads) * args.width > INT32_MAX / 2)
    return fail(REPLAYSSM_UNSUPPORTED, "width: too many queries a key head, got %d tokens a row", args.width);
  if (args.num_slots < 1 || args.capacity < 1)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "keys: expected slots and positions, got %d and %d", args.num_slots,
                args.capacity);
  if (args.rows == 0) return REPLAYSSM_OK;
  REPLAYSSM_RETURN_IF_ERROR(check_dtype("q", args.q));
  REPLAYSSM_RETURN_IF_ERROR(check_activation("q", args.q, args.q.dtype));
  REPLAYSSM_RETURN_IF_ERROR(check_activation("keys", args.keys, args.q.dtype, "q's"));
  REPLAYSSM_RETURN_IF_ERROR(check_activation("values", args.values, args.q.dtype, "q's"));
  REPLAYSSM_RETURN_IF_ERROR(check_activation("out", args.out, args.q.dtype, "q's"));
  REPLAYSSM_REQUIRE_POINTER(args.slots);
  REPLAYSSM_REQUIRE_POINTER(args.positions);
  REPLAYSSM_REQUIRE_POINTER(args.cells);
  return REPLAYSSM_OK;
}

replayssm_status check_snapshots(const Problem& problem, const replayssm_buffer* snapshots) {
  REPLAYSSM_REQUIRE_POINTER(snapshots);
  REPLAYSSM_REQUIRE_POINTER(snapshots->base);
  const int64_t state = make_layout(problem.geometry, problem.config).checkpoint.bytes;
  const int64_t least = problem.config.max_step_tokens * state;
  if (reinterpret_cast<uintptr_t>(snapshots->base) % 16 != 0 || snapshots->slot_stride % 16 != 0)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "snapshots: expected multiples of 16 bytes, got base %p, slot stride %lld",
                snapshots->base, (long long)snapshots->slot_stride);
  if (snapshots->slot_stride < least)
    return fail(REPLAYSSM_INVALID_ARGUMENT,
                "snapshots: expected a slot stride of at least max_step_tokens=%d states of %lld bytes, got %lld",
                problem.config.max_step_tokens, (long long)state, (long long)snapshots->slot_stride);
  return REPLAYSSM_OK;
}

}  // namespace

replayssm_status fail(replayssm_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace replayssm

using namespace replayssm;

#ifdef REPLAYSSM_WITH_CUDA
#define REPLAYSSM_DISPATCH(op, ...) \
  (exec->device == REPLAYSSM_CUDA ? cuda::op(*exec, __VA_ARGS__) : host::op(*exec, __VA_ARGS__))
#else
#define REPLAYSSM_DISPATCH(op, ...) host::op(*exec, __VA_ARGS__)
#endif

extern "C" {

const char* replayssm_last_error(void) { return last_error; }

const char* replayssm_version(void) { return REPLAYSSM_VERSION; }

#ifdef REPLAYSSM_WITH_CUDA
int32_t replayssm_has_cuda(void) { return 1; }
const char* replayssm_cuda_architectures(void) { return cuda::architectures(); }
replayssm_status replayssm_load_kernels(void) { return cuda::load_kernels(); }
#else
int32_t replayssm_has_cuda(void) { return 0; }
const char* replayssm_cuda_architectures(void) { return ""; }
replayssm_status replayssm_load_kernels(void) {
  return fail(REPLAYSSM_UNSUPPORTED, "this build of libreplayssm has no CUDA ops: it was built without nvcc");
}
#endif

replayssm_status replayssm_layout_init(const replayssm_geometry* geometry, const replayssm_config* config,
                                       replayssm_layout* layout) {
  return replayssm_layout_external(geometry, config, 0, layout);
}

replayssm_status replayssm_layout_external(const replayssm_geometry* geometry, const replayssm_config* config,
                                           int32_t external, replayssm_layout* layout) {
  Problem problem;
  REPLAYSSM_RETURN_IF_ERROR(make_problem(geometry, config, &problem));
  REPLAYSSM_RETURN_IF_ERROR(check_external(*config, external));
  REPLAYSSM_REQUIRE_POINTER(layout);
  *layout = make_layout(*geometry, *config, external);
  return REPLAYSSM_OK;
}

replayssm_status replayssm_layer_from_blob(const replayssm_layout* layout, void* base, int32_t layer,
                                           replayssm_layer* out) {
  REPLAYSSM_REQUIRE_POINTER(layout);
  REPLAYSSM_REQUIRE_POINTER(base);
  REPLAYSSM_REQUIRE_POINTER(out);
  if (layout->version != REPLAYSSM_LAYOUT_VERSION)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "layout version: expected %d, got %d", REPLAYSSM_LAYOUT_VERSION,
                layout->version);
  if (reinterpret_cast<uintptr_t>(base) % 16 != 0)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "base: expected a multiple of 16 bytes, got %p", base);
  auto at = [&](const replayssm_section& section) {
    const bool in_blob = section.bytes > 0 && section.offset >= 0;
    return replayssm_buffer{in_blob ? static_cast<char*>(base) + section.offset : nullptr, layout->slot_stride};
  };
  *out = {at(layout->checkpoint),
          at(layout->read_copy),
          at(layout->x_ring),
          at(layout->b_ring),
          at(layout->delta_ring),
          at(layout->conv_ring),
          layer,
          0};
  return REPLAYSSM_OK;
}

int64_t replayssm_plan_bytes(int32_t rows) {
  const int64_t bytes = sizeof(replayssm_plan_header) + int64_t{rows} * (sizeof(replayssm_plan_row) + sizeof(int32_t));
  return (bytes + 63) / 64 * 64;
}

int64_t replayssm_table_bytes(int32_t num_slots, int32_t num_layers) {
  return kCursorsOffset + (int64_t{num_slots} * (int64_t{sizeof(replayssm_cursor)} + num_layers) + 63) / 64 * 64;
}

replayssm_status replayssm_table_from_buffer(void* base, int32_t num_slots, int32_t num_layers, replayssm_table* out) {
  REPLAYSSM_REQUIRE_POINTER(base);
  REPLAYSSM_REQUIRE_POINTER(out);
  if (reinterpret_cast<uintptr_t>(base) % 16 != 0)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "base: expected a multiple of 16 bytes, got %p", base);
  char* const bytes = static_cast<char*>(base);
  const replayssm_table table = {
      reinterpret_cast<replayssm_cursor*>(bytes + kCursorsOffset),
      reinterpret_cast<replayssm_error*>(bytes),
      reinterpret_cast<int64_t*>(bytes + kCountersOffset),
      reinterpret_cast<uint8_t*>(bytes + kCursorsOffset + int64_t{num_slots} * int64_t{sizeof(replayssm_cursor)}),
      num_slots,
      num_layers};
  REPLAYSSM_RETURN_IF_ERROR(check_table(&table));
  *out = table;
  return REPLAYSSM_OK;
}

static replayssm_status begin_sequences(const replayssm_exec* exec, const replayssm_table* table, const int32_t* slots,
                                        const int64_t* streams, int32_t rows, int64_t writes) {
  REPLAYSSM_RETURN_IF_ERROR(check_exec(exec));
  REPLAYSSM_RETURN_IF_ERROR(check_table(table));
  REPLAYSSM_RETURN_IF_ERROR(check_rows(rows));
  if (rows == 0) return REPLAYSSM_OK;
  REPLAYSSM_REQUIRE_POINTER(slots);
  REPLAYSSM_REQUIRE_POINTER(streams);
  return REPLAYSSM_DISPATCH(reset, *table, slots, streams, rows, writes);
}

replayssm_status replayssm_reset(const replayssm_exec* exec, const replayssm_table* table, const int32_t* slots,
                                 const int64_t* streams, int32_t rows) {
  return begin_sequences(exec, table, slots, streams, rows, 0);
}

replayssm_status replayssm_adopt(const replayssm_exec* exec, const replayssm_table* table, const int32_t* slots,
                                 const int64_t* streams, int32_t rows) {
  return begin_sequences(exec, table, slots, streams, rows, 1);
}

replayssm_status replayssm_plan(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                const replayssm_config* config, const replayssm_table* table, const int32_t* slots,
                                const int32_t* counts, int32_t uniform_count, int32_t rows, void* plan) {
  REPLAYSSM_RETURN_IF_ERROR(check_exec(exec));
  Problem problem;
  REPLAYSSM_RETURN_IF_ERROR(make_problem(geometry, config, &problem));
  REPLAYSSM_RETURN_IF_ERROR(check_table(table));
  REPLAYSSM_RETURN_IF_ERROR(check_rows(rows));
  REPLAYSSM_REQUIRE_POINTER(plan);
  if (rows > 0) REPLAYSSM_REQUIRE_POINTER(slots);
  if (!counts && uniform_count < 0)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "tokens_per_row: expected >= 0, got %d", uniform_count);
  return REPLAYSSM_DISPATCH(plan, problem, *table, slots, counts, uniform_count, rows, plan);
}

replayssm_status replayssm_plan_next(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                     const replayssm_config* config, const replayssm_table* table, const int32_t* slots,
                                     const int32_t* counts, const int32_t* accepted, int32_t rows, int32_t row_tokens,
                                     void* plan, replayssm_error* status) {
  REPLAYSSM_RETURN_IF_ERROR(check_exec(exec));
  Problem problem;
  REPLAYSSM_RETURN_IF_ERROR(make_problem(geometry, config, &problem));
  REPLAYSSM_RETURN_IF_ERROR(check_table(table));
  REPLAYSSM_RETURN_IF_ERROR(check_rows(rows));
  if (row_tokens < 1 || int64_t{rows} * row_tokens > INT32_MAX)
    return fail(REPLAYSSM_INVALID_ARGUMENT,
                "row_tokens: expected at least 1, and at most %d tokens in all, got %d for %d rows", INT32_MAX,
                row_tokens, rows);
  REPLAYSSM_REQUIRE_POINTER(plan);
  if (rows > 0) {
    REPLAYSSM_REQUIRE_POINTER(slots);
    REPLAYSSM_REQUIRE_POINTER(counts);
    REPLAYSSM_REQUIRE_POINTER(accepted);
  }
  return REPLAYSSM_DISPATCH(plan_next, problem, *table, slots, counts, accepted, rows, row_tokens, plan, status);
}

replayssm_status replayssm_plan_lengths(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                        const replayssm_config* config, int32_t num_slots, const int32_t* slots,
                                        const int32_t* prompt_lengths, const int32_t* sequence_lengths,
                                        const int32_t* token_ends, int32_t rows, int32_t prompts, void* plan,
                                        replayssm_error* error) {
  REPLAYSSM_RETURN_IF_ERROR(check_exec(exec));
  Problem problem;
  REPLAYSSM_RETURN_IF_ERROR(make_problem(geometry, config, &problem));
  if (num_slots < 1) return fail(REPLAYSSM_INVALID_ARGUMENT, "num_slots: expected >= 1, got %d", num_slots);
  REPLAYSSM_RETURN_IF_ERROR(check_rows(rows));
  REPLAYSSM_REQUIRE_POINTER(plan);
  REPLAYSSM_REQUIRE_POINTER(error);
  if (rows > 0) {
    REPLAYSSM_REQUIRE_POINTER(slots);
    REPLAYSSM_REQUIRE_POINTER(prompt_lengths);
    if (!prompts) REPLAYSSM_REQUIRE_POINTER(sequence_lengths);
    REPLAYSSM_REQUIRE_POINTER(token_ends);
  }
  const LengthsArgs args = {slots, prompt_lengths, sequence_lengths, token_ends, num_slots, prompts != 0};
  return REPLAYSSM_DISPATCH(plan_lengths, problem, args, rows, plan, error);
}

replayssm_status replayssm_commit(const replayssm_exec* exec, const replayssm_table* table, const void* plan,
                                  int32_t rows, const int32_t* accepted, int32_t use) {
  REPLAYSSM_RETURN_IF_ERROR(check_exec(exec));
  REPLAYSSM_RETURN_IF_ERROR(check_table(table));
  REPLAYSSM_RETURN_IF_ERROR(check_rows(rows));
  REPLAYSSM_RETURN_IF_ERROR(check_use(use));
  REPLAYSSM_REQUIRE_POINTER(plan);
  return REPLAYSSM_DISPATCH(commit, *table, plan, rows, accepted, static_cast<replayssm_plan_use>(use));
}

replayssm_status replayssm_abandon(const replayssm_exec* exec, const replayssm_table* table, const void* plan,
                                   int32_t rows, int32_t use) {
  REPLAYSSM_RETURN_IF_ERROR(check_exec(exec));
  REPLAYSSM_RETURN_IF_ERROR(check_table(table));
  REPLAYSSM_RETURN_IF_ERROR(check_rows(rows));
  REPLAYSSM_RETURN_IF_ERROR(check_use(use));
  REPLAYSSM_REQUIRE_POINTER(plan);
  return REPLAYSSM_DISPATCH(abandon, *table, plan, rows, static_cast<replayssm_plan_use>(use));
}

replayssm_status replayssm_conv_step(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                     const replayssm_config* config, const replayssm_layer* layer,
                                     const replayssm_table* table, const void* plan, int32_t rows,
                                     const replayssm_conv_args* args) {
  Problem problem;
  REPLAYSSM_RETURN_IF_ERROR(check_layer_op(exec, geometry, config, layer, table, rows, &problem));
  REPLAYSSM_REQUIRE_POINTER(plan);
  REPLAYSSM_REQUIRE_POINTER(args);
  REPLAYSSM_RETURN_IF_ERROR(check_token_counts(args->num_tokens, args->max_count));
  if (args->records) REPLAYSSM_RETURN_IF_ERROR(check_step_count(problem, args->max_count));
  if (rows == 0) return REPLAYSSM_OK;
  if (args->num_tokens > 0) {
    REPLAYSSM_RETURN_IF_ERROR(check_activation("in", args->in, config->activation));
    REPLAYSSM_RETURN_IF_ERROR(check_activation("out", args->out, config->activation));
  }
  REPLAYSSM_RETURN_IF_ERROR(check_conv_ring(*layer));
  REPLAYSSM_REQUIRE_POINTER(args->weight.data);
  REPLAYSSM_RETURN_IF_ERROR(check_dtype("weight", args->weight));
  REPLAYSSM_RETURN_IF_ERROR(check_dtype("bias", args->bias));
  return REPLAYSSM_DISPATCH(conv_step, problem, *layer, *table, plan, rows, *args);
}

replayssm_status replayssm_rms_norm(const replayssm_exec* exec, const replayssm_norm_args* args) {
  REPLAYSSM_RETURN_IF_ERROR(check_exec(exec));
  REPLAYSSM_REQUIRE_POINTER(args);
  REPLAYSSM_RETURN_IF_ERROR(check_norm(*args));
  if (args->rows == 0) return REPLAYSSM_OK;
  return REPLAYSSM_DISPATCH(rms_norm, *args);
}

replayssm_status replayssm_relu2(const replayssm_exec* exec, void* x, int32_t dtype, int64_t count) {
  REPLAYSSM_RETURN_IF_ERROR(check_exec(exec));
  REPLAYSSM_RETURN_IF_ERROR(check_dtype("x", {x, dtype, {}}));
  if (count < 0) return fail(REPLAYSSM_INVALID_ARGUMENT, "count: expected >= 0, got %lld", (long long)count);
  if (count == 0) return REPLAYSSM_OK;
  REPLAYSSM_REQUIRE_POINTER(x);
  return REPLAYSSM_DISPATCH(relu2, x, dtype, count);
}

replayssm_status replayssm_attend(const replayssm_exec* exec, const replayssm_attend_args* args) {
  REPLAYSSM_RETURN_IF_ERROR(check_exec(exec));
  REPLAYSSM_REQUIRE_POINTER(args);
  REPLAYSSM_RETURN_IF_ERROR(check_attend(*args));
  if (args->rows == 0) return REPLAYSSM_OK;
  return REPLAYSSM_DISPATCH(attend, *args);
}

replayssm_status replayssm_flush(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                 const replayssm_config* config, const replayssm_layer* layer,
                                 const replayssm_table* table, const void* plan, int32_t rows,
                                 const replayssm_tensor* A_log) {
  Problem problem;
  REPLAYSSM_RETURN_IF_ERROR(check_state_op(exec, geometry, config, layer, table, rows, &problem));
  REPLAYSSM_REQUIRE_POINTER(plan);
  REPLAYSSM_REQUIRE_POINTER(A_log);
  REPLAYSSM_REQUIRE_POINTER(A_log->data);
  REPLAYSSM_RETURN_IF_ERROR(check_dtype("A_log", *A_log));
  if (rows == 0) return REPLAYSSM_OK;
  return REPLAYSSM_DISPATCH(flush, problem, *layer, *table, plan, rows, *A_log);
}

replayssm_status replayssm_step(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                const replayssm_config* config, const replayssm_layer* layer,
                                const replayssm_table* table, const void* plan, int32_t rows,
                                const replayssm_scan_args* args, int32_t flushed) {
  Problem problem;
  REPLAYSSM_RETURN_IF_ERROR(check_state_op(exec, geometry, config, layer, table, rows, &problem));
  REPLAYSSM_REQUIRE_POINTER(plan);
  REPLAYSSM_RETURN_IF_ERROR(check_step_args(problem, args, true));
  if (rows == 0) return REPLAYSSM_OK;
  return REPLAYSSM_DISPATCH(step, problem, *layer, *table, plan, rows, *args, flushed != 0);
}

replayssm_status replayssm_prefill(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                   const replayssm_config* config, const replayssm_layer* layer,
                                   const replayssm_table* table, const void* plan, int32_t rows,
                                   const replayssm_scan_args* args) {
  Problem problem;
  REPLAYSSM_RETURN_IF_ERROR(check_state_op(exec, geometry, config, layer, table, rows, &problem));
  REPLAYSSM_REQUIRE_POINTER(plan);
  REPLAYSSM_RETURN_IF_ERROR(check_scan_args(problem, args));
  if (rows == 0) return REPLAYSSM_OK;
  return REPLAYSSM_DISPATCH(prefill, problem, *layer, *table, plan, rows, *args);
}

replayssm_status replayssm_conventional_step(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                             const replayssm_config* config, const replayssm_layer* layer,
                                             const replayssm_table* table, const void* plan, int32_t rows,
                                             const replayssm_scan_args* args) {
  Problem problem;
  REPLAYSSM_RETURN_IF_ERROR(check_state_op(exec, geometry, config, layer, table, rows, &problem));
  REPLAYSSM_RETURN_IF_ERROR(check_conventional("conventional_step", problem));
  REPLAYSSM_REQUIRE_POINTER(plan);
  REPLAYSSM_RETURN_IF_ERROR(check_scan_args(problem, args));
  if (rows == 0) return REPLAYSSM_OK;
  return REPLAYSSM_DISPATCH(conventional_step, problem, *layer, *table, plan, rows, *args);
}

replayssm_status replayssm_conventional_verify(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                               const replayssm_config* config, const replayssm_layer* layer,
                                               const replayssm_table* table, const void* plan, int32_t rows,
                                               const replayssm_scan_args* args, const replayssm_buffer* snapshots) {
  Problem problem;
  REPLAYSSM_RETURN_IF_ERROR(check_state_op(exec, geometry, config, layer, table, rows, &problem));
  REPLAYSSM_RETURN_IF_ERROR(check_conventional("conventional_verify", problem));
  REPLAYSSM_REQUIRE_POINTER(plan);
  REPLAYSSM_RETURN_IF_ERROR(check_step_args(problem, args));
  REPLAYSSM_RETURN_IF_ERROR(check_snapshots(problem, snapshots));
  if (rows == 0) return REPLAYSSM_OK;
  return REPLAYSSM_DISPATCH(conventional_verify, problem, *layer, *table, plan, rows, *args, *snapshots);
}

replayssm_status replayssm_materialize(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                       const replayssm_config* config, const replayssm_layer* layer,
                                       const replayssm_table* table, const int32_t* slots, int32_t rows,
                                       const replayssm_tensor* A_log, float* state, float* conv_tail) {
  Problem problem;
  REPLAYSSM_RETURN_IF_ERROR(check_state_op(exec, geometry, config, layer, table, rows, &problem));
  REPLAYSSM_REQUIRE_POINTER(A_log);
  REPLAYSSM_RETURN_IF_ERROR(check_dtype("A_log", *A_log));
  if (conv_tail) REPLAYSSM_RETURN_IF_ERROR(check_conv_ring(*layer));
  if (rows == 0) return REPLAYSSM_OK;
  REPLAYSSM_REQUIRE_POINTER(slots);
  return REPLAYSSM_DISPATCH(materialize, problem, *layer, *table, slots, rows, *A_log, state, conv_tail);
}

replayssm_status replayssm_restore(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                   const replayssm_config* config, const replayssm_layer* layer,
                                   const replayssm_table* table, const int32_t* slots, int32_t rows, const float* state,
                                   const float* conv_tail) {
  Problem problem;
  REPLAYSSM_RETURN_IF_ERROR(check_state_op(exec, geometry, config, layer, table, rows, &problem));
  REPLAYSSM_RETURN_IF_ERROR(check_conv_ring(*layer));
  REPLAYSSM_REQUIRE_POINTER(table->restored);
  if (rows == 0) return REPLAYSSM_OK;
  REPLAYSSM_REQUIRE_POINTER(slots);
  REPLAYSSM_REQUIRE_POINTER(state);
  REPLAYSSM_REQUIRE_POINTER(conv_tail);
  return REPLAYSSM_DISPATCH(restore, problem, *layer, *table, slots, rows, state, conv_tail);
}

replayssm_status replayssm_refresh_read_copy(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                             const replayssm_config* config, const replayssm_layer* layer,
                                             const replayssm_table* table, const int32_t* slots, int32_t rows) {
  Problem problem;
  REPLAYSSM_RETURN_IF_ERROR(check_state_op(exec, geometry, config, layer, table, rows, &problem));
  if (config->read_copy == REPLAYSSM_READ_COPY_NONE)
    return fail(REPLAYSSM_INVALID_ARGUMENT,
                "refresh_read_copy: expected a config with a read copy, got read_copy='none'");
  if (rows == 0) return REPLAYSSM_OK;
  REPLAYSSM_REQUIRE_POINTER(slots);
  return REPLAYSSM_DISPATCH(refresh_read_copy, problem, *layer, *table, slots, rows);
}

replayssm_status replayssm_copy(const replayssm_exec* exec, const replayssm_table* table, void* data,
                                int64_t layer_stride, int64_t slot_stride, const int32_t* src, const int32_t* dst,
                                int32_t rows) {
  REPLAYSSM_RETURN_IF_ERROR(check_exec(exec));
  REPLAYSSM_RETURN_IF_ERROR(check_table(table));
  REPLAYSSM_RETURN_IF_ERROR(check_rows(rows));
  if (table->num_layers > 0) REPLAYSSM_REQUIRE_POINTER(data);
  if (slot_stride % 16 != 0 || layer_stride % 16 != 0)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "strides: expected multiples of 16 bytes, got slot %lld, layer %lld",
                (long long)slot_stride, (long long)layer_stride);
  if (rows == 0) return REPLAYSSM_OK;
  REPLAYSSM_REQUIRE_POINTER(src);
  REPLAYSSM_REQUIRE_POINTER(dst);
  return REPLAYSSM_DISPATCH(copy, *table, data, layer_stride, slot_stride, src, dst, rows);
}

}  // extern "C"
