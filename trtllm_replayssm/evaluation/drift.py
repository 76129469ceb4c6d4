# SPDX-License-Identifier: Apache-2.0
"""How far a state format leads a model away from FP32 states, along a text.

The text is given (teacher forcing). Two decoders read it side by side, one with FP32 states and one in the format under
test, and after every token their distributions of the next one are compared: KL divergence, in float64 from FP32
logits, and whether they agree on the most likely token. The text is brought in steps of T tokens, all of them accepted,
which flushes at the same tokens as decoding one by one if T divides the window.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from tqdm import tqdm

from .. import ReplayConfig
from ..measurement import write_atomically
from ..runtime.texts import read_rows, require_different
from .generation import generate
from .statistics import buckets, interval, slope
from .subject import ACTIVATIONS, Decoder, Subject
from .walk import walk

REFERENCE = "fp32:none"
METADATA = ("configuration", "seconds", "date", "commit", "command")  # of a configuration's file
REMEDY = "name another folder or delete this one"


@dataclass(frozen=True)
class Settings:
    """What decides the numbers of a run, all configurations alike.

    checkpoint, files: paths. rows: different texts. tokens: of each. window, step_tokens: of ReplaySSM. generate: how
    many tokens each row continues its first `prompt` tokens with, greedily; 0: none.
    """

    checkpoint: Path
    files: tuple[Path, ...]
    rows: int = 8
    tokens: int = 4096
    window: int = 16
    step_tokens: int = 16
    dtype: str = "bfloat16"
    seed: int = 0
    generate: int = 0
    prompt: int = 64

    def __post_init__(self):
        for name in ("rows", "tokens", "window", "step_tokens", "prompt"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.generate < 0:
            raise ValueError(f"generate is {self.generate}, expected at least 0")
        for name in ("window", "tokens", "prompt"):
            if getattr(self, name) % self.step_tokens:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, expected a multiple of the step's {self.step_tokens} tokens"
                )
        if self.generate and self.prompt >= self.tokens:
            raise ValueError(f"prompt is {self.prompt}, expected fewer than the {self.tokens} tokens of a text")

    def identity(self, device: torch.device) -> dict:
        """What must be equal for the results of two runs to belong together."""
        weights = sorted(self.checkpoint.glob("*.safetensors"))
        return {
            "checkpoint": {
                file.name: _digest(file)
                for file in (self.checkpoint / "config.json", self.checkpoint / "tokenizer.json", *weights)
            },
            "texts": [_digest(file) for file in self.files],
            **{
                name: getattr(self, name)
                for name in ("rows", "tokens", "window", "step_tokens", "dtype", "seed", "generate", "prompt")
            },
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        }

    @property
    def arrays(self) -> dict[str, tuple[type, tuple[int, int]]]:
        """What a configuration's file holds: name -> dtype, shape."""
        each = (self.rows, self.tokens)
        following = (self.rows, self.tokens - 1)
        arrays = {
            "kl": (np.float32, each),
            "same": (np.bool_, each),
            "loss": (np.float32, following),
            "reference_loss": (np.float32, following),
        }
        if self.generate:
            generated = (np.int64, (self.rows, self.generate))
            arrays |= {"generated": generated, "reference_generated": generated}
        return arrays


