# SPDX-License-Identifier: Apache-2.0
"""The trtllm-serve adapter on doubles of TensorRT-LLM, a profile at a time, with the real ops."""

import importlib
import importlib.util
import pickle
import re
import subprocess
import sys
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace

import doubles
import numpy as np
import pytest
import torch
import yaml
from doubles.shared import Mamba2Metadata, empty
from mixer import Weights, random_tokens, same_bits
from serving import LAYER_MASK, MAPPING, Request, Server

from trtllm_replayssm import MambaGeometry, ops, self_test
from trtllm_replayssm.integrations.trtllm_build import doctor
from trtllm_replayssm.integrations.trtllm_serve import MODULE_DIR
from trtllm_replayssm.integrations.trtllm_serve.settings import Settings

PACKAGE = "trtllm_replayssm.integrations.trtllm_serve"
PROFILES = pytest.mark.parametrize("profile, drafts", [("A", None), ("B", 3), ("C", 3)])
SPECULATIVE = pytest.mark.parametrize("profile", ["B", "C"])
MAMBA_LAYERS = sum(LAYER_MASK)


@pytest.fixture
def serve(monkeypatch):
    """A function that puts up TensorRT-LLM of a profile, installs ReplaySSM and starts a server."""
    for name in ("TRTLLM_USE_MAMBA_REPLAY", "TRTLLM_USE_PY_MAMBA"):
        monkeypatch.setenv(name, "")  # so that what install sets is undone
        monkeypatch.delenv(name)

    def start(profile, environment=(), **options):
        for name, value in dict(environment).items():
            monkeypatch.setenv(f"TRTLLM_{name}", value)
        doubles.drop_package()
        doubles.make_package(profile)
        importlib.import_module(f"{PACKAGE}.model")
        model, manager = (importlib.import_module(name) for name in (doubles.MODEL, doubles.MANAGER))
        metadata = lambda rows, chunk: Mamba2Metadata(rows, chunk, profile == "C")  # noqa: E731
        return Server(profile, model, manager, metadata, **options)

    yield start
    doubles.drop_package()


def holder_of(server):
    return getattr(server.manager, "_impl", server.manager)


def decoder_of(server):
    return holder_of(server)._replayssm


def log_of(level):
    return [text for at, text in sys.modules[doubles.LOGGER].logger.lines if at == level]


def run(server, steps):
    for _ in range(steps):
        server.step()
    return server


# ---- the right numbers ----


@PROFILES
def test_500_steps_are_the_oracles(serve, device, profile, drafts):
    """Prompts in chunks, standard steps, verifications, padding, pre-emption, slots that change hands. A09, A10, A11,
    A14."""
    server = run(serve(profile, drafts=drafts, device=device), 500)
    assert server.worst < 5e-6 and server.finite
    pool = decoder_of(server).pool
    pool.validate()
    counts = pool.stats()
    assert counts["flushes"] > 50 and counts["tokens"] > 1000
    assert min(server.counts[name] for name in ("prefilled", "decoded", "padded")) > 100
    assert min(server.counts[name] for name in ("preempted", "finished")) > 10
    assert profile == "A" or server.counts["verified"] > 500


@SPECULATIVE
def test_attention_dp_ranks_that_idle(serve, profile):
    """Without requests a rank decodes a dummy, since the others wait for it: no slot of a request changes."""
    server = run(serve(profile, drafts=3, attention_dp=True, max_batch=3), 120)
    assert server.worst < 5e-6 and server.finite
    assert server.counts["idle"] > 10 and min(server.counts[name] for name in ("padded", "finished")) > 3
    pool = decoder_of(server).pool
    assert pool.geometry.num_heads == 4 and pool.first_head == 0  # of each rank, which has all heads


@PROFILES
def test_as_many_requests_as_there_are_slots(serve, profile, drafts):
    """A07."""
    server = serve(profile, drafts=drafts)
    server.most_live, server._depart = server.max_batch, lambda: None
    server.random.random = lambda: 0.0  # all of them in each step, with drafts
    run(server, 100)
    assert server.worst < 5e-6 and len(server.live) == server.max_batch
    assert server.counts["verified" if drafts else "decoded"] > 4 * 90


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@PROFILES
def test_captured_steps_are_the_oracles(serve, profile, drafts):
    """Steps without prompts out of CUDA graphs, the acceptance inside of them. A05, A15."""
    server = run(serve(profile, drafts=drafts, device="cuda", graphs=True), 400)
    assert server.worst < 5e-6 and server.finite and len(server.captured) > 4
    decoder_of(server).pool.validate()


