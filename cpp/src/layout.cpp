// SPDX-License-Identifier: Apache-2.0
//
// The slot layout: the only place where a size of the state is computed.
#include "layout.h"

#include <algorithm>

#include "formats.h"

namespace replayssm {
namespace {

constexpr int64_t kSectionAlignment = 256;

int64_t align_up(int64_t bytes) { return (bytes + kSectionAlignment - 1) / kSectionAlignment * kSectionAlignment; }

template <size_t count>
const char* name_of(int32_t code, const char* const (&names)[count]) {
  return code >= 0 && code < static_cast<int32_t>(count) ? names[code] : nullptr;
}

int64_t checkpoint_head_bytes(const replayssm_geometry& g, int32_t format) {
  if (format == REPLAYSSM_CHECKPOINT_FP8_SR) return Fp8Chunk{g.head_dim, g.state_dim}.bytes();
  if (format == REPLAYSSM_CHECKPOINT_NVFP4) return BlockChunk<Nvfp4Amax>{g.head_dim, g.state_dim}.bytes();
  return int64_t{g.head_dim} * g.state_dim * dtype_bytes(checkpoint_dtype(format));
}

int64_t read_copy_head_bytes(const replayssm_geometry& g, int32_t format) {
  switch (format) {
    case REPLAYSSM_READ_COPY_FP8:
      return Fp8Chunk{g.head_dim, g.state_dim}.bytes();
    case REPLAYSSM_READ_COPY_NVFP4:
      return BlockChunk<Nvfp4>{g.head_dim, g.state_dim}.bytes();
    case REPLAYSSM_READ_COPY_NVFP4_AMAX:
      return BlockChunk<Nvfp4Amax>{g.head_dim, g.state_dim}.bytes();
    case REPLAYSSM_READ_COPY_E2M2:
      return BlockChunk<E2m2>{g.head_dim, g.state_dim}.bytes();
    default:
      return 0;
  }
}

}  // namespace

extern "C" const char* replayssm_checkpoint_name(int32_t format) {
  static const char* const names[] = {"fp32", "bf16", "fp16", "fp16_sr", "fp8_sr", "nvfp4"};
  return name_of(format, names);
}

extern "C" const char* replayssm_read_copy_name(int32_t format) {
  static const char* const names[] = {"none", "fp8", "nvfp4", "nvfp4_amax", "e2m2"};
  return name_of(format, names);
}

extern "C" const char* replayssm_dtype_name(int32_t dtype) {
  static const char* const names[] = {"fp32", "bf16", "fp16"};
  return name_of(dtype, names);
}

int64_t dtype_bytes(int32_t dtype) { return dtype == REPLAYSSM_FP32 ? 4 : 2; }

int32_t checkpoint_dtype(int32_t format) {
  switch (format) {
    case REPLAYSSM_CHECKPOINT_BF16:
      return REPLAYSSM_BF16;
    case REPLAYSSM_CHECKPOINT_FP16:
    case REPLAYSSM_CHECKPOINT_FP16_SR:
      return REPLAYSSM_FP16;
    default:
      return REPLAYSSM_FP32;
  }
}

replayssm_status check_geometry(const replayssm_geometry& g) {
  if (g.num_heads < 1 || g.num_heads > 65536)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "num_heads: expected 1..65536, got %d", g.num_heads);
  if (g.head_dim < 8 || g.head_dim > 128 || g.head_dim % 8 != 0)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "head_dim: expected a multiple of 8 in 8..128, got %d", g.head_dim);
  if (g.num_groups < 1 || g.num_heads % g.num_groups != 0)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "num_groups: expected a divisor of num_heads=%d, got %d", g.num_heads,
                g.num_groups);
  if (g.state_dim != 64 && g.state_dim != 128)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "state_dim: expected 64 or 128, got %d", g.state_dim);
  if (g.conv_kernel < 2 || g.conv_kernel > 8)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "conv_kernel: expected 2..8, got %d", g.conv_kernel);
  return REPLAYSSM_OK;
}

