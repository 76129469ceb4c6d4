# SPDX-License-Identifier: Apache-2.0
"""mamba_cache_manager of profile B: MTP, states after each draft."""

import torch

from doubles.shared import Speculative, empty, shapes_of


class MambaCacheManager(Speculative):
    def __init__(self, d_state, d_conv, num_heads, n_groups, head_dim, num_layers, max_batch_size, spec_state_size,
                 mapping, dtype, ssm_cache_dtype, layer_mask=None, speculative_num_draft_tokens=None):  # fmt: skip
        shapes = shapes_of(d_state, d_conv, num_heads, n_groups, head_dim, mapping)
        self._make_states(shapes, max_batch_size, layer_mask, dtype, ssm_cache_dtype, speculative_num_draft_tokens,
                          spec_state_size, empty)  # fmt: skip
        self._make_slots(max_batch_size)

    def reorder_state_indices_when_padding_requests(self, request_size, padding_size):
        """Padding rows borrow slots that no request has."""
        taken = set(self.mamba_cache_index.values())
        free = [slot for slot in range(len(self.state_indices)) if slot not in taken][:padding_size]
        self.state_indices[request_size : request_size + padding_size] = torch.tensor(free, dtype=torch.int32)

    def update_mamba_states(self, attn_metadata, num_accepted_tokens):
        self._promote(attn_metadata, num_accepted_tokens, self.state_indices)


class MambaHybridCacheManager(MambaCacheManager):
    def __init__(
        self,
        mamba_d_state,
        mamba_d_conv,
        mamba_num_heads,
        mamba_n_groups,
        mamba_head_dim,
        mamba_num_layers,
        mamba_layer_mask,
        mamba_cache_dtype,
        mamba_ssm_cache_dtype,
        kv_cache_config,
        kv_cache_type,
        *,
        max_batch_size,
        mapping,
        spec_config=None,
        **kv,
    ):
        drafts = None if spec_config is None else spec_config.max_draft_len
        MambaCacheManager.__init__(
            self,
            mamba_d_state,
            mamba_d_conv,
            mamba_num_heads,
            mamba_n_groups,
            mamba_head_dim,
            mamba_num_layers,
            max_batch_size,
            max_batch_size,
            mapping,
            mamba_cache_dtype,
            mamba_ssm_cache_dtype,
            mamba_layer_mask,
            speculative_num_draft_tokens=drafts,
        )

    def update_mamba_states(self, attn_metadata, num_accepted_tokens):
        MambaCacheManager.update_mamba_states(self, attn_metadata, num_accepted_tokens)
