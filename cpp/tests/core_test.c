/* SPDX-License-Identifier: Apache-2.0
 *
 * The C ABI from plain C, on the host: one small layer decodes prompts, single tokens and drafts with random
 * acceptance, and every output is compared with a double-precision recurrence; then the cursors alone (cursor_test.c).
 * The full suite is in tests/ops (Python).
 */
#include <math.h>
#include <string.h>

#include "check.h"

enum { H = 4, P = 16, G = 2, N = 64, K = 4, SLOTS = 3, WINDOW = 5, STEP_TOKENS = 3, ROUNDS = 300, LONGEST = 8 };

static double uniform(double low, double high) { return low + (high - low) * rand() / RAND_MAX; }

static const replayssm_geometry geometry = {H, P, G, N, K};
static const replayssm_config config = {
    WINDOW, STEP_TOKENS, REPLAYSSM_CHECKPOINT_FP32, REPLAYSSM_READ_COPY_NONE, REPLAYSSM_FP32, 0};
static const replayssm_exec host = {REPLAYSSM_HOST, NULL};

static void test_layout(void) {
  replayssm_layout layout;
  CHECK(replayssm_layout_init(&geometry, &config, &layout) == REPLAYSSM_OK);
  CHECK(layout.ring_rows == WINDOW + STEP_TOKENS && layout.conv_rows == K - 1 + STEP_TOKENS);
  CHECK(layout.checkpoint.offset == 0 && layout.checkpoint.bytes == H * P * N * 4);
  CHECK(layout.x_ring.bytes == H * 8 * P * 4 && layout.b_ring.bytes == G * 8 * N * 4 &&
        layout.delta_ring.bytes == H * 8 * 4);
  CHECK(layout.conv_ring.offset % 256 == 0 && layout.slot_stride % 256 == 0);
  CHECK(layout.slot_stride >= layout.conv_ring.offset + layout.conv_ring.bytes);

  replayssm_config wrong = config;
  wrong.max_step_tokens = WINDOW + 1;
  CHECK(replayssm_layout_init(&geometry, &wrong, &layout) == REPLAYSSM_INVALID_ARGUMENT);
  CHECK(strstr(replayssm_last_error(), "max_step_tokens: expected 1..5") != NULL);
  wrong = config;
  wrong.checkpoint = REPLAYSSM_CHECKPOINT_NVFP4;
  wrong.read_copy = REPLAYSSM_READ_COPY_NVFP4;
  CHECK(replayssm_layout_init(&geometry, &wrong, &layout) == REPLAYSSM_INVALID_ARGUMENT);
  CHECK(strstr(replayssm_last_error(), "read_copy: expected 'none' with checkpoint='nvfp4'") != NULL);

  replayssm_layout rest;
  const int32_t external = REPLAYSSM_EXTERNAL_CHECKPOINT | REPLAYSSM_EXTERNAL_CONV_RING;
  CHECK(replayssm_layout_init(&geometry, &config, &layout) == REPLAYSSM_OK && layout.external == 0);
  CHECK(replayssm_layout_external(&geometry, &config, external, &rest) == REPLAYSSM_OK && rest.external == external);
  CHECK(rest.checkpoint.offset == -1 && rest.checkpoint.bytes == layout.checkpoint.bytes);
  CHECK(rest.conv_ring.offset == -1 && rest.x_ring.offset == 0 && rest.slot_stride < layout.slot_stride);
  _Alignas(16) char blob[16];
  replayssm_layer layer;
  CHECK(replayssm_layer_from_blob(&rest, blob, 0, &layer) == REPLAYSSM_OK);
  CHECK(!layer.checkpoint.base && !layer.conv_ring.base && layer.x_ring.base == blob);
  CHECK(replayssm_layout_external(&geometry, &config, 4, &rest) == REPLAYSSM_INVALID_ARGUMENT);
  CHECK(strstr(replayssm_last_error(), "external: unknown sections 0x4") != NULL);
  wrong = config;
  wrong.checkpoint = REPLAYSSM_CHECKPOINT_FP8_SR;
  CHECK(replayssm_layout_external(&geometry, &wrong, external, &rest) == REPLAYSSM_INVALID_ARGUMENT);
  CHECK(replayssm_layout_external(&geometry, &wrong, REPLAYSSM_EXTERNAL_CONV_RING, &rest) == REPLAYSSM_OK);
  CHECK(sizeof(replayssm_cursor) == 32 && sizeof(replayssm_plan_row) == 64 && sizeof(replayssm_plan_header) == 64);
  CHECK(sizeof(replayssm_error) == 32);
}

