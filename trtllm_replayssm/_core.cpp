// SPDX-License-Identifier: Apache-2.0
//
// The Python binding of libreplayssm. It knows integers only: addresses, strides and dtype codes, so that it needs
// neither torch's C++ ABI nor numpy. A Spec is bound once for each kind of pool and holds all that does not change from
// call to call. Statuses become exceptions; the refusal that a host op left in the error word is raised at once, and
// the word cleared. (The report of a state that is not finite refuses nothing and waits there for validate().)
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include <cinttypes>
#include <cstdio>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

#include "replayssm/replayssm.h"

namespace nb = nanobind;

namespace {

constexpr int64_t kHost = -1;  // in place of a cudaStream_t: run on the host

struct InvalidArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void check(replayssm_status status) {
  switch (status) {
    case REPLAYSSM_OK:
      return;
    case REPLAYSSM_INVALID_ARGUMENT:
      throw InvalidArgument(replayssm_last_error());
    case REPLAYSSM_UNSUPPORTED:
      throw Unsupported(replayssm_last_error());
    default:
      throw std::runtime_error(replayssm_last_error());
  }
}

std::string describe(int32_t code, int32_t row, int64_t given, int64_t expected) {
  const char* format = nullptr;
  switch (code) {
    case REPLAYSSM_ROW_SLOT_RANGE:
      format = "slot is %" PRId64 ", expected -1 (padded row) or less than %" PRId64;
      break;
    case REPLAYSSM_ROW_SLOT_OPEN:
      format = "slot %" PRId64 " has an outstanding plan or is named twice, expected distinct slots without a plan";
      break;
    case REPLAYSSM_ROW_SLOT_INVALID:
      format =
          "slot %" PRId64 " (flags %" PRId64 ") is abandoned or half restored, expected reset, load or restore first";
      break;
    case REPLAYSSM_ROW_COUNT_RANGE:
      format = "token count is %" PRId64 ", expected 0 or more";
      break;
    case REPLAYSSM_ROW_TOKEN_RANGE:
      format = "its tokens end at %" PRId64 ", expected at most the %" PRId64 " tokens of the token tensors";
      break;
    case REPLAYSSM_ROW_TOO_LONG:
      format = "brings %" PRId64 " tokens, expected at most %" PRId64
               " (a step takes max_step_tokens; ops.prefill takes more)";
      break;
    case REPLAYSSM_ROW_ACCEPTED_RANGE:
      format = "accepted is %" PRId64 ", expected 0..%" PRId64 " (exactly the upper limit after prefill)";
      break;
    case REPLAYSSM_ROW_NOT_PLANNED:
      format = "slot %" PRId64 " was not opened by this plan";
      break;
    case REPLAYSSM_ROW_NO_DECAY:
      format = "slot holds %" PRId64 " records, expected A_log to fold them";
      break;
    case REPLAYSSM_ROW_HAS_RECORDS:
      format = "slot holds %" PRId64 " records, expected none: conventional_step and _verify read none";
      break;
    case REPLAYSSM_ROW_HAS_SNAPSHOTS:
      format = "the state of slot %" PRId64
               " is a snapshot, expected ops.conventional_verify, or a reset first: no other op reads it";
      break;
    case REPLAYSSM_ROW_STATE_NOT_FINITE:
      format = "the state of head %" PRId64 " in layer %" PRId64
               " was stored with a NaN or an infinity, expected finite values (a reset heals the slot)";
      break;
    case REPLAYSSM_ROW_LENGTH_RANGE:
      format = "prompt, or generated part, of %" PRId64 " tokens, expected at least %" PRId64;
      break;
    default:
      format = "unknown error (given %" PRId64 ", expected %" PRId64 ")";
      break;
  }
  char text[256];
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
#pragma GCC diagnostic ignored "-Wformat-extra-args"
  std::snprintf(text, sizeof text, format, given, expected);
#pragma GCC diagnostic pop
  return "row " + std::to_string(row) + ": " + text;
}

replayssm_exec execution(int64_t stream) {
  if (stream == kHost) return {REPLAYSSM_HOST, nullptr};
  return {REPLAYSSM_CUDA, reinterpret_cast<void*>(stream)};
}

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

replayssm_tensor vector(uintptr_t data, int32_t dtype) { return {pointer<void>(data), dtype, {0, 0}}; }

// Where the slots of a pool lie: the address of their blobs; with an external checkpoint also its address, and its
// bytes from layer to layer and from slot to slot.
using Slots = std::variant<uintptr_t, std::tuple<uintptr_t, uintptr_t, int64_t, int64_t>>;

// Geometry and config of a pool and its extent. The table is one buffer.
struct Spec {
  replayssm_geometry geometry;
  replayssm_config config;
  replayssm_layout layout;
  int32_t num_slots, num_layers, first_head;

