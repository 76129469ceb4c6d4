/* SPDX-License-Identifier: Apache-2.0
 *
 * libreplayssm: decoding Mamba-2 layers from a checkpoint and a ring of records.
 *
 * Per token t and value head h of group g = h / (H / G):
 *
 *     delta_t = clamp(softplus(dt_t + dt_bias), dt_min, dt_max)      a_t = -exp(A_log) * delta_t
 *     S_t     = exp(a_t) * S_{t-1} + delta_t * x_t (outer) B_t       y_t = S_t * C_t + D * x_t
 *
 * ReplaySSM keeps S as a checkpoint and the records (delta, x, B) of the last `history` committed tokens:
 *
 *     S = exp(e(0,h)) * S_ckpt + sum_j exp(e(j,h)) * delta_j * x_j (outer) B_j,    e(j,i) = a_{j+1} + ... + a_i
 *
 * so that a step reads the state once and writes only its records; once per window a flush folds the records in.
 *
 * This header is the whole public surface. It is plain C: no function throws, every function returns a status, and
 * replayssm_last_error() tells, per thread, what was given and what was expected. Every op has one contract and two
 * implementations (host, CUDA), selected by replayssm_exec. A CUDA op neither allocates, synchronises nor reads device
 * memory on the host, so that it can be captured in a CUDA graph at its first call; on the host an op is done when it
 * returns.
 *
 * Values that live on the device (slots, counts, accepted) cannot be refused by a status without a synchronisation. A
 * row with a bad value touches nothing and leaves its reason in the table's error word; the first error stays until the
 * word is cleared. The host implementation checks all rows of a call before it touches any. One error refuses nothing:
 * STATE_NOT_FINITE tells of a state that was stored. On the host, an error that refuses a row takes its place.
 */
#ifndef REPLAYSSM_H
#define REPLAYSSM_H

#include <stdint.h>

#if defined(_WIN32)
#define REPLAYSSM_API
#else
#define REPLAYSSM_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define REPLAYSSM_LAYOUT_VERSION 3
#define REPLAYSSM_MAX_WINDOW 64        /* longest window L */
#define REPLAYSSM_MAX_STEP_TOKENS 16   /* largest T_max */
#define REPLAYSSM_MAX_NORM_WIDTH 16384 /* longest group of rms_norm */

typedef enum {
  REPLAYSSM_OK = 0,
  REPLAYSSM_INVALID_ARGUMENT = 1, /* the caller's values contradict the contract */
  REPLAYSSM_UNSUPPORTED = 2,      /* meaningful, but not built or not implemented */
  REPLAYSSM_CUDA_ERROR = 3        /* a launch failed; the text names the CUDA error */
} replayssm_status;

typedef enum { REPLAYSSM_HOST = 0, REPLAYSSM_CUDA = 1 } replayssm_device;

typedef enum { REPLAYSSM_FP32 = 0, REPLAYSSM_BF16 = 1, REPLAYSSM_FP16 = 2 } replayssm_dtype;

/* Of the state that the recurrence continues from: flush and prefill read and write it. Every cast starts from FP32. */
typedef enum {
  REPLAYSSM_CHECKPOINT_FP32 = 0,
  REPLAYSSM_CHECKPOINT_BF16 = 1, /* rounded to nearest, ties to even, like FP16 and NVFP4 */
  REPLAYSSM_CHECKPOINT_FP16 = 2,
  REPLAYSSM_CHECKPOINT_FP16_SR = 3, /* FP16, rounded stochastically */
  REPLAYSSM_CHECKPOINT_FP8_SR = 4,  /* E4M3 with an FP32 scale a row of P, rounded stochastically */
  REPLAYSSM_CHECKPOINT_NVFP4 = 5    /* with block scales from amax, as NVIDIA Model Optimizer computes them */
} replayssm_checkpoint_format;

/* Of a second copy that steps read instead of the checkpoint. It is written whenever the checkpoint is, from the same
 * FP32 state, rounded to nearest, and never enters the recurrence. Refused: a copy of NVFP4, and an FP8 copy of FP8_SR,
 * which would be no smaller than the checkpoint. */
typedef enum {
  REPLAYSSM_READ_COPY_NONE = 0, /* steps read the checkpoint */
  REPLAYSSM_READ_COPY_FP8 = 1,
  REPLAYSSM_READ_COPY_NVFP4 = 2,      /* with column scales and searched block scales */
  REPLAYSSM_READ_COPY_NVFP4_AMAX = 3, /* with block scales from amax, as a checkpoint of NVFP4 has them */
  REPLAYSSM_READ_COPY_E2M2 = 4        /* 5-bit codes with searched block scales */
} replayssm_read_copy_format;

/* What the tokens of a plan went through, told to commit and abandon. */
typedef enum {
  REPLAYSSM_STEPPED = 0,    /* replayssm_step: records appended, flagged rows flushed */
  REPLAYSSM_FOLDED = 1,     /* replayssm_prefill or replayssm_conventional_step: the checkpoint holds every token */
  REPLAYSSM_SNAPSHOTTED = 2 /* replayssm_conventional_verify: the caller's snapshots hold the state after each token */
} replayssm_plan_use;

