# SPDX-License-Identifier: Apache-2.0
"""Pools whose checkpoints are an engine's own states: adopted, stepped on, and cast to read copies anew."""

import re
from dataclasses import replace
from math import nan

import pytest
import torch
from mixer import NANO_TP8, PAIRS, SMALL, Weights, config_of, random_tokens, same_bits

from trtllm_replayssm import ReplayConfig, SlotLayout, StatePool, ops

LAYERS, SLOTS = 2, 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp16_sr": torch.float16}
EXTERNAL_PAIRS = [pair for pair in PAIRS if pair[0] in DTYPES]


def states_of(geometry, config, device, seed=0) -> torch.Tensor:
    """An engine's states [LAYERS, SLOTS, H, P, N], NaN in unused slots and in gaps between the slots."""
    g = geometry
    size = g.num_heads * g.head_dim * g.state_dim
    memory = torch.full((LAYERS, SLOTS, size + 64), nan, dtype=DTYPES[config.checkpoint], device=device)
    return memory[:, :, :size].unflatten(2, (g.num_heads, g.head_dim, g.state_dim))


def external_pool(geometry, config, device, states):
    return StatePool(geometry, config, SLOTS, LAYERS, device, external={"checkpoint": states, "conv_ring": None})


def cycle(pool, slots, tokens, weights, accepted):
    count = len(tokens.x) // len(slots)
    plan = pool.plan(slots, count)
    outputs = torch.stack([ops.step(pool, layer, plan, *tokens, *weights) for layer in range(pool.num_layers)])
    pool.commit(plan, accepted)
    return outputs


@pytest.mark.parametrize("checkpoint, read_copy", EXTERNAL_PAIRS)
@pytest.mark.parametrize("geometry, activation", [(SMALL, "fp32"), (NANO_TP8, "bf16")])
def test_adopted_states_continue_like_the_pools_own(device, geometry, activation, checkpoint, read_copy):
    """Same state, same tokens, same streams: outputs, states and stored checkpoints have the bits of a pool of whole
    slots, over several flushes; other slots and the gaps between slots stay as they were.
    """
    config = config_of(checkpoint, read_copy, 8, 4, activation)
    states = states_of(geometry, config, device)
    pool = external_pool(geometry, config, device, states)
    own = StatePool(geometry, config, SLOTS, LAYERS, device)
    generator = torch.Generator().manual_seed(1)
    slots = torch.tensor([3, 1], dtype=torch.int32, device=device)
    own.reset([3, 1], streams=[70, 71])
    tail = torch.zeros(2, geometry.conv_kernel - 1, geometry.conv_channels, device=device)
    for layer in range(LAYERS):
        given = torch.randn((2, *states.shape[2:]), generator=generator).to(device).to(states.dtype)
        states[layer, slots.long()] = given
        own.restore(layer, slots, given.float(), tail)
    pool.adopt(slots, streams=torch.tensor([70, 71], device=device))
    if read_copy != "none":
        for layer in range(LAYERS):
            pool.refresh_read_copy(layer, slots)
    assert pool.cursors([3, 1]).writes.tolist() == [1, 1]

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[activation]
    weights = Weights.random(geometry, device)
    for step in range(9):
        tokens = random_tokens(geometry, dtype, 8, device, seed=step)
        accepted = [1 + step % 4, 4 - step % 4]
        assert same_bits(cycle(pool, [3, 1], tokens, weights, accepted), cycle(own, [3, 1], tokens, weights, accepted))
    pool.validate()
    assert pool.stats()["flushes"] == own.stats()["flushes"] > 0
    section = own.layout.sections["checkpoint"]
    for layer in range(LAYERS):
        assert same_bits(pool.materialize(layer, [3, 1])[0], own.materialize(layer, [3, 1])[0])
        stored = own.data[layer, [3, 1], section.offset : section.offset + section.bytes]
        assert same_bits(states[layer, [3, 1]].flatten(1).view(torch.uint8), stored)
    assert states[:, [0, 2, 4]].isnan().all()
    memory = torch.as_strided(states, (LAYERS, SLOTS, 64), (*states.stride()[:2], 1), states[0, 0].numel())
    assert memory.isnan().all()