@pytest.mark.parametrize(
    "dtypes, environment, more, checkpoint, bound",
    [
        ((torch.bfloat16, torch.float32), {}, {}, "fp32", 6e-3),
        ((torch.float32, torch.float16), {}, {}, "fp16", 5e-4),
        ((torch.float32, torch.float16), {}, {"mamba_ssm_stochastic_rounding": True}, "fp16_sr", 5e-4),
        ((torch.float32, torch.float16), {"REPLAYSSM_STOCHASTIC_ROUNDING": "1"}, {}, "fp16_sr", 5e-4),
        ((torch.float32, torch.float32), {"REPLAYSSM_READ_COPY": "fp8"}, {}, "fp32", 2e-2),
        ((torch.float32, torch.float32), {"REPLAYSSM_READ_COPY": "e2m2", "REPLAYSSM_WINDOW": "16"}, {}, "fp32", 3e-2),
    ],
)
def test_formats(serve, dtypes, environment, more, checkpoint, bound):
    """The manager's dtype is the checkpoint's; read copies are made after prefill too."""
    server = run(serve("C", environment, drafts=2, dtypes=dtypes, **more), 80)
    config = decoder_of(server).pool.config
    assert (config.checkpoint, config.read_copy) == (checkpoint, environment.get("REPLAYSSM_READ_COPY", "none"))
    assert config.window == int(environment.get("REPLAYSSM_WINDOW", config.window))
    assert bound / 4 < server.error < bound


def test_states_in_bf16_are_warned_of(serve):
    """A04: in the server's own log."""
    server = run(serve("C", drafts=2, dtypes=(torch.bfloat16, torch.bfloat16)), 40)
    assert decoder_of(server).pool.config.checkpoint == "bf16" and server.error < 3e-2
    assert [line for line in log_of("warning") if 'ReplaySSM: checkpoint "bf16" drops small updates' in line]


def test_conv_states_in_a_format_of_the_kv_cache_are_refused():
    """A06."""
    from trtllm_replayssm.integrations.trtllm_serve.decode import ReplayDecoder, States

    states = States(torch.zeros(2, 6, 192, 3, dtype=torch.float8_e4m3fn), torch.zeros(2, 6, 4, 16, 64), None)
    with pytest.raises(RuntimeError, match="expected float32, bfloat16 or float16, got .*float32, .*float8_e4m3fn"):
        ReplayDecoder(states, 1, False, 0, Settings())


@SPECULATIVE
@pytest.mark.parametrize("environment, checkpoint", [({}, "fp16_sr"), ({"REPLAYSSM_STOCHASTIC_ROUNDING": "0"}, "fp16")])
def test_rounding_that_the_mixer_is_told_of(serve, profile, environment, checkpoint):
    """Managers of B have no argument for it."""
    dtypes = torch.float32, torch.float16
    server = serve(profile, environment, drafts=2, dtypes=dtypes, rounding=True)
    assert decoder_of(server).pool.config.checkpoint == checkpoint
    assert any(f"state {checkpoint} (the manager's own)" in line for line in log_of("info"))
    assert run(seeded(server), 60).error < 5e-4
    with pytest.raises(RuntimeError, match="stochastic rounding: expected mamba_ssm_cache_dtype float16, got .*32"):
        serve(profile, {"REPLAYSSM_STOCHASTIC_ROUNDING": "auto"}, drafts=2, rounding=True)


@pytest.mark.parametrize("on_mismatch", ["refuse", "fallback"])
def test_rounding_that_only_the_kernel_is_told_of_is_refused(serve, on_mismatch):
    """Too late for the stock kernels: the manager has no states for them any more."""
    dtypes = torch.float32, torch.float16
    server = serve("B", {"REPLAYSSM_ON_MISMATCH": on_mismatch}, drafts=2, dtypes=dtypes)
    with pytest.raises(RuntimeError, match="got a rand_seed, .*: set TRTLLM_REPLAYSSM_STOCHASTIC_ROUNDING to 1 or 0"):
        run(seeded(server), 20)
    for value, checkpoint in (("0", "fp16"), ("1", "fp16_sr")):
        server = seeded(serve("B", {"REPLAYSSM_STOCHASTIC_ROUNDING": value}, drafts=2, dtypes=dtypes))
        assert run(server, 20).error < 5e-4 and decoder_of(server).pool.config.checkpoint == checkpoint


def seeded(server):
    """The server, its decode kernels called as where states are rounded stochastically."""
    for mixer in server.mixers:
        for name in [name for name in vars(mixer) if name.startswith("selective_state_update_func")]:
            kernel = getattr(mixer, name)
            setattr(mixer, name, partial(kernel, rand_seed=torch.ones(1, dtype=torch.int64), philox_rounds=10))
    return server


