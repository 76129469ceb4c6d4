# SPDX-License-Identifier: Apache-2.0
from trtllm_replayssm.integrations.trtllm_build.model import ReplayNemotronHForCausalLM  # noqa: F401