/* One Mamba-2 layer. Supported: head_dim a multiple of 8 in 8..128; state_dim 64 or 128; num_groups divides num_heads;
 * conv_kernel 2..8. (With state_dim 128 and 16-bit activations, step and flush have CUDA kernels for tensor cores if
 * head_dim is a multiple of 16; conventional_step and _verify have tuned ones for head_dim 64 and 80.) */
typedef struct {
  int32_t num_heads;   /* H */
  int32_t head_dim;    /* P */
  int32_t num_groups;  /* G */
  int32_t state_dim;   /* N */
  int32_t conv_kernel; /* K */
} replayssm_geometry;

typedef struct {
  int32_t window;          /* L: most records a slot holds between steps, 1..REPLAYSSM_MAX_WINDOW */
  int32_t max_step_tokens; /* T_max: most tokens a step brings a row, 1..min(L, REPLAYSSM_MAX_STEP_TOKENS) */
  int32_t checkpoint;      /* replayssm_checkpoint_format */
  int32_t read_copy;       /* replayssm_read_copy_format */
  int32_t activation;      /* replayssm_dtype of x, B, C, the conv inputs, the records and the outputs */
  uint64_t seed;           /* of stochastic rounding */
} replayssm_config;

/* A slice of a slot: bytes from the slot's start, both multiples of 256 but for the true size of `bytes`. */
typedef struct {
  int64_t offset; /* -1: the section lies elsewhere (replayssm_layout_external) */
  int64_t bytes;  /* 0: the section does not exist */
} replayssm_section;

/* Sections that can lie outside of the slots' blobs. */
enum {
  REPLAYSSM_EXTERNAL_CHECKPOINT = 1, /* an engine's own states: [P,N] a head, heads in order, in a plain format */
  REPLAYSSM_EXTERNAL_CONV_RING = 2   /* the engine runs the convolution itself: conv_step and conv tails are refused */
};

/* The one definition of how a slot lies in memory. Sections, all row-major:
 *   checkpoint, read_copy: a chunk a head, in its format
 *   x_ring [G,R,H/G,P], b_ring [G,R,N] activation dtype     delta_ring [G,R,H/G] fp32: a group's record is one run
 *   conv_ring [conv_rows, conv_channels] activation dtype, channels in the order x | B | C
 * Record r of a slot lies in ring row r mod ring_rows, raw conv input r in conv row r mod conv_rows.
 *
 * The chunk of a head with state S [P,N], by format:
 *   FP32, BF16, FP16  values [P,N]
 *   FP8    E4M3 codes [P,N] | fp32 row scales [P]. scale = amax(row) / 448; S = code * scale.
 *   NVFP4 checkpoint, NVFP4_AMAX
 *          E2M1 codes [P,N/2], two a byte, the even column in the low nibble | E4M3 block scales [P,N/16] | fp32 head
 *          scale | zeros up to a multiple of 16 bytes. head scale g = amax(head) / 2688; block scale s =
 *          E4M3(clamp(amax(16 columns) / (6 g), 2^-9, 448)), 1 for a block of zeros; S = code * (s * g). NVIDIA Model
 *          Optimizer packs a tensor of one head to the same bytes.
 *   NVFP4 read copy
 *          codes and block scales as above | E4M3 column scales [N] | fp32 head scale | zeros up to a multiple of 16
 *          bytes. g = amax(head) / 1536; column scale c = E4M3(max(sqrt(amax(column) / amax(head)), 2^-6)); of a block
 *          of 16 columns of u = FP16(S / (512 g c)) the scale s is, of three near a 512 / 6 and a 512 / 4, with a =
 *          max(amax(u), 2^-15 * 6.5), the one of the least squared error of the block (if amax(head) >= 2^127 the
 *          first); S = (code * (s * g)) * c.
 *   E2M2   codes of 5 bits: sign, 2 exponent bits, 2 mantissa bits: 0, .25 .. 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7. Their
 *          upper four bits [P,N/2] as in NVFP4 | their lowest bits [P,N/16], 16 columns in a little-endian uint16, the
 *          first in bit 0 | E4M3 block scales [P,N/16] | fp32 head scale | zeros up to a multiple of 16 bytes.
 *          g = amax(head) / 2464; of u as above with c = 1 s = E4M3(max(amax(u), 2^-15 * 7.5) * 512 / d), by the one of
 *          d = 7, 6.5, 7.5, 6 of the least error (if amax(head) >= 2^127 by 7); S = code * (s * g).
 *   A row or head whose scale is 0 (all values 0, or too small for the scale) has zeros for codes and other scales.
 *   One that holds a NaN or an infinity has a NaN for its scale and zeros elsewhere: every value reads as NaN. Steps
 *   may multiply C by c instead of S. How the searches round, with ties away from 0, and what they take for an error
 *   stands in cpp/src/formats.h. */