  Spec(const replayssm_geometry& geometry_, const replayssm_config& config_, int32_t num_slots_, int32_t num_layers_,
       int32_t first_head_, int32_t external)
      : geometry(geometry_), config(config_), num_slots(num_slots_), num_layers(num_layers_), first_head(first_head_) {
    check(replayssm_layout_external(&geometry, &config, external, &layout));
  }

  int64_t table_bytes() const { return replayssm_table_bytes(num_slots, num_layers); }
  int64_t layer_stride() const { return num_slots * layout.slot_stride; }

  replayssm_table table(uintptr_t address) const {
    replayssm_table result;
    check(replayssm_table_from_buffer(pointer<void>(address), num_slots, num_layers, &result));
    return result;
  }

  // Where a part of the table's buffer starts.
  template <typename T>
  int64_t offset_of(T* replayssm_table::* part) const {
    constexpr uintptr_t kBase = 64;  // any aligned address
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(table(kBase).*part) - kBase);
  }

  replayssm_layer layer(const Slots& slots, int32_t index) const {
    const auto* external = std::get_if<1>(&slots);
    const uintptr_t data = external ? std::get<0>(*external) : std::get<0>(slots);
    replayssm_layer result;
    check(replayssm_layer_from_blob(&layout, pointer<void>(data + index * layer_stride()), index, &result));
    if (external) {
      const auto& [blobs, checkpoint, from_layer, from_slot] = *external;
      result.checkpoint = {pointer<void>(checkpoint + index * from_layer), from_slot};
    }
    result.first_head = first_head;
    return result;
  }

  static void finish(replayssm_status status, int64_t stream, const replayssm_table& table) {
    check(status);
    if (stream != kHost) return;
    const int32_t code = table.error->code;
    if (code == REPLAYSSM_ROW_OK || code == REPLAYSSM_ROW_STATE_NOT_FINITE) return;
    const replayssm_error error = *table.error;
    *table.error = {};
    throw InvalidArgument(describe(error.code, error.row, error.given, error.expected));
  }

  void reset(int64_t stream, uintptr_t table_, uintptr_t slots, uintptr_t streams, int32_t rows) const {
    const auto exec = execution(stream);
    const auto shared = table(table_);
    finish(replayssm_reset(&exec, &shared, pointer<int32_t>(slots), pointer<int64_t>(streams), rows), stream, shared);
  }

  void adopt(int64_t stream, uintptr_t table_, uintptr_t slots, uintptr_t streams, int32_t rows) const {
    const auto exec = execution(stream);
    const auto shared = table(table_);
    finish(replayssm_adopt(&exec, &shared, pointer<int32_t>(slots), pointer<int64_t>(streams), rows), stream, shared);
  }

  void plan(int64_t stream, uintptr_t table_, uintptr_t slots, uintptr_t counts, int32_t uniform_count, int32_t rows,
            uintptr_t plan_) const {
    const auto exec = execution(stream);
    const auto shared = table(table_);
    finish(replayssm_plan(&exec, &geometry, &config, &shared, pointer<int32_t>(slots), pointer<int32_t>(counts),
                          uniform_count, rows, pointer<void>(plan_)),
           stream, shared);
  }

