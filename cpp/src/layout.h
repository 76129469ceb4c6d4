// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops.h"

namespace replayssm {

// Both name the offending value in the last error.
replayssm_status check_geometry(const replayssm_geometry&);
replayssm_status check_config(const replayssm_config&);

// Names what the sections `external` (REPLAYSSM_EXTERNAL_*) of a checked config ask in vain.
replayssm_status check_external(const replayssm_config&, int32_t external);

// The layout of a checked geometry and config.
replayssm_layout make_layout(const replayssm_geometry&, const replayssm_config&, int32_t external = 0);

int64_t dtype_bytes(int32_t dtype);
// The dtype in which a plain checkpoint format (FP32, BF16, FP16, FP16_SR) stores a value.
int32_t checkpoint_dtype(int32_t checkpoint_format);

}  // namespace replayssm