typedef struct {
  int32_t version;
  int32_t ring_rows;             /* R = L + T_max */
  int32_t conv_rows;             /* K - 1 + T_max */
  int32_t conv_channels;         /* H*P + 2*G*N */
  int64_t checkpoint_head_bytes; /* bytes of a head's chunk, a multiple of 16; 0: no such section */
  int64_t read_copy_head_bytes;
  replayssm_section checkpoint, read_copy, x_ring, b_ring, delta_ring, conv_ring;
  int64_t slot_stride; /* bytes from slot to slot of one layer, a multiple of 256 */
  int32_t external;    /* REPLAYSSM_EXTERNAL_* */
} replayssm_layout;

/* One section of all slots of one layer. Slot s starts at base + s * slot_stride (bytes), both multiples of 16.
 * Sections need not share a stride: one blob a slot is the special case. */
typedef struct {
  void* base;
  int64_t slot_stride;
} replayssm_buffer;

typedef struct {
  replayssm_buffer checkpoint, read_copy, x_ring, b_ring, delta_ring, conv_ring;
  int32_t layer;      /* index of the layer in its pool */
  int32_t first_head; /* index of head 0 among the heads of all tensor-parallel ranks, a part of the rounding's key */
} replayssm_layer;

/* The state of a slot that all layers share. 32 bytes. All zero is an empty slot. */
typedef struct {
  int64_t tokens;  /* committed tokens since the reset */
  uint64_t stream; /* identity of the sequence, given at reset */
  int64_t writes;  /* commits that wrote the state; 0: the checkpoint counts as all zero and is not read */
  int32_t history; /* h: committed tokens whose records are not in the checkpoint (SNAPSHOT: the live snapshot + 1) */
  int32_t flags;   /* REPLAYSSM_SLOT_* */
} replayssm_cursor;

enum {
  REPLAYSSM_SLOT_OPEN = 1,      /* a plan is outstanding */
  REPLAYSSM_SLOT_INVALID = 2,   /* a plan that may have written the state was abandoned */
  REPLAYSSM_SLOT_RESTORING = 4, /* some, but not all, layers were restored */
  REPLAYSSM_SLOT_SNAPSHOT = 8,  /* the state is a snapshot: until a reset only conventional_verify reads it */
  /* Of a slot that plan_next opened, from this bit on: the tokens of the outstanding step, at least 1. */
  REPLAYSSM_SLOT_COUNT_SHIFT = 8
};

/* What plan_next takes besides a number of accepted tokens. */
enum {
  REPLAYSSM_ACCEPT_ALL = -1,  /* every token of the outstanding step, if there is one */
  REPLAYSSM_NEW_SEQUENCE = -2 /* forget the slot, whatever its state: a sequence of stream 0 begins */
};

/* One row of a plan: the cursors of its slot as they were when the step was planned. 64 bytes. */
typedef struct {
  int64_t tokens;
  uint64_t stream;
  int64_t writes;
  int32_t slot;        /* -1: padded or refused, the row touches nothing */
  int32_t first_token; /* its first row in the packed token tensors */
  int32_t count;       /* T: tokens it brings */
  int32_t history;
  int32_t flags;    /* REPLAYSSM_ROW_* */
  int32_t ring_row; /* tokens mod ring_rows: where its first record goes */
  int32_t conv_row; /* tokens mod conv_rows */
  int32_t reserved[3];
} replayssm_plan_row;

enum {
  REPLAYSSM_ROW_FLUSH = 1,   /* a step folds the row's records first: history > 0, history + count > L, not LONG and
                                not SNAPSHOT */
  REPLAYSSM_ROW_EMPTY = 2,   /* writes == 0: the checkpoint counts as zero and is not read */
  REPLAYSSM_ROW_LONG = 4,    /* count > max_step_tokens: only prefill and conventional_step take it */
  REPLAYSSM_ROW_SNAPSHOT = 8 /* snapshot history - 1 is its state: only conv_step and conventional_verify take it */
};

/* A plan is replayssm_plan_bytes(rows) bytes, 64-byte aligned: this header (64 bytes), rows x replayssm_plan_row, then
 * int32 row_order[rows]: from its begin the indices of the num_flush rows flagged FLUSH, ascending, up to its end those
 * of the other live rows, descending, and -1 between them, for rows that are padded or refused. Layer ops leave it as
 * it is, but while they run: CTAs of step and flush may count jobs in `claims`, of layer l in word l modulo their
 * number, so that ops of one plan must not run at the same time for layers that share a word. */
enum { REPLAYSSM_PLAN_CLAIMS = 12 };
typedef struct {
  int32_t rows;
  int32_t num_tokens; /* sum of the counts, padded rows included; of plan_next: rows * row_tokens */
  int32_t num_live;   /* rows that are neither padded nor refused */
  int32_t num_flush;
  int32_t claims[REPLAYSSM_PLAN_CLAIMS]; /* zero */
} replayssm_plan_header;