  void plan_next(int64_t stream, uintptr_t table_, uintptr_t slots, uintptr_t counts, uintptr_t accepted, int32_t rows,
                 int32_t row_tokens, uintptr_t plan_) const {
    const auto exec = execution(stream);
    const auto shared = table(table_);
    finish(replayssm_plan_next(&exec, &geometry, &config, &shared, pointer<int32_t>(slots), pointer<int32_t>(counts),
                               pointer<int32_t>(accepted), rows, row_tokens, pointer<void>(plan_), nullptr),
           stream, shared);
  }

  // The error word is a buffer of its own; a host op's refusal is raised, too.
  void plan_lengths(int64_t stream, uintptr_t slots, uintptr_t prompt_lengths, uintptr_t sequence_lengths,
                    uintptr_t token_ends, int32_t rows, bool prompts, uintptr_t plan_, uintptr_t error_) const {
    const auto exec = execution(stream);
    auto* const error = pointer<replayssm_error>(error_);
    check(replayssm_plan_lengths(&exec, &geometry, &config, num_slots, pointer<int32_t>(slots),
                                 pointer<int32_t>(prompt_lengths), pointer<int32_t>(sequence_lengths),
                                 pointer<int32_t>(token_ends), rows, prompts, pointer<void>(plan_), error));
    if (stream == kHost && error->code != REPLAYSSM_ROW_OK)
      throw InvalidArgument(describe(error->code, error->row, error->given, error->expected));
  }

  void commit(int64_t stream, uintptr_t table_, uintptr_t plan_, int32_t rows, uintptr_t accepted, int32_t use) const {
    const auto exec = execution(stream);
    const auto shared = table(table_);
    finish(replayssm_commit(&exec, &shared, pointer<void>(plan_), rows, pointer<int32_t>(accepted), use), stream,
           shared);
  }

  void abandon(int64_t stream, uintptr_t table_, uintptr_t plan_, int32_t rows, int32_t use) const {
    const auto exec = execution(stream);
    const auto shared = table(table_);
    finish(replayssm_abandon(&exec, &shared, pointer<void>(plan_), rows, use), stream, shared);
  }

  void conv_step(int64_t stream, uintptr_t table_, const Slots& data, int32_t layer_, uintptr_t plan_, int32_t rows,
                 uintptr_t in, int64_t in_stride, uintptr_t weight, int32_t weight_dtype, uintptr_t bias,
                 int32_t bias_dtype, uintptr_t out, int64_t out_stride, int64_t num_tokens, int32_t max_count,
                 bool records) const {
    const auto exec = execution(stream);
    const auto shared = table(table_);
    const auto section = layer(data, layer_);
    const replayssm_conv_args args = {{pointer<void>(in), config.activation, {in_stride, 1}},
                                      vector(weight, weight_dtype),
                                      vector(bias, bias_dtype),
                                      {pointer<void>(out), config.activation, {out_stride, 1}},
                                      num_tokens,
                                      max_count,
                                      records};
    finish(replayssm_conv_step(&exec, &geometry, &config, &section, &shared, pointer<void>(plan_), rows, &args), stream,
           shared);
  }

  void flush(int64_t stream, uintptr_t table_, const Slots& data, int32_t layer_, uintptr_t plan_, int32_t rows,
             uintptr_t A_log, int32_t A_log_dtype) const {
    const auto exec = execution(stream);
    const auto shared = table(table_);
    const auto section = layer(data, layer_);
    const auto decay = vector(A_log, A_log_dtype);
    finish(replayssm_flush(&exec, &geometry, &config, &section, &shared, pointer<void>(plan_), rows, &decay), stream,
           shared);
  }

  enum class Scan { kStep, kStepFlushed, kPrefill, kConventional, kVerify };

