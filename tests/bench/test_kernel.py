# SPDX-License-Identifier: Apache-2.0
"""`bench kernel` on the CPU: what it counts, refuses, keeps and resumes."""

import json
import sys
import types

import pytest
import torch

from trtllm_replayssm import SlotLayout
from trtllm_replayssm.bench import kernel, peers
from trtllm_replayssm.bench.kernel import Case, KernelBench, parse_geometry
from trtllm_replayssm.bench.peers import (
    ConventionalPeer,
    FlashInferReplay,
    ReferenceReplay,
    TritonPeer,
    VllmReplay,
    _Relaunched,
)
from trtllm_replayssm.cli import main

GEOMETRY = "4x16x2x64"
SMALL = ("kernel", "--geometry", GEOMETRY, "--steps", 16, "--repeats", 2, "--no-plot")
FIELDS = {
    "bench", "geometry", "batch", "tokens", "mode", "checkpoint", "read_copy", "window", "flushes", "steps", "repeats",
    "us", "us_min", "us_max", "layers", "accepted_per_row_and_step", "flushes_per_step", "expected_flushes_per_step",
    "bytes_read_per_step", "bytes_written_per_step", "fraction_of_read_bandwidth", "fraction_of_copy_bandwidth",
    "read_bandwidth", "copy_bandwidth", "gpu", "device", "date", "commit", "command",
}  # fmt: skip


@pytest.fixture(autouse=True)
def known_bandwidths(monkeypatch):
    monkeypatch.setattr(kernel, "bandwidths", lambda device: {"read_bandwidth": 10**9, "copy_bandwidth": 5 * 10**8})


def layout(tokens=1, checkpoint="fp32", read_copy="none"):
    return SlotLayout(parse_geometry(GEOMETRY), Case(GEOMETRY, 1, tokens, "replay", checkpoint, read_copy).config)


def test_records(bench):
    """A record a case; bytes are those that the layout gives a step, and fractions what they make of the time."""
    records, errors = bench(*SMALL, "--batches", 3, "--json")
    assert [record["mode"] for record in records] == ["replay", "conventional"]
    assert all(set(record) == FIELDS for record in records)
    assert records[0]["command"].startswith(f"trtllm-replayssm bench kernel --geometry {GEOMETRY} --steps 16")
    assert all(f"peer:{name} is not measured: " in errors for name in peers.PEERS)
    replay, conventional = records
    sizes = layout()
    state = sizes.sections["checkpoint"].bytes
    # A row at T = 1, L = 16 reads the state in every step and, over a window, records 0 to 15 of earlier steps; at a
    # flush, 16 of them. It writes a record a step and a state a window.
    assert replay["flushes_per_step"] == replay["expected_flushes_per_step"] == round(3 / 16, 4)
    assert replay["bytes_read_per_step"] == 3 * state + round(3 * sum(range(1, 17)) / 16 * sizes.record_bytes)
    assert replay["bytes_written_per_step"] == round(3 * state / 16 + 3 * sizes.record_bytes)
    assert conventional["bytes_read_per_step"] == conventional["bytes_written_per_step"] == 3 * state
    moved = replay["bytes_read_per_step"] + replay["bytes_written_per_step"]
    assert replay["fraction_of_read_bandwidth"] == pytest.approx(moved / (replay["us"] * 1e-6) / 1e9, abs=6e-4)
    assert replay["us_min"] <= replay["us"] <= replay["us_max"]


def test_verification_counts_what_it_accepts(bench):
    """A16."""
    arguments = ("--batches", 8, "--tokens", 4, "--modes", "replay", "conventional_verify", "--json")
    replay, snapshots = bench(*SMALL, *arguments)[0]
    assert replay["steps"] > 16  # enough that 2 % of the flushes are no chance
    assert replay["flushes_per_step"] == pytest.approx(replay["expected_flushes_per_step"], rel=0.02)
    assert replay["accepted_per_row_and_step"] == pytest.approx(2.5, rel=0.03)
    state = layout(4).sections["checkpoint"].bytes
    assert (snapshots["bytes_read_per_step"], snapshots["bytes_written_per_step"]) == (8 * state, 4 * 8 * state)