/* What went wrong in a row, first error first. 32 bytes; code 0: nothing. */
typedef struct {
  int32_t code; /* replayssm_row_error */
  int32_t row;
  int64_t given;
  int64_t expected; /* the limit, where there is one */
  int64_t reserved;
} replayssm_error;

typedef enum {
  REPLAYSSM_ROW_OK = 0,
  REPLAYSSM_ROW_SLOT_RANGE = 1,     /* slot outside -1..num_slots-1 */
  REPLAYSSM_ROW_SLOT_OPEN = 2,      /* slot with an outstanding plan, or named twice */
  REPLAYSSM_ROW_SLOT_INVALID = 3,   /* slot must be reset, loaded or restored first; expected: its flags */
  REPLAYSSM_ROW_COUNT_RANGE = 4,    /* count < 0 */
  REPLAYSSM_ROW_TOKEN_RANGE = 5,    /* the row's tokens lie beyond the token tensors; given: first + count (in
                                       plan_lengths: their end is not where expected) */
  REPLAYSSM_ROW_TOO_LONG = 6,       /* step got a row of more than max_step_tokens */
  REPLAYSSM_ROW_ACCEPTED_RANGE = 7, /* accepted outside 0..count, not the whole count of folded tokens, or a row that
                                       the op refused */
  REPLAYSSM_ROW_NOT_PLANNED = 8,    /* commit/abandon of a slot that this plan did not open */
  REPLAYSSM_ROW_NO_DECAY = 9,       /* materialize of records without A_log */
  REPLAYSSM_ROW_HAS_RECORDS = 10,   /* conventional_step or _verify of a slot that holds records; given: their number */
  REPLAYSSM_ROW_HAS_SNAPSHOTS = 11, /* anything but conventional_verify of a slot whose state is a snapshot; given: the
                                       slot */
  REPLAYSSM_ROW_STATE_NOT_FINITE = 12, /* the state that the row stored holds a NaN or an infinity, in its format;
                                          given: the head, expected: the layer */
  REPLAYSSM_ROW_LENGTH_RANGE = 13 /* plan_lengths: a prompt of no token, or a decode step before its first generated
                                     token; given: tokens of the prompt, or generated, expected: the least */
} replayssm_row_error;

/* Traffic counters, int64 each, added up by commit for one layer. */
enum {
  REPLAYSSM_COUNT_TOKENS = 0,        /* tokens committed */
  REPLAYSSM_COUNT_FLUSHES = 1,       /* flushes by steps */
  REPLAYSSM_COUNT_STATE_READS = 2,   /* whole states read */
  REPLAYSSM_COUNT_STATE_WRITES = 3,  /* whole states written: the checkpoint, and the read copy if there is one */
  REPLAYSSM_COUNT_RECORD_READS = 4,  /* records read */
  REPLAYSSM_COUNT_RECORD_WRITES = 5, /* records written */
  REPLAYSSM_COUNT_STEP_READS = 6,    /* of the state reads, those by steps that did not flush: of the read copy if there
                                        is one; all others are of the checkpoint */
  REPLAYSSM_NUM_COUNTERS = 8
};

/* What all layers of a pool share. All pointers on the device of the ops. */
typedef struct {
  replayssm_cursor* cursors; /* [num_slots] */
  replayssm_error* error;    /* [1] */
  int64_t* counters;         /* [REPLAYSSM_NUM_COUNTERS] */
  uint8_t* restored;         /* [num_slots, num_layers]: layers restored while a slot is RESTORING */
  int32_t num_slots;
  int32_t num_layers;
} replayssm_table;

typedef struct {
  int32_t device; /* replayssm_device */
  void* stream;   /* cudaStream_t; ignored on the host */
} replayssm_exec;

/* A strided tensor. The last dimension is contiguous, but for dt, whose last stride is given. Strides in elements. */
typedef struct {
  void* data;
  int32_t dtype;     /* replayssm_dtype */
  int64_t stride[2]; /* of the leading dimensions: token, then head or group (dt: token, head) */
} replayssm_tensor;

/* Inputs and output of step, prefill, conventional_step and conventional_verify. Rows of the packed token tensors
 * belong to plan rows by first_token and count. x, B, C and out have the config's activation dtype. A step is given
 * neither x nor B (data NULL) if conv_step has stored them as the tokens' records. */
typedef struct {
  replayssm_tensor x;       /* [num_tokens, H, P] */
  replayssm_tensor B;       /* [num_tokens, G, N] */
  replayssm_tensor C;       /* [num_tokens, G, N] */
  replayssm_tensor dt;      /* [num_tokens, H], raw (before bias and softplus), any dtype */
  replayssm_tensor A_log;   /* [H], any dtype, contiguous */
  replayssm_tensor D;       /* [H], any dtype, contiguous; data NULL: no skip connection */
  replayssm_tensor dt_bias; /* [H], any dtype, contiguous; data NULL: zero */
  replayssm_tensor out;     /* [num_tokens, H, P]; rows of padded and refused plan rows are not written */
  float dt_min, dt_max;     /* time_step_limit, the only clamp of delta */
  int64_t num_tokens;
  int32_t max_count; /* an upper bound of every count, known on the host (step, verify: at most max_step_tokens) */
} replayssm_scan_args;

