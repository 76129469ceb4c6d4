# SPDX-License-Identifier: Apache-2.0
"""What quantised activations cost: Model Optimizer's simulation of its own checkpoints, on a GPU.

Every recipe makes a checkpoint; its model predicts the calibration text three times, all in fp32: in the embedded
runtime, whose weights are the export's and whose activations are not quantised; in Model Optimizer's simulation with
the quantisers of weights alone; and with all of them. Each is compared with the source's predictions.

    python benchmarks/quantized_activations.py --checkpoint examples/tiny-nemotron-h --calib kjv.txt --output FILE

Needs `.[quantize]`. The record is written anew after each recipe.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
import torch.nn.functional as F

from trtllm_replayssm import ReplayConfig
from trtllm_replayssm.builder.model_optimizer import RECIPES, Calibration, calibrated, modelopt
from trtllm_replayssm.builder.quantize import quantize
from trtllm_replayssm.measurement import write_atomically
from trtllm_replayssm.runtime import Engine, ModelConfig
from trtllm_replayssm.runtime.texts import read_rows
from trtllm_replayssm.runtime.tokenizer import Tokenizer
from trtllm_replayssm.runtime.weights import Weights

Tensor = torch.Tensor
_BATCH = 16  # rows that are simulated at a time


def embedded(checkpoint: str | Path, rows: Tensor) -> Tensor:
    """Logarithms of the probabilities that the embedded runtime gives, fp32 [rows, tokens, vocab] on the GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that weights are dequantised
        engine = Engine(checkpoint, device="cuda", dtype="float32", max_batch=1, context=rows.shape[1])
    return torch.stack([engine.logits(row.tolist()).log_softmax(-1) for row in rows])


@torch.inference_mode()
def simulated(model, rows: Tensor) -> Tensor:
    """As `embedded`, by a model of transformers."""
    batches = (model(batch.to(model.device), use_cache=False).logits for batch in rows.split(_BATCH))
    return torch.cat([logits.float().log_softmax(-1) for logits in batches])


def compared(source: Tensor, other: Tensor, rows: Tensor) -> dict[str, float]:
    """Divergence of `other` from `source`, see builder.rounding.Divergence."""
    pairs = list(zip(source.double(), other.double(), strict=True))
    kl = sum(float((p.exp() * (p - q)).sum()) for p, q in pairs) / rows.numel()
    same = float((source.argmax(-1) == other.argmax(-1)).double().mean())
    loss = F.nll_loss(other[:, :-1].flatten(0, 1), rows[:, 1:].flatten().to(other.device))
    return {"kl": round(kl, 6), "same_top": round(same, 6), "loss": round(float(loss), 5)}


def measure(checkpoint: str, recipe: str, rows: Tensor, source: Tensor) -> dict:
    """The record of one recipe. source: what `embedded` gives for the checkpoint."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        report = quantize(checkpoint, made, rows, recipe, state=ReplayConfig(), text="", compare=False)
        seconds = time.perf_counter() - began
        errors: dict[str, list[float]] = {}
        for error in report.errors:
            errors.setdefault(error.format, []).append(error.relative)
        result = {
            "recipe": recipe,
            "quantize_seconds": round(seconds, 1),
            "bytes": sum(report.bytes.values()),
            "mean_relative_error_of_weights": {name: round(sum(e) / len(e), 5) for name, e in errors.items()},
        }
        result["embedded"] = compared(source, embedded(made, rows), rows)
        calibration = Calibration(Path(folder) / "simulated", checkpoint, recipe, rows)
        weights = Weights(checkpoint, ModelConfig.read(checkpoint))
        model = calibrated(checkpoint, weights, recipe, rows, calibration, lambda *_: None).float()
    result["simulated"] = compared(source, simulated(model, rows), rows)
    mtq.disable_quantizer(model, lambda name: "weight_quantizer" not in name)
    result["simulated_weights"] = compared(source, simulated(model, rows), rows)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint", required=True, metavar="DIR")
    parser.add_argument("--calib", required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--recipes", nargs="+", default=[name for name, one in RECIPES.items() if one.layers is None])
    parser.add_argument("--commit", default="unknown", help="of this project, for the record")
    parser.add_argument("--output", required=True, metavar="FILE")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # transformers' convolution is torch's
    rows = read_rows(Tokenizer(options.checkpoint), [options.calib], options.rows, options.tokens)
    source = embedded(options.checkpoint, rows)
    record = {
        "bench": "quantized-activations",
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "commit": options.commit,
        "torch": torch.__version__,
        "modelopt": modelopt().__version__,
        "command": "python benchmarks/quantized_activations.py "
        + " ".join(Path(word).name if word.startswith("/") else word for word in sys.argv[1:]),
        "tokens": rows.numel(),
        "source": compared(source, source, rows),
        "results": [],
    }
    for recipe in options.recipes:
        record["results"].append(measure(options.checkpoint, recipe, rows, source))
        write_atomically(Path(options.output), (json.dumps(record, indent=1) + "\n").encode())
        print(json.dumps(record["results"][-1]))


if __name__ == "__main__":
    main()
