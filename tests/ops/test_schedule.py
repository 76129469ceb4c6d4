# SPDX-License-Identifier: Apache-2.0
"""Random schedules over 32 slots: requests join, decode, fork, are pre-empted, resume elsewhere and leave.

Whatever happened around it, each request has the outputs and the state, bit for bit, of a run alone.
"""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mixer import Stack, same_bits

from trtllm_replayssm import MambaGeometry, ReplayConfig, ops

SLOTS = 32
GEOMETRY = MambaGeometry(num_heads=2, head_dim=8, num_groups=1, state_dim=64)
CONFIG = ReplayConfig(window=6, max_step_tokens=3, activation="bf16")
OPS = {"step": ops.step, "prefill": ops.prefill}


class Request:
    """What one request went through: its tape, the cycles so far with their outputs, and where it is now."""

    def __init__(self, stack, seed, slot):
        self.stack = stack
        self.tape = stack.tape(seed, 300)
        self.slot = slot
        self.saved = None
        self.position = 0
        self.cycles = []

    def chunk(self, count):
        return tuple(tensor[self.position : self.position + count] for tensor in self.tape)

    def fork(self, slot):
        twin = object.__new__(Request)
        twin.__dict__ = {**self.__dict__, "slot": slot, "cycles": list(self.cycles)}
        return twin

    def check(self, pool):
        """Replays the cycles alone."""
        alone = self.stack.pool()
        alone.reset(0)
        position = 0
        for op, count, accepted, outputs in self.cycles:
            chunk = tuple(tensor[position : position + count] for tensor in self.tape)
            assert same_bits(self.stack.cycle(alone, [0], [chunk], [accepted], OPS[op])[0], outputs)
            position += accepted
        assert position == self.position
        if self.slot is not None:
            for layer, mixer in enumerate(self.stack.mixers):
                here = pool.materialize(layer, self.slot, mixer.weights.A_log)
                there = alone.materialize(layer, 0, mixer.weights.A_log)
                assert all(same_bits(a, b) for a, b in zip(here, there, strict=True))


class Schedule(RuleBasedStateMachine):
    stack = Stack(GEOMETRY, CONFIG)

    @initialize()
    def start(self):
        self.pool = self.stack.pool(SLOTS)
        self.requests = []
        self.joined = 0

    def placed(self):
        return [request for request in self.requests if request.slot is not None]

    def free_slots(self):
        return sorted(set(range(SLOTS)) - {request.slot for request in self.placed()})

    def advance(self, op, parts, padding):
        """One plan for the given (request, count, accepted), padded rows between them."""
        slots, chunks, accepted = [], [], []
        for request, count, take in parts:
            slots.append(request.slot)
            chunks.append(request.chunk(count))
            accepted.append(take)
        for place, count in padding:
            place = min(place, len(slots))
            slots.insert(place, -1)
            chunks.insert(place, tuple(t[:count] * float("nan") for t in self.stack.tape(0, 3)))
            accepted.insert(place, 0)
        slots_tensor = torch.tensor(slots, dtype=torch.int32, device=self.pool.device)
        outputs = self.stack.cycle(self.pool, slots_tensor, chunks, accepted, OPS[op])
        live = [out for slot, out in zip(slots, outputs, strict=True) if slot >= 0]
        for (request, count, take), out in zip(parts, live, strict=True):
            request.cycles.append((op, count, take, out))
            request.position += take

    @rule(data=st.data(), count=st.integers(1, 6), seed=st.integers(0, 50))
    def join(self, data, count, seed):
        free = self.free_slots()
        count = min(count, len(free))
        if not count:
            return
        slots = data.draw(st.permutations(free))[:count]
        self.pool.reset(slots)
        new = [Request(self.stack, seed + i, slot) for i, slot in enumerate(slots)]
        self.requests += new
        lengths = data.draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
        self.advance("prefill", [(r, n, n) for r, n in zip(new, lengths, strict=True)], [])

    @precondition(lambda self: self.placed())
    @rule(data=st.data(), padding=st.lists(st.tuples(st.integers(0, 32), st.integers(0, 3)), max_size=3))
    def step(self, data, padding):
        order = data.draw(st.permutations(self.placed()))
        chosen = [r for r in order[: data.draw(st.integers(1, len(order)))] if r.position < 270]
        counts = data.draw(st.lists(st.integers(0, 3), min_size=len(chosen), max_size=len(chosen)))
        taken = data.draw(st.lists(st.integers(0, 3), min_size=len(chosen), max_size=len(chosen)))
        parts = [(r, n, min(n, take)) for r, n, take in zip(chosen, counts, taken, strict=True)]
        if parts:
            self.advance("step", parts, padding)

    @precondition(lambda self: self.placed())
    @rule(data=st.data(), count=st.integers(1, 9))
    def another_chunk(self, data, count):
        request = data.draw(st.sampled_from(self.placed()))
        if request.position < 270:
            self.advance("prefill", [(request, count, count)], [(0, 2)])

    @precondition(lambda self: self.placed())
    @rule(data=st.data())
    def preempt(self, data):
        request = data.draw(st.sampled_from(self.placed()))
        request.saved = self.pool.save(request.slot)
        self.pool.data[:, request.slot] = 0xFF
        self.pool.reset(request.slot)
        request.slot = None

    @precondition(lambda self: any(r.saved is not None for r in self.requests) and self.free_slots())
    @rule(data=st.data())
    def resume(self, data):
        request = data.draw(st.sampled_from([r for r in self.requests if r.saved is not None]))
        slot = data.draw(st.sampled_from(self.free_slots()))
        self.pool.load(slot, request.saved)
        request.slot, request.saved = slot, None

    @precondition(lambda self: self.placed() and self.free_slots())
    @rule(data=st.data())
    def fork(self, data):
        request = data.draw(st.sampled_from(self.placed()))
        slot = data.draw(st.sampled_from(self.free_slots()))
        self.pool.copy(request.slot, slot)
        self.requests.append(request.fork(slot))

    @precondition(lambda self: self.placed())
    @rule(data=st.data())
    def leave(self, data):
        request = data.draw(st.sampled_from(self.placed()))
        request.check(self.pool)
        self.requests.remove(request)

    @invariant()
    def cursors_agree(self):
        placed = self.placed()
        if placed:
            cursors = self.pool.cursors([request.slot for request in placed])
            assert cursors.tokens.tolist() == [request.position for request in placed]
            assert not cursors.flags.any()
            assert int(cursors.history.max()) <= CONFIG.window

    def teardown(self):
        for request in self.requests:
            request.check(self.pool)


SETTINGS = settings(max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
TestSchedule = Schedule.TestCase
TestSchedule.settings = SETTINGS

if torch.cuda.is_available():

    class CudaSchedule(Schedule):
        stack = Stack(GEOMETRY, CONFIG, device="cuda")

    TestCudaSchedule = pytest.mark.gpu(CudaSchedule.TestCase)
    TestCudaSchedule.settings = SETTINGS