typedef struct {
  replayssm_tensor in;     /* [num_tokens, conv_channels], raw, activation dtype */
  replayssm_tensor weight; /* [conv_channels, K], any dtype, contiguous; tap K-1 meets the newest input */
  replayssm_tensor bias;   /* [conv_channels], any dtype; data NULL: zero */
  replayssm_tensor out;    /* [num_tokens, conv_channels], silu(conv), activation dtype; must not overlap `in`. With
                              `records` C alone: [num_tokens, G*N] */
  int64_t num_tokens;
  int32_t max_count; /* an upper bound of every count, known on the host (with `records` at most max_step_tokens) */
  int32_t records;   /* 1: x and B become the tokens' records, in the rings, instead of parts of `out`; 0: no */
} replayssm_conv_args;

/* Inputs and output of rms_norm. width: a multiple of 8 * groups, width / groups at most REPLAYSSM_MAX_NORM_WIDTH. */
typedef struct {
  replayssm_tensor x;      /* [rows, width], any dtype */
  replayssm_tensor addend; /* [addends, rows, width], any dtype; strides of rows and addends; data NULL: none. Their sum
                              with x, in FP32, is normed, and stored in x, whose rows must not overlap then */
  replayssm_tensor gate;   /* [rows, width], any dtype; data NULL: none. x * silu(gate) is normed; not with addend */
  replayssm_tensor weight; /* [width], any dtype */
  replayssm_tensor out;    /* [rows, width], any dtype; overlaps none of the others */
  int64_t rows;
  int32_t width, groups;
  int32_t addends; /* >= 1 with an addend */
  float eps;
} replayssm_norm_args;

/* Inputs and output of attend. q, keys, values and out have one dtype. */
typedef struct {
  replayssm_tensor q;       /* [num_tokens, heads, head_dim] */
  replayssm_tensor keys;    /* [num_slots, kv_heads, capacity, head_dim]; strides of slots and heads, positions lie
                               head_dim apart */
  replayssm_tensor values;  /* like keys */
  replayssm_tensor out;     /* like q */
  const int64_t* slots;     /* [num_tokens] */
  const int64_t* positions; /* [num_tokens], 0..capacity-1, rising in a row */
  const int64_t* cells;     /* [rows, width]: where each row's tokens are packed; shorter rows repeat their last one */
  int32_t rows, width, heads, kv_heads, head_dim, num_slots, capacity;
  float scale; /* of the products of queries and keys */
} replayssm_attend_args;

/* Text of this thread's last failed call; "" if none. */
REPLAYSSM_API const char* replayssm_last_error(void);
/* 1 if the library holds the CUDA ops. */
REPLAYSSM_API int32_t replayssm_has_cuda(void);
/* Version of the library, and the CUDA architectures it was compiled for ("" without CUDA). */
REPLAYSSM_API const char* replayssm_version(void);
REPLAYSSM_API const char* replayssm_cuda_architectures(void);
/* Loads every kernel into the current CUDA context, so that a first call inside stream capture loads nothing. */
REPLAYSSM_API replayssm_status replayssm_load_kernels(void);

/* Checks geometry and config, each value by name, and computes the layout. */
REPLAYSSM_API replayssm_status replayssm_layout_init(const replayssm_geometry* geometry, const replayssm_config* config,
                                                     replayssm_layout* layout);
/* The same, with the sections that `external` names left out of the blob. Refused with
 * REPLAYSSM_EXTERNAL_CHECKPOINT: FP8_SR and NVFP4, whose chunks are no plain tensors. */
REPLAYSSM_API replayssm_status replayssm_layout_external(const replayssm_geometry* geometry,
                                                         const replayssm_config* config, int32_t external,
                                                         replayssm_layout* layout);
/* The layer whose slots are blobs of layout->slot_stride bytes each from `base` on; first_head is 0. Buffers of
 * external sections are NULL: a caller that has an external checkpoint fills its buffer in. */
REPLAYSSM_API replayssm_status replayssm_layer_from_blob(const replayssm_layout* layout, void* base, int32_t layer,
                                                         replayssm_layer* out);
REPLAYSSM_API int64_t replayssm_plan_bytes(int32_t rows);

/* A table in one buffer, 16-byte aligned: error word at byte 0, counters at 64, cursors at 128, then the restore marks.
 * All zero is a table of empty slots. */
REPLAYSSM_API int64_t replayssm_table_bytes(int32_t num_slots, int32_t num_layers);
REPLAYSSM_API replayssm_status replayssm_table_from_buffer(void* base, int32_t num_slots, int32_t num_layers,
                                                           replayssm_table* out);

