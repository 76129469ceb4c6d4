# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for other libraries' kernels, in torch and row by row: what their functions take, keep and return."""

import time
import types

import torch

from trtllm_replayssm.bench.peers import ConventionalPeer, VllmReplay


class Reference(ConventionalPeer):
    """The recurrence in torch, as if it came from elsewhere; `factor` 1 is right. It takes `seconds` longer."""

    longest_step = 4
    settings = [{"factor": 1.0}, {"factor": 1.0, "again": True}]

    def missing(self):
        return None

    def call(self, case, state, given, others, setting):
        time.sleep(setting.get("seconds", 0))
        slots = others.get("state_batch_indices", torch.arange(case.batch)[:, None]).long()
        newest = slots[:, :1] if case.tokens == 1 else slots.gather(1, others["num_accepted_tokens"][:, None] - 1)
        states, outputs = state[newest[:, 0]].float(), []
        delta = torch.nn.functional.softplus(given["dt"].float() + given["dt_bias"])
        for token in range(case.tokens):
            x, B, C = (given[name].float()[token :: case.tokens] for name in ("x", "B", "C"))
            d = delta[token :: case.tokens]
            B, C = (t.repeat_interleave(2, 1)[:, :, None] for t in (B, C))
            states = torch.exp(given["A"] * d[..., None]) * states + (d * x)[..., None] * B
            state[slots[:, token]] = states
            outputs.append((states * C).sum(-1) + given["D"] * x)
        return torch.stack(outputs, 1).flatten(0, 1) * setting["factor"]


class ReferenceWithFlushes(Reference):
    """The same, which writes the state that counts once a window."""

    longest_window = 16
    longest_step = 1

    def memory(self, *arguments):
        memory = super().memory(*arguments)
        return memory | {"checkpoint": torch.zeros_like(memory["state"])}

    cursors, flushing, advance = VllmReplay.cursors, VllmReplay.flushing, VllmReplay.advance

    def call(self, case, state, given, others, setting):
        y = super().call(case, state, given, {}, setting)
        flushed = others["is_flush"][:, None, None, None]
        others["checkpoint"].copy_(torch.where(flushed, state, others["checkpoint"]))
        return y


def replayed(state, records, new, A, D):
    """Outputs of new tokens behind a state [H,P,N] and records, the state behind the records: a token is (x [H,P], B
    [G,N], delta [H]), a new one with C [G,N].
    """
    sharing = state.shape[0] // new[0][1].shape[0]

    def with_token(state, x, B, delta):
        B = B.float().repeat_interleave(sharing, 0)
        return torch.exp(A * delta)[:, None, None] * state + (delta[:, None] * x.float())[..., None] * B[:, None]

    state = state.float()
    for x, B, delta in records:
        state = with_token(state, x, B, delta)
    outputs, newest = [], state
    for x, B, delta, C in new:
        newest = with_token(newest, x, B, delta)
        C = C.float().repeat_interleave(sharing, 0)
        outputs.append((newest * C[:, None]).sum(-1) + D[:, None] * x.float())
    return torch.stack(outputs), state


class FakeFlashInfer(types.ModuleType):
    """The contract of flashinfer.mamba's ReplaySSM, row by row."""

    def __init__(self):
        super().__init__("flashinfer.mamba")
        self.launched, self.AutoTuner = set(), self

    def get(self):
        return self

    def choose_one(self, name, runners, config, inputs):
        return runners[0], None

    def allocate_checkpointing_ssu_scratch(self, batch, heads, tokens, window, dtype, device):
        return tuple(torch.zeros(batch, heads, dtype=dtype, device=device) for _ in range(3))

    def checkpointing_ssu(
        self, state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, out, D, dt_bias,
        dt_softplus, cb_scaled, cumAdt_vec, cb_old, enable_pdl,
    ):  # fmt: skip
        self.launched.add((self.AutoTuner.get().choose_one("checkpointing_ssu", [None], None, [])[1], enable_pdl))
        assert dt.stride(-1) == A.stride(-1) == A.stride(-2) == D.stride(-1) == dt_bias.stride(-1) == 0 and dt_softplus
        delta = torch.nn.functional.softplus(dt[..., 0].float() + dt_bias[:, 0])
        (batch, tokens), ring = x.shape[:2], x_cache.shape[2]
        for row in range(batch):
            held, start = int(prev_num_accepted_tokens[row]), int(ring_start[row])
            places = [(start + n) % ring for n in range(held + tokens)]
            records = [(x_cache[row, :, p], B_cache[row, :, p], dt_cache[row, :, p]) for p in places[:held]]
            new = [(x[row, t], B[row, t], delta[row, t], C[row, t]) for t in range(tokens)]
            out[row], folded = replayed(state[row], records, new, A[:, 0, 0], D[:, 0])
            if held + tokens > ring - tokens:
                state[row] = folded
            for place, (values, keys, step, _) in zip(places[held:], new, strict=True):
                x_cache[row, :, place], B_cache[row, :, place], dt_cache[row, :, place] = values, keys, step