def make_decoder(**options):
    """A decoder of two layers over garbage, and a function that runs a step of given rows."""
    from trtllm_replayssm.integrations.trtllm_serve.decode import Head, ReplayDecoder, States

    geometry = MambaGeometry(num_heads=4, head_dim=16, num_groups=2, state_dim=64)
    weights = Weights.random(geometry)
    head = Head(weights.A_log, weights.D, weights.dt_bias)
    ssm, conv = torch.full((2, 6, 4, 16, 64), torch.nan), torch.zeros(2, 6, geometry.conv_channels, 3)
    windows = torch.arange(2 * 8 * 3).view(2, 8, 3, 1, 1).expand(-1, -1, -1, geometry.conv_channels, 3).float()
    decoder = ReplayDecoder(States(conv, ssm, windows), 3, False, 0, Settings(**options))
    decoder.pool.data.fill_(0xFF)

    def step(slots, tokens, dummies=None):
        rows = len(slots)
        x, B, C, dt = (t.unflatten(0, (rows, -1)) for t in tokens)
        slots = torch.tensor(slots, dtype=torch.int32)
        outputs = [decoder.step(layer, head, x, dt, B, C, slots, dummies, empty(*x.shape)) for layer in (0, 1)]
        return torch.stack(outputs)

    return decoder, step, geometry


@pytest.mark.parametrize("padding", [[0, 0, 0], [5, -1, 5], [1, 1, 1]])
def test_padding_changes_no_bit_of_live_rows(padding):
    """A01, A27: dummies that share a slot, that have none, that were given a live one."""
    results = []
    for extra in ([], padding):
        decoder, step, geometry = make_decoder()
        decoder.states.ssm[:, [3, 1]] = torch.randn(2, 2, 4, 16, 64, generator=torch.Generator().manual_seed(0))
        decoder.adopt(torch.tensor([3, 1], dtype=torch.int32))
        slots, outputs = [3, 1, *extra], []
        for seed in range(20):
            live, dead = random_tokens(geometry, torch.float32, 6, seed=seed), random_tokens(geometry, torch.float32, 9)
            tokens = [torch.cat([a, b]) if extra else a for a, b in zip(live, dead, strict=True)]
            out = step(slots, tokens)
            assert out.isfinite().all()
            outputs.append(out[:, :2])
            decoder.accept(0, torch.tensor([1 + seed % 3, 3 - seed % 3] + [1] * len(extra)))
        decoder.pool.validate()
        results.append((torch.stack(outputs), decoder.states.ssm[:, [3, 1]], decoder.states.conv[:, [3, 1]]))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert results[0][0].abs().sum() > 0


def test_dummies_move_nothing():
    decoder, step, geometry = make_decoder()
    step([2, 4], random_tokens(geometry, torch.float32, 6), dummies=torch.tensor([True, False]))
    decoder.accept(0, torch.tensor([3, 2]))
    assert decoder.pool.cursors([2, 4]).tokens.tolist() == [0, 2]
    assert decoder.states.ssm.isnan().all()


@pytest.mark.parametrize("together", [1, 64 << 20])
def test_the_accepted_window_is_promoted(monkeypatch, together):
    """Of all layers at once, or one after the other."""
    from trtllm_replayssm.integrations.trtllm_serve import decode

    monkeypatch.setattr(decode, "_PROMOTED_BYTES", together)
    decoder, step, geometry = make_decoder()
    step([2, 4, 4], random_tokens(geometry, torch.float32, 9))
    decoder.accept(2, torch.tensor([7, 7, 3, 2, 1]))  # after two contexts
    windows, conv = decoder.states.windows, decoder.states.conv
    assert torch.equal(conv[:, 2], windows[:, 0, 2])
    assert torch.equal(conv[:, 4], windows[:, 1, 1])  # of the first row of that slot
    assert not conv[:, [0, 1, 3, 5]].any()


@pytest.mark.parametrize("slots", [[-1, 2, -1], [2, -1, -1], [-1, -1, 2], [-1, -1, -1], [-1, 0, 2]])
def test_rows_without_a_slot_promote_no_window(slots):
    decoder, step, geometry = make_decoder()
    windows, conv = decoder.states.windows, decoder.states.conv
    conv.copy_(-1 - torch.arange(6.0).view(6, 1, 1).expand_as(conv))
    expected = conv.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[:, slot] = windows[:, row, 1]
    step(slots, random_tokens(geometry, torch.float32, 9))
    decoder.accept(0, torch.tensor([2, 2, 2]))
    assert torch.equal(conv, expected)