/* Names of the codes, "fp32" and so on, counting from 0; NULL beyond the last. */
REPLAYSSM_API const char* replayssm_checkpoint_name(int32_t format);
REPLAYSSM_API const char* replayssm_read_copy_name(int32_t format);
REPLAYSSM_API const char* replayssm_dtype_name(int32_t dtype);

/* ---- once a step, for all layers: the only ops that touch cursors --------------------------------------------------
 */

/* Empties slots: tokens = history = writes = 0, whatever their state. slots int32 [rows] (-1: skipped), streams int64
 * [rows]. Touches no layer memory: an empty slot's checkpoint and rings are never read. */
REPLAYSSM_API replayssm_status replayssm_reset(const replayssm_exec* exec, const replayssm_table* table,
                                               const int32_t* slots, const int64_t* streams, int32_t rows);
/* What reset does, but the state of the slots is what their checkpoints hold (writes = 1), put there by another, for
 * instance an engine's own prefill. With a read copy, replayssm_refresh_read_copy must follow in every layer. A slot
 * may be named twice. */
REPLAYSSM_API replayssm_status replayssm_adopt(const replayssm_exec* exec, const replayssm_table* table,
                                               const int32_t* slots, const int64_t* streams, int32_t rows);
/* Snapshots the cursors of each row's slot, decides which rows flush, and opens the slots. slots int32 [rows], -1 =
 * padded row; counts int32 [rows], or NULL: uniform_count each. Live slots must be distinct, closed and valid. */
REPLAYSSM_API replayssm_status replayssm_plan(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                              const replayssm_config* config, const replayssm_table* table,
                                              const int32_t* slots, const int32_t* counts, int32_t uniform_count,
                                              int32_t rows, void* plan);
/* Ends a plan. Stepped: tokens += accepted; history = (flush ? 0 : history) + accepted; writes += flush. Folded: tokens
 * += count; history = 0; writes += 1. Snapshotted: tokens += accepted; history = accepted, which makes snapshot
 * accepted - 1 the state of the slot; writes += 1; the slot is SNAPSHOT. A verification that accepts none of its tokens
 * has overwritten the snapshot it began with: the slot becomes INVALID, unless it began with the checkpoint, which
 * stands (engines accept the bonus token at least). Rows of count 0 change nothing. accepted int32 [rows], or NULL:
 * all; entries of padded rows are ignored. */
REPLAYSSM_API replayssm_status replayssm_commit(const replayssm_exec* exec, const replayssm_table* table,
                                                const void* plan, int32_t rows, const int32_t* accepted, int32_t use);
/* Closes a plan's slots with nothing committed. Slots whose state the plan's ops may have written become INVALID:
 * stepped: those flagged FLUSH or LONG; folded: all that prefill takes; snapshotted: those flagged SNAPSHOT. */
REPLAYSSM_API replayssm_status replayssm_abandon(const replayssm_exec* exec, const replayssm_table* table,
                                                 const void* plan, int32_t rows, int32_t use);
/* commit and plan in one, for callers that hold no plan from step to step and learn accepted counts only when they plan
 * the next one (a TensorRT engine): first ends, per row, the step that is still outstanding in its slot, then plans the
 * row's new tokens. The number of outstanding tokens rests in the cursor, so slots may change rows and batches freely.
 *
 * The rows' tokens lie in tensors padded to row_tokens tokens a row: first_token = i * row_tokens, and counts are
 * 0..row_tokens. slots, counts, accepted int32 [rows]; accepted is the part of the slot's outstanding step that stays,
 * or ACCEPT_ALL or NEW_SEQUENCE; with nothing outstanding 0.
 *   row_tokens <= max_step_tokens: the plan is for replayssm_step. Its slots stay open until a plan_next that names
 *     them; a row of count 0 settles its slot: the outstanding step is committed and the slot is closed.
 *   row_tokens >  max_step_tokens: the plan is for replayssm_prefill, which can't be rolled back: every token is
 *     committed at once, no row is flagged FLUSH, and the slots are closed.
 * If an op that consumes the plan fails, the slots must be reset, loaded or restored. status [1], or NULL, receives the
 * table's error word as the op leaves it. A slot opened by replayssm_plan (SLOT_OPEN) or SNAPSHOT is refused. */
REPLAYSSM_API replayssm_status replayssm_plan_next(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                                   const replayssm_config* config, const replayssm_table* table,
                                                   const int32_t* slots, const int32_t* counts, const int32_t* accepted,
                                                   int32_t rows, int32_t row_tokens, void* plan,
                                                   replayssm_error* status);