@pytest.mark.parametrize("formats, reads", [("fp32:none", "checkpoint"), ("fp16_sr:nvfp4", "read_copy")])
@pytest.mark.parametrize("tokens", [1, 4])
def test_steps_without_flushes(bench, formats, reads, tokens):
    """Rows stay where they are, at every phase that does not flush, and only read the state."""
    arguments = ("--batches", 26, "--formats", formats, "--tokens", tokens, "--no-flush", "--json")
    (record,) = bench(*SMALL, *arguments)[0]
    assert (record["flushes_per_step"], record["accepted_per_row_and_step"]) == (0, 0)
    sizes = layout(tokens, *formats.split(":"))
    phases = 16 - tokens + 1
    history = sum(row % phases for row in range(26))
    assert record["bytes_read_per_step"] == 26 * sizes.sections[reads].bytes + history * sizes.record_bytes
    assert record["bytes_written_per_step"] == 26 * tokens * sizes.record_bytes


def test_a_wrong_count_of_flushes_is_refused(bench, monkeypatch, tmp_path):
    """A16. Off by 2.5 %: not recorded, said, and the exit code tells. The other cases are measured."""
    right = kernel.flushes_per_row_and_step
    monkeypatch.setattr(kernel, "flushes_per_row_and_step", lambda window, tokens: right(window, tokens) * 1.025)
    output = tmp_path / "kernel.json"
    shown, errors = bench(*SMALL, "--batches", 2, "--output", output, code=1)
    assert "invalid run, not recorded" in errors and "0.1250 flushes a step were counted" in errors
    assert [record["mode"] for record in json.loads(output.read_text())] == ["conventional"]
    assert " replay " not in shown


def test_an_interrupted_run_goes_on(bench, monkeypatch, tmp_path):
    output = tmp_path / "kernel.json"
    arguments = (*SMALL, "--batches", 1, 2, 3, "--modes", "replay", "--output", output)
    measure, measured = KernelBench.measure, []

    def until_the_third(self, case):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(case.batch)
        return measure(self, case)

    monkeypatch.setattr(KernelBench, "measure", until_the_third)
    bench(*arguments, code=130)
    kept = json.loads(output.read_text())
    assert [record["batch"] for record in kept] == measured == [1, 2]
    monkeypatch.setattr(KernelBench, "measure", lambda self, case: measured.append(case.batch) or measure(self, case))
    records, _ = bench(*arguments, "--json")
    assert measured == [1, 2, 3]
    assert json.loads(output.read_text()) == records and records[:2] == kept
    # Another commit's figures are another case's.
    bench(*arguments, "--commit", "abc")
    assert measured == [1, 2, 3, 1, 2, 3]
    assert json.loads(output.read_text())[:3] == records


def test_picture(bench, tmp_path):
    arguments = (*SMALL[:-1], "--batches", 1, 2, "--modes", "replay")
    bench(*arguments, "--output", tmp_path / "kernel.json")
    drawn = (tmp_path / "kernel.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    (tmp_path / "kernel.png").unlink()
    assert main(["bench", "plot", str(tmp_path / "kernel.json")]) == 0
    assert (tmp_path / "kernel.png").read_bytes() == drawn


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--geometry", "mega"), "geometry is 'mega', expected super, nano4b, ultra, or HEADS"),
        (("--geometry", "4x16x3x64"), "num_heads"),
        (("--batches", "0"), "batch is 0, expected at least 1"),
        (("--modes", "fast"), "unknown 'fast', expected some of replay conventional"),
        (("--modes", "conventional", "--tokens", "2"), "use conventional_verify"),
        (("--modes", "peer:vllm", "--tokens", "5"), "mode peer:vllm takes 4 tokens, got 5"),
        (("--modes", "conventional", "--formats", "fp16_sr:none"), "mode conventional takes fp32, bf16, fp16"),
        (("--modes", "conventional", "--no-flush"), "--no-flush goes with mode replay"),
        (("--formats", "fp32"), "expected CHECKPOINT:READ_COPY"),
        (("--formats", "fp32:none", "fp12:none"), "got 'fp12'"),
        (("--windows", "3", "--tokens", "4"), "max_step_tokens"),
        (("--output", "results"), "expected a name that ends in .json"),
        (("--steps", "0"), "--steps is 0, expected at least 1"),
        (("--prefill", "64", "--modes", "conventional"), "expected replay and peer:mamba_ssm"),
    ],
)
def test_bad_options(bench, monkeypatch, arguments, message):
    """Refused before anything is measured."""
    monkeypatch.setitem(peers.PEERS, "vllm", Reference("no-such-package", "torch"))
    monkeypatch.setattr(KernelBench, "measure", lambda *_: pytest.fail("measured"))
    assert message in bench(*SMALL, *arguments, code=2)[1]