  // snapshots, of kVerify only: address and bytes from slot to slot.
  template <Scan scan, typename... Snapshots>
  void run(int64_t stream, uintptr_t table_, const Slots& data, int32_t layer_, uintptr_t plan_, int32_t rows,
           uintptr_t x, int64_t x_stride0, int64_t x_stride1, uintptr_t B, int64_t B_stride0, int64_t B_stride1,
           uintptr_t C, int64_t C_stride0, int64_t C_stride1, uintptr_t dt, int32_t dt_dtype, int64_t dt_stride0,
           int64_t dt_stride1, uintptr_t A_log, int32_t A_log_dtype, uintptr_t D, int32_t D_dtype, uintptr_t dt_bias,
           int32_t dt_bias_dtype, uintptr_t out, int64_t out_stride0, int64_t out_stride1, float dt_min, float dt_max,
           int64_t num_tokens, int32_t max_count, Snapshots... snapshots) const {
    const auto exec = execution(stream);
    const auto shared = table(table_);
    const auto section = layer(data, layer_);
    const auto dtype = config.activation;
    const replayssm_scan_args args = {{pointer<void>(x), dtype, {x_stride0, x_stride1}},
                                      {pointer<void>(B), dtype, {B_stride0, B_stride1}},
                                      {pointer<void>(C), dtype, {C_stride0, C_stride1}},
                                      {pointer<void>(dt), dt_dtype, {dt_stride0, dt_stride1}},
                                      vector(A_log, A_log_dtype),
                                      vector(D, D_dtype),
                                      vector(dt_bias, dt_bias_dtype),
                                      {pointer<void>(out), dtype, {out_stride0, out_stride1}},
                                      dt_min,
                                      dt_max,
                                      num_tokens,
                                      max_count};
    const auto* rows_of = pointer<void>(plan_);
    replayssm_status status;
    if constexpr (scan == Scan::kPrefill) {
      status = replayssm_prefill(&exec, &geometry, &config, &section, &shared, rows_of, rows, &args);
    } else if constexpr (scan == Scan::kConventional) {
      status = replayssm_conventional_step(&exec, &geometry, &config, &section, &shared, rows_of, rows, &args);
    } else if constexpr (scan == Scan::kVerify) {
      const auto buffer = [](uintptr_t base, int64_t stride) {
        return replayssm_buffer{pointer<void>(base), stride};
      }(snapshots...);
      status =
          replayssm_conventional_verify(&exec, &geometry, &config, &section, &shared, rows_of, rows, &args, &buffer);
    } else {
      status = replayssm_step(&exec, &geometry, &config, &section, &shared, rows_of, rows, &args,
                              scan == Scan::kStepFlushed);
    }
    finish(status, stream, shared);
  }

  void materialize(int64_t stream, uintptr_t table_, const Slots& data, int32_t layer_, uintptr_t slots, int32_t rows,
                   uintptr_t A_log, int32_t A_log_dtype, uintptr_t state, uintptr_t conv_tail) const {
    const auto exec = execution(stream);
    const auto shared = table(table_);
    const auto section = layer(data, layer_);
    const auto decay = vector(A_log, A_log_dtype);
    finish(replayssm_materialize(&exec, &geometry, &config, &section, &shared, pointer<int32_t>(slots), rows, &decay,
                                 pointer<float>(state), pointer<float>(conv_tail)),
           stream, shared);
  }

  void restore(int64_t stream, uintptr_t table_, const Slots& data, int32_t layer_, uintptr_t slots, int32_t rows,
               uintptr_t state, uintptr_t conv_tail) const {
    const auto exec = execution(stream);
    const auto shared = table(table_);
    const auto section = layer(data, layer_);
    finish(replayssm_restore(&exec, &geometry, &config, &section, &shared, pointer<int32_t>(slots), rows,
                             pointer<float>(state), pointer<float>(conv_tail)),
           stream, shared);
  }

  void refresh_read_copy(int64_t stream, uintptr_t table_, const Slots& data, int32_t layer_, uintptr_t slots,
                         int32_t rows) const {
    const auto exec = execution(stream);
    const auto shared = table(table_);
    const auto section = layer(data, layer_);
    finish(replayssm_refresh_read_copy(&exec, &geometry, &config, &section, &shared, pointer<int32_t>(slots), rows),
           stream, shared);
  }

