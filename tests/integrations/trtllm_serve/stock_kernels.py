# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's Mamba-2 kernels in plain torch, by their public contracts: what its mixer calls when it is run without
its CUDA extensions. States and convolution inputs live where the caller says; nothing here knows of ReplaySSM.
"""

import torch
from torch.nn.functional import conv1d, silu, softplus


def _convolve(inputs, weight, bias):
    """[rows, channels, K-1+T] -> silu of the causal depthwise convolution [rows, channels, T]."""
    return silu(conv1d(inputs, weight[:, None].to(inputs.dtype), bias.to(inputs.dtype), groups=len(weight)))


def causal_conv1d_fn(x, weight, bias, *, activation, conv_states, has_initial_state, query_start_loc, cache_indices):
    """Prompts: x [channels, tokens], packed by query_start_loc; keeps each prompt's last K-1 inputs."""
    out, kept = torch.empty_like(x), conv_states.shape[-1]
    bounds = query_start_loc.tolist()
    for row, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = conv_states[cache_indices[row].long()]
        before = state if has_initial_state[row] else torch.zeros_like(state)
        inputs = torch.cat([before, x[:, start:end]], 1)
        out[:, start:end] = _convolve(inputs[None], weight, bias)[0]
        state.copy_(inputs[:, -kept:])
    return out


def causal_conv1d_update(
    x, conv_state, weight, bias, activation, conv_state_indices, intermediate_conv_window=None, **_
):
    """Decoding: x [rows, channels] moves the states on; drafts [rows, channels, T] leave a window each."""
    rows, kept = conv_state_indices.long(), conv_state.shape[-1]
    tokens = x if x.dim() == 3 else x[:, :, None]
    inputs = torch.cat([conv_state[rows], tokens], 2)
    windows = inputs.unfold(2, kept, 1)[:, :, 1:]  # [rows, channels, T, K-1]
    if intermediate_conv_window is None:
        conv_state[rows] = windows[:, :, -1]
    else:
        count = windows.shape[2]
        intermediate_conv_window[: len(rows), :count] = windows.transpose(1, 2)
    out = _convolve(inputs, weight, bias)
    return torch.empty_like(x).copy_(out if x.dim() == 3 else out[:, :, 0])  # laid out like x


def _recur(state, x, dt, A, B, C, D, dt_bias):
    """One token: fp32 state [rows, H, P, N], x [rows, H, P], dt [rows, H], B, C [rows, G, N]. Returns (y, state)."""
    per_group = x.shape[1] // B.shape[1]
    B, C = (tensor.float().repeat_interleave(per_group, 1) for tensor in (B, C))
    delta = softplus(dt.float() + dt_bias)
    decay = torch.exp(A * delta)[..., None, None]
    state = decay * state + (delta[..., None] * x.float())[..., None] * B[:, :, None]
    return (state @ C[..., None])[..., 0] + D[:, None] * x.float(), state


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, *, D, z, dt_bias, initial_states, dt_softplus, cu_seqlens, seq_idx,
    return_varlen_states, return_final_states, chunk_indices, chunk_offsets, out=None, state_dtype=None,
    mamba_ssm_cache_dtype=None, dt_limit=None,
):  # fmt: skip
    """Prompts [1, tokens, ...], packed by cu_seqlens. Returns their final states, after y where no `out` is given."""
    y, states = torch.empty_like(x) if out is None else out, []
    bounds = cu_seqlens.tolist()
    for row, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = torch.zeros(1, *x.shape[2:], B.shape[-1], device=x.device)
        if initial_states is not None:
            state += initial_states[row]
        for t in range(start, end):
            token, state = _recur(state, x[:, t], dt[:, t], A, B[:, t], C[:, t], D, dt_bias)
            if z is not None:
                token = token * silu(z[:, t].float())
            y[:, t] = token.to(y.dtype)
        states.append(state)
    final = torch.cat(states).to(state_dtype or mamba_ssm_cache_dtype)
    return final if out is not None else (y, final)


def selective_state_update(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None, out=None,
    disable_state_update=False, intermediate_states_buffer=None, cache_steps=None, intermediate_state_indices=None, **_
):  # fmt: skip
    """Decoding: x [rows, (T,) H, P]. Writes the states, or for drafts the state after each token beside them."""
    rows = state_batch_indices.long()
    out = torch.empty_like(x) if out is None else out
    tokens = [t if x.dim() == 4 else t[:, None] for t in (x, dt, B, C)]
    target = out if x.dim() == 4 else out[:, None]
    running = state[rows].float()
    for t in range(tokens[0].shape[1]):
        x_t, dt_t, B_t, C_t = (tensor[:, t] for tensor in tokens)
        y, running = _recur(running, x_t, dt_t[..., 0], A[:, 0, 0], B_t, C_t, D[:, 0], dt_bias[:, 0])
        if z is not None:
            y = y * silu(z.float())
        target[:, t] = y.to(out.dtype)
        if intermediate_states_buffer is not None:
            intermediate_states_buffer[intermediate_state_indices.long(), t] = running.to(state.dtype)
    if not disable_state_update:
        state[rows] = running.to(state.dtype)
    return out