static void test_table(void) {
  _Alignas(64) char buffer[1024] = {0};
  replayssm_table table;
  CHECK(replayssm_table_bytes(5, 3) == 128 + 192 && replayssm_table_bytes(1, 1) == 128 + 64);
  CHECK(replayssm_table_from_buffer(buffer, 5, 3, &table) == REPLAYSSM_OK);
  CHECK((char*)table.error == buffer && (char*)table.counters == buffer + 64 && (char*)table.cursors == buffer + 128);
  CHECK((char*)table.restored == buffer + 128 + 5 * 32 && table.num_slots == 5 && table.num_layers == 3);
  CHECK(replayssm_table_from_buffer(buffer + 8, 5, 3, &table) == REPLAYSSM_INVALID_ARGUMENT);
  CHECK(strstr(replayssm_last_error(), "base: expected a multiple of 16 bytes") != NULL);
  CHECK(replayssm_table_from_buffer(buffer, 0, 3, &table) == REPLAYSSM_INVALID_ARGUMENT);

  CHECK(strcmp(replayssm_checkpoint_name(REPLAYSSM_CHECKPOINT_FP16_SR), "fp16_sr") == 0);
  CHECK(strcmp(replayssm_read_copy_name(REPLAYSSM_READ_COPY_NVFP4), "nvfp4") == 0);
  CHECK(strcmp(replayssm_dtype_name(REPLAYSSM_FP16), "fp16") == 0);
  CHECK(!replayssm_checkpoint_name(6) && !replayssm_read_copy_name(5) && !replayssm_dtype_name(3));
  CHECK(!replayssm_checkpoint_name(-1));

  /* status is the error word as plan_next leaves it: the first error, until the caller clears the word */
  replayssm_error status = {0};
  const int32_t slots[] = {1, 7}, counts[] = {1, 1}, accepted[] = {0, 0};
  _Alignas(64) char plan[256];
  for (int i = 0; i < 2; ++i) {
    CHECK(replayssm_plan_next(&host, &geometry, &config, &table, slots, counts, accepted, 2 - i, 1, plan, &status) ==
          REPLAYSSM_OK);
    CHECK(status.code == REPLAYSSM_ROW_SLOT_RANGE && status.row == 1 && status.given == 7 && status.expected == 5);
  }
}

static void test_formats(void) {
  replayssm_layout layout;
  replayssm_config formats = config;
  formats.checkpoint = REPLAYSSM_CHECKPOINT_FP8_SR;
  formats.read_copy = REPLAYSSM_READ_COPY_NVFP4;
  CHECK(replayssm_layout_init(&geometry, &formats, &layout) == REPLAYSSM_OK);
  CHECK(layout.checkpoint_head_bytes == P * N + P * 4 && layout.checkpoint.bytes == H * layout.checkpoint_head_bytes);
  CHECK(layout.read_copy_head_bytes == P * N / 2 + P * N / 16 + N + 16);
  formats.read_copy = REPLAYSSM_READ_COPY_NVFP4_AMAX;
  CHECK(replayssm_layout_init(&geometry, &formats, &layout) == REPLAYSSM_OK);
  CHECK(layout.read_copy_head_bytes == P * N / 2 + P * N / 16 + 16);
  formats.read_copy = REPLAYSSM_READ_COPY_E2M2;
  CHECK(replayssm_layout_init(&geometry, &formats, &layout) == REPLAYSSM_OK);
  CHECK(layout.read_copy_head_bytes == P * N / 2 + P * N / 8 + P * N / 16 + 16);
  CHECK(layout.read_copy.offset >= layout.checkpoint.bytes && layout.read_copy.offset % 256 == 0);

  /* What a caller that lays out its own sections may get wrong. */
  _Alignas(16) char memory[256] = {0};
  char plan[256] = {0};
  replayssm_cursor cursor = {0};
  replayssm_error error = {0};
  int64_t counters[REPLAYSSM_NUM_COUNTERS] = {0};
  const replayssm_table table = {&cursor, &error, counters, NULL, 1, 1};
  const replayssm_scan_args none = {0};
  replayssm_layer layer = {.checkpoint = {memory, 0}, .read_copy = {NULL, 0}};
  CHECK(replayssm_step(&host, &geometry, &formats, &layer, &table, plan, 0, &none, 0) == REPLAYSSM_INVALID_ARGUMENT);
  CHECK(strstr(replayssm_last_error(), "expected a read_copy buffer for read_copy='e2m2', got NULL") != NULL);
  layer.read_copy.base = memory;
  layer.first_head = -1;
  CHECK(replayssm_step(&host, &geometry, &formats, &layer, &table, plan, 0, &none, 0) == REPLAYSSM_INVALID_ARGUMENT);
  CHECK(strstr(replayssm_last_error(), "first_head: expected >= 0, got -1") != NULL);
  layer.first_head = 3;
  CHECK(replayssm_step(&host, &geometry, &formats, &layer, &table, plan, 0, &none, 0) == REPLAYSSM_OK);
  CHECK(replayssm_conventional_step(&host, &geometry, &formats, &layer, &table, plan, 0, &none) ==
        REPLAYSSM_UNSUPPORTED);
}