  void copy(int64_t stream, uintptr_t table_, uintptr_t data, uintptr_t src, uintptr_t dst, int32_t rows) const {
    const auto exec = execution(stream);
    const auto shared = table(table_);
    finish(replayssm_copy(&exec, &shared, pointer<void>(data), layer_stride(), layout.slot_stride,
                          pointer<int32_t>(src), pointer<int32_t>(dst), rows),
           stream, shared);
  }
};

using Matrix = std::tuple<uintptr_t, int32_t, int64_t>;  // address (0: none), dtype, elements from row to row

void rms_norm(int64_t stream, const Matrix& x, const Matrix& addend, const Matrix& gate, uintptr_t weight,
              int32_t weight_dtype, const Matrix& out, int64_t rows, int32_t width, int32_t groups, float eps,
              int32_t addends, int64_t addend_stride) {
  const auto matrix = [](const Matrix& given) {
    const auto [address, dtype, stride] = given;
    return replayssm_tensor{pointer<void>(address), dtype, {stride, 1}};
  };
  const auto exec = execution(stream);
  replayssm_norm_args args = {
      matrix(x), matrix(addend), matrix(gate), vector(weight, weight_dtype), matrix(out), rows, width,
      groups,    addends,        eps};
  args.addend.stride[1] = addend_stride;
  check(replayssm_rms_norm(&exec, &args));
}

void relu2(int64_t stream, uintptr_t x, int32_t dtype, int64_t count) {
  const auto exec = execution(stream);
  check(replayssm_relu2(&exec, pointer<void>(x), dtype, count));
}

using Strided = std::tuple<uintptr_t, int64_t, int64_t>;  // address, strides

void attend(int64_t stream, int32_t dtype, const Strided& q, const Strided& keys, const Strided& values,
            const Strided& out, uintptr_t slots, uintptr_t positions, uintptr_t cells, int32_t rows, int32_t width,
            int32_t heads, int32_t kv_heads, int32_t head_dim, int32_t num_slots, int32_t capacity, float scale) {
  const auto tensor = [dtype](const Strided& given) {
    const auto [address, outer, inner] = given;
    return replayssm_tensor{pointer<void>(address), dtype, {outer, inner}};
  };
  const auto exec = execution(stream);
  const replayssm_attend_args args = {tensor(q),
                                      tensor(keys),
                                      tensor(values),
                                      tensor(out),
                                      pointer<int64_t>(slots),
                                      pointer<int64_t>(positions),
                                      pointer<int64_t>(cells),
                                      rows,
                                      width,
                                      heads,
                                      kv_heads,
                                      head_dim,
                                      num_slots,
                                      capacity,
                                      scale};
  check(replayssm_attend(&exec, &args));
}

using Slice = std::tuple<int64_t, int64_t>;
// Codes by name, counting from 0.
nb::dict codes(const char* (*name_of)(int32_t)) {
  nb::dict result;
  for (int32_t code = 0; name_of(code); ++code) result[name_of(code)] = code;
  return result;
}

nb::dict codes(std::initializer_list<std::pair<const char*, int>> names) {
  nb::dict result;
  for (const auto& [name, code] : names) result[name] = code;
  return result;
}

Slice slice(const replayssm_section& section) { return {section.offset, section.bytes}; }

}  // namespace

