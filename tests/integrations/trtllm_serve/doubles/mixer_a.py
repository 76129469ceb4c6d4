# SPDX-License-Identifier: Apache-2.0
"""mamba2_mixer of profile A: the decode kernel gates, and returns its output."""

import torch
from stock_kernels import causal_conv1d_update, selective_state_update

from doubles.shared import MixerBase


class Mamba2Mixer(MixerBase):
    def forward(self, hidden_states, attn_metadata, mamba_metadata):
        manager = attn_metadata.kv_cache_manager
        (z, xbc, dt), contexts, decodes = self._parts(hidden_states, attn_metadata)
        slots = manager.get_state_indices()[: contexts + decodes]
        states = manager.get_conv_states(self.layer_idx), manager.get_ssm_states(self.layer_idx)
        outputs = []
        if contexts:
            z_p = z[0][None].unflatten(-1, (self.tp_nheads, -1))
            kept = {"mamba_ssm_cache_dtype": self._mamba_ssm_cache_dtype}
            y = self._prefill(
                z_p,
                xbc[0],
                dt[0],
                slots[:contexts],
                *states,
                mamba_metadata,
                **kept,
            )
            outputs.append(y[0].flatten(1))
        if decodes:
            raw = causal_conv1d_update(
                xbc[1], states[0], self.conv1d.weight, self.conv1d.bias, activation="silu",
                conv_state_indices=slots[contexts:],
            )  # fmt: skip
            x, B, C = self._split(raw)
            A, D, bias = self._expanded()
            y = selective_state_update(
                states[1], x, dt[1][..., None].expand(-1, -1, self.head_dim), A, B, C, D,
                z=z[1].unflatten(-1, (self.tp_nheads, -1)), dt_bias=bias, dt_softplus=self.delta_softplus,
                state_batch_indices=slots[contexts:],
            )  # fmt: skip
            outputs.append(y.flatten(1))
        return self.out_proj(self.norm(torch.cat(outputs)))