class Drift:
    """A run over several configurations, each "checkpoint:read copy" as in ReplayConfig, kept in `folder`.

    Every finished configuration is a file there; a run that finds files of the same settings goes on after them, with
    the same results as if it had never stopped. ValueError: an unknown configuration, one named twice, too little text,
    texts that are not different, or a folder with results of other settings. `commit` and `command` are recorded with
    what this run measures.

    Attributes:
        subject: the checkpoint. tokens: int64 [rows, tokens], the texts.
    """

    def __init__(
        self,
        settings: Settings,
        configurations: Sequence[str],
        folder: Path,
        device: torch.device,
        progress: bool = False,
        commit: str = "unknown",
        command: str = "unknown",
    ):
        self.settings, self.folder, self._progress = settings, folder, progress
        self._origin = {"commit": commit, "command": command}
        if len(set(configurations)) < len(configurations):
            raise ValueError(f"configurations: expected different ones, got {' '.join(configurations)}")
        self.configurations = {name: self._replay(name) for name in configurations}
        self.subject = Subject(settings.checkpoint, device, settings.dtype, progress)
        tokens = read_rows(self.subject.tokenizer, settings.files, settings.rows, settings.tokens)
        require_different(tokens, settings.files)
        self.tokens = tokens.to(device)
        self._claim(settings.identity(device))

    def run(self) -> dict[str, Result]:
        """Runs what is not there yet. Configuration -> result, in the order they were named.

        ValueError: a file that is damaged or another configuration's, by name, before anything is measured; a
        configuration whose figures are not finite, by name, before they are written.
        """
        files = {name: self._file(name) for name in self.configurations}
        results = {name: Result.read(file, name, self.settings) for name, file in files.items() if file.exists()}
        pending = [name for name in self.configurations if name not in results]
        per_configuration = self.settings.rows * self.settings.tokens
        total = len(self.configurations) * per_configuration
        done = total - len(pending) * per_configuration
        with tqdm(total=total, initial=done, unit="token", unit_scale=True, disable=not self._progress) as bar:
            for name in pending:
                bar.set_description(name)
                arrays, metadata = self._measure(name, bar)
                try:
                    _require(arrays, self.settings)
                except ValueError as error:
                    raise ValueError(f"configuration {name!r}: {error}") from None
                write_atomically(files[name], save(arrays, metadata))
                results[name] = Result.read(files[name], name, self.settings)
        return {name: results[name] for name in self.configurations}

    @torch.inference_mode()
    def _measure(self, name: str, bar: tqdm) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """What a configuration's file holds: arrays and metadata."""
        configs = {"reference_": self._replay(REFERENCE), "": self.configurations[name]}
        began = time.perf_counter()
        arrays = self._compare(*configs.values(), bar)
        seconds = time.perf_counter() - began
        if self.settings.generate:
            prompt, stride = self.tokens[:, : self.settings.prompt], self.settings.step_tokens
            for kind, config in configs.items():
                arrays[f"{kind}generated"] = generate(self.subject, config, prompt, self.settings.generate, stride)
        today = datetime.date.today().isoformat()
        metadata = {"configuration": name, "seconds": str(seconds), "date": today, **self._origin}
        return {key: value.cpu().numpy() for key, value in arrays.items()}, metadata

    def _compare(self, reference: ReplayConfig, candidate: ReplayConfig, bar: tqdm) -> dict[str, torch.Tensor]:
        """kl, same, loss and reference_loss of Result."""
        device, shape, stride = self.tokens.device, self.tokens.shape, self.settings.step_tokens
        decoders = [Decoder(self.subject, config, self.tokens) for config in (reference, candidate)]
        kl, *losses = (torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(3))
        same = torch.zeros(shape, dtype=torch.bool, device=device)
        following = F.pad(self.tokens[:, 1:], (0, 1))

        def step(first: torch.Tensor, context: int) -> None:
            p, q = (decoder.step(first, stride, context) for decoder in decoders)
            at = first + torch.arange(stride, device=device)
            same.index_copy_(1, at, p.argmax(-1) == q.argmax(-1))
            p, q = (logits.double().log_softmax(-1) for logits in (p, q))
            kl.index_copy_(1, at, ((p - q) * p.exp()).sum(-1).float())
            target = following.index_select(1, at)[..., None]
            for loss, log_probability in zip(losses, (p, q), strict=True):
                loss.index_copy_(1, at, -log_probability.gather(-1, target).squeeze(-1).float())

        rows, tokens = shape
        walk(step, 0, tokens, stride, device, advance=lambda done: bar.update(done * rows))
        for decoder in decoders:
            decoder.memory.pool.validate()
        reference_loss, loss = (values[:, :-1].contiguous() for values in losses)  # the last token has no next one
        return {"kl": kl, "same": same, "loss": loss, "reference_loss": reference_loss}

    def _replay(self, name: str) -> ReplayConfig:
        checkpoint, separator, read_copy = name.partition(":")
        if not separator:
            raise ValueError(f"configuration {name!r}: expected CHECKPOINT:READ_COPY, such as fp32:nvfp4")
        settings = self.settings
        activation = ACTIVATIONS[settings.dtype]
        try:
            # What it warns of (steps as long as the window, coarse checkpoints) is what is measured here.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ReplayConfig(
                    settings.window, settings.step_tokens, checkpoint, read_copy, activation, settings.seed
                )
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"configuration {name!r}: {error}") from None

    def _claim(self, identity: dict) -> None:
        """Makes the folder this run's, or raises ValueError if it holds another's."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "settings.json"
        if file.exists():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"{file}: not the JSON of a run's settings: {error}; {REMEDY}") from None
            if not isinstance(found, dict):
                raise ValueError(f"{file}: expected the settings of a run, got {type(found).__name__}; {REMEDY}")
            if other := [key for key in identity if found.get(key) != identity[key]]:
                raise ValueError(
                    f"{self.folder}: holds results of another run, which differs in {', '.join(other)}; {REMEDY}"
                )
        else:
            write_atomically(file, json.dumps(identity, indent=1).encode())

    def _file(self, name: str) -> Path:
        return self.folder / f"{name.replace(':', '+')}.safetensors"


@dataclass(frozen=True)
class Result:
    """A configuration compared with FP32 states. Position t is the one after t + 1 tokens.

    kl: fp32 [rows, tokens], nats. same: bool [rows, tokens], most likely tokens agree. loss, reference_loss: fp32
    [rows, tokens - 1], of the text's next token, nats. generated, reference_generated: int64 [rows, n] or None.
    seconds: of the comparison. date, commit, command: when and with what it was measured.
    """

    kl: np.ndarray
    same: np.ndarray
    loss: np.ndarray
    reference_loss: np.ndarray
    generated: np.ndarray | None
    reference_generated: np.ndarray | None
    seconds: float
    date: str
    commit: str
    command: str

    @classmethod
    def read(cls, file: Path, configuration: str, settings: Settings) -> Result:
        """ValueError: a file that is damaged, incomplete, or of another configuration or other sizes, by name."""
        try:
            with safe_open(file, "np") as stored:
                metadata = stored.metadata() or {}
                if missing := [name for name in METADATA if name not in metadata]:
                    raise ValueError(f"its metadata lacks {', '.join(missing)}")
                if (found := metadata["configuration"]) != configuration:
                    raise ValueError(f"it is of configuration {found!r}, expected {configuration!r}")
                arrays = {name: stored.get_tensor(name) for name in settings.arrays}
            _require(arrays, settings)
            return cls(
                **{"generated": None, "reference_generated": None} | arrays,
                seconds=float(metadata["seconds"]),
                **{name: metadata[name] for name in ("date", "commit", "command")},
            )
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"{file}: not a whole result of a configuration: {error}; delete it, and the next run measures it anew"
            ) from None

    def summary(self) -> dict:
        """The figures of a record.

        kl_by_bucket: per range of positions, doubling: mean and 95 % interval over rows. kl_end: the mean of the last
        1/32 of the positions. slope_last_half: change of the KL along the last half of the positions by least squares,
        beside their mean. Intervals of one row are None.
        """
        rows, tokens = self.kl.shape
        kl = self.kl.astype(np.float64)
        end, half = kl[:, -max(tokens // 32, 1) :].mean(1), kl[:, tokens // 2 :]
        by_bucket = []
        for begin, stop in buckets(tokens):
            means = kl[:, begin:stop].mean(1)
            by_bucket.append({"from": begin + 1, "to": stop, "kl": means.mean(), "interval": interval(means)})
        changes = slope(half)
        return {
            "rows": rows,
            "kl_end": end.mean(),
            "kl_end_interval": interval(end),
            "kl_end_by_row": end.tolist(),
            "kl_mean": kl.mean(),
            "kl_mean_by_row": kl.mean(1).tolist(),
            "kl_by_bucket": by_bucket,
            "kl_last_half": half.mean(),
            "slope_last_half": changes.mean(),
            "slope_last_half_interval": interval(changes),
            "top1": self.same.mean(),
            "top1_interval": interval(self.same.mean(1)),
            "loss": self.loss.mean(dtype=np.float64),
            "reference_loss": self.reference_loss.mean(dtype=np.float64),
            "seconds": round(self.seconds, 1),
        }


def _require(arrays: dict[str, np.ndarray], settings: Settings) -> None:
    """ValueError unless `arrays` are those of a configuration's file, and finite."""
    for name, (dtype, shape) in settings.arrays.items():
        array = arrays[name]
        if array.dtype != dtype or array.shape != shape:
            expected = f"{np.dtype(dtype)} {list(shape)}"
            raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, expected {expected}")
        if len(wrong := np.argwhere(~np.isfinite(array))):
            row, position = wrong[0]
            raise ValueError(
                f"{name} is {array[row, position]} in row {row} at position {position}, expected finite numbers"
            )


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
