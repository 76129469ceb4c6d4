# SPDX-License-Identifier: Apache-2.0
"""Other libraries' kernels in `bench kernel`: the harness, and the adapters against stand-ins for the libraries."""

import gc
import json
import sys

import pytest
import torch

from trtllm_replayssm.bench import kernel, peers
from trtllm_replayssm.bench.kernel import Case
from trtllm_replayssm.bench.peers import FlashInferReplay, ReferenceReplay, TritonPeer, _Relaunched

from .conftest import FIELDS, GEOMETRY, SMALL, layout
from .libraries import FakeConventional, FakeFlashInfer, FakeReference, FakeVllm, Reference, ReferenceWithFlushes

pytestmark = pytest.mark.usefixtures("known_bandwidths")


def test_peers_go_through_the_same_harness(bench, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "vllm", Reference("no-such-package", "torch"))
    (record,) = bench(*SMALL, "--batches", 2, "--modes", "peer:vllm", "--json")[0]
    assert set(record) == FIELDS | {"setting", "settings_refused", "peer_version"}
    assert record["setting"]["factor"] == 1 and record["peer_version"] == "unknown"
    state = layout().sections["checkpoint"].bytes
    assert record["bytes_read_per_step"] == record["bytes_written_per_step"] == 2 * state


def test_a_peer_that_fails_does_not_end_the_run(bench, monkeypatch):
    """As one that does not compile for a geometry."""

    def call(*_):
        raise RuntimeError("static assertion failed\nmore")

    broken = Reference("no-such-package", "torch")
    broken.call = call
    monkeypatch.setitem(peers.PEERS, "vllm", broken)
    (record,), errors = bench(*SMALL, "--batches", 2, "--modes", "peer:vllm", "replay", "--json", code=1)
    assert record["mode"] == "replay" and "peer:vllm failed, RuntimeError: static assertion failed" in errors


def test_a_setting_that_a_peer_refuses_is_left_out(bench, monkeypatch):
    """As one that takes more shared memory than there is; the record says how many."""

    class Refusing(Reference):
        settings = [*Reference.settings, {"factor": 1.0, "refused": True}]

        def call(self, case, state, given, others, setting):
            if "refused" in setting:
                raise RuntimeError("out of resources")
            return super().call(case, state, given, others, setting)

    frozen = gc.get_freeze_count()
    monkeypatch.setitem(peers.PEERS, "vllm", Refusing("no-such-package", "torch"))
    (record,), _ = bench(*SMALL, "--batches", 2, "--modes", "peer:vllm", "--json")
    assert record["settings_refused"] == 1 and "refused" not in record["setting"]
    assert gc.get_freeze_count() == frozen


@pytest.mark.parametrize("settings", [[{"factor": 1.1}], [{"factor": 1.0, "seconds": 2e-3}, {"factor": 1.1}]])
def test_a_peer_that_computes_something_else_is_refused(bench, monkeypatch, settings):
    """By itself or at its fastest."""
    wrong = Reference("no-such-package", "torch")
    wrong.settings = settings
    monkeypatch.setitem(peers.PEERS, "vllm", wrong)
    records, errors = bench(*SMALL, "--batches", 2, "--modes", "peer:vllm", "--json", code=1)
    assert records == [] and "its outputs are off the recurrence by 0.1" in errors


def test_peers_that_replay_flush_as_often_as_ours(bench, monkeypatch):
    """And are set against the bytes that ours moves, which appends its tokens beside them, too."""
    peer = ReferenceWithFlushes("no-such-package", "torch")
    monkeypatch.setitem(peers.PEERS, "vllm_replay", peer)
    arguments = (*SMALL, "--batches", 3, "--modes", "replay", "peer:vllm_replay", "--json")
    rings, ours, theirs = bench(*arguments)[0]
    assert (rings["tokens_in"], ours["tokens_in"], theirs["tokens_in"]) == ("rings", "tensors", "tensors")
    for field in ("flushes_per_step", "bytes_read_per_step", "bytes_written_per_step"):
        assert theirs[field] == pytest.approx(ours[field], abs=1), field
    peer.advance = lambda case, cursors, accepted: peer.cursors(case, (cursors["write_pos"] + accepted) % 8)
    records, errors = bench(*arguments, code=1)
    assert [record["mode"] for record in records] == ["replay", "replay"]
    assert "flushes a step were counted, the renewal value is 0.1875" in errors
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
    _, ours, theirs = bench(*SMALL, *arguments)[0]
    assert theirs["setting"] in json.loads(json.dumps(settings))
    if name == "flashinfer_replay":
        assert fake.launched == {tuple(setting.values()) for setting in settings}
    elif name == "vllm_replay":
        assert fake.launched == {None, (16, 1, 64, 64, 2)}
    else:
        assert fake.launched == {(None, None), ((16, 1, 64, 2), (32, 2, 64, 2))}
    for field in ("bytes_read_per_step", "bytes_written_per_step"):
        assert theirs[field] == pytest.approx(ours[field], rel=0.05 if tokens > 1 else 1e-6), field


@pytest.mark.parametrize(
    "name, tokens", [("mamba_ssm", 1), ("vllm", 1), ("vllm", 3), ("flashinfer", 1), ("flashinfer", 3)]
)
def test_adapters_of_conventional_libraries(bench, monkeypatch, name, tokens):
    peer, fake = peers.PEERS[name], FakeConventional()
    monkeypatch.setitem(sys.modules, peer._module, fake)
    monkeypatch.setattr(peers.Library, "missing", lambda self: None)
    if name != "flashinfer":
        monkeypatch.setattr(type(peer), "settings", [{}, {"BLOCK_SIZE_M": 8, "num_warps": 1}])
    (record,) = bench(*SMALL, "--batches", 2, "--tokens", tokens, "--modes", f"peer:{name}", "--json")[0]
    state = layout().sections["checkpoint"].bytes
    assert (record["bytes_read_per_step"], record["bytes_written_per_step"]) == (2 * state, 2 * state * tokens)
    if name == "flashinfer":
        assert fake.launched == {"auto", "simple"} | ({"vertical", "horizontal"} if tokens == 1 else set())
    else:
        assert fake.launched == {"the library's", 8}


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