NB_MODULE(_core, m) {
  // torch keeps its operators, and through them these functions, until the process ends: no leak.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(
      [](const std::exception_ptr& p, void*) {
        try {
          std::rethrow_exception(p);
        } catch (const InvalidArgument& e) {
          PyErr_SetString(PyExc_ValueError, e.what());
        } catch (const Unsupported& e) {
          PyErr_SetString(PyExc_NotImplementedError, e.what());
        }
      },
      nullptr);

  m.attr("HOST") = kHost;
  m.attr("LAYOUT_VERSION") = REPLAYSSM_LAYOUT_VERSION;
  m.attr("STEPPED") = static_cast<int>(REPLAYSSM_STEPPED);
  m.attr("FOLDED") = static_cast<int>(REPLAYSSM_FOLDED);
  m.attr("SNAPSHOTTED") = static_cast<int>(REPLAYSSM_SNAPSHOTTED);
  m.attr("SLOT_OPEN") = static_cast<int>(REPLAYSSM_SLOT_OPEN);
  m.attr("SLOT_INVALID") = static_cast<int>(REPLAYSSM_SLOT_INVALID);
  m.attr("SLOT_RESTORING") = static_cast<int>(REPLAYSSM_SLOT_RESTORING);
  m.attr("SLOT_SNAPSHOT") = static_cast<int>(REPLAYSSM_SLOT_SNAPSHOT);
  m.attr("NUM_COUNTERS") = static_cast<int>(REPLAYSSM_NUM_COUNTERS);
  m.attr("CURSOR_BYTES") = sizeof(replayssm_cursor);
  m.attr("ERROR_BYTES") = sizeof(replayssm_error);
  m.attr("DTYPES") = codes(&replayssm_dtype_name);
  m.attr("CHECKPOINT_FORMATS") = codes(&replayssm_checkpoint_name);
  m.attr("READ_COPY_FORMATS") = codes(&replayssm_read_copy_name);
  m.attr("EXTERNAL_SECTIONS") =
      codes({{"checkpoint", REPLAYSSM_EXTERNAL_CHECKPOINT}, {"conv_ring", REPLAYSSM_EXTERNAL_CONV_RING}});
  m.attr("COUNTERS") = codes({{"tokens", REPLAYSSM_COUNT_TOKENS},
                              {"flushes", REPLAYSSM_COUNT_FLUSHES},
                              {"state_reads", REPLAYSSM_COUNT_STATE_READS},
                              {"state_writes", REPLAYSSM_COUNT_STATE_WRITES},
                              {"record_reads", REPLAYSSM_COUNT_RECORD_READS},
                              {"record_writes", REPLAYSSM_COUNT_RECORD_WRITES},
                              {"step_reads", REPLAYSSM_COUNT_STEP_READS}});

  m.def("version", &replayssm_version);
  m.def("has_cuda", [] { return replayssm_has_cuda() != 0; });
  m.def("cuda_architectures", &replayssm_cuda_architectures);
  m.def("load_kernels", [] { check(replayssm_load_kernels()); });
  m.def("plan_bytes", &replayssm_plan_bytes, nb::arg("rows"));
  m.def("describe", &describe, nb::arg("code"), nb::arg("row"), nb::arg("given"), nb::arg("expected"));

  nb::class_<replayssm_geometry>(m, "Geometry")
      .def(
          "__init__",
          [](replayssm_geometry* self, int32_t num_heads, int32_t head_dim, int32_t num_groups, int32_t state_dim,
             int32_t conv_kernel) {
            const replayssm_geometry geometry = {num_heads, head_dim, num_groups, state_dim, conv_kernel};
            const replayssm_config any = {1, 1, REPLAYSSM_CHECKPOINT_FP32, REPLAYSSM_READ_COPY_NONE, REPLAYSSM_FP32, 0};
            replayssm_layout layout;
            check(replayssm_layout_init(&geometry, &any, &layout));
            new (self) replayssm_geometry(geometry);
          },
          nb::arg("num_heads"), nb::arg("head_dim"), nb::arg("num_groups"), nb::arg("state_dim"),
          nb::arg("conv_kernel"));

  nb::class_<replayssm_config>(m, "Config")
      .def(
          "__init__",
          [](replayssm_config* self, int32_t window, int32_t max_step_tokens, int32_t checkpoint, int32_t read_copy,
             int32_t activation, uint64_t seed) {
            const replayssm_config config = {window, max_step_tokens, checkpoint, read_copy, activation, seed};
            const replayssm_geometry any = {1, 64, 1, 128, 4};
            replayssm_layout layout;
            check(replayssm_layout_init(&any, &config, &layout));
            new (self) replayssm_config(config);
          },
          nb::arg("window"), nb::arg("max_step_tokens"), nb::arg("checkpoint"), nb::arg("read_copy"),
          nb::arg("activation"), nb::arg("seed"));

  nb::class_<replayssm_layout>(m, "Layout")
      .def(
          "__init__",
          [](replayssm_layout* self, const replayssm_geometry& geometry, const replayssm_config& config,
             int32_t external) {
            replayssm_layout layout;
            check(replayssm_layout_external(&geometry, &config, external, &layout));
            new (self) replayssm_layout(layout);
          },
          nb::arg("geometry"), nb::arg("config"), nb::arg("external") = 0)
      .def_ro("version", &replayssm_layout::version)
      .def_ro("ring_rows", &replayssm_layout::ring_rows)
      .def_ro("conv_rows", &replayssm_layout::conv_rows)
      .def_ro("conv_channels", &replayssm_layout::conv_channels)
      .def_ro("slot_stride", &replayssm_layout::slot_stride)
      .def_ro("checkpoint_head_bytes", &replayssm_layout::checkpoint_head_bytes)
      .def_ro("read_copy_head_bytes", &replayssm_layout::read_copy_head_bytes)
      .def_prop_ro("checkpoint", [](const replayssm_layout& l) { return slice(l.checkpoint); })
      .def_prop_ro("read_copy", [](const replayssm_layout& l) { return slice(l.read_copy); })
      .def_prop_ro("x_ring", [](const replayssm_layout& l) { return slice(l.x_ring); })
      .def_prop_ro("b_ring", [](const replayssm_layout& l) { return slice(l.b_ring); })
      .def_prop_ro("delta_ring", [](const replayssm_layout& l) { return slice(l.delta_ring); })
      .def_prop_ro("conv_ring", [](const replayssm_layout& l) { return slice(l.conv_ring); });

  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  m.def("rms_norm", &rms_norm, unlocked);
  m.def("relu2", &relu2, unlocked);
  m.def("attend", &attend, unlocked);
  nb::class_<Spec>(m, "Spec")
      .def(nb::init<const replayssm_geometry&, const replayssm_config&, int32_t, int32_t, int32_t, int32_t>(),
           nb::arg("geometry"), nb::arg("config"), nb::arg("num_slots"), nb::arg("num_layers"), nb::arg("first_head"),
           nb::arg("external") = 0)
      .def_prop_ro("error_offset", [](const Spec& spec) { return spec.offset_of(&replayssm_table::error); })
      .def_prop_ro("counters_offset", [](const Spec& spec) { return spec.offset_of(&replayssm_table::counters); })
      .def_prop_ro("cursors_offset", [](const Spec& spec) { return spec.offset_of(&replayssm_table::cursors); })
      .def_prop_ro("table_bytes", &Spec::table_bytes)
      .def("reset", &Spec::reset, unlocked)
      .def("adopt", &Spec::adopt, unlocked)
      .def("plan", &Spec::plan, unlocked)
      .def("plan_next", &Spec::plan_next, unlocked)
      .def("plan_lengths", &Spec::plan_lengths, unlocked)
      .def("commit", &Spec::commit, unlocked)
      .def("abandon", &Spec::abandon, unlocked)
      .def("conv_step", &Spec::conv_step, unlocked)
      .def("flush", &Spec::flush, unlocked)
      .def("step", &Spec::run<Spec::Scan::kStep>, unlocked)
      .def("step_flushed", &Spec::run<Spec::Scan::kStepFlushed>, unlocked)
      .def("prefill", &Spec::run<Spec::Scan::kPrefill>, unlocked)
      .def("conventional_step", &Spec::run<Spec::Scan::kConventional>, unlocked)
      .def("conventional_verify", &Spec::run<Spec::Scan::kVerify, uintptr_t, int64_t>, unlocked)
      .def("materialize", &Spec::materialize, unlocked)
      .def("restore", &Spec::restore, unlocked)
      .def("refresh_read_copy", &Spec::refresh_read_copy, unlocked)
      .def("copy", &Spec::copy, unlocked);
}
