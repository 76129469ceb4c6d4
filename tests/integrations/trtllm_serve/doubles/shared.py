# SPDX-License-Identifier: Apache-2.0
"""What the doubles of all profiles have in common."""

import dataclasses

import torch
from stock_kernels import causal_conv1d_fn, mamba_chunk_scan_combined
from torch import nn

CUDA_GRAPH_DUMMY_REQUEST_ID = (1 << 64) - 1


class Linear(nn.Module):
    """Holds the convolution's weights; as a projection it is the identity."""

    def __init__(self, in_features=0, out_features=0, **_):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(out_features), requires_grad=False)

    def forward(self, hidden_states, **_):
        return hidden_states


class Norm(nn.Module):
    """The gate only. Profile A's kernels have gated already and give no z."""

    is_nvfp4 = False

    def __init__(self, *_, **__):
        super().__init__()

    def forward(self, out, z=None):
        return out if z is None else (out.float() * nn.functional.silu(z.float())).to(out.dtype)


def local_layers(layer_mask) -> list[int]:
    return [layer for layer, is_mamba in enumerate(layer_mask) if is_mamba]


def empty(*shape, dtype=torch.float32):
    """torch.empty at its worst."""
    return torch.full(shape, torch.nan, dtype=dtype)


class Slots:
    """request id -> slot, as every Python manager keeps it."""

    def _make_slots(self, count):
        self.mamba_cache_free_blocks = list(range(count))
        self.mamba_cache_index = {}
        self.state_indices = torch.arange(count, dtype=torch.int32)

    def _slot(self, request_id):
        if request_id not in self.mamba_cache_index:
            if not self.mamba_cache_free_blocks:
                raise RuntimeError("run out of mamba cache blocks")
            self.mamba_cache_index[request_id] = self.mamba_cache_free_blocks.pop()
        return self.mamba_cache_index[request_id]

    def prepare_resources(self, scheduled_batch):
        requests = scheduled_batch.context_requests + scheduled_batch.generation_requests
        slots = [self._slot(request.py_request_id) for request in requests]
        self.state_indices[: len(slots)] = torch.tensor(slots, dtype=torch.int32)

    def free_resources(self, request):
        if request.py_request_id in self.mamba_cache_index:
            self.mamba_cache_free_blocks.append(self.mamba_cache_index.pop(request.py_request_id))

    def get_state_indices(self):
        return self.state_indices