@pytest.mark.parametrize("checkpoint, read_copy", [pair for pair in PAIRS if pair[1] != "none"])
def test_refreshed_copies_are_those_of_the_stored_state(device, checkpoint, read_copy):
    """The copy of a stored state has the bits that `restore` of the same state gives it; the checkpoint stands."""
    config = config_of(checkpoint, read_copy)
    pool, other = (StatePool(SMALL, config, 3, 1, device) for _ in range(2))
    pool.reset([0, 2])
    weights, tokens = Weights.random(SMALL, device), random_tokens(SMALL, torch.float32, 10, device)
    plan = pool.plan([0, 2], 5)
    ops.prefill(pool, 0, plan, *tokens, *weights)
    pool.commit(plan)
    copy, state = pool.layout.sections["read_copy"], pool.layout.sections["checkpoint"]
    pool.data[:, :, copy.offset : copy.offset + copy.bytes] = 0xFF
    before = pool.data.clone()
    pool.refresh_read_copy(0, torch.tensor([2, -1, 0, 2, 1], dtype=torch.int32, device=device))
    pool.validate()
    for slot in (0, 2):
        stored, tail = pool.materialize(0, slot)
        other.restore(0, slot, stored, tail)
        expected = other.data[0, slot, copy.offset : copy.offset + copy.bytes]
        assert same_bits(pool.data[0, slot, copy.offset : copy.offset + copy.bytes], expected)
        rest = slice(state.offset, state.offset + state.bytes)
        assert same_bits(pool.data[0, slot, rest], before[0, slot, rest])
    assert same_bits(pool.data[0, 1], before[0, 1])  # never written: no state to copy


def test_a_state_that_is_not_finite_in_the_copy_is_told(device):
    config = config_of("fp32", "nvfp4")
    states = states_of(SMALL, config, device)
    pool = external_pool(SMALL, config, device, states)
    pool.adopt([1])
    pool.refresh_read_copy(1, [1])
    with pytest.raises(ValueError, match="row 0: the state of head . in layer 1 was stored with a NaN"):
        pool.validate()


def test_a_slot_adopted_twice_at_once(device):
    """A batch may name a padding slot several times."""
    pool = external_pool(SMALL, config_of("fp32", "fp8"), device, states_of(SMALL, config_of("fp32", "fp8"), device))
    slots = torch.tensor([4, 4, 0], dtype=torch.int32, device=device)
    pool.checkpoint.zero_()
    pool.adopt(slots)
    pool.refresh_read_copy(0, slots)
    pool.validate()
    assert pool.cursors().writes.tolist() == [1, 0, 0, 0, 1]


def test_open_slots_and_slots_out_of_range_are_refused(device):
    config = config_of("fp32", "fp8")
    pool = external_pool(SMALL, config, device, states_of(SMALL, config, device))
    pool.adopt([0])
    pool.plan([0])
    for slots, match in (([0], "row 0: slot 0 has an outstanding plan"), ([5], "slot is 5, expected")):
        with pytest.raises(ValueError, match=match):
            pool.refresh_read_copy(0, torch.tensor(slots, dtype=torch.int32, device=device))
            pool.validate()


@pytest.mark.parametrize("checkpoint", ["fp8_sr", "nvfp4"])
def test_codes_and_scales_are_no_engines_states(checkpoint):
    match = f"expected checkpoint='fp32', 'bf16', 'fp16' or 'fp16_sr' where .*, got '{checkpoint}'"
    with pytest.raises(ValueError, match=match):
        SlotLayout(SMALL, config_of(checkpoint, "none"), external=("checkpoint",))


