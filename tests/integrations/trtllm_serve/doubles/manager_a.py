# SPDX-License-Identifier: Apache-2.0
"""mamba_cache_manager of profile A: no speculative state."""

import torch

from doubles.shared import Slots, empty, local_layers, shapes_of


class MambaCacheManager(Slots):
    def __init__(self, d_state, d_conv, num_heads, n_groups, head_dim, num_layers, max_batch_size, mapping, dtype,
                 ssm_cache_dtype, layer_mask=None):  # fmt: skip
        layers = local_layers(layer_mask)
        self.mamba_layer_offsets = {layer: offset for offset, layer in enumerate(layers)}
        conv, ssm = shapes_of(d_state, d_conv, num_heads, n_groups, head_dim, mapping)
        self.conv_states = empty(len(layers), max_batch_size, *conv, dtype=dtype)
        self.ssm_states = empty(len(layers), max_batch_size, *ssm, dtype=ssm_cache_dtype)
        self._make_slots(max_batch_size)

    def get_conv_states(self, layer_idx):
        return self.conv_states[self.mamba_layer_offsets[layer_idx]]

    def get_ssm_states(self, layer_idx):
        return self.ssm_states[self.mamba_layer_offsets[layer_idx]]

    def shutdown(self):
        self.conv_states = self.ssm_states = torch.tensor([])


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
        MambaCacheManager.__init__(
            self,
            mamba_d_state,
            mamba_d_conv,
            mamba_num_heads,
            mamba_n_groups,
            mamba_head_dim,
            mamba_num_layers,
            max_batch_size,
            mapping,
            mamba_cache_dtype,
            mamba_ssm_cache_dtype,
            mamba_layer_mask,
        )
