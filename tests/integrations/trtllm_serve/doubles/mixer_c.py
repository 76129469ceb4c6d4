# SPDX-License-Identifier: Apache-2.0
"""mamba2_mixer of profile C: slots come from the metadata, the draft length may change."""

import torch
from stock_kernels import causal_conv1d_update
from stock_kernels import causal_conv1d_update as causal_conv1d_update_triton
from stock_kernels import selective_state_update as selective_state_update_fi  # noqa: F401
from stock_kernels import selective_state_update as selective_state_update_native

from doubles.shared import MixerBase


class Mamba2Mixer(MixerBase):
    def __init__(self, **named):
        super().__init__(**named)
        self.selective_state_update_func = selective_state_update_native

    def forward(self, hidden_states, attn_metadata, mamba_metadata, spec_metadata=None, **kwargs):
        manager = attn_metadata.kv_cache_manager
        (z, xbc, dt), contexts, decodes = self._parts(hidden_states, attn_metadata)
        slots = mamba_metadata.state_indices[: contexts + decodes]
        cache = manager.mamba_layer_cache(self.layer_idx)
        preallocated = torch.empty(len(hidden_states), self.tp_d_inner, dtype=hidden_states.dtype)
        split = attn_metadata.num_ctx_tokens
        if contexts:
            out = preallocated[:split].view(1, split, -1, self.head_dim)
            states = (cache.conv, cache.temporal)
            self._prefill(None, xbc[0], dt[0], slots[:contexts], *states, mamba_metadata, out=out,
                          dt_limit=(0.0, float("inf")), state_dtype=self._mamba_ssm_cache_dtype)  # fmt: skip
        if decodes:
            verify = manager.is_speculative() and spec_metadata is not None
            slots_d, out = slots[contexts:], preallocated[split:]
            more, raw = {}, xbc[1]
            weights = (self.conv1d.weight, self.conv1d.bias)
            shape = (decodes,)
            if verify:
                shape = (decodes, spec_metadata.runtime_draft_len + 1)
                rows = torch.arange(decodes, dtype=torch.int32)
                raw = causal_conv1d_update_triton(
                    raw.unflatten(0, shape).transpose(1, 2), cache.conv, *weights, activation="silu",
                    conv_state_indices=slots_d, intermediate_conv_window=cache.intermediate_conv_window,
                    intermediate_state_indices=rows,
                ).transpose(1, 2).flatten(0, 1)  # fmt: skip
                more = dict(disable_state_update=True, intermediate_states_buffer=cache.intermediate_ssm,
                            cache_steps=shape[1], intermediate_state_indices=rows)  # fmt: skip
            else:
                raw = causal_conv1d_update(raw, cache.conv, *weights, activation="silu", conv_state_indices=slots_d)
            x, B, C = (part.unflatten(0, shape) for part in self._split(raw))
            A, D, bias = self._expanded()
            steps = dt[1].to(torch.float32)[..., None].expand(-1, -1, self.head_dim).unflatten(0, shape)
            self.selective_state_update_func(
                cache.temporal, x, steps, A, B, C, D, z=None, dt_bias=bias, dt_softplus=True,
                state_batch_indices=slots_d, out=out.view(*shape, -1, self.head_dim), **more,
            )  # fmt: skip
        return self.out_proj(self.norm(preallocated, z=torch.cat(z)))


def replay_selective_state_update(*_, **__):
    """The native replay."""