replayssm_status check_config(const replayssm_config& c) {
  if (c.window < 1 || c.window > REPLAYSSM_MAX_WINDOW)
    return fail(REPLAYSSM_INVALID_ARGUMENT, "window: expected 1..%d, got %d", REPLAYSSM_MAX_WINDOW, c.window);
  if (c.max_step_tokens < 1 || c.max_step_tokens > std::min(c.window, REPLAYSSM_MAX_STEP_TOKENS))
    return fail(REPLAYSSM_INVALID_ARGUMENT, "max_step_tokens: expected 1..%d (at most the window and %d), got %d",
                std::min(c.window, REPLAYSSM_MAX_STEP_TOKENS), REPLAYSSM_MAX_STEP_TOKENS, c.max_step_tokens);
  if (!replayssm_checkpoint_name(c.checkpoint))
    return fail(REPLAYSSM_INVALID_ARGUMENT, "checkpoint: unknown format code %d", c.checkpoint);
  if (!replayssm_read_copy_name(c.read_copy))
    return fail(REPLAYSSM_INVALID_ARGUMENT, "read_copy: unknown format code %d", c.read_copy);
  // A copy pays by being smaller than what it stands for.
  if (c.checkpoint == REPLAYSSM_CHECKPOINT_NVFP4 && c.read_copy != REPLAYSSM_READ_COPY_NONE)
    return fail(REPLAYSSM_INVALID_ARGUMENT,
                "read_copy: expected 'none' with checkpoint='nvfp4', got '%s': no copy is smaller than that checkpoint",
                replayssm_read_copy_name(c.read_copy));
  if (c.checkpoint == REPLAYSSM_CHECKPOINT_FP8_SR && c.read_copy == REPLAYSSM_READ_COPY_FP8)
    return fail(
        REPLAYSSM_INVALID_ARGUMENT,
        "read_copy: expected 'none', 'nvfp4', 'nvfp4_amax' or 'e2m2' with checkpoint='fp8_sr', got 'fp8': it is as "
        "large as that checkpoint");
  if (!replayssm_dtype_name(c.activation))
    return fail(REPLAYSSM_INVALID_ARGUMENT, "activation: unknown dtype code %d", c.activation);
  return REPLAYSSM_OK;
}

replayssm_status check_external(const replayssm_config& c, int32_t external) {
  constexpr int32_t kAll = REPLAYSSM_EXTERNAL_CHECKPOINT | REPLAYSSM_EXTERNAL_CONV_RING;
  if (external & ~kAll) return fail(REPLAYSSM_INVALID_ARGUMENT, "external: unknown sections 0x%x", external & ~kAll);
  if (external & REPLAYSSM_EXTERNAL_CHECKPOINT && c.checkpoint > REPLAYSSM_CHECKPOINT_FP16_SR)
    return fail(REPLAYSSM_INVALID_ARGUMENT,
                "external: expected checkpoint='fp32', 'bf16', 'fp16' or 'fp16_sr' where the checkpoint is another's "
                "tensor, got '%s'",
                replayssm_checkpoint_name(c.checkpoint));
  return REPLAYSSM_OK;
}

replayssm_layout make_layout(const replayssm_geometry& g, const replayssm_config& c, int32_t external) {
  replayssm_layout layout{};
  layout.version = REPLAYSSM_LAYOUT_VERSION;
  layout.ring_rows = c.window + c.max_step_tokens;
  layout.conv_rows = g.conv_kernel - 1 + c.max_step_tokens;
  layout.conv_channels = g.num_heads * g.head_dim + 2 * g.num_groups * g.state_dim;

  layout.checkpoint_head_bytes = checkpoint_head_bytes(g, c.checkpoint);
  layout.read_copy_head_bytes = read_copy_head_bytes(g, c.read_copy);

  const int64_t H = g.num_heads, P = g.head_dim, G = g.num_groups, N = g.state_dim, R = layout.ring_rows;
  const int64_t activation = dtype_bytes(c.activation);
  int64_t end = 0;
  auto place = [&end](replayssm_section& section, int64_t bytes, bool elsewhere = false) {
    section = {elsewhere ? -1 : end, bytes};
    if (!elsewhere) end = align_up(end + bytes);
  };
  layout.external = external;
  place(layout.checkpoint, H * layout.checkpoint_head_bytes, external & REPLAYSSM_EXTERNAL_CHECKPOINT);
  place(layout.read_copy, H * layout.read_copy_head_bytes);
  place(layout.x_ring, H * R * P * activation);
  place(layout.b_ring, G * R * N * activation);
  place(layout.delta_ring, H * R * 4);
  place(layout.conv_ring, int64_t{layout.conv_rows} * layout.conv_channels * activation,
        external & REPLAYSSM_EXTERNAL_CONV_RING);
  layout.slot_stride = end;
  return layout;
}

}  // namespace replayssm
