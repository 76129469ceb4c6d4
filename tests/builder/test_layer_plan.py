# SPDX-License-Identifier: Apache-2.0
"""Plans of Mamba layers and of a GPU's bytes, against sums done by hand."""

import json

import pytest

from trtllm_replayssm import MambaGeometry, ReplayConfig
from trtllm_replayssm.builder.byte_plan import plan_bytes
from trtllm_replayssm.builder.layer_plan import RankSlice, plan_layers
from trtllm_replayssm.cli import main
from trtllm_replayssm.runtime import ModelConfig
from trtllm_replayssm.runtime.weights import Weights

from .checkpoints import write_family

SUPER = MambaGeometry(num_heads=128, head_dim=64, num_groups=8, state_dim=128, conv_kernel=4)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_take_a_layer_apart_section_by_section(tp):
    """A25. Rows of in_proj in their order (z, x, B, C, dt) and channels of the convolution come together again."""
    parts = [RankSlice.of(SUPER, tp, rank) for rank in range(tp)]
    sections = zip(*(part.in_proj_rows(SUPER) for part in parts), strict=True)
    rows = [row for section in sections for piece in section for row in piece]
    assert rows == list(range(8192 + 10240 + 128))
    sections = zip(*(part.conv_channels(SUPER) for part in parts), strict=True)
    assert [channel for section in sections for piece in section for channel in piece] == list(range(10240))
    assert parts[0].geometry(SUPER) == MambaGeometry(128 // tp, 64, 8 // tp, 128, 4)


def test_fewer_groups_than_ranks():
    """Each group is copied to the ranks that have its heads."""
    parts = [RankSlice.of(SUPER, 16, rank) for rank in range(16)]
    for part in parts:
        (group,) = part.groups
        assert {head // 16 for head in part.heads} == {group}
    with pytest.raises(ValueError, match="128 Mamba heads cannot be divided among 3 tensor-parallel ranks"):
        RankSlice.of(SUPER, 3, 0)
    with pytest.raises(ValueError, match="8 groups of B and C can be neither divided among 12"):
        RankSlice.of(MambaGeometry(24, 64, 8, 128), 12, 0)


def test_layers(tmp_path):
    model = ModelConfig.read(write_family(tmp_path, "ultra-550b-a55b"))
    plans = plan_layers(model, ReplayConfig(window=16, read_copy="nvfp4"), tp=4, rank=3)
    assert len(plans) == 48
    assert [plan.layer for plan in plans[:5]] == [0, 2, 4, 6, 9]  # attention is layer 7
    assert plans[0].geometry == MambaGeometry(2, 64, 2, 128, 4)
    report = json.loads(json.dumps(plans[-1].to_json()))
    assert report["name"] == "backbone.layers.106.mixer"
    assert report["tp"] == {"size": 4, "rank": 3, "heads": [6, 8], "groups": [6, 8]}
    assert (report["window"], report["read_copy"]) == (16, "nvfp4")
    assert report["sections"]["checkpoint"] == {"offset": 0, "bytes": 65536, "shape": [2, 64, 128], "dtype": "fp32"}
    assert report["slot_bytes"] == plans[0].layout.slot_stride


def test_bytes(tmp_path):
    folder = write_family(tmp_path, "super-120b-a12b", quantized=True)
    model = ModelConfig.read(folder)
    weights = Weights(folder, model)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    config = ReplayConfig(window=16, max_step_tokens=4)
    plan = plan_bytes(model, weights, config, memory=10**9, tokens=1000)
    assert 0 < stored - sum(plan.weights.values()) < 0.05 * stored  # but for the header
    # 40 layers of E experts: two matrices of 48 x 32 in 4.5 bits and two numbers each.
    assert plan.weights["NVFP4"] == 40 * 8 * 2 * (48 * 32 * 9 // 16 + 8)
    # Keys and values of 8 layers and the MTP head's, 2 heads of 16, in 1000 positions and those of a step.
    assert plan.request_kv == 2 * 9 * 2 * 16 * 1004 * 2
    record = 8 * 64 * 2 + 8 * 128 * 2 + 8 * 4
    convolution = (3 + 4) * (512 + 2 * 1024) * 2
    assert plan.request_replay == 40 * (
        8 * 64 * 128 * 4 + 20 * record + convolution + 128
    )  # Δ's end to a multiple of 256
    assert plan.request_conventional == 40 * (5 * 8 * 64 * 128 * 4 + convolution)
    assert plan.available == int(0.9 * (10**9 - sum(plan.weights.values())))
    assert plan.fit_replay == plan.available // (plan.request_kv + plan.request_replay)
    # Without drafts there are no snapshots, and the MTP head is not loaded.
    plain = plan_bytes(model, weights, ReplayConfig(window=16), memory=10**9, tokens=1000, kv_dtype="fp8")
    assert plain.request_kv == 2 * 8 * 2 * 16 * 1001
    assert plain.request_conventional == 40 * (8 * 64 * 128 * 4 + 4 * 2560 * 2)
    assert plain.weights["BF16"] < plan.weights["BF16"]


def test_bytes_of_ranks(tmp_path):
    """Layers are divided; norms, routers and latent projections are on every GPU."""
    folder = write_family(tmp_path, "super-120b-a12b")
    model = ModelConfig.read(folder)
    weights = Weights(folder, model)
    whole, eighth = (
        plan_bytes(model, weights, ReplayConfig(window=16), memory=10**9, tokens=100, tp=tp) for tp in (1, 8)
    )
    on_all = 40 * (8 * 64 + 2 * 32 * 64) + 89 * 64  # gate, latent projections; norms
    keys = 8 * 2 * 32 * 64  # of 2 heads, one of which each of 8 GPUs has
    divided = whole.weights["BF16"] // 2 - on_all - keys
    assert eighth.weights["BF16"] == pytest.approx(2 * (on_all + keys / 2 + divided / 8), rel=1e-6)
    assert eighth.request_replay * 8 == pytest.approx(whole.request_replay, rel=0.01)
    with pytest.raises(ValueError, match="8 Mamba heads cannot be divided among 16"):
        plan_bytes(model, weights, ReplayConfig(window=16), memory=10**9, tokens=100, tp=16)


def test_command(tmp_path, capsys):
    folder = str(write_family(tmp_path, "nano-30b-a3b", quantized=True))
    arguments = ["plan", "--checkpoint", folder, "--draft-tokens", "3", "--tokens", "2000"]
    assert main([*arguments, "--gpu", "b300", "--tp", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["gpu"], report["memory"], report["tp"], len(report["layers"])) == ("b300", 288 * 10**9, 4, 23)
    assert report["requests"]["replay"] > report["requests"]["conventional"] > 0
    assert main([*arguments, "--memory", "1GB", "--requests", "100000"]) == 0
    text = capsys.readouterr().out
    assert "23 Mamba-2 layers of 8 heads x 64 x 128, groups: 8, on each of 1 GPUs" in text
    assert "FP32 states, 4 snapshots" in text and "do not fit" in text
    for wrong, message in (
        (["--gpu", "rtx"], "--gpu: expected one of h100, h200, b200, gb200, b300, gb300, got 'rtx'"),
        (["--memory", "many"], "--memory: expected a number of B, KiB"),
        (["--gpu", "h200", "--tp", "0"], "--tp: expected 1..1024, got 0"),
        (["--gpu", "h200", "--tp", "3"], "8 Mamba heads cannot be divided among 3"),
    ):
        assert main([*arguments, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_states_as_the_checkpoint_says(tmp_path, capsys):
    """What `quantize` writes into config.json, unless an option says otherwise."""
    block = {"checkpoint": "fp16_sr", "read_copy": "nvfp4", "window": 24, "max_step_tokens": 4}
    folder = str(write_family(tmp_path, "nano-4b", replayssm=block))

    def kept(*more):
        assert main(["plan", "--checkpoint", folder, "--gpu", "h200", "--json", *more]) == 0
        return {
            name: value for name, value in json.loads(capsys.readouterr().out)["layers"][0].items() if name in block
        }

    assert kept() == block
    assert kept("--draft-tokens", "1", "--read-copy", "fp8") == block | {"max_step_tokens": 2, "read_copy": "fp8"}