def shapes_of(d_state, d_conv, num_heads, n_groups, head_dim, mapping):
    ranks = 1 if mapping.enable_attention_dp else mapping.tp_size
    channels = (head_dim * num_heads + 2 * n_groups * d_state) // ranks
    return (channels, d_conv - 1), (num_heads // ranks, head_dim, d_state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    conv: torch.Tensor
    temporal: torch.Tensor

    def at_layer_idx(self, layer):
        parts = {name: None if value is None else value[layer] for name, value in vars(self).items()}
        return type(self)(**parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeState(State):
    intermediate_conv_window: torch.Tensor
    intermediate_ssm: torch.Tensor | None = None


class Speculative(Slots):
    """What the managers of B and C share."""

    def _make_states(self, shapes, max_batch_size, layer_mask, dtype, ssm_cache_dtype, drafts, rows, make):
        self.speculative_num_draft_tokens, self.spec_state_size = drafts, rows
        layers = local_layers(layer_mask)
        self.mamba_layer_offsets = {layer: offset for offset, layer in enumerate(layers)}
        (conv, ssm), count = shapes, len(layers)
        states = {
            "conv": make(count, max_batch_size, *conv, dtype=dtype),
            "temporal": make(count, max_batch_size, *ssm, dtype=ssm_cache_dtype),
        }
        if drafts is None:
            self.mamba_cache = State(**states)
        else:
            self.mamba_cache = SpeculativeState(
                **states,
                intermediate_conv_window=torch.zeros(count, rows, drafts + 1, *conv, dtype=dtype),
                intermediate_ssm=torch.zeros(count, rows, drafts + 1, *ssm, dtype=ssm_cache_dtype),
            )

    def is_speculative(self):
        return isinstance(self.mamba_cache, SpeculativeState)

    def mamba_layer_cache(self, layer_idx):
        return self.mamba_cache.at_layer_idx(self.mamba_layer_offsets[layer_idx])

    def get_ssm_states(self, layer_idx):
        return self.mamba_layer_cache(layer_idx).temporal

    def shutdown(self):
        self.mamba_cache = State(conv=torch.tensor([]), temporal=torch.tensor([]))

    def _promote(self, attn_metadata, num_accepted_tokens, state_indices):
        first, count = attn_metadata.num_contexts, attn_metadata.num_seqs - attn_metadata.num_contexts
        last = num_accepted_tokens[first : first + count].long() - 1
        slots, rows = state_indices[first : first + count].long(), torch.arange(count)
        cache = self.mamba_cache
        cache.temporal[:, slots] = cache.intermediate_ssm[:, rows, last]
        cache.conv[:, slots] = cache.intermediate_conv_window[:, rows, last]


class MixerBase(nn.Module):
    def __init__(self, *, d_model, d_state, d_conv, nheads, n_groups, head_dim, chunk_size, layer_idx, dtype=None,
                 config=None):  # fmt: skip
        super().__init__()
        self.layer_idx, self.d_state, self.head_dim, self.chunk_size = layer_idx, d_state, head_dim, chunk_size
        self.tp_nheads, self.tp_ngroups, self.tp_d_inner = nheads, n_groups, nheads * head_dim
        self.tp_conv_dim = self.tp_d_inner + 2 * n_groups * d_state
        self.delta_softplus = True
        self.in_proj, self.out_proj, self.norm = Linear(), Linear(), Norm()
        self.conv1d = Linear(d_conv, self.tp_conv_dim)
        for name in ("A", "D", "dt_bias"):
            setattr(self, name, nn.Parameter(torch.empty(nheads, dtype=torch.float32), requires_grad=False))
        self._mamba_ssm_cache_dtype = config.quant_config.mamba_ssm_cache_dtype

    def _split(self, xbc):
        sizes = [self.tp_d_inner, self.tp_ngroups * self.d_state, self.tp_ngroups * self.d_state]
        x, B, C = xbc.split(sizes, -1)
        return (
            x.unflatten(-1, (self.tp_nheads, self.head_dim)),
            B.unflatten(-1, (self.tp_ngroups, self.d_state)),
            C.unflatten(-1, (self.tp_ngroups, self.d_state)),
        )

    def _expanded(self):
        p, n = self.head_dim, self.d_state
        return (
            self.A[:, None, None].expand(-1, p, n),
            self.D[:, None].expand(-1, p),
            self.dt_bias[:, None].expand(-1, p),
        )

    def _prefill(self, z, xbc, dt, slots, conv_states, ssm_states, metadata, **more):
        count = metadata.cu_seqlens.numel() - 1
        starts = metadata.has_initial_states[:count]
        xbc = causal_conv1d_fn(
            xbc.transpose(0, 1), self.conv1d.weight, self.conv1d.bias, activation="silu", conv_states=conv_states,
            has_initial_state=starts, query_start_loc=metadata.cu_seqlens, cache_indices=slots,
        ).transpose(0, 1)  # fmt: skip
        initial = None
        if metadata.use_initial_states:
            initial = torch.where(starts[:, None, None, None], ssm_states[slots.long()], 0)
        x, B, C = self._split(xbc[None])
        result = mamba_chunk_scan_combined(
            x, dt[None], self.A, B, C, chunk_size=self.chunk_size, D=self.D, z=z, dt_bias=self.dt_bias,
            initial_states=initial, chunk_indices=metadata.chunk_indices, chunk_offsets=metadata.chunk_offsets,
            dt_softplus=True, cu_seqlens=metadata.cu_seqlens, seq_idx=metadata.seq_idx, return_varlen_states=True,
            return_final_states=False, **more,
        )  # fmt: skip
        y, final = result if isinstance(result, tuple) else (None, result)
        ssm_states[slots.long()] = final
        return y

    def _parts(self, hidden_states, attn_metadata):
        zxbcdt = self.in_proj(hidden_states)
        z, xbc, dt = zxbcdt.split([self.tp_d_inner, self.tp_conv_dim, self.tp_nheads], -1)
        contexts, tokens = attn_metadata.num_contexts, attn_metadata.num_ctx_tokens
        sizes = [tokens, attn_metadata.num_tokens - tokens]
        return [part.split(sizes) for part in (z, xbc, dt)], contexts, len(attn_metadata.seq_lens) - contexts


class Mamba2Metadata:
    """As far as mixers read it; `state_indices` in C only."""

    def __init__(self, max_batch_size, chunk_size, has_indices=False):
        if has_indices:
            self.state_indices = torch.zeros(max_batch_size, dtype=torch.int32)

    def prepare(self, attn_metadata):
        contexts, lengths = attn_metadata.num_contexts, attn_metadata.seq_lens_cuda
        lengths, device = lengths[: attn_metadata.num_contexts], lengths.device
        self.cu_seqlens = torch.cat([torch.zeros(1, device=device), lengths.cumsum(0)]).int()
        self.seq_idx = torch.repeat_interleave(torch.arange(contexts, device=device), lengths)[None]
        cached = attn_metadata.kv_cache_params.num_cached_tokens_per_seq[:contexts]
        self.has_initial_states = torch.tensor(cached, device=device) > 0
        self.use_initial_states = bool(self.has_initial_states.any())
        self.chunk_indices = self.chunk_offsets = None
        if hasattr(self, "state_indices"):
            ids, manager = attn_metadata.request_ids, attn_metadata.kv_cache_manager
            drafts = manager._impl.speculative_num_draft_tokens or 0
            low = CUDA_GRAPH_DUMMY_REQUEST_ID - drafts
            slots = manager.get_state_indices(ids, [low <= i <= CUDA_GRAPH_DUMMY_REQUEST_ID for i in ids])
            self.state_indices[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