/* A plan for a runtime that keeps no cursors of ours, only two lengths a sequence (TensorRT-LLM's engine runtime). All
 * rows are prompts, or all are decode steps of one token each, and all that a cursor would say follows from the
 * lengths: prompts:  the sequence begins (tokens = history = writes = 0) and brings prompt_lengths[i] tokens, for
 * prefill. steps:    k = sequence_lengths[i] - prompt_lengths[i] - 1 tokens were decoded before, the one of this step
 * not among them; tokens = prompt_lengths[i] + k; history = k ? (k - 1) mod L + 1 : 0; writes = 1 + max(k - 1, 0) / L,
 * which is where steps of one token lead after a prefill. For step. The stream is 0. The rows' tokens are packed: those
 * of row i end at token_ends[i] (inclusive prefix sums, so the last one is num_tokens), and must be as many as the row
 * brings. slots, prompt_lengths, sequence_lengths (read for steps only), token_ends int32 [rows]. Slots have no state
 * but their memory: nothing is opened, and there is no commit. error [1] is overwritten: code 0, or the first row that
 * is refused. Layer ops take it as the error word of a table whose cursors they do not read. */
REPLAYSSM_API replayssm_status replayssm_plan_lengths(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                                      const replayssm_config* config, int32_t num_slots,
                                                      const int32_t* slots, const int32_t* prompt_lengths,
                                                      const int32_t* sequence_lengths, const int32_t* token_ends,
                                                      int32_t rows, int32_t prompts, void* plan,
                                                      replayssm_error* error);

/* ---- per layer -----------------------------------------------------------------------------------------------------
 */

/* From a plan to the last op that takes it, nobody but these ops may write what its slots hold, nor A_log, D and
 * dt_bias: on CUDA steps may load them before what is ahead of them in the stream has ended. Kernels of the caller's
 * that are launched early themselves (programmatic dependent launch) must wait for those ahead of them before they end.
 * What an ordinary launch has written is there if another ordinary launch stands between it and the op. */

/* out = x / sqrt(mean(x^2) + eps) * weight, the mean over each of `groups` equal parts of a row, in FP32: what stands
 * between the other ops of a model. With `addend` the norm before a layer and the sum before that; with `gate`
 * Mamba-2's norm after the state. A row's bits depend on nothing but the row. */
REPLAYSSM_API replayssm_status replayssm_rms_norm(const replayssm_exec* exec, const replayssm_norm_args* args);

/* x = max(x, 0)^2 in place, between a model's dense layers. NaN stays. x: `count` elements of any dtype, contiguous. */
REPLAYSSM_API replayssm_status replayssm_relu2(const replayssm_exec* exec, void* x, int32_t dtype, int64_t count);

/* Grouped-query attention of new tokens over the keys of their slots up to their own positions, which are there
 * already: out = softmax(scale * q . keys) values, in FP32. A row whose slot is none is not written. A token's bits
 * depend neither on its batch nor on the other tokens of its row, unless values of later tokens are not finite: these
 * may make NaNs of it. On CUDA for BF16 and FP16 and head_dim 64 or 128; else UNSUPPORTED. */
REPLAYSSM_API replayssm_status replayssm_attend(const replayssm_exec* exec, const replayssm_attend_args* args);

/* out = silu(causal depthwise conv of `in` over the slot's raw inputs + bias). Keeps the raw inputs that later tokens
 * or a rollback need: the new tokens of a row of count <= max_step_tokens, else the last K-1 (a long row is a prompt
 * and is never rolled back). Inputs before token 0 count as 0.
 * With `records` x and B go where step would append them: a step without x and B of its own must follow on the same
 * plan, and rows that it does not take (LONG, SNAPSHOT) are refused. New records never lie on live ones, in rows that
 * flush neither. */
REPLAYSSM_API replayssm_status replayssm_conv_step(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                                   const replayssm_config* config, const replayssm_layer* layer,
                                                   const replayssm_table* table, const void* plan, int32_t rows,
                                                   const replayssm_conv_args* args);
/* Folds the committed records of the rows flagged FLUSH into their checkpoints, and casts the read copies.
 * replayssm_step does this itself; call it only where flush and outputs are separate nodes, and then tell step so:
 * prefill after it would fold twice. Like every op that stores a state, it proceeds and reports STATE_NOT_FINITE if a
 * value is not finite as stored. */
REPLAYSSM_API replayssm_status replayssm_flush(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                               const replayssm_config* config, const replayssm_layer* layer,
                                               const replayssm_table* table, const void* plan, int32_t rows,
                                               const replayssm_tensor* A_log);
/* Flushes flagged rows (unless `flushed`), appends the new records (of those that conv_step has stored only delta), and
 * computes the outputs without forming a state:
 * y_s = exp(e(0,h+s)) S_ckpt C_s + sum_{j<=h+s} delta_j exp(e(j,h+s)) (B_j . C_s) x_j + D x_s,  s = 1..count.
 * S_ckpt is the stored read copy, if the config has one, else the stored checkpoint; also in rows that flush. */
REPLAYSSM_API replayssm_status replayssm_step(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                              const replayssm_config* config, const replayssm_layer* layer,
                                              const replayssm_table* table, const void* plan, int32_t rows,
                                              const replayssm_scan_args* args, int32_t flushed);