/* Records that conv_step stores: what the two ops take, and that either way a step ends in the same bytes. */
static void test_records(void) {
  enum { CHANNELS = H * P + 2 * G * N, COUNT = 2, ROUNDS_EACH = 40 };
  replayssm_layout layout;
  CHECK(replayssm_layout_init(&geometry, &config, &layout) == REPLAYSSM_OK);
  float A_log[H], weight[CHANNELS][K], in[COUNT][CHANNELS], xBC[COUNT][CHANNELS], C[COUNT][G * N], dt[COUNT][H];
  float y[2][COUNT][H][P];
  for (int h = 0; h < H; ++h) A_log[h] = (float)uniform(-2, 2);
  for (int c = 0; c < CHANNELS; ++c)
    for (int k = 0; k < K; ++k) weight[c][k] = (float)uniform(-1, 1);

  char* memory[2];
  replayssm_layer layers[2];
  replayssm_cursor cursors[2] = {{0}};
  replayssm_error error = {0};
  int64_t counters[REPLAYSSM_NUM_COUNTERS] = {0};
  const replayssm_table tables[2] = {{&cursors[0], &error, counters, NULL, 1, 1},
                                     {&cursors[1], &error, counters, NULL, 1, 1}};
  _Alignas(64) char plan[256];
  const int32_t slot = 0;
  for (int way = 0; way < 2; ++way) {
    memory[way] = aligned_alloc(256, layout.slot_stride);
    memset(memory[way], 0xFF, layout.slot_stride);
    CHECK(replayssm_layer_from_blob(&layout, memory[way], 0, &layers[way]) == REPLAYSSM_OK);
  }
  const replayssm_conv_args convs[2] = {{.in = {in, REPLAYSSM_FP32, {CHANNELS, 1}},
                                         .weight = {weight, REPLAYSSM_FP32, {K, 1}},
                                         .out = {xBC, REPLAYSSM_FP32, {CHANNELS, 1}},
                                         .num_tokens = COUNT,
                                         .max_count = COUNT},
                                        {.in = {in, REPLAYSSM_FP32, {CHANNELS, 1}},
                                         .weight = {weight, REPLAYSSM_FP32, {K, 1}},
                                         .out = {C, REPLAYSSM_FP32, {G * N, 1}},
                                         .num_tokens = COUNT,
                                         .max_count = COUNT,
                                         .records = 1}};
  const replayssm_scan_args by_tensors = {.x = {&xBC[0][0], REPLAYSSM_FP32, {CHANNELS, P}},
                                          .B = {&xBC[0][H * P], REPLAYSSM_FP32, {CHANNELS, N}},
                                          .C = {&xBC[0][H * P + G * N], REPLAYSSM_FP32, {CHANNELS, N}},
                                          .dt = {dt, REPLAYSSM_FP32, {H, 1}},
                                          .A_log = {A_log, REPLAYSSM_FP32, {1, 0}},
                                          .out = {y[0], REPLAYSSM_FP32, {H * P, P}},
                                          .dt_max = INFINITY,
                                          .num_tokens = COUNT,
                                          .max_count = COUNT};
  replayssm_scan_args by_records = by_tensors;
  by_records.x.data = by_records.B.data = NULL;
  by_records.C = (replayssm_tensor){C, REPLAYSSM_FP32, {G * N, N}};
  by_records.out.data = y[1];
  const replayssm_scan_args* const scans[2] = {&by_tensors, &by_records};

  for (int round = 0; round < ROUNDS_EACH; ++round) {
    for (int t = 0; t < COUNT; ++t) {
      for (int c = 0; c < CHANNELS; ++c) in[t][c] = (float)uniform(-1, 1);
      for (int h = 0; h < H; ++h) dt[t][h] = (float)uniform(-2, 2);
    }
    const int32_t accepted = rand() % (COUNT + 1);
    for (int way = 0; way < 2; ++way) {
      CHECK(replayssm_plan(&host, &geometry, &config, &tables[way], &slot, NULL, COUNT, 1, plan) == REPLAYSSM_OK);
      CHECK(replayssm_conv_step(&host, &geometry, &config, &layers[way], &tables[way], plan, 1, &convs[way]) ==
            REPLAYSSM_OK);
      CHECK(replayssm_step(&host, &geometry, &config, &layers[way], &tables[way], plan, 1, scans[way], 0) ==
            REPLAYSSM_OK);
      CHECK(replayssm_commit(&host, &tables[way], plan, 1, &accepted, REPLAYSSM_STEPPED) == REPLAYSSM_OK);
    }
    CHECK(error.code == REPLAYSSM_ROW_OK);
    CHECK(memcmp(y[0], y[1], sizeof(y[0])) == 0 && memcmp(memory[0], memory[1], layout.slot_stride) == 0);
  }
  CHECK(cursors[1].writes > 2 && counters[REPLAYSSM_COUNT_FLUSHES] == 2 * cursors[1].writes);

  /* One of x and B alone, and either where no records may be. */
  const replayssm_table* const table = &tables[1];
  replayssm_scan_args half = by_records;
  half.x.data = xBC;
  CHECK(replayssm_step(&host, &geometry, &config, &layers[1], table, plan, 1, &half, 0) == REPLAYSSM_INVALID_ARGUMENT);
  CHECK(strcmp(replayssm_last_error(), "B: must not be NULL") == 0);
  half.x.data = NULL, half.B.data = xBC;
  CHECK(replayssm_step(&host, &geometry, &config, &layers[1], table, plan, 1, &half, 0) == REPLAYSSM_INVALID_ARGUMENT);
  CHECK(strcmp(replayssm_last_error(), "x: must not be NULL") == 0);
  const replayssm_buffer snapshots = {memory[0], STEP_TOKENS * layout.checkpoint.bytes};
  CHECK(replayssm_prefill(&host, &geometry, &config, &layers[1], table, plan, 1, &by_records) ==
        REPLAYSSM_INVALID_ARGUMENT);
  CHECK(replayssm_conventional_step(&host, &geometry, &config, &layers[1], table, plan, 1, &by_records) ==
        REPLAYSSM_INVALID_ARGUMENT);
  CHECK(replayssm_conventional_verify(&host, &geometry, &config, &layers[1], table, plan, 1, &by_records, &snapshots) ==
        REPLAYSSM_INVALID_ARGUMENT);
  CHECK(strcmp(replayssm_last_error(), "x: must not be NULL") == 0);
  replayssm_conv_args conv = convs[1];
  conv.max_count = STEP_TOKENS + 1;
  CHECK(replayssm_conv_step(&host, &geometry, &config, &layers[1], table, plan, 1, &conv) ==
        REPLAYSSM_INVALID_ARGUMENT);
  CHECK(strstr(replayssm_last_error(), "max_count: a step takes at most max_step_tokens=3 tokens a row, got 4"));

  /* A long row is a prompt: nothing of it is stored. */
  CHECK(replayssm_plan(&host, &geometry, &config, table, &slot, NULL, STEP_TOKENS + 1, 1, plan) == REPLAYSSM_OK);
  conv = convs[1], conv.num_tokens = STEP_TOKENS + 1, conv.max_count = STEP_TOKENS;
  CHECK(replayssm_conv_step(&host, &geometry, &config, &layers[1], table, plan, 1, &conv) == REPLAYSSM_OK);
  CHECK(error.code == REPLAYSSM_ROW_TOO_LONG && error.given == STEP_TOKENS + 1 && error.expected == STEP_TOKENS);
  CHECK(memcmp(memory[0], memory[1], layout.slot_stride) == 0);
  free(memory[0]);
  free(memory[1]);
}

