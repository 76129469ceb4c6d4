# SPDX-License-Identifier: Apache-2.0
"""Which small read copy of the state hurts a model least: a simulation.

The runtime reads texts in steps of a window with FP32 states (teacher forcing). Behind every layer's `ops.step` the
outputs get the error that a read copy would have given them: with S the state that the step read and Q(S) its copy,
(Q(S) - S)·C, decayed to each token. So errors reach the later layers, their states and the logits as they would in
earnest, while a format needs a torch function only. Reported are, against plain NVFP4 (block scale amax / 6): the
squared relative error of S·C (mean over layers and heads, on the inputs that FP32 states give), and the KL divergence
of the logits from those with FP32 states, with a 95 % interval of the ratio over texts.

A second table is about checkpoints that are quantised at every flush: random states that decay by ρ a window, and how
far such a checkpoint strays compared with a copy that is quantised once.

    python benchmarks/read_copies.py --text FILE --rows 8 --tokens 2048 --output read-copies.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from trtllm_replayssm import ReplayConfig, ops
from trtllm_replayssm.evaluation.statistics import interval, written
from trtllm_replayssm.evaluation.subject import Decoder, Subject
from trtllm_replayssm.measurement import write_atomically
from trtllm_replayssm.runtime.engine import pick_device
from trtllm_replayssm.runtime.texts import read_rows

Tensor = torch.Tensor
Copy = Callable[[Tensor, "LayerFacts"], Tensor]  # S [rows, H, P, N] -> what a read of its copy gives

BLOCK = 16
EXTENT = {"e2m1": 6.0, "e2m2": 7.0}
BITS = {"e2m1": 4, "e2m2": 5}


class LayerFacts:
    """What a rule may know of a layer beforehand: A, dt_bias, and from another text the moments E[C Cᵀ] [H, N, N] of C
    and the heads' mean decay over a window.
    """

    def __init__(self, A_log: Tensor, dt_bias: Tensor):
        self.A, self.dt_bias = A_log.exp(), dt_bias
        self.moments: Tensor | None = None
        self.decay: Tensor | None = None


# ---- number formats --------------------------------------------------------------------------------------------------


def e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float()


def round_code(x: Tensor, format: str) -> Tensor:
    """To the nearest value of a format, ties to even. E2M1: 0 0.5 1 1.5 2 3 4 6; E2M2: steps of half that, up to 7."""
    finest = 2.0 if format == "e2m1" else 4.0
    a = x.abs()
    step = torch.where(a < 2, 1 / finest, torch.where(a < 4, 2 / finest, 4 / finest))
    return torch.copysign((torch.round(a / step) * step).clamp_max(EXTENT[format]), x)


def fp8(S: Tensor, facts: LayerFacts) -> Tensor:
    """E4M3 with a scale a row of P."""
    scale = (S.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-30)
    return e4m3(S / scale) * scale


def blocked(
    divisors: tuple[float, ...] = (6.0,),
    *,
    format: str = "e2m1",
    neighbours: range | None = None,
    weighted: bool = False,
    feedback: bool = False,
) -> Copy:
    """A code a value, an E4M3 scale a block of 16 columns, an FP32 scale a head.

    divisors: the block's scale is the one of amax / divisor that gives the least squared error. neighbours: instead, of
    the E4M3 codes so far from that of amax / 6. weighted: errors of a column count by E[C²]. feedback: they count by
    E[C Cᵀ], errors of the blocks before included.
    """

    def copy(S: Tensor, facts: LayerFacts) -> Tensor:
        # The largest block scale must not saturate whatever the divisor: 448 at the least of them.
        room = EXTENT[format] * 448 * (min(divisors) / EXTENT[format] if neighbours is None else 4 / 6)
        head = (S.abs().amax((-1, -2), keepdim=True) / room).clamp_min(1e-30)
        out, error = torch.empty_like(S), torch.zeros_like(S)
        for begin in range(0, S.shape[-1], BLOCK):
            columns = slice(begin, begin + BLOCK)
            x = S[..., columns]
            amax = x.abs().amax(-1, keepdim=True)
            if neighbours is None:
                scales = [e4m3((amax / (d * head)).clamp(2**-9, 448)) for d in divisors]
            else:
                code = e4m3((amax / (6 * head)).clamp(2**-9, 448)).to(torch.float8_e4m3fn).view(torch.uint8).int()
                codes = [(code + distance).clamp(1, 126).to(torch.uint8) for distance in neighbours]
                scales = [code.view(torch.float8_e4m3fn).float() for code in codes]
            metric = linear = None
            if feedback:
                metric = facts.moments[:, columns, columns]
                linear = error[..., :begin] @ facts.moments[:, :begin, columns]
            elif weighted:
                metric = torch.diag_embed(facts.moments.diagonal(dim1=-2, dim2=-1)[:, columns])
            best = None
            for scale in scales:
                q = round_code(x / (scale * head), format) * (scale * head)
                e = q - x
                cost = e if metric is None else e @ metric
                cost = ((cost if linear is None else cost + 2 * linear) * e).sum(-1, keepdim=True)
                if best is None:
                    best, chosen = cost, q
                else:
                    chosen = torch.where(cost < best, q, chosen)
                    best = torch.minimum(cost, best)
            out[..., columns], error[..., columns] = chosen, chosen - x
        return out

    return copy


def scaled_columns(copy: Copy, exponent: float = 0.5, powers_of_two: bool = False, rows: bool = False) -> Copy:
    """Columns of N divided by (amax over P / the head's)^exponent, stored as E4M3, or as powers of 2 within a block of
    2 bits each. A reader multiplies C by it. rows: rows of P are divided by their amax, too.
    """

    def scaled(S: Tensor, facts: LayerFacts) -> Tensor:
        amax = S.abs().amax(-2, keepdim=True).clamp_min(1e-30)
        if powers_of_two:
            blocks = amax.unflatten(-1, (-1, BLOCK))
            steps = torch.round(exponent * torch.log2(blocks.amax(-1, keepdim=True) / blocks)).clamp(0, 3)
            scale = torch.exp2(-steps).flatten(-2)
        else:
            scale = e4m3(((amax / amax.amax(-1, keepdim=True)) ** exponent).clamp_min(2**-6))
        if rows:
            scale = scale * (S / scale).abs().amax(-1, keepdim=True).clamp_min(1e-30)
        return copy(S / scale, facts) * scale

    return scaled


def rotated(copy: Copy) -> Copy:
    """Columns mixed by a Hadamard matrix, which a reader applies to C."""

    def turned(S: Tensor, facts: LayerFacts) -> Tensor:
        matrix = torch.ones(1, 1, device=S.device)
        while len(matrix) < S.shape[-1]:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        matrix = matrix / len(matrix) ** 0.5
        return copy(S @ matrix, facts) @ matrix

    return turned


def slow_heads_in_fp8(copy: Copy, speed: Callable[[LayerFacts], Tensor]) -> Copy:
    """FP8 for the quarter of the layer's heads that forget most slowly, `copy` for the others."""

    def mixed(S: Tensor, facts: LayerFacts) -> Tensor:
        slowest = speed(facts).argsort()[: S.shape[1] // 4]
        out = copy(S, facts)
        out[:, slowest] = fp8(S[:, slowest], facts)
        return out

    return mixed


FOUR = (6.0, 6.5, 5.5, 4.0)
SEVENTEEN = range(-8, 9)


def variants(P: int, N: int) -> dict[str, tuple[float, Copy]]:
    """Name -> bits a value (the FP32 scale a head left out), and the copy."""
    nvfp4, e2m2, row_fp8 = 4 + 8 / BLOCK, 5 + 8 / BLOCK, 8 + 32 / N
    column, pairs = 8 / P, 2 / P
    quarter = (row_fp8 + 3 * nvfp4) / 4
    by_A = slow_heads_in_fp8(blocked(FOUR), lambda facts: facts.A)
    by_A_dt = slow_heads_in_fp8(blocked(FOUR), lambda facts: facts.A * F.softplus(facts.dt_bias))
    by_decay = slow_heads_in_fp8(blocked(FOUR), lambda facts: -facts.decay)
    columns_and_A = slow_heads_in_fp8(scaled_columns(blocked(FOUR)), lambda facts: facts.A)
    return {
        "plain: amax/6": (nvfp4, blocked()),
        "amax/{6, 4} (four over six)": (nvfp4, blocked((6.0, 4.0))),
        "amax/{6, 6.5, 4}": (nvfp4, blocked((6.0, 6.5, 4.0))),
        "amax/{6, 6.5, 5.5, 4}": (nvfp4, blocked(FOUR)),
        "17 neighbouring scales": (nvfp4, blocked(neighbours=SEVENTEEN)),
        "rotation, amax/6": (nvfp4, rotated(blocked())),
        "rotation, 17 scales": (nvfp4, rotated(blocked(neighbours=SEVENTEEN))),
        "row x column scales, amax/{6, 6.5, 5.5, 4}": (
            nvfp4 + column + 32 / N,
            scaled_columns(blocked(FOUR), 1.0, rows=True),
        ),
        "column scales^1/2, amax/6": (nvfp4 + column, scaled_columns(blocked())),
        "column scales^1/2, amax/{6, 4}": (nvfp4 + column, scaled_columns(blocked((6.0, 4.0)))),
        "column scales^1/2, amax/{6, 6.5, 4}": (nvfp4 + column, scaled_columns(blocked((6.0, 6.5, 4.0)))),
        "column scales^1/2, amax/{6, 6.5, 5.5, 4}": (nvfp4 + column, scaled_columns(blocked(FOUR))),
        "column scales^1/2, 17 scales": (nvfp4 + column, scaled_columns(blocked(neighbours=SEVENTEEN))),
        "2-bit column scales^1/2, amax/{6, 6.5, 5.5, 4}": (
            nvfp4 + pairs,
            scaled_columns(blocked(FOUR), powers_of_two=True),
        ),
        "17 scales, weighted by E[C^2]": (nvfp4, blocked(neighbours=SEVENTEEN, weighted=True)),
        "17 scales, error feedback by E[C C^T]": (nvfp4, blocked(neighbours=SEVENTEEN, feedback=True)),
        "slow quarter (A) FP8, rest amax/{6, 6.5, 5.5, 4}": (quarter, by_A),
        "slow quarter (A softplus(dt_bias)) FP8, rest the same": (quarter, by_A_dt),
        "slow quarter (measured) FP8, rest the same": (quarter, by_decay),
        "slow quarter (A) FP8, rest with column scales^1/2": (quarter + 0.75 * column, columns_and_A),
        "E2M2, amax/7": (e2m2, blocked((7.0,), format="e2m2")),
        "E2M2, amax/{7, 6.5, 7.5, 6}": (e2m2, blocked((7.0, 6.5, 7.5, 6.0), format="e2m2")),
        "FP8": (row_fp8, fp8),
    }


def accumulation(decays: tuple[float, ...] = (0.3, 0.7, 0.85, 0.95, 0.972, 0.986, 0.995)) -> list[dict]:
    """Squared error of a checkpoint that is quantised at every flush, over that of a copy, beside 1 / (1 - ρ²)."""
    random = torch.Generator().manual_seed(0)
    P, N, window, steps = 64, 128, 16, 1500
    rho = torch.tensor(decays)[:, None, None]
    mean = 0.3 * torch.randn(len(decays), 1, N, generator=random)
    results = []
    for name, copy in (("nvfp4", blocked()), ("fp8", fp8)):
        exact = torch.zeros(1, len(decays), P, N)
        shared, strayed, rounded = exact, 0.0, 0.0
        for step in range(steps):
            x = torch.randn(len(decays), window, P, generator=random)
            B = F.silu(torch.randn(len(decays), window, N, generator=random) + mean)
            exact = rho * exact + x.mT @ B
            shared = copy(rho * shared + x.mT @ B, None)
            if step >= steps // 2:
                strayed = strayed + (shared - exact).square().sum((0, 2, 3))
                rounded = rounded + (copy(exact, None) - exact).square().sum((0, 2, 3))
        ratios = (strayed / rounded).tolist()
        results += [
            {"format": name, "decay": decay, "ratio": round(ratio, 2), "predicted": round(1 / (1 - decay**2), 2)}
            for decay, ratio in zip(decays, ratios, strict=True)
        ]
    return results


# ---- the model with a simulated copy -------------------------------------------------------------------------------


class SimulatedStep:
    """Stands in for a layer's `ops.step` in a pool of FP32 states, every step one window.

    copies: those whose error on this layer's inputs is summed up, [heads] each. applied: the one that later layers see.
    """

    def __init__(self, facts: LayerFacts, copies: dict[str, Copy], applied: Copy | None):
        self.facts, self.applied = facts, applied
        self.copies = copies
        self.errors = {name: 0.0 for name in copies}
        self.energy = 0.0

    def __call__(self, pool, layer, plan, x, B, C, dt, A_log, D, dt_bias, dt_limit, out=None):
        y = ops.step(pool, layer, plan, x, B, C, dt, A_log, D, dt_bias, dt_limit, out)
        rows, heads = plan.rows, x.shape[1]
        section = pool.layout.sections["checkpoint"]
        S = pool.data[layer, :rows, section.offset : section.offset + section.bytes].view(torch.float32)
        S = S.reshape(rows, *section.shape)  # what this step read: it flushed first
        C = C.float().unflatten(0, (rows, -1)).transpose(1, 2).repeat_interleave(heads // C.shape[1], 1)
        delta = F.softplus(dt.float() + dt_bias).clamp(*dt_limit).unflatten(0, (rows, -1)).transpose(1, 2)
        decay = (-A_log.exp()[:, None] * delta).cumsum(-1).exp()[..., None]  # [rows, heads, tokens, 1]
        self.observe(C, decay[..., -1, 0])
        self.energy = self.energy + (C @ S.mT * decay).square().sum((0, 2, 3))
        for name, copy in self.copies.items():
            error = C @ (copy(S, self.facts) - S).mT * decay
            self.errors[name] = self.errors[name] + error.square().sum((0, 2, 3))
        if self.applied is None:
            return y
        error = C @ (self.applied(S, self.facts) - S).mT * decay
        return y + error.transpose(1, 2).flatten(0, 1).to(y.dtype)

    def observe(self, C: Tensor, decay: Tensor) -> None:
        """Overridden where facts are gathered."""


class Calibration(SimulatedStep):
    """Gathers the facts of its layer."""

    def __init__(self, facts: LayerFacts):
        super().__init__(facts, {}, None)
        self.windows = 0

    def observe(self, C: Tensor, decay: Tensor) -> None:
        self.windows += 1
        moments, decay = (C.mT @ C / C.shape[-2]).mean(0), decay.mean(0)
        if self.windows == 1:
            self.facts.moments, self.facts.decay = moments, decay
        else:
            self.facts.moments += (moments - self.facts.moments) / self.windows
            self.facts.decay += (decay - self.facts.decay) / self.windows


def read_texts(
    subject: Subject, replay: ReplayConfig, tokens: Tensor, steps: list, each: Callable[[int, Tensor], None]
):
    """Runs the windows of `tokens` with `steps` in place of the layers' ops. each(position, logits) after every one."""
    decoder, window = Decoder(subject, replay, tokens), replay.window
    for mixer, step in zip(subject.mixers, steps, strict=True):
        mixer.step = step
    for position in range(0, tokens.shape[1], window):
        first = torch.full((), position, device=tokens.device)
        each(position, decoder.step(first, window, position + window).double().log_softmax(-1))


@torch.inference_mode()
def study(subject: Subject, texts: Tensor, calibration: Tensor, window: int, names: list[str]) -> list[dict]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # steps as long as the window are meant
        replay = ReplayConfig(window, window, activation=subject.activation)
    facts = [LayerFacts(mixer.A_log, mixer.dt_bias) for mixer in subject.mixers]
    read_texts(subject, replay, calibration, [Calibration(f) for f in facts], lambda *_: None)

    geometry = subject.config
    table = variants(geometry.mamba_head_dim, geometry.state_dim)
    table = {name: table[name] for name in names or table}
    rows, windows = len(texts), texts.shape[1] // window
    reference = []
    steps = [SimulatedStep(f, {name: copy for name, (_, copy) in table.items()}, None) for f in facts]
    with tqdm(total=windows * (1 + len(table)), unit="window", disable=not sys.stderr.isatty()) as bar:

        def keep(position: int, log_probabilities: Tensor) -> None:
            reference.append(log_probabilities.float().cpu())
            bar.update()

        read_texts(subject, replay, texts, steps, keep)
        relative = {
            name: torch.stack([step.errors[name] / step.energy for step in steps]).double().cpu() for name in table
        }
        kl = {}
        for name, (_, copy) in table.items():
            kl[name] = torch.zeros(rows, dtype=torch.float64)
            bar.set_description(name)

            def compare(position: int, q: Tensor, name=name) -> None:
                p = reference[position // window].to(q.device, torch.float64)
                kl[name] += ((p - q) * p.exp()).sum((1, 2)).cpu() / texts.shape[1]
                bar.update()

            read_texts(subject, replay, texts, [SimulatedStep(f, {}, copy) for f in facts], compare)
    plain = next(iter(table))
    results = []
    for name, (bits, _) in table.items():
        pairs = torch.stack([kl[plain], kl[name]], 1).numpy()
        error, of_plain = relative[name], relative[plain]
        results.append(
            {
                "variant": name,
                "bits": round(bits, 3),
                "read_error": error.mean().sqrt().item(),
                "read_error_gain": (of_plain.mean() / error.mean()).item(),
                "read_error_gain_least": (of_plain / error).min().item(),
                "kl": kl[name].mean().item(),
                "kl_gain": (kl[plain].mean() / kl[name].mean()).item(),
                "kl_gain_interval": interval(pairs, lambda sample: sample[..., 0].mean(-1) / sample[..., 1].mean(-1)),
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="examples/tiny-nemotron-h", help="nemotron_h checkpoint directory")
    parser.add_argument("--text", nargs="+", required=True, help="UTF-8 text files")
    parser.add_argument("--rows", type=int, default=8, help="texts; one more is for calibration")
    parser.add_argument("--tokens", type=int, default=2048, help="of each text, a multiple of the window")
    parser.add_argument("--window", type=int, default=16, help="tokens between flushes, at most 16")
    parser.add_argument("--variants", nargs="+", default=[], help="only these, the first as the baseline")
    parser.add_argument("--device", help="default: a GPU if there is one that can be used")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--commit", default="unknown", help="commit id to record")
    parser.add_argument("--output", type=Path, help="JSON file for the record")
    args = parser.parse_args()
    device = pick_device(args.device)
    subject = Subject(args.checkpoint, device, args.dtype)
    tokens = read_rows(subject.tokenizer, args.text, args.rows + 1, args.tokens).to(device)
    results = study(subject, tokens[:-1], tokens[-1:], args.window, args.variants)
    for r in results:
        gain = f"{r['kl_gain']:5.2f} ({written(r['kl_gain_interval'], '.2f')})"
        print(
            f"{r['variant']:56} {r['bits']:6.3f} bits  read error {r['read_error']:.4f}, gain "
            f"{r['read_error_gain']:5.2f}  KL {r['kl']:.2e}, gain {gain}"
        )
    accumulated = accumulation()
    for a in accumulated:
        print(
            f"shared {a['format']} checkpoint, decay {a['decay']}: {a['ratio']} times the error of a copy "
            f"(1 / (1 - decay^2) = {a['predicted']})"
        )
    if args.output:
        record = {
            "bench": "read_copies",
            "model": Path(args.checkpoint).resolve().name,
            "rows": args.rows,
            "tokens": args.tokens,
            "window": args.window,
            "activation": args.dtype,
            "variants": results,
            "accumulation": accumulated,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
            "commit": args.commit,
            "command": shlex.join(["python", *(os.path.basename(a) if a.startswith("/") else a for a in sys.argv)]),
        }
        write_atomically(args.output, (json.dumps(record, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