/* Prompt chunks of any length: folds committed records into the checkpoint's state, runs the recurrence over the new
 * tokens, writes outputs, checkpoint and read copy. Continues a slot wherever it stands. Appends no records. */
REPLAYSSM_API replayssm_status replayssm_prefill(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                                 const replayssm_config* config, const replayssm_layer* layer,
                                                 const replayssm_table* table, const void* plan, int32_t rows,
                                                 const replayssm_scan_args* args);
/* The classical decode kernel, the baseline: reads the checkpoint, updates it by each token, writes it back. Same
 * contract as prefill on slots without records; a row with history > 0 is refused (HAS_RECORDS). Tuned for count 1.
 * FP32, BF16 and FP16 checkpoints without a read copy only, like conventional_verify: others are UNSUPPORTED. */
REPLAYSSM_API replayssm_status replayssm_conventional_step(const replayssm_exec* exec,
                                                           const replayssm_geometry* geometry,
                                                           const replayssm_config* config, const replayssm_layer* layer,
                                                           const replayssm_table* table, const void* plan, int32_t rows,
                                                           const replayssm_scan_args* args);

/* The classical verification kernel, the baseline: reads the state once, updates it by each token, and stores it after
 * each, so that any number of tokens can be committed. Snapshot t, the state after token t of the row, in the
 * checkpoint format, goes to snapshots->base + slot * snapshots->slot_stride (bytes) + t * layout.checkpoint.bytes, for
 * t < max_step_tokens; base and stride are multiples of 16, and the caller keeps the buffer from step to step. A row
 * reads the pool's checkpoint (zero, if EMPTY), one flagged SNAPSHOT its snapshot history - 1; nothing is copied at
 * commit. The arithmetic is conventional_step's, rounded to the checkpoint format between calls only. A row with
 * records (HAS_RECORDS) or more than max_step_tokens tokens (TOO_LONG) is refused. */
REPLAYSSM_API replayssm_status replayssm_conventional_verify(
    const replayssm_exec* exec, const replayssm_geometry* geometry, const replayssm_config* config,
    const replayssm_layer* layer, const replayssm_table* table, const void* plan, int32_t rows,
    const replayssm_scan_args* args, const replayssm_buffer* snapshots);

/* ---- on demand -----------------------------------------------------------------------------------------------------
 */

/* state fp32 [rows,H,P,N] after the committed tokens (from the checkpoint, never the read copy), conv_tail fp32
 * [rows,K-1,conv_channels] the last K-1 raw conv inputs, oldest first (inputs before token 0 are 0). Disturbs nothing.
 * Rows of slot -1 or refused are not written. The slot must be closed and not SNAPSHOT. A_log.data NULL is allowed as
 * long as no row holds records. Either output may be NULL. */
REPLAYSSM_API replayssm_status replayssm_materialize(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                                     const replayssm_config* config, const replayssm_layer* layer,
                                                     const replayssm_table* table, const int32_t* slots, int32_t rows,
                                                     const replayssm_tensor* A_log, float* state, float* conv_tail);
/* The inverse, one layer of a slot at a time: writes checkpoint, read copy and conv rows. The slot is RESTORING, and
 * planning it is refused, until all num_layers layers were restored; then tokens = K-1 (ring positions only need the
 * K-1 raw inputs to lie before it), history = 0, writes += 1; the stream stays. The slot must be closed and not
 * SNAPSHOT. */
REPLAYSSM_API replayssm_status replayssm_restore(const replayssm_exec* exec, const replayssm_geometry* geometry,
                                                 const replayssm_config* config, const replayssm_layer* layer,
                                                 const replayssm_table* table, const int32_t* slots, int32_t rows,
                                                 const float* state, const float* conv_tail);
/* Casts the read copies of slots anew from their checkpoints as stored. slots int32 [rows]; -1 and empty slots are
 * skipped, a slot may be named twice. The slots must be closed and not SNAPSHOT. Needs a config with a read copy. */
REPLAYSSM_API replayssm_status replayssm_refresh_read_copy(const replayssm_exec* exec,
                                                           const replayssm_geometry* geometry,
                                                           const replayssm_config* config, const replayssm_layer* layer,
                                                           const replayssm_table* table, const int32_t* slots,
                                                           int32_t rows);
/* Copies whole slots, all layers and cursors: slot src[i] of layer l, at data + l*layer_stride + slot*slot_stride
 * (slot_stride bytes). Sources must be closed and valid, destinations closed, distinct and no sources; neither
 * SNAPSHOT. */
REPLAYSSM_API replayssm_status replayssm_copy(const replayssm_exec* exec, const replayssm_table* table, void* data,
                                              int64_t layer_stride, int64_t slot_stride, const int32_t* src,
                                              const int32_t* dst, int32_t rows);

#ifdef __cplusplus
}
#endif
#endif /* REPLAYSSM_H */
