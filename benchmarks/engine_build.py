# SPDX-License-Identifier: Apache-2.0
"""Time and memory that building an engine takes, without a GPU, of random checkpoints of Nemotron 3 Nano-4B's layers.

    python benchmarks/engine_build.py --width 3136 --output benchmarks/results/engine-build.json

"narrow" is the 52-layer model of the tests; --width gives Nano-4B's own 42 layers and sizes at a hidden size of that
many (3136: all of it, 8 GB of bf16 weights). Each build is a process of its own. Memory is the most that was resident,
pages of mapped weight files among it: what must fit is about half of that.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from trtllm_replayssm.runtime import ModelConfig
from trtllm_replayssm.runtime.weights import expected_tensors

PATTERN = "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"
COMMON = {
    "model_type": "nemotron_h",
    "dtype": "bfloat16",
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "head_dim": 128,
    "eos_token_id": 2,
}
NARROW = COMMON | {
    "hybrid_override_pattern": PATTERN + PATTERN[:10],
    "hidden_size": 256,
    "vocab_size": 1024,
    "mamba_num_heads": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
}


def nano(width: int) -> dict:
    """Nano-4B, or narrower in proportion but for the vocabulary."""
    return COMMON | {
        "hybrid_override_pattern": PATTERN,
        "hidden_size": width,
        "vocab_size": 131072,
        "mamba_num_heads": max(8, 96 * width // 3136 // 8 * 8),
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 4 * width,
    }


def write(folder: Path, raw: dict) -> None:
    """A checkpoint of small random weights, a file a tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    names = {}
    for index, (name, shape) in enumerate(expected_tensors(ModelConfig.read(folder)).items()):
        values = torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.02, 0.02)
        names[name] = f"model-{index:05}.safetensors"
        save_file({name: values}, folder / names[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def measure(checkpoint: Path, state_io: str) -> dict:
    command = [sys.executable, "-m", "trtllm_replayssm", "build", "--checkpoint", str(checkpoint), "--json"]
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder:
        more = ["--output", f"{folder}/engine", "--draft-tokens", "3", "--state-io", state_io]
        report = json.loads(subprocess.run(command + more, capture_output=True, text=True, check=True).stdout)
    files = report["files"]
    return {
        "bench": "engine_build",
        "layers": len(report["model"]["layers"]),
        "hidden_size": report["model"]["hidden_size"],
        "state_io": state_io,
        "weight_bytes": files["weights.bin"]["bytes"],
        "plan_bytes": files["model.engine"]["bytes"],
        "seconds": report["plan"]["seconds"]["model"],
        "peak_resident_bytes": report["plan"]["peak_bytes"],
        "activation_bytes": report["plan"]["activation_bytes"]["model"],
        "builder": f"{report['plan']['tensorrt']} {report['plan']['version']}",
    }


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {os.cpu_count()} cores"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, action="append", default=[], metavar="N", help="hidden size of a Nano-4B")
    parser.add_argument("--commit", metavar="HASH", help="to note in the records")
    parser.add_argument("--output", required=True, metavar="FILE")
    options = parser.parse_args()
    where = {
        "cpu": cpu(),
        "date": datetime.date.today().isoformat(),
        "commit": options.commit,
        "command": " ".join(["python", "benchmarks/engine_build.py", *sys.argv[1:]]),
    }
    models = [(NARROW, ("alias", "same_pointer", "host_pointer"))]
    models += [(nano(width), ("alias",)) for width in options.width]
    records = []
    for raw, modes in models:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Path(folder) / "checkpoint"
            write(checkpoint, raw)
            for state_io in modes:
                records.append(measure(checkpoint, state_io) | where)
                print(json.dumps(records[-1]))
    Path(options.output).write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