class FakeReference(types.ModuleType):
    """The contract of the verification kernel of ReplaySSM's authors, row by row; and their launch parameters."""

    def __init__(self):
        super().__init__("selective_state_update_replayssm_spec")
        self._overrides, self.launched = {}, set()

    def selective_state_update_replayssm_spec(
        self, state_checkpoint, post_conv_cache, dt_cache, conv_out, dt_spec, A, write_pos, post_conv_state_pos,
        is_flush, query_start_loc, state_batch_indices, max_cache_len, max_spec_len, d_inner, ngroups, dstate, D,
        dt_bias, dt_softplus, bc_pre, null_block_id,
    ):  # fmt: skip
        self.launched.add((self._overrides.get("mamba2_spec_verify"), self._overrides.get("mamba2_spec_flush")))
        heads, head_dim = state_checkpoint.shape[1:3]
        ring, out = post_conv_cache.shape[1], torch.empty(len(conv_out), heads, head_dim, dtype=conv_out.dtype)

        def parts(channels):
            x, B, C = channels.split([d_inner, ngroups * dstate, channels.numel() - d_inner - ngroups * dstate])
            return x.view(heads, head_dim), B.view(ngroups, dstate), C

        def delta(dt):
            return torch.nn.functional.softplus(dt.float() + dt_bias)

        for row, slot in enumerate(state_batch_indices.tolist()):
            held, start = int(write_pos[row]), int(post_conv_state_pos[row])
            first, end = query_start_loc[row : row + 2].tolist()
            places = [(start + n) % ring for n in range(held + end - first)]
            records = [(*parts(post_conv_cache[slot, p])[:2], delta(dt_cache[slot, :, p])) for p in places[:held]]
            new = []
            for token in range(first, end):
                x, B, C = parts(conv_out[token])
                new.append((x, B, delta(dt_spec[token]), C.view(ngroups, dstate)))
            out[first:end], folded = replayed(state_checkpoint[slot], records, new, A[:, 0, 0], D[:, 0])
            if is_flush[row]:
                state_checkpoint[slot] = folded
            assert held + end - first <= (max_cache_len if is_flush[row] else max_cache_len - max_spec_len)
            for place, token in zip(places[held:], range(first, end), strict=True):
                post_conv_cache[slot, place] = conv_out[token, : post_conv_cache.shape[2]]
                dt_cache[slot, :, place] = dt_spec[token].float()
        return out


class FakeVllm(FakeReference):
    """The contract of vLLM's ReplaySSM, row by row."""

    def selective_state_update_replayssm_output_only(
        self, state, x, dt, A, B, C, D, dt_bias, dt_softplus, x_cache, dt_cache, B_cache, bc_pre, write_pos, is_flush,
        max_cache_len, out,
    ):  # fmt: skip
        self.launched.add(self._overrides.get("mamba2_output_only"))
        delta = torch.nn.functional.softplus(dt[..., 0].float() + dt_bias[:, 0])
        for row, held in enumerate(write_pos.tolist()):
            records = [(x_cache[row, :, n], B_cache[row, :, n], dt_cache[row, :, n]) for n in range(held)]
            new = (x[row], B[row], delta[row])
            out[row : row + 1], _ = replayed(state[row], records, [(*new, C[row])], A[:, 0, 0], D[:, 0])
            if is_flush[row]:
                state[row] = replayed(state[row], [*records, new], [(*new, C[row])], A[:, 0, 0], D[:, 0])[1]
            else:
                x_cache[row, :, held], B_cache[row, :, held], dt_cache[row, :, held] = new
        return out


class FakeConventional(types.ModuleType):
    """The contract of vLLM's and FlashInfer's conventional kernels, row by row: of one token, and of drafts, where a
    row's states are slots: read is that of the token accepted last, written is one a token.
    """

    def __init__(self):
        super().__init__("selective_state_update")
        self.launched, self._selective_scan_update_kernel = set(), "the library's"

    def selective_state_update(
        self, state, x, dt, A, B, C, D, dt_bias, dt_softplus, out=None, state_batch_indices=None,
        dst_state_batch_indices=None, cu_seqlens=None, num_accepted_tokens=None, null_block_id=0, cache_steps=1,
        algorithm=None,
    ):  # fmt: skip
        kernel = self._selective_scan_update_kernel
        self.launched.add(algorithm or (kernel if isinstance(kernel, str) else kernel._setting["BLOCK_SIZE_M"]))
        out = torch.empty_like(x) if out is None else out
        delta = torch.nn.functional.softplus(dt[..., 0].float() + dt_bias[:, 0])
        if cu_seqlens is None:
            cu_seqlens, state_batch_indices = torch.arange(len(x) + 1), torch.arange(len(x))[:, None]
            num_accepted_tokens = torch.ones(len(x), dtype=torch.int32)
        elif algorithm:
            assert cache_steps == state_batch_indices.shape[1] and null_block_id == 0
            state_batch_indices = dst_state_batch_indices
        else:
            assert null_block_id not in state_batch_indices
        for row, slots in enumerate(state_batch_indices.tolist()):
            newest = state[slots[num_accepted_tokens[row] - 1]].float()
            for token, slot in zip(range(*cu_seqlens[row : row + 2].tolist()), slots, strict=True):
                given = (x[token], B[token], delta[token])
                out[token : token + 1], _ = replayed(newest, [], [(*given, C[token])], A[:, 0, 0], D[:, 0].float())
                _, newest = replayed(newest, [given], [(*given, C[token])], A[:, 0, 0], D[:, 0].float())
                state[slot] = newest
        return out