def test_a_verification_that_nobody_accepts_leaves_no_trace():
    """A warm-up that runs layers only; a step that fails half-way."""
    results = []
    for interrupted in (False, True):
        decoder, step, geometry = make_decoder()
        for seed in range(6):
            if interrupted:
                step([2], random_tokens(geometry, torch.float32, 3, seed=99))
            out = step([2], random_tokens(geometry, torch.float32, 3, seed=seed))
            decoder.accept(0, torch.tensor([2]))
        results.append(out)
        assert int(decoder.pool.cursors([2]).tokens) == 12
    assert torch.allclose(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("read_copy, bound", [("none", 5e-6), ("fp8", 3e-2)])
def test_a_request_whose_prompt_was_processed_elsewhere(serve, read_copy, bound):
    """Disaggregated serving: its states lie in the manager's tensors when it first decodes, in a slot that was used."""
    server = run(serve("C", {"REPLAYSSM_READ_COPY": read_copy}, drafts=2), 60)
    g, holder = server.geometry, holder_of(server)
    inner = g.num_heads * g.head_dim
    while not holder.mamba_cache_free_blocks:
        server.step()
    request = Request(10**6, server._hidden(0), MAMBA_LAYERS, (g.num_heads, g.head_dim, g.state_dim))
    request.history = server._hidden(g.conv_kernel - 1)
    slot = holder._slot(request.py_request_id)
    raw = torch.from_numpy(request.history[:, inner : inner + g.conv_channels].T)
    for layer in range(MAMBA_LAYERS):
        request.states[layer] = server.numbers.normal(size=request.states[layer].shape).astype(np.float32)
        holder.mamba_cache.temporal[layer, slot] = torch.from_numpy(request.states[layer])
        holder.mamba_cache.conv[layer, slot] = raw
    server.live = [request]
    server._depart = server._admit = lambda: None
    server.squares[:] = 0
    run(server, 25)
    assert server.error < bound and len(request.history) > 20
    assert sum("request 1000000 decodes whose prompt" in line for line in log_of("warning")) == 1


def test_a_rank_without_mamba_layers(serve):
    """A08: nothing to keep, nothing to fail on."""
    server = serve("C", drafts=2)
    manager = type(server.manager)(
        64, 4, 4, 2, 16, 3, [False] * 3, torch.float32, torch.float32, None, None, max_batch_size=2, mapping=MAPPING,
        spec_config=SimpleNamespace(tokens_per_gen_step=3),
    )  # fmt: skip
    assert manager._impl._replayssm is None
    manager.prepare_resources(SimpleNamespace(context_requests=[], generation_requests=[]))
    attn_metadata = SimpleNamespace(num_contexts=0, num_seqs=1)
    manager.update_mamba_states(attn_metadata, torch.ones(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    manager.shutdown()


# ---- memory ----


@SPECULATIVE
def test_no_state_is_held_twice_and_none_for_drafts(serve, profile):
    server = serve(profile, drafts=3)
    cache, pool = holder_of(server).mamba_cache, decoder_of(server).pool
    assert pool.checkpoint.data_ptr() == cache.temporal.data_ptr()
    assert cache.intermediate_ssm.numel() == 0
    assert cache.intermediate_conv_window.shape[:3] == (MAMBA_LAYERS, 5, 4)
    assert pool.layout.sections["checkpoint"].offset == pool.layout.sections["conv_ring"].offset == -1
    assert pool.config.max_step_tokens == 4 and pool.num_slots == cache.temporal.shape[1]
    assert any(f"{MAMBA_LAYERS} Mamba layers" in line and "GiB" in line for line in log_of("info"))


def test_rings_exist_before_the_kv_pool_takes_the_rest(serve):
    """The Mamba half of the constructor comes first, and the rings are part of it."""
    server = serve("B", drafts=3)
    order = []
    hybrid, holder = type(server.manager), type(server.manager).__mro__[1]
    stock = holder.__init__
    holder.__init__ = lambda self, *a, **k: (stock(self, *a, **k), order.append(hasattr(self, "_replayssm")))[0]
    hybrid(64, 4, 4, 2, 16, 4, LAYER_MASK, torch.float32, torch.float32, None, None, max_batch_size=2, mapping=MAPPING)
    assert order == [True]


def test_shutdown_lets_go_of_the_states_and_tells_the_traffic(serve):
    """A02: what ran can be read back from the log: fewer states written than tokens decoded."""
    server = run(serve("C", drafts=3), 60)
    counts = decoder_of(server).pool.stats()
    server.manager.shutdown()
    assert holder_of(server)._replayssm is None
    line = log_of("info")[-1]
    assert f"tokens {counts['tokens']}," in line and f"state_writes {counts['state_writes']}," in line
    assert counts["state_writes"] < counts["tokens"] / 4


# ---- switches ----


@pytest.mark.parametrize(
    "name, value",
    [
        ("", "false"), ("", "2"), ("", ""), ("_WINDOW", "65"), ("_WINDOW", "-1"), ("_READ_COPY", "fp4"),
        ("_STOCHASTIC_ROUNDING", "yes"), ("_SEED", "1e3"), ("_SHADOW", "0x10"), ("_CHECK", "often"),
        ("_ON_MISMATCH", "ignore"), ("_WINDOWS", "8"), ("_OFF", "1"),
    ],
)  # fmt: skip
def test_bad_switches_name_themselves(name, value):
    """A02."""
    with pytest.raises(ValueError, match=f"^TRTLLM_REPLAYSSM{name}: (expected|no such variable)"):
        Settings.of({f"TRTLLM_REPLAYSSM{name}": value})


def test_good_switches():
    text = {"": "1", "_WINDOW": "32", "_READ_COPY": "nvfp4", "_STOCHASTIC_ROUNDING": "0", "_SEED": str(2**64 - 1)}
    text |= {"_CHECK": "0", "_SHADOW": "7", "_ON_MISMATCH": "fallback"}
    given = Settings.of({f"TRTLLM_REPLAYSSM{name}": value for name, value in text.items()} | {"TLLM_X": "?"})
    assert given == Settings(True, True, 32, "nvfp4", "0", 2**64 - 1, 0, 7)
    assert Settings.of({}) == Settings()


@pytest.mark.parametrize(
    "name, value", [("_WINDOW", "65"), ("_NOT_THERE", "1"), ("_PLUGIN", "1"), ("_ON_MISMATCH", "?")]
)
def test_the_kill_switch_wins_over_everything(name, value):
    for names in (["", name], [name, ""]):
        given = Settings.of({f"TRTLLM_REPLAYSSM{key}": "0" if key == "" else value for key in names})
        assert given == Settings(enabled=False)


def test_variables_that_others_read_are_known(pytestconfig):
    """Whatever of our prefix the code, its build and its image know, the adapter does not take for a typing error."""
    places = ["pyproject.toml", "examples/trtllm-build/Dockerfile", "trtllm_replayssm/**/*.p*", "plugins/**/*.cpp"]
    text = "".join(
        path.read_text() for place in places for path in pytestconfig.rootpath.glob(place) if "pyc" not in str(path)
    )
    names = set(re.findall(r"TRTLLM_REPLAYSSM_[A-Z_]*[A-Z]", text)) - {"TRTLLM_REPLAYSSM_EXPORT"}  # a macro
    assert names > {f"TRTLLM_REPLAYSSM_{name}" for name in ("PLUGIN", "AUTOREGISTER", "NVCC", "SHADOW")}
    for name in names:
        try:
            Settings.of({name: "no value of anything"})
        except ValueError as error:
            assert f"{name}: expected " in str(error)


@pytest.mark.parametrize("environment", [{}, {"REPLAYSSM_ON_MISMATCH": "fallback"}])
def test_installs_in_the_image_that_registers_the_plugins(serve, environment):
    """examples/trtllm-build/Dockerfile."""
    server = serve("C", environment | {"REPLAYSSM_PLUGIN": "1", "REPLAYSSM_AUTOREGISTER": "libnvinfer.so.10"}, drafts=2)
    assert decoder_of(server) is not None


def test_switched_off_is_stock(serve):
    server = run(serve("C", {"REPLAYSSM": "0", "REPLAYSSM_PLUGIN": "1", "REPLAYSSM_SEED": "?"}, drafts=3), 60)
    model = sys.modules[doubles.MODEL]
    assert model.Mamba2Mixer is sys.modules[doubles.MIXER].Mamba2Mixer
    assert model.MODEL_CLASS_MAPPING["NemotronHForCausalLM"] is model.NemotronHForCausalLM
    assert holder_of(server).mamba_cache.intermediate_ssm.numel() > 0
    assert not hasattr(holder_of(server), "_replayssm") and server.worst < 5e-6


@pytest.mark.parametrize("every", [1, 5])
def test_shadow(serve, every):
    """The stock kernel agrees, layer after layer; a state that was spoilt is told."""
    server = run(serve("C", {"REPLAYSSM_SHADOW": str(every)}, drafts=2), 60)
    shadow = decoder_of(server).shadow
    assert len(shadow.differences) > 30 / every
    assert {layer for _, layer, _ in shadow.differences} == set(range(MAMBA_LAYERS))
    assert all(step % every == 0 and 0 < difference < 1e-5 for step, _, difference in shadow.differences)
    assert sum("ReplaySSM shadow" in line for line in log_of("info")) == len(shadow.differences)
    server._compare = lambda request, tokens, accepted, outputs: setattr(
        request, "history", np.concatenate([request.history, tokens[:accepted]])
    )
    for _ in range(40):
        server.mixers[0].A.mul_(1.5)  # the stock kernel sees it, ours has its own copy
        server.step()
    assert any("relative difference" in line for line in log_of("warning"))


# ---- refusals ----


def test_mtp_on_profile_a_is_refused(serve):
    from_probe = "expected a TensorRT-LLM that keeps Mamba states for drafts"
    with pytest.raises(RuntimeError, match=from_probe):
        serve("A", drafts=2)
    with pytest.raises(RuntimeError, match=from_probe):
        serve("A", {"REPLAYSSM_ON_MISMATCH": "fallback"}, drafts=2)


CASES = {
    "native replay": ({}, {"use_replay_state_update": True}, "set TRTLLM_USE_MAMBA_REPLAY=0"),
    "too many drafts": ({}, {"drafts": 16}, "max_step_tokens: expected 1..16"),
    "rounding of fp32": ({}, {"mamba_ssm_stochastic_rounding": True}, "expected mamba_ssm_cache_dtype float16"),
    "state dtype": ({}, {"dtypes": (torch.float32, torch.float64)}, "expected float32, bfloat16 or float16"),
    "window": ({"REPLAYSSM_WINDOW": "2"}, {}, "max_step_tokens: expected 1..2"),
}


@pytest.mark.filterwarnings("ignore:ReplaySSM is OFF")
@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_refused_or_stays_stock(serve, case):
    environment, options, match = CASES[case]
    options = {"drafts": 3} | options
    with pytest.raises(RuntimeError, match=match):
        serve("C", environment, **options)
    server = serve("C", environment | {"REPLAYSSM_ON_MISMATCH": "fallback"}, **options)
    assert holder_of(server)._replayssm is None
    assert holder_of(server).mamba_cache.intermediate_ssm.numel() > 0
    assert any("ReplaySSM is OFF" in line and match.split(": ")[0] in line for line in log_of("warning"))
    if case != "native replay":  # whose kernel the double does not have
        assert run(server, 30).worst < 5e-6


@pytest.mark.filterwarnings("ignore:ReplaySSM is OFF")
def test_ops_that_give_wrong_numbers_are_refused_or_stay_stock(serve, monkeypatch):
    """A29: when the cache manager is made."""
    step = ops.step
    monkeypatch.setattr(ops, "step", lambda *arguments: step(*arguments) * (1 + 2e-5))
    self_test.require.cache_clear()
    with pytest.raises(
        RuntimeError, match=r"self-test on the CPU: step has a relative error of 2\.0e-05 \(limit 2e-06"
    ):
        serve("C", drafts=3)
    server = serve("C", {"REPLAYSSM_ON_MISMATCH": "fallback"}, drafts=3)
    assert holder_of(server)._replayssm is None
    assert any("ReplaySSM is OFF" in line and "self-test" in line for line in log_of("warning"))


@pytest.mark.filterwarnings("ignore:ReplaySSM is OFF")
@pytest.mark.parametrize(
    "name, variable, base",
    [
        ("CppMambaHybridCacheManager", "enable_block_reuse: false", None),
        ("MambaHybridCacheManagerV2", "use_kv_cache_manager_v2: false", None),
        ("NemotronHybridCacheManagerV2", "use_kv_cache_manager_v2: false", "MambaHybridCacheManagerV2"),
    ],
)
def test_managers_whose_slots_move_are_refused_by_name(serve, name, variable, base):
    """The last lies in a module of its own."""

    def made():
        manager = sys.modules[doubles.MANAGER]
        return type(name, (getattr(manager, base),), {})() if base else getattr(manager, name)()

    serve("C", drafts=2)
    with pytest.raises(RuntimeError, match=f"{name}: .* set TRTLLM_USE_PY_MAMBA=1 and {variable}"):
        made()
    serve("C", {"REPLAYSSM_ON_MISMATCH": "fallback"}, drafts=2)
    assert made()._replayssm is None


def test_the_manager_may_be_a_package_with_lazy_exports():
    """As in the newest TensorRT-LLM that was read (upstream.json)."""
    doubles.make_package("C")
    try:
        legacy = sys.modules.pop(doubles.MANAGER)
        delattr(sys.modules[doubles.PYEXECUTOR], "mamba_cache_manager")
        package = doubles.make_module(f"{doubles.PYEXECUTOR}.kv_cache.mamba_cache_manager")
        package.__getattr__ = lambda name: getattr(legacy, name)
        importlib.import_module(f"{PACKAGE}.model")
        assert legacy.PythonMambaCacheManager.__init__.__wrapped__
        assert legacy.MambaHybridCacheManagerV2.__init__.__wrapped__
        assert doctor._trtllm_serve()["profile"] == "C"
    finally:
        doubles.drop_package()


def test_a_manager_that_nobody_knows_is_refused(serve):
    server = serve("C", drafts=2)
    run(server, 5)
    stranger = SimpleNamespace(mamba_layer_offsets={0: 0})
    attn_metadata = SimpleNamespace(kv_cache_manager=stranger, num_contexts=0)
    with pytest.raises(
        RuntimeError, match="expected a Python or Mixed cache manager, made after the model, got Simple"
    ):
        server.mixers[0](torch.zeros(1, server.width), attn_metadata, server.metadata)


def test_mtp_over_pipeline_ranks_is_refused(serve):
    server = serve("C", drafts=2)
    sizes = (64, 4, 4, 2, 16, 4, LAYER_MASK, torch.float32, torch.float32, None, None)
    mapping = SimpleNamespace(**vars(MAPPING) | {"pp_size": 2})
    with pytest.raises(RuntimeError, match="MTP: expected pp_size 1, got 2"):
        type(server.manager)(
            *sizes, max_batch_size=2, mapping=mapping, spec_config=SimpleNamespace(tokens_per_gen_step=3)
        )
    manager = type(server.manager)(*sizes, max_batch_size=2, mapping=mapping)
    assert manager._impl._replayssm.pool.config.max_step_tokens == 1


def test_trees_of_drafts_are_refused(serve):
    """A19."""
    server = run(serve("C", drafts=2), 5)
    arguments = (SimpleNamespace(num_contexts=0, num_seqs=1), torch.ones(1, dtype=torch.int32), torch.zeros(1))
    with pytest.raises(RuntimeError, match="expected a chain of drafts, got a tree"):
        server.manager.update_mamba_states(*arguments, accepted_leaf_positions=torch.zeros(1))


@pytest.mark.parametrize("name, value", [("USE_MAMBA_REPLAY", "1"), ("USE_PY_MAMBA", "0")])
def test_contrary_switches_of_tensorrt_llm_are_refused(serve, name, value):
    with pytest.raises(RuntimeError, match=f"TRTLLM_{name}: expected . .*, got '{value}'"):
        serve("C", {name: value}, drafts=2)


@pytest.mark.parametrize(
    "spoil, match",
    [
        (lambda model, mixer, manager: delattr(manager.PythonMambaCacheManager, "use_replay_state_update") or
         delattr(model, "NemotronHMTP"), "got one with NemotronHMTP missing, update_mamba_states found"),
        (lambda model, mixer, manager: delattr(mixer, "selective_state_update_native"),
         "profile C: expected selective_state_update_native in tensorrt_llm._torch.modules.mamba.mamba2_mixer"),
        (lambda model, mixer, manager: setattr(mixer.Mamba2Mixer, "forward", lambda self, hidden_states: None),
         "Mamba2Mixer.forward to take attn_metadata, mamba_metadata, it takes self, hidden_states"),
        (lambda model, mixer, manager: sys.modules.pop(doubles.MIXER), "expected a module tensorrt_llm.*, found none"),
        (lambda model, mixer, manager: delattr(manager, "MambaCacheManager") or
         delattr(manager, "PythonMambaCacheManager"),
         "expected PythonMambaCacheManager or MambaCacheManager in tensorrt_llm._torch.pyexecutor.mamba_cache_manager, "
         "found neither"),
    ],
)  # fmt: skip
def test_another_tensorrt_llm_is_told_by_what_is_missing(monkeypatch, spoil, match):
    doubles.make_package("C")
    try:
        spoil(*(sys.modules[name] for name in (doubles.MODEL, doubles.MIXER, doubles.MANAGER)))
        with pytest.raises(RuntimeError, match=match):
            importlib.import_module(f"{PACKAGE}.model")
        monkeypatch.setenv("TRTLLM_REPLAYSSM_ON_MISMATCH", "fallback")
        with pytest.warns(UserWarning, match=f"ReplaySSM is OFF, the stock kernels decode: .*{match}"):
            importlib.import_module(f"{PACKAGE}.model")
        assert sys.modules[f"{PACKAGE}.model"].ReplayNemotronHForCausalLM is None
    finally:
        doubles.drop_package()


@pytest.mark.filterwarnings("ignore:ReplaySSM is OFF")
@pytest.mark.parametrize(
    "profile, attribute",
    [("A", "mamba_layer_offsets"), ("A", "ssm_states"), ("B", "mamba_cache"), ("C", "mamba_cache_index")],
)
def test_a_manager_that_lacks_what_steps_need_is_refused_when_it_is_made(serve, monkeypatch, profile, attribute):
    make_package, spoilt = doubles.make_package, []

    def make_spoilt_package(profile):
        make_package(profile)
        manager = sys.modules[doubles.MANAGER]
        holder = getattr(manager, "PythonMambaCacheManager", manager.MambaCacheManager)
        stock = holder.__init__

        @wraps(stock)
        def without(self, *arguments, **named):
            stock(self, *arguments, **named)
            delattr(self, attribute)
            spoilt.append(self)

        holder.__init__ = without

    monkeypatch.setattr(doubles, "make_package", make_spoilt_package)
    with pytest.raises(
        RuntimeError, match=f"profile {profile}: expected .*Manager to have {attribute}, .*; it has none"
    ):
        serve(profile)
    serve(profile, {"REPLAYSSM_ON_MISMATCH": "fallback"})
    assert spoilt[-1]._replayssm is None


@PROFILES
def test_the_doctor_tells_the_profile(monkeypatch, profile, drafts):
    doubles.make_package(profile)
    try:
        report = doctor._trtllm_serve()
        assert report["good"] and report["profile"] == profile
        assert report["why"].startswith(f"profile {profile}: ")
        monkeypatch.setenv("TRTLLM_REPLAYSSM", "0")
        assert doctor._trtllm_serve()["why"].endswith("switched off here by TRTLLM_REPLAYSSM=0")
        monkeypatch.setenv("TRTLLM_REPLAYSSM", "1")
        monkeypatch.setenv("TRTLLM_USE_MAMBA_REPLAY", "1")
        report = doctor._trtllm_serve()
        assert report["good"] == (profile != "C") and report["profile"] == profile
        assert profile != "C" or report["why"].startswith("Mismatch: TRTLLM_USE_MAMBA_REPLAY: expected 0 (")
        monkeypatch.setenv("TRTLLM_REPLAYSSM_WINDOW", "65")
        report = doctor._trtllm_serve()
        assert not report["good"] and report["why"].startswith("ValueError: TRTLLM_REPLAYSSM_WINDOW: expected auto or")
        del sys.modules[doubles.MIXER].Mamba2Mixer
        report = doctor._trtllm_serve()
        assert not report["good"] and report["profile"] is None
        expected = "expected Mamba2Mixer.forward in tensorrt_llm._torch.modules.mamba.mamba2_mixer, found none"
        assert report["why"] == f"Mismatch: profile {profile}: {expected}"
    finally:
        doubles.drop_package()


def test_other_hybrid_models_stay_stock(serve):
    """A manager without mixers of ours in the process (Qwen3-Next has the same one) is not touched."""
    server = serve("C", drafts=2)
    server.mixers[0].__class__.built = 0
    other = type(server.manager)(
        64, 4, 4, 2, 16, 4, LAYER_MASK, torch.float32, torch.float32, None, None, max_batch_size=2, mapping=MAPPING,
        spec_config=SimpleNamespace(tokens_per_gen_step=3),
    )  # fmt: skip
    assert other._impl.mamba_cache.intermediate_ssm.numel() > 0 and not hasattr(other._impl, "_replayssm")


# ---- how it gets there ----


def test_installing_twice_is_as_good_as_once(serve):
    serve("C", drafts=2)
    mixer = sys.modules[doubles.MIXER]
    patched = mixer.selective_state_update_native, sys.modules[doubles.MODEL].Mamba2Mixer
    importlib.reload(sys.modules[f"{PACKAGE}.model"])
    assert patched == (mixer.selective_state_update_native, sys.modules[doubles.MODEL].Mamba2Mixer)


@PROFILES
def test_the_registered_class_is_sent_by_reference(serve, profile, drafts):
    serve(profile, drafts=drafts)
    registered = sys.modules[doubles.MODEL].MODEL_CLASS_MAPPING["NemotronHForCausalLM"]
    assert pickle.loads(pickle.dumps(registered)) is registered
    assert registered is sys.modules[f"{PACKAGE}.model"].ReplayNemotronHForCausalLM
    assert issubclass(registered, sys.modules[doubles.MODEL].NemotronHForCausalLM)


def test_the_module_directory_lies_alone():
    """Its parent goes first on sys.path: a neighbour called like an installed package would take its place."""
    command = [sys.executable, "-m", "trtllm_replayssm", "trtllm-module-dir"]
    printed = Path(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip())
    assert printed == MODULE_DIR and (printed / "__init__.py").is_file()
    assert [path.name for path in printed.parent.iterdir() if path.name != "__pycache__"] == [printed.name]
    assert importlib.util.find_spec(printed.name) is None  # nothing else has its name


def test_importing_the_directory_installs(monkeypatch):
    """As `trtllm-serve --custom_module_dirs` does it."""
    doubles.make_package("C")
    try:
        monkeypatch.syspath_prepend(str(MODULE_DIR.parent))
        importlib.import_module(MODULE_DIR.name)
        assert sys.modules[doubles.MODEL].Mamba2Mixer.__name__ == "ReplayMamba2Mixer"
    finally:
        sys.modules.pop(MODULE_DIR.name, None)
        doubles.drop_package()


@pytest.mark.parametrize("name", ["super-mtp", "nano-mtp"])
def test_example_configurations_fit(serve, pytestconfig, name):
    """What they ask of the manager is what the adapter takes."""
    config = yaml.safe_load((pytestconfig.rootpath / "examples" / "trtllm-serve" / f"{name}.yaml").read_text())
    cache, speculation = config["kv_cache_config"], config["speculative_config"]
    assert speculation["decoding_type"] == "MTP" and cache["enable_block_reuse"] is False
    dtypes = torch.bfloat16, getattr(torch, cache["mamba_ssm_cache_dtype"])
    rounding = {"mamba_ssm_stochastic_rounding": cache.get("mamba_ssm_stochastic_rounding", False)}
    server = serve("C", drafts=speculation["max_draft_len"], dtypes=dtypes, **rounding)
    expected = {"super-mtp": "fp16_sr", "nano-mtp": "fp32"}[name]
    assert decoder_of(server).pool.config.checkpoint == expected