static void test_decoding(void) {
  replayssm_layout layout;
  CHECK(replayssm_layout_init(&geometry, &config, &layout) == REPLAYSSM_OK);
  char* memory = malloc(layout.slot_stride * SLOTS + 256);
  memset(memory, 0xFF, layout.slot_stride * SLOTS + 256); /* NaN everywhere: nothing unwritten may be read */
  replayssm_layer layer;
  CHECK(replayssm_layer_from_blob(&layout, (char*)(((uintptr_t)memory + 255) / 256 * 256), 0, &layer) == REPLAYSSM_OK);

  replayssm_cursor cursors[SLOTS] = {{0}};
  replayssm_error error = {0};
  int64_t counters[REPLAYSSM_NUM_COUNTERS] = {0};
  uint8_t restored[SLOTS] = {0};
  const replayssm_table table = {cursors, &error, counters, restored, SLOTS, 1};

  float A_log[H], D[H], dt_bias[H];
  for (int h = 0; h < H; ++h) {
    A_log[h] = (float)uniform(-2, 2);
    D[h] = (float)uniform(-1, 1);
    dt_bias[h] = (float)uniform(-4, 0);
  }
  static double state[H][P][N]; /* of slot 1, zero at first */
  float x[LONGEST][H][P], B[LONGEST][G][N], C[LONGEST][G][N], dt[LONGEST][H], out[LONGEST][H][P];
  _Alignas(64) char plan[256];
  CHECK(replayssm_plan_bytes(1) <= (int64_t)sizeof(plan));
  const int32_t slot = 1;
  int64_t committed = 0;

  for (int round = 0; round < ROUNDS; ++round) {
    const int prompt = round % 50 == 0; /* the first round, then now and then a prompt that continues the slot */
    const int32_t count = prompt ? LONGEST : 1 + rand() % STEP_TOKENS;
    for (int t = 0; t < count; ++t) {
      for (int h = 0; h < H; ++h) {
        dt[t][h] = (float)uniform(-2, 2);
        for (int p = 0; p < P; ++p) x[t][h][p] = (float)uniform(-1, 1);
      }
      for (int g = 0; g < G; ++g)
        for (int n = 0; n < N; ++n) {
          B[t][g][n] = (float)uniform(-1, 1);
          C[t][g][n] = (float)uniform(-1, 1);
        }
    }
    const int32_t accepted = prompt ? count : rand() % (count + 1);
    const replayssm_scan_args args = {.x = {x, REPLAYSSM_FP32, {H * P, P}},
                                      .B = {B, REPLAYSSM_FP32, {G * N, N}},
                                      .C = {C, REPLAYSSM_FP32, {G * N, N}},
                                      .dt = {dt, REPLAYSSM_FP32, {H, 1}},
                                      .A_log = {A_log, REPLAYSSM_FP32, {1, 0}},
                                      .D = {D, REPLAYSSM_FP32, {1, 0}},
                                      .dt_bias = {dt_bias, REPLAYSSM_FP32, {1, 0}},
                                      .out = {out, REPLAYSSM_FP32, {H * P, P}},
                                      .dt_min = 0,
                                      .dt_max = INFINITY,
                                      .num_tokens = count,
                                      .max_count = count};
    CHECK(replayssm_plan(&host, &geometry, &config, &table, &slot, NULL, count, 1, plan) == REPLAYSSM_OK);
    if (prompt) {
      CHECK(replayssm_prefill(&host, &geometry, &config, &layer, &table, plan, 1, &args) == REPLAYSSM_OK);
    } else {
      CHECK(replayssm_step(&host, &geometry, &config, &layer, &table, plan, 1, &args, 0) == REPLAYSSM_OK);
    }
    const int32_t use = prompt ? REPLAYSSM_FOLDED : REPLAYSSM_STEPPED;
    CHECK(replayssm_commit(&host, &table, plan, 1, &accepted, use) == REPLAYSSM_OK);
    CHECK(error.code == REPLAYSSM_ROW_OK);
    committed += accepted;
    CHECK(cursors[slot].tokens == committed && cursors[slot].history <= WINDOW && cursors[slot].flags == 0);

    static double trial[H][P][N];
    memcpy(trial, state, sizeof(state));
    double error2 = 0, norm2 = 0;
    for (int t = 0; t < count; ++t) {
      for (int h = 0; h < H; ++h) {
        const double delta = log1p(exp((double)dt[t][h] + dt_bias[h]));
        const double decay = exp(-exp((double)A_log[h]) * delta);
        const int g = h / (H / G);
        for (int p = 0; p < P; ++p) {
          double y = D[h] * x[t][h][p];
          for (int n = 0; n < N; ++n) {
            trial[h][p][n] = decay * trial[h][p][n] + delta * x[t][h][p] * B[t][g][n];
            y += trial[h][p][n] * C[t][g][n];
          }
          error2 += (out[t][h][p] - y) * (out[t][h][p] - y);
          norm2 += y * y;
        }
      }
      if (t < accepted) memcpy(state, trial, sizeof(state));
    }
    CHECK(sqrt(error2 / norm2) <= 2e-6);
  }
  CHECK(counters[REPLAYSSM_COUNT_TOKENS] == committed && counters[REPLAYSSM_COUNT_FLUSHES] > ROUNDS / WINDOW / 2);
  CHECK(counters[REPLAYSSM_COUNT_FLUSHES] + ROUNDS / 50 == cursors[slot].writes);

  /* A second plan on an open slot and a slot out of range touch nothing and say so. */
  CHECK(replayssm_plan(&host, &geometry, &config, &table, &slot, NULL, 1, 1, plan) == REPLAYSSM_OK);
  CHECK(replayssm_plan(&host, &geometry, &config, &table, &slot, NULL, 1, 1, plan) == REPLAYSSM_OK);
  CHECK(error.code == REPLAYSSM_ROW_SLOT_OPEN && error.row == 0 && error.given == slot);
  memset(&error, 0, sizeof(error));
  const int32_t beyond = SLOTS;
  CHECK(replayssm_plan(&host, &geometry, &config, &table, &beyond, NULL, 1, 1, plan) == REPLAYSSM_OK);
  CHECK(error.code == REPLAYSSM_ROW_SLOT_RANGE && error.given == SLOTS && error.expected == SLOTS);
  CHECK(cursors[0].flags == 0 && cursors[1].flags == REPLAYSSM_SLOT_OPEN && cursors[2].flags == 0);
  /* Token offsets beyond int32 are refused, not wrapped. */
  memset(&error, 0, sizeof(error));
  memset(cursors, 0, sizeof(cursors));
  const int32_t slots[] = {-1, -1, 0}, counts[] = {INT32_MAX, INT32_MAX, 1};
  _Alignas(64) char wide[512];
  CHECK(replayssm_plan_bytes(3) <= (int64_t)sizeof(wide));
  CHECK(replayssm_plan(&host, &geometry, &config, &table, slots, counts, 0, 3, wide) == REPLAYSSM_OK);
  CHECK(error.code == REPLAYSSM_ROW_TOKEN_RANGE && error.row == 2 && error.given == 2 * (int64_t)INT32_MAX + 1);
  CHECK(cursors[0].flags == 0);

  /* Tokens of a plan that the tensors do not hold are refused, also if they hold none. */
  memset(&error, 0, sizeof(error));
  CHECK(replayssm_plan(&host, &geometry, &config, &table, &slot, NULL, 1, 1, plan) == REPLAYSSM_OK);
  const replayssm_scan_args none = {.A_log = {A_log, REPLAYSSM_FP32, {1, 0}}, .max_count = 1};
  CHECK(replayssm_step(&host, &geometry, &config, &layer, &table, plan, 1, &none, 0) == REPLAYSSM_OK);
  CHECK(error.code == REPLAYSSM_ROW_TOKEN_RANGE && error.given == 1 && error.expected == 0);
  free(memory);
}

int main(void) {
  srand(7);
  test_layout();
  test_table();
  test_formats();
  test_records();
  test_decoding();
  test_cursors();
  puts("core_test: layout, formats, records, decoding and cursors are right");
  return 0;
}
