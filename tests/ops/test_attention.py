# SPDX-License-Identifier: Apache-2.0
"""ops.attend against float64: any heads, rows and positions, and bits that depend on a token's own keys alone."""

import pytest
import torch
from mixer import same_bits

from trtllm_replayssm import ops

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


class Case:
    """Rows of `counts` new tokens at `starts` in slots of a larger cache, with NaN behind the newest one."""

    def __init__(self, device, dtype, counts, starts, heads=10, kv_heads=2, head_dim=64, capacity=80):
        generator = torch.Generator().manual_seed(0)
        rows, tokens = len(counts), sum(counts)

        def random(*shape):
            return torch.randn(shape, generator=generator).to(dtype)

        self.q = random(tokens, heads, head_dim)
        self.keys, self.values = (random(rows + 2, kv_heads, capacity, head_dim) for _ in range(2))
        order = torch.randperm(rows + 2, generator=generator)[:rows]
        first = torch.tensor([0, *counts[:-1]]).cumsum(0)
        steps = torch.arange(max(counts))
        self.cells = first[:, None] + torch.minimum(steps, torch.tensor(counts)[:, None] - 1)
        self.slots = order.repeat_interleave(torch.tensor(counts))
        self.positions = torch.cat([start + torch.arange(n) for n, start in zip(counts, starts, strict=True)])
        for slot, n, start in zip(order, counts, starts, strict=True):
            self.keys[slot, :, start + n :] = float("nan")
            self.values[slot, :, start + n :] = float("nan")
        for name in ("q", "keys", "values", "slots", "positions", "cells"):
            setattr(self, name, getattr(self, name).to(device))

    def run(self, **changed):
        names = ("q", "keys", "values", "slots", "positions", "cells")
        return ops.attend(*(changed.get(name, getattr(self, name)) for name in names))

    def expected(self):
        out = torch.empty(self.q.shape, dtype=torch.float64)
        sharing = self.q.shape[1] // self.keys.shape[1]
        for token, (slot, position) in enumerate(zip(self.slots.tolist(), self.positions.tolist(), strict=True)):
            keys, values = (
                cache[slot, :, : position + 1].double().cpu().repeat_interleave(sharing, 0)
                for cache in (self.keys, self.values)
            )
            scores = torch.einsum("hd,hkd->hk", self.q[token].double().cpu(), keys) * self.q.shape[2] ** -0.5
            out[token] = torch.einsum("hk,hkd->hd", scores.softmax(-1), values)
        return out


def dtypes(device):
    return [torch.bfloat16, torch.float16] if device.type == "cuda" else list(BOUNDS)


@pytest.mark.parametrize(
    ("counts", "starts", "sizes"),
    [
        ([1, 1, 1], [0, 15, 64], {}),
        ([4, 1, 3, 2], [0, 16, 31, 70], {}),
        ([4, 4], [12, 300], dict(heads=40, kv_heads=8, head_dim=128, capacity=320)),
        ([1] * 5, [255, 256, 257, 0, 1], dict(heads=32, kv_heads=2, head_dim=128, capacity=272)),
        ([70, 1, 33], [0, 79, 5], dict(heads=10, kv_heads=2)),
        ([9], [3], dict(heads=8, kv_heads=1)),
        ([2], [3], dict(heads=3, kv_heads=3)),
    ],
)
def test_any_rows(device, counts, starts, sizes):
    for dtype in dtypes(device):
        case = Case(device, dtype, counts, starts, **sizes)
        expected = case.expected()
        torch.testing.assert_close(case.run().double().cpu(), expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


def test_bits_depend_on_a_tokens_own_keys_alone(device):
    """The same token alone, with others behind it, and among other rows."""
    case = Case(device, torch.bfloat16, [4, 7, 1], [50, 66, 20], heads=10, kv_heads=2, head_dim=128)
    whole = case.run()
    index = torch.arange(12, device=device)
    assert same_bits(case.run(cells=index[:, None]), whole)
    assert same_bits(case.run(cells=case.cells[1:2])[4:11], whole[4:11])
    wide = torch.full((12, 3, 10, 128), float("nan"), dtype=torch.bfloat16, device=device)
    wide[:, 1] = case.q
    assert same_bits(case.run(q=wide[:, 1]), whole)


def test_rows_without_a_slot_are_left_out(device):
    case = Case(device, torch.bfloat16, [2, 2], [5, 6])
    whole = case.run()
    for slot in (-1, len(case.keys)):
        slots = case.slots.clone()
        slots[:2] = slot
        out = torch.full_like(whole, 7.0)
        arguments = (case.q, case.keys, case.values, slots, case.positions, case.cells, out, 64**-0.5)
        torch.ops.trtllm_replayssm.attend(*arguments)
        assert out[:2].eq(7).all() and same_bits(out[2:], whole[2:])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (dict(q=lambda q: q.tolist()), TypeError, "q: expected a torch.Tensor, got list"),
        (dict(q=lambda q: q[0]), ValueError, r"q: expected shape \(num_tokens, heads, head_dim\), got \(10, 64\)"),
        (dict(keys=lambda k: [1]), TypeError, "keys: expected a torch.Tensor, got list"),
        (dict(keys=lambda k: k[0]), ValueError, r"keys: expected shape \(num_slots, kv_heads, .*, got \(2, "),
        (dict(keys=lambda k: k.half()), TypeError, "keys: expected torch.bfloat16, got torch.float16"),
        (dict(values=lambda v: v[:1]), ValueError, r"values: expected shape \(4, 2, 80, 64\), got \(1, 2, 80, 64\)"),
        (dict(values=lambda v: v[..., ::2].repeat(1, 1, 1, 2)[..., :64].mT.contiguous().mT), ValueError, "values: "),
        (dict(slots=lambda s: s.int()), TypeError, "slots: expected torch.int64, got torch.int32"),
        (dict(positions=lambda p: p[1:]), ValueError, r"positions: expected shape \(4,\), got \(3,\)"),
        (dict(cells=lambda c: c.tolist()), TypeError, "cells: expected a torch.Tensor, got list"),
        (dict(cells=lambda c: c[0]), ValueError, r"cells: expected shape \(rows, width\), got \(2,\)"),
        (dict(keys=lambda k: k.repeat(1, 2, 1, 1)[:, :3], values=lambda v: v.repeat(1, 2, 1, 1)[:, :3]), ValueError,
         "heads: expected a multiple of kv_heads, got 10 and 3"),
    ],
)  # fmt: skip
def test_bad_arguments(device, change, error, text):
    case = Case(device, torch.bfloat16, [2, 2], [5, 6])
    with pytest.raises(error, match=text):
        case.run(**{name: f(getattr(case, name)) for name, f in change.items()})


def test_what_cuda_has_not(device):
    for dtype, head_dim in ((torch.float32, 64), (torch.bfloat16, 72)):
        case = Case(device, dtype, [1], [5], head_dim=head_dim)
        if device.type == "cuda":
            with pytest.raises(NotImplementedError, match="attend: CUDA has it for BF16 and FP16"):
                case.run()
        else:
            torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-2, atol=1e-2)