def test_external_sections_are_not_in_the_blob():
    config = ReplayConfig(window=8, max_step_tokens=4)
    whole, rest = SlotLayout(SMALL, config), SlotLayout(SMALL, config, external=("checkpoint", "conv_ring"))
    align = lambda size: -(-size // 256) * 256  # noqa: E731
    outside = sum(align(whole.sections[name].bytes) for name in ("checkpoint", "conv_ring"))
    assert rest.slot_stride == whole.slot_stride - outside
    assert {name: s._replace(offset=0) for name, s in rest.sections.items()} == {
        name: s._replace(offset=0) for name, s in whole.sections.items()
    }
    blob = torch.zeros(rest.slot_stride, dtype=torch.uint8)
    assert set(rest.unpack(blob)) == {"x_ring", "b_ring", "delta_ring"}
    with pytest.raises(ValueError, match="expected a section of the blob, got 'checkpoint'"):
        rest.state(blob)
    with pytest.raises(ValueError, match="external: expected any of checkpoint, conv_ring, got 'x_ring'"):
        SlotLayout(SMALL, config, external=("x_ring",))


@pytest.mark.parametrize(
    "change, error, match",
    [
        (
            lambda s: s[:, :4],
            ValueError,
            r"external checkpoint: expected shape (2, 5, 4, 16, 64), got (2, 4, 4, 16, 64)",
        ),
        (lambda s: s.half(), TypeError, "external checkpoint: expected torch.float32, got torch.float16"),
        (lambda s: s.transpose(2, 3).contiguous().transpose(2, 3), ValueError, "expected contiguous states [H, P, N]"),
        (lambda s: None, TypeError, "external checkpoint: expected a torch.Tensor, got NoneType"),
    ],
)
def test_states_that_are_no_checkpoints(change, error, match):
    config = config_of("fp32", "none")
    with pytest.raises(error, match=re.escape(match)):
        StatePool(SMALL, config, SLOTS, LAYERS, external={"checkpoint": change(states_of(SMALL, config, "cpu"))})


def test_misaligned_states_are_refused(device):
    config = config_of("fp32", "none")
    memory = torch.zeros(LAYERS * SLOTS * 4 * 16 * 64 + 1, device=device)[1:]
    pool = StatePool(SMALL, config, SLOTS, LAYERS, device, external={"checkpoint": memory.view(2, 5, 4, 16, 64)})
    pool.adopt([0])
    with pytest.raises(ValueError, match="checkpoint: expected multiples of 16 bytes"):
        cycle(pool, [0], random_tokens(SMALL, torch.float32, 1, device), Weights.random(SMALL, device), None)


def test_what_needs_whole_slots_is_refused(device):
    config = replace(config_of("fp32", "none"), window=8)
    pool = external_pool(SMALL, config, device, torch.zeros_like(states_of(SMALL, config, device)))
    pool.adopt([0])
    state, tail = pool.materialize(0, [0], A_log=Weights.random(SMALL, device).A_log)
    assert tail is None and not state.any()
    tail = torch.zeros(1, 3, SMALL.conv_channels, device=device)
    uses = {
        "save": lambda: pool.save([0]),
        "load": lambda: pool.load([0], torch.zeros(1, dtype=torch.uint8)),
        "copy": lambda: pool.copy([0], [1]),
        "restore": lambda: pool.restore(0, [0], state, tail),
    }
    for name, use in uses.items():
        with pytest.raises(NotImplementedError, match=f"{name}: expected a pool that holds whole slots"):
            use()
    with pytest.raises(ValueError, match="refresh_read_copy: expected a config with a read copy"):
        pool.refresh_read_copy(0, [0])
    plan = pool.plan([0], 1)
    weight = torch.zeros(SMALL.conv_channels, 4, device=device)
    with pytest.raises(ValueError, match="expected a conv_ring buffer, got NULL: the convolution is another's"):
        ops.conv_step(pool, 0, plan, torch.zeros(1, SMALL.conv_channels, device=device), weight)