def test_pictures_of_other_records(capsys, tmp_path):
    (tmp_path / "drift.json").write_text('[{"bench": "drift"}]')
    assert main(["bench", "plot", str(tmp_path / "drift.json")]) == 2
    assert "expected records of one of kernel, prefill, step, serve, got drift" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[", "{}", "[1]", '[{"model": 1}]'])
def test_other_files_are_not_touched(bench, tmp_path, content):
    file = tmp_path / "kernel.json"
    file.write_text(content)
    assert str(file) in bench(*SMALL, "--output", file, code=2)[1]
    assert file.read_text() == content


class Reference(ConventionalPeer):
    """The recurrence in torch, as if it came from elsewhere; `factor` 1 is right."""

    longest_step = 4
    settings = [{"factor": 1.0}, {"factor": 1.0, "again": True}]

    def missing(self):
        return None

    def call(self, case, state, given, others, setting):
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


def test_peers_go_through_the_same_harness(bench, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "vllm", Reference("no-such-package", "torch"))
    (record,) = bench(*SMALL, "--batches", 2, "--modes", "peer:vllm", "--json")[0]
    assert set(record) == FIELDS | {"setting", "peer_version"}
    assert record["setting"]["factor"] == 1 and record["peer_version"] == "unknown"
    state = layout().sections["checkpoint"].bytes
    assert record["bytes_read_per_step"] == record["bytes_written_per_step"] == 2 * state


def test_a_peer_that_computes_something_else_is_refused(bench, monkeypatch):
    wrong = Reference("no-such-package", "torch")
    wrong.settings = [{"factor": 1.1}]
    monkeypatch.setitem(peers.PEERS, "vllm", wrong)
    records, errors = bench(*SMALL, "--batches", 2, "--modes", "peer:vllm", "--json", code=1)
    assert records == [] and "its outputs are off the recurrence by 0.1" in errors


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


def test_peers_that_replay_flush_as_often_as_ours(bench, monkeypatch):
    """And are set against the bytes that ours moves."""
    peer = ReferenceWithFlushes("no-such-package", "torch")
    monkeypatch.setitem(peers.PEERS, "vllm_replay", peer)
    arguments = (*SMALL, "--batches", 3, "--modes", "replay", "peer:vllm_replay", "--json")
    ours, theirs = bench(*arguments)[0]
    for field in ("flushes_per_step", "bytes_read_per_step", "bytes_written_per_step"):
        assert theirs[field] == pytest.approx(ours[field], abs=1), field
    peer.advance = lambda case, cursors, accepted: peer.cursors(case, (cursors["write_pos"] + accepted) % 8)
    (record,), errors = bench(*arguments, code=1)
    assert record["mode"] == "replay" and "flushes a step were counted, the renewal value is 0.1875" in errors
    assert "takes windows up to 16, got 17" in bench(*arguments[:-1], "--windows", 17, code=2)[1]


def test_peers_verify_like_ours(bench, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "vllm", Reference("no-such-package", "torch"))
    arguments = ("--batches", 8, "--tokens", 4, "--modes", "conventional_verify", "peer:vllm", "--json")
    ours, theirs = bench(*SMALL, *arguments)[0]
    for field in ("bytes_read_per_step", "bytes_written_per_step"):
        assert theirs[field] == ours[field], field
    assert theirs["accepted_per_row_and_step"] == pytest.approx(2.5, rel=0.1)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", [ReferenceReplay, FlashInferReplay])
def test_cursors_of_peers_that_replay(kind, tokens):
    """A row flushes when its step has no room in the window, and its ring then begins behind the records folded."""
    case = Case(GEOMETRY, 5, tokens, "peer:vllm", window=7)
    peer, generator = kind("no-such-package", "torch"), torch.Generator().manual_seed(1)
    held, start = list(range(5)), [0] * 5
    cursors = peer.cursors(case, torch.arange(5, dtype=torch.int32))
    ring = 7 + tokens if kind is FlashInferReplay else 1 << (7 + tokens - 1).bit_length()
    names = {
        FlashInferReplay: ("prev_num_accepted_tokens", "ring_start"),
        ReferenceReplay: ("write_pos", "post_conv_state_pos"),
    }[kind]
    for _ in range(40):
        assert [cursors[name].tolist() for name in names] == [held, start]
        full = [records + tokens > 7 for records in held]
        assert peer.flushing(case, cursors).tolist() == full
        accepted = torch.randint(1, tokens + 1, (5,), dtype=torch.int32, generator=generator)
        cursors = peer.advance(case, cursors, accepted)
        for row, count in enumerate(accepted.tolist()):
            if full[row]:
                start[row], held[row] = (start[row] + held[row]) % ring, 0
            held[row] += count


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


@pytest.mark.parametrize(
    "name, tokens, settings",
    [
        (
            "flashinfer_replay",
            1,
            [{"tactic": None, "enable_pdl": False}, {"tactic": (1, 16, 8, 2), "enable_pdl": True}],
        ),
        ("flashinfer_replay", 3, [{"tactic": None, "enable_pdl": True}, {"tactic": (0, 0, 0, 1), "enable_pdl": False}]),
        ("reference_replay", 1, [{}, {"verify": [16, 1, 64, 2], "flush": [32, 2, 64, 2]}]),
        ("reference_replay", 3, [{}, {"verify": [16, 1, 64, 2], "flush": [32, 2, 64, 2]}]),
        ("vllm_replay", 1, [{}, {"config": [16, 1, 64, 64, 2]}]),
    ],
)
def test_adapters_of_libraries_that_replay(bench, monkeypatch, name, tokens, settings):
    """Against their contracts: outputs are the recurrence's beyond flushes and rejected drafts, every setting is
    launched, and the records are those that ours has of such a step.
    """
    peer = peers.PEERS[name]
    fake = {"flashinfer_replay": FakeFlashInfer, "reference_replay": FakeReference, "vllm_replay": FakeVllm}[name]()
    for module in (
        "flashinfer.mamba.checkpointing_ssu",
        peer._module,
        peer._module.rpartition(".")[0] + ".replayssm_config",
    ):
        monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.setattr(peers.Library, "missing", lambda self: None)
    monkeypatch.setattr(type(peer), "settings", settings)
    monkeypatch.setattr(kernel, "steps_to_count", lambda *_: 48)
    monkeypatch.setattr(kernel, "TOLERANCE", 0.2)  # of so few steps
    arguments = ("--batches", 2, "--tokens", tokens, "--windows", 6, "--modes", "replay", f"peer:{name}", "--json")
    ours, theirs = bench(*SMALL, *arguments)[0]
    assert theirs["setting"] in json.loads(json.dumps(settings))
    if name == "flashinfer_replay":
        assert fake.launched == {tuple(setting.values()) for setting in settings}
    elif name == "vllm_replay":
        assert fake.launched == {None, (16, 1, 64, 64, 2)}
    else:
        assert fake.launched == {(None, None), ((16, 1, 64, 2), (32, 2, 64, 2))}
    for field in ("bytes_read_per_step", "bytes_written_per_step"):
        assert theirs[field] == pytest.approx(ours[field], rel=0.05 if tokens > 1 else 1e-6), field


def test_launch_settings_replace_those_of_the_library():
    class Kernel:
        arg_names = ["state", "BLOCK_SIZE_M"]

        def __getitem__(self, grid):
            return lambda *arguments, **options: (grid, arguments, options)

    setting = {"BLOCK_SIZE_M": 16, "num_warps": 2}
    assert setting in TritonPeer.settings and TritonPeer.settings[0] == {}
    launch = _Relaunched(Kernel(), setting)["grid"]
    assert launch("s", 4, num_warps=8) == ("grid", ("s", 16), {"num_warps": 2})
    assert launch("s", BLOCK_SIZE_M=4, num_warps=8) == ("grid", ("s",), {"BLOCK_SIZE_M": 16, "num_warps": 2})


def test_prefill(bench, tmp_path):
    output = tmp_path / "prefill.json"
    records, errors = bench(
        *SMALL[:-1], "--prefill", 40, 64, "--formats", "fp32:none", "fp16_sr:nvfp4", "--output", output, "--json"
    )
    assert "peer:mamba_ssm is not measured" in errors
    assert [(r["tokens"], r["checkpoint"]) for r in records] == [
        (40, "fp32"), (40, "fp16_sr"), (64, "fp32"), (64, "fp16_sr"),
    ]  # fmt: skip
    assert all(record["bench"] == "prefill" and record["us"] > 0 for record in records)
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
