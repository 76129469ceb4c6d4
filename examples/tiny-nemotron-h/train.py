"""Train, evaluate and export the tiny Nemotron-H checkpoint of this folder.

The model is the one that `config.json` describes: Mamba-2, attention, MLP and MoE layers as in NVIDIA's Nemotron 3,
plus one MTP (multi-token prediction) layer. Module names equal the checkpoint's tensor names, so that export and
import are a plain state dict. Data and tokenizer come from `prepare_data.py`.

    python train.py --output OUT                 train on this folder's data; writes a whole checkpoint folder
    python train.py --output OUT --steps 0       the same folder with random weights
    python train.py --evaluate .                 recompute the figures of training.json from model.safetensors
    python train.py --plot .                     redraw loss.png from training.json
"""

from __future__ import annotations

import argparse
import copy
import datetime
import io
import json
import math
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from prepare_data import HERE, load_chapters, split_chapters, write_atomically
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor, nn

# Parameters that stay FP32 in the checkpoint: the recurrence multiplies their rounding errors up over the sequence,
# and the routers compare values that may be close.
KEEP_FP32 = ("A_log", "D", "dt_bias", "e_score_correction_bias")

# Besides model.safetensors, what makes a checkpoint folder.
CHECKPOINT_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


# --------------------------------------------------------------------------------------------------------------------
# Model
# --------------------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, in groups of `width / groups` channels; computes in FP32."""

    def __init__(self, width: int, eps: float, groups: int = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.groups = eps, groups

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.float().unflatten(-1, (self.groups, -1))
        grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * grouped.flatten(-2).to(x.dtype)


class CausalConv(nn.Module):
    """Depthwise causal convolution over time, [B, T, channels] -> [B, T, channels]."""

    def __init__(self, channels: int, kernel: int):
        super().__init__()
        bound = kernel**-0.5
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        kernel, length = self.weight.shape[-1], x.shape[1]
        # A sum over shifted inputs: with 4 taps it is faster to differentiate than a library convolution.
        padded = F.pad(x, (0, 0, kernel - 1, 0))
        return self.bias + sum(self.weight[:, 0, k] * padded[:, k : k + length] for k in range(kernel))


def segment_sums(a: Tensor) -> Tensor:
    """[..., Q] -> [..., Q, Q] with entry (i, j) = a[j+1] + ... + a[i] for j <= i, and -inf above the diagonal."""
    total = a.cumsum(-1)
    difference = total[..., :, None] - total[..., None, :]
    causal = torch.ones_like(difference, dtype=torch.bool).tril()
    return difference.masked_fill(~causal, -math.inf)


def ssd(x: Tensor, delta: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, chunk: int) -> Tensor:
    """The Mamba-2 recurrence, chunk by chunk ("state space duality"), all in FP32.

        S_t = exp(log_decay_t) S_{t-1} + delta_t x_t B_t^T,    y_t = S_t C_t,    S_{-1} = 0

    x [batch, T, G, Hg, P], delta and log_decay [batch, T, G, Hg], B and C [batch, T, G, N] -> y like x, where the
    Hg heads of a group share B and C. Inside a chunk the output is a masked matrix product; between chunks only the
    states [P, N] at the chunk borders are passed on, themselves by one matrix product over all chunks.
    """
    length = x.shape[1]
    padding = -length % chunk  # padded steps have delta = 0 and log_decay = 0: they leave the state as it is
    x, delta, log_decay, B, C = (
        F.pad(v, (0, 0) * (v.ndim - 2) + (0, padding)).unflatten(1, (-1, chunk)) for v in (x, delta, log_decay, B, C)
    )
    x = (x * delta[..., None]).permute(0, 1, 3, 4, 2, 5)  # [batch, chunks, G, Hg, Q, P]
    log_decay = log_decay.permute(0, 1, 3, 4, 2)  # [batch, chunks, G, Hg, Q]
    B, C = (v.transpose(2, 3)[:, :, :, None] for v in (B, C))  # [batch, chunks, G, 1, Q, N]
    from_start = log_decay.cumsum(-1)

    within = (C @ B.mT) * segment_sums(log_decay).exp() @ x

    to_end = (from_start[..., -1:] - from_start).exp()
    chunk_states = (x * to_end[..., None]).mT @ B  # [batch, chunks, G, Hg, P, N]
    # Row c of `passing` carries every earlier chunk's state to the start of chunk c.
    chunk_decay = from_start[..., -1].movedim(1, -1)  # [batch, G, Hg, chunks]
    passing = segment_sums(F.pad(chunk_decay, (1, 0))).exp()[..., :-1, 1:]
    start_states = torch.einsum("bghcd,bdghpn->bcghpn", passing, chunk_states)
    across = from_start.exp()[..., None] * (C @ start_states.mT)

    y = (within + across).permute(0, 1, 4, 2, 3, 5).flatten(1, 2)
    return y[:, :length]


class Mamba2(nn.Module):
    """Mamba-2 mixer: in_proj -> (z | x B C | dt), causal convolution, recurrence, gated norm, out_proj."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.heads, self.head_dim = config.mamba_num_heads, config.mamba_head_dim
        self.groups, self.state_dim, self.chunk = config.n_groups, config.ssm_state_size, config.chunk_size
        self.dt_limit = tuple(config.time_step_limit)
        self.inner = self.heads * self.head_dim
        conv_dim = self.inner + 2 * self.groups * self.state_dim

        self.in_proj = nn.Linear(config.hidden_size, self.inner + conv_dim + self.heads, bias=False)
        self.conv1d = CausalConv(conv_dim, config.conv_kernel)
        self.A_log = nn.Parameter(torch.arange(1, self.heads + 1).float().log())
        self.D = nn.Parameter(torch.ones(self.heads))
        # The initial step sizes are spread evenly in log space; dt_bias is their inverse softplus.
        low, high = math.log(config.time_step_min), math.log(config.time_step_max)
        delta = torch.empty(self.heads).uniform_(low, high).exp().clamp(min=config.time_step_floor)
        self.dt_bias = nn.Parameter(delta + torch.log(-torch.expm1(-delta)))
        self.norm = RMSNorm(self.inner, config.layer_norm_epsilon, groups=self.groups)
        self.out_proj = nn.Linear(self.inner, config.hidden_size, bias=False)

    @torch.no_grad()
    def remember(self, shortest: float, longest: float) -> None:
        """Set A so that the heads, at their initial step sizes, forget by a factor of e within `shortest` … `longest`
        tokens, spread evenly in log space.
        """
        spans = torch.logspace(math.log10(shortest), math.log10(longest), self.heads)
        self.A_log.copy_(-(spans * F.softplus(self.dt_bias.cpu())).log())

    @torch.no_grad()
    def remember_at_least(self, tokens: float) -> None:
        """Fix A so that a head forgets by a factor of e within `tokens` at the largest step size, never faster. Step
        sizes begin at half of that.
        """
        largest = self.dt_limit[1]
        self.A_log.fill_(-math.log(tokens * largest)).requires_grad_(False)
        self.dt_bias.fill_(math.log(math.expm1(largest / 2)))

    def forward(self, u: Tensor) -> Tensor:
        z, xBC, dt = self.in_proj(u).split([self.inner, self.conv1d.bias.numel(), self.heads], -1)
        xBC = F.silu(self.conv1d(xBC))
        with torch.autocast(u.device.type, enabled=False):
            states = self.groups * self.state_dim
            x, B, C = xBC.float().split([self.inner, states, states], -1)
            x = x.unflatten(-1, (self.groups, -1, self.head_dim))
            delta = F.softplus(dt.float() + self.dt_bias).clamp(*self.dt_limit)
            log_decay = -self.A_log.exp() * delta
            delta, log_decay = (v.unflatten(-1, (self.groups, -1)) for v in (delta, log_decay))
            B, C = (v.unflatten(-1, (self.groups, -1)) for v in (B, C))
            y = ssd(x, delta, log_decay, B, C, self.chunk) + self.D.view(self.groups, -1, 1) * x
            y = self.norm(y.flatten(2) * F.silu(z.float()))
        return self.out_proj(y)


class Attention(nn.Module):
    """Causal grouped-query attention without a position encoding: the Mamba layers know the positions."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.head_dim = config.head_dim
        self.sharing = config.num_attention_heads // config.num_key_value_heads
        query, key_value = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_value, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_value, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        q, k, v = (
            projection(u).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(self.sharing, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two projections around a squared ReLU."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(u)).square())


class Router(nn.Module):
    """Sigmoid router. The correction bias takes part in the choice of experts, never in their weights."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.normalize, self.scale = config.norm_topk_prob, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.register_buffer("load", torch.zeros(config.n_routed_experts), persistent=False)

    def forward(self, u: Tensor) -> Tensor:
        """[..., hidden] -> the weight of each expert [..., experts] in FP32, 0 for those not chosen."""
        with torch.autocast(u.device.type, enabled=False):
            scores = F.linear(u.float(), self.weight).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        if self.training:
            self.load += mask.detach().flatten(0, -2).sum(0)
        weights = scores * mask
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Nudge the correction bias towards equal load since the last call, in place of an auxiliary loss."""
        self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class MoE(nn.Module):
    """Routed experts plus one shared expert that every token passes through."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.gate = Router(config)
        self.experts = nn.ModuleList(
            MLP(config.hidden_size, config.moe_intermediate_size) for _ in range(config.n_routed_experts)
        )
        self.shared_experts = MLP(config.hidden_size, config.moe_shared_expert_intermediate_size)

    def forward(self, u: Tensor) -> Tensor:
        # All experts at once, as one wide MLP whose inner channels are weighted by expert: at this size cheaper than
        # gathering each expert's tokens, and the same result.
        up = torch.cat([expert.up_proj.weight for expert in self.experts])
        down = torch.cat([expert.down_proj.weight for expert in self.experts], dim=1)
        inner = F.relu(F.linear(u, up)).square().unflatten(-1, (len(self.experts), -1))
        inner = (inner * self.gate(u)[..., None].to(inner.dtype)).flatten(-2)
        return F.linear(inner, down) + self.shared_experts(u)


def make_mixer(kind: str, config: SimpleNamespace) -> nn.Module:
    """Build the mixer that a letter of `hybrid_override_pattern` stands for."""
    if kind == "-":
        return MLP(config.hidden_size, config.intermediate_size)
    return {"M": Mamba2, "*": Attention, "E": MoE}[kind](config)


class Block(nn.Module):
    """Pre-norm residual block: x + dropout(mixer(norm(x)))."""

    def __init__(self, kind: str, config: SimpleNamespace, dropout: float):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = make_mixer(kind, config)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.mixer(self.norm(x)), self.dropout, self.training)


class Backbone(nn.Module):
    """Embedding, the layers of `hybrid_override_pattern`, final norm: tokens [B, T] -> [B, T, hidden]."""

    def __init__(self, config: SimpleNamespace, dropout: float):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(kind, config, dropout) for kind in config.hybrid_override_pattern)
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embeddings(tokens), self.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        return self.norm_f(x)


class MTP(nn.Module):
    """Multi-token prediction: from the hidden state that predicted token t+1 and token t+1 itself, predict t+2.

    The first inner layer also merges its two inputs, the last one also norms the output, which goes to the shared
    lm_head and, for a further draft token, back in as the hidden state.
    """

    def __init__(self, config: SimpleNamespace, dropout: float):
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_epsilon
        self.layers = nn.ModuleList(Block(kind, config, dropout) for kind in config.mtp_hybrid_override_pattern)
        first, last = self.layers[0], self.layers[-1]
        first.enorm, first.hnorm = RMSNorm(width, eps), RMSNorm(width, eps)
        first.eh_proj = nn.Linear(2 * width, width, bias=False)
        last.final_layernorm = RMSNorm(width, eps)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """embedded: embeddings of the tokens at t+1, hidden: states at t, both [B, T, hidden] -> [B, T, hidden]."""
        first, last = self.layers[0], self.layers[-1]
        x = first.eh_proj(torch.cat([first.enorm(embedded), first.hnorm(hidden)], -1))
        for layer in self.layers:
            x = layer(x)
        return last.final_layernorm(x)


class NemotronH(nn.Module):
    """The language model with its MTP layer; embedding and lm_head serve both."""

    def __init__(self, config: SimpleNamespace, dropout: float = 0.0):
        super().__init__()
        self.backbone = Backbone(config, dropout)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = MTP(config, dropout)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=config.initializer_range)
                # What is added to the residual stream starts smaller, so that the stream's size does not grow with
                # depth.
                if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                    parameter.data /= math.sqrt(config.num_hidden_layers)

    def forward(self, tokens: Tensor, depth: int = 0) -> list[Tensor]:
        """tokens [B, T] -> logits [B, T-d, vocab] for d = 0 … depth.

        Entry 0 predicts token t+1 at position t. Entry d predicts token t+1+d from the true tokens up to t+d, with d
        passes of the MTP layer. The last positions have no target and are left to the caller.
        """
        hidden = self.backbone(tokens)
        logits = [self.lm_head(hidden)]
        for d in range(1, depth + 1):
            hidden = self.mtp(self.backbone.embeddings(tokens[:, d:]), hidden[:, :-1])
            logits.append(self.lm_head(hidden))
        return logits


# --------------------------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> SimpleNamespace:
    """config.json as attributes. Transformers writes an infinite number as {"__float__": "Infinity"}."""
    values = json.loads((folder / "config.json").read_text())
    values["time_step_limit"] = [float(v["__float__"]) if isinstance(v, dict) else v for v in values["time_step_limit"]]
    return SimpleNamespace(**values)


def encode_split(tokenizer: Tokenizer, eos: int) -> tuple[dict[str, list[Tensor]], dict[str, int], str]:
    """Tokens of each chapter by role (BOS chapter EOS, int64), the UTF-8 bytes by role, and the text's SHA-256."""
    chapters, digest = load_chapters()
    split = split_chapters(chapters)
    tokens = {
        role: [torch.tensor([*encoding.ids, eos]) for encoding in tokenizer.encode_batch(texts)]
        for role, texts in split.items()
    }
    return tokens, {role: sum(len(text.encode()) for text in texts) for role, texts in split.items()}, digest


def pad_batches(chapters: list[Tensor], pad: int, budget: int = 16384) -> list[Tensor]:
    """Group whole chapters of similar length into [B, T] batches of at most `budget` tokens (or one chapter)."""
    batches: list[Tensor] = []
    group: list[Tensor] = []
    for chapter in sorted(chapters, key=len):  # ascending: the newest one is the longest
        if group and len(chapter) * (len(group) + 1) > budget:
            batches.append(nn.utils.rnn.pad_sequence(group, batch_first=True, padding_value=pad))
            group = []
        group.append(chapter)
    batches.append(nn.utils.rnn.pad_sequence(group, batch_first=True, padding_value=pad))
    return batches


# --------------------------------------------------------------------------------------------------------------------
# Losses
# --------------------------------------------------------------------------------------------------------------------


def token_losses(logits: list[Tensor], tokens: Tensor, pad: int) -> list[Tensor]:
    """Mean cross entropy (nats a token) of each entry of `NemotronH.forward`, padding left out."""
    return [
        F.cross_entropy(entry[:, :-1].flatten(0, 1).float(), tokens[:, d + 1 :].flatten(), ignore_index=pad)
        for d, entry in enumerate(logits)
    ]


@torch.no_grad()
def evaluate(model: NemotronH, chapters: list[Tensor], pad: int, depth: int) -> list[dict[str, float]]:
    """Score whole chapters, each from an empty state. Per depth:

    `loss` (nats a token), `top1` (0 … 1, the text's token is the most likely one), `agreement` (0 … 1, the most likely
    token is that of the main model, so that greedy verification would accept it; trivially 1 at depth 0), `tokens`.
    """
    device = model.lm_head.weight.device
    sums = torch.zeros(depth + 1, 4, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    for batch in pad_batches(chapters, pad):
        batch = batch.to(device)
        logits = model(batch, depth)
        main_choice = logits[0].argmax(-1)
        for d, entry in enumerate(logits):
            entry, target = entry[:, :-1].float(), batch[:, d + 1 :]
            choice, real = entry.argmax(-1), target != pad
            loss = F.cross_entropy(entry.flatten(0, 1), target.flatten(), ignore_index=pad, reduction="sum")
            hits = ((choice == target) & real).sum()
            agreeing = ((choice == main_choice[:, d:-1]) & real).sum()
            sums[d] += torch.stack([loss, hits, agreeing, real.sum()])
    model.train(was_training)
    return [
        {"loss": loss / n, "top1": hits / n, "agreement": agreeing / n, "tokens": int(n)}
        for loss, hits, agreeing, n in sums.tolist()
    ]


def report(model: NemotronH, split: dict[str, list[Tensor]], byte_counts: dict[str, int], pad: int, depth: int) -> dict:
    """The figures of training.json for the validation and the test chapters, in the model's own precision."""
    figures = {}
    for role in ("validation", "test"):
        per_depth = evaluate(model, split[role], pad, depth)
        following = per_depth[0]
        figures[role] = {
            "next_token_loss": following["loss"],
            "next_token_perplexity": math.exp(following["loss"]),
            "next_token_top1": following["top1"],
            "bits_per_byte": following["loss"] * following["tokens"] / math.log(2) / byte_counts[role],
            "tokens": following["tokens"],
        }
        for d, entry in enumerate(per_depth[1:], 1):
            figures[role] |= {f"mtp{d}_{key}": entry[key] for key in ("loss", "top1", "agreement")}
    return figures


def baselines(split: dict[str, list[Tensor]], vocab: int) -> dict[str, float]:
    """What a model without any context reaches on the validation chapters: the floor to compare figures with."""
    counts = Counter(torch.cat(split["train"]).tolist())
    frequency = torch.tensor([counts[token] + 1 for token in range(vocab)], dtype=torch.float64)
    frequency /= frequency.sum()
    targets = torch.cat([chapter[1:] for chapter in split["validation"]])
    return {
        "uniform_loss": math.log(vocab),
        "uniform_top1": 1 / vocab,
        "unigram_loss": -frequency.log()[targets].mean().item(),
        "unigram_top1": (targets == frequency.argmax()).double().mean().item(),
    }


# --------------------------------------------------------------------------------------------------------------------
# Checkpoint folder
# --------------------------------------------------------------------------------------------------------------------


def rounded_state(model: NemotronH) -> dict[str, Tensor]:
    """The state dict in the checkpoint's precisions: BF16 but for KEEP_FP32."""
    return {
        name: tensor.detach().cpu().to(torch.float32 if name.endswith(KEEP_FP32) else torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }


def load_model(folder: Path, device: str) -> NemotronH:
    """The FP32 model with the (rounded) weights of a checkpoint folder; every tensor must be there and used."""
    model = NemotronH(read_config(folder))
    model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return model.to(device).eval()


def write_json(path: Path, value: dict) -> None:
    """Write JSON atomically, floats to five digits: more would not be reproducible on another device."""

    def tidy(v):
        if isinstance(v, dict):
            return {key: tidy(item) for key, item in v.items()}
        if isinstance(v, list):
            return [tidy(item) for item in v]
        return float(f"{v:.5g}") if isinstance(v, float) else v

    write_atomically(path, (json.dumps(tidy(value), indent=2) + "\n").encode())


def plot(folder: Path) -> None:
    """Draw loss.png from training.json."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    record = json.loads((folder / "training.json").read_text())
    history = record["history"]
    steps = [row["step"] for row in history]
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for depth in range(len(history[0]["train"])):
        label = f"MTP, token t+{depth + 1}" if depth else "next token"
        for role, style in (("train", "--"), ("validation", "-")):
            axes.plot(steps, [row[role][depth] for row in history], f"C{depth}", ls=style, label=f"{label}: {role}")
    axes.axvline(record["best_step"], color="grey", lw=0.8, ls=":", label="checkpoint kept")
    axes.set(xlabel="optimiser step", ylabel="cross entropy (nats per token)", ylim=(None, history[0]["validation"][0]))
    axes.set_title("tiny-nemotron-h: losses (training ones with dropout)")
    axes.grid(alpha=0.3)
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_atomically(folder / "loss.png", image.getvalue())


# --------------------------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------------------------


def make_optimizer(model: NemotronH, args: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only (a decayed A_log, dt_bias or norm would drift for no reason)."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=next(model.parameters()).is_cuda)


def learning_rate(progress: float, step: int, args: argparse.Namespace) -> float:
    """Linear warm-up by step, then a cosine from `lr` to 2 % of it by progress (0 … 1)."""
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return args.lr * min(1.0, (step + 1) / args.warmup) * cosine


def train(args: argparse.Namespace) -> None:
    """Train, keep the weights with the best validation loss, round them, evaluate the rounded ones, write OUT."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")  # TF32 in training; the final evaluation is in full FP32
    config = read_config(HERE)
    if args.least_memory:
        config.time_step_limit = [0.0, config.time_step_max]
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    split, byte_counts, digest = encode_split(tokenizer, config.eos_token_id)
    pad = config.pad_token_id
    stream = torch.cat(split["train"]).to(args.device)  # the training chapters in order, each between BOS and EOS
    model = NemotronH(config, args.dropout).to(args.device).train()
    if args.memory:
        for module in model.modules():
            if isinstance(module, Mamba2):
                module.remember(*args.memory)
    if args.least_memory:
        for module in model.modules():
            if isinstance(module, Mamba2):
                module.remember_at_least(args.least_memory)
    optimizer = make_optimizer(model, args)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    offsets = torch.arange(args.sequence, device=args.device)

    history: list[dict] = []
    best = (math.inf, 0, copy.deepcopy(model.state_dict()))
    running = torch.zeros(args.mtp_depth + 1, device=args.device)
    start = time.monotonic()
    step, last_validation = 0, 0
    while True:
        # Whichever limit comes first, steps or minutes: the schedule ends there with a low learning rate.
        elapsed = (time.monotonic() - start) / 60
        progress = max(step / args.steps, elapsed / args.minutes) if args.steps else 1.0
        finished = progress >= 1
        if step > last_validation and (finished or step % args.validate_every == 0):
            with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
                losses = [entry["loss"] for entry in evaluate(model, split["validation"], pad, args.mtp_depth)]
            if losses[0] < best[0]:
                best = (losses[0], step, copy.deepcopy(model.state_dict()))
            train_losses = (running / (step - last_validation)).tolist()
            history.append({"step": step, "train": train_losses, "validation": losses})
            text = "  ".join(f"{t:.3f}/{v:.3f}" for t, v in zip(train_losses, losses, strict=True))
            print(f"step {step:5d}  {elapsed:5.2f} min  train/validation by depth: {text}", flush=True)
            running.zero_()
            last_validation = step
        if finished:
            break

        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, step, args)
        starts = torch.randint(len(stream) - args.sequence, (args.batch, 1), device=args.device)
        tokens = stream[starts + offsets]
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            logits = model(tokens, args.mtp_depth)
        losses = token_losses(logits, tokens, pad)
        loss = losses[0] + args.mtp_weight * sum(losses[1:]) / max(args.mtp_depth, 1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for router in routers:
            router.balance(args.balance_rate)
        running += torch.stack(losses).detach()
        step += 1
    minutes = (time.monotonic() - start) / 60

    args.output.mkdir(parents=True, exist_ok=True)
    for name in CHECKPOINT_FILES:
        write_atomically(args.output / name, (HERE / name).read_bytes())
    if args.least_memory:
        values = json.loads((HERE / "config.json").read_text()) | {"time_step_limit": config.time_step_limit}
        write_json(args.output / "config.json", values)
    model.load_state_dict(best[2])
    weights = save(rounded_state(model), metadata={"format": "pt"})
    write_atomically(args.output / "model.safetensors", weights)

    torch.set_float32_matmul_precision("highest")
    settings = [
        (k, " ".join(map(str, v)) if isinstance(v, list) else v)
        for k, v in vars(args).items()
        if v is not None and k not in ("output", "evaluate", "plot", "device")
    ]
    record = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python train.py --output OUT", *(f"--{k.replace('_', '-')} {v}" for k, v in settings)]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": step,
        "best_step": best[1],
        "tokens_per_step": args.batch * args.sequence,
        "minutes": minutes,
        "data_sha256": digest,
        "tokens": {role: sum(map(len, chapters)) for role, chapters in split.items()},
        "precision": "weights as shipped (rounded), arithmetic FP32",
        "without_context": baselines(split, config.vocab_size),
        **report(load_model(args.output, args.device), split, byte_counts, pad, args.mtp_depth),
        "history": history,
    }
    write_json(args.output / "training.json", record)
    print(json.dumps({key: record[key] for key in ("best_step", "minutes", "validation", "test")}, indent=2))


def recompute(folder: Path, device: str) -> None:
    """Print the figures of a checkpoint folder, computed from its model.safetensors, beside the recorded ones."""
    config = read_config(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    split, byte_counts, digest = encode_split(tokenizer, config.eos_token_id)
    record = json.loads((folder / "training.json").read_text())
    if digest != record["data_sha256"]:
        raise SystemExit("the text differs from the one that training.json was computed on")
    depth = sum(key.endswith("_loss") and key.startswith("mtp") for key in record["validation"])
    figures = report(load_model(folder, device), split, byte_counts, config.pad_token_id, depth)
    for role, values in figures.items():
        for key, value in values.items():
            print(f"{role:10s}  {key:22s}  recomputed {value:<10.5g}  recorded {record[role][key]:<10.5g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--output", type=Path, metavar="OUT", help="train and write a checkpoint folder here")
    task.add_argument("--evaluate", type=Path, metavar="DIR", help="recompute the figures of a checkpoint folder")
    task.add_argument("--plot", type=Path, metavar="DIR", help="draw DIR/loss.png from DIR/training.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights, batches and dropout")
    parser.add_argument("--steps", type=int, default=2400, help="optimiser steps; 0 writes random weights")
    parser.add_argument("--minutes", type=float, default=60, help="time limit; the schedule shrinks to fit it")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens a sequence")
    parser.add_argument(
        "--memory",
        type=float,
        nargs=2,
        metavar=("SHORTEST", "LONGEST"),
        help="initial memory of the heads of a layer in tokens; default: A = 1 … heads",
    )
    parser.add_argument(
        "--least-memory",
        type=float,
        metavar="TOKENS",
        help="memory that no head can fall below: A is fixed, step sizes are limited",
    )
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=100, help="steps of linear warm-up")
    parser.add_argument("--weight-decay", type=float, default=0.3, help="AdamW's, on matrices")
    parser.add_argument("--dropout", type=float, default=0.2, help="on the embedding and on each mixer's output")
    parser.add_argument("--mtp-weight", type=float, default=0.3, help="of the mean MTP loss beside the next-token loss")
    parser.add_argument("--mtp-depth", type=int, default=2, help="trained passes of the MTP layer: t+2, t+3 …")
    parser.add_argument("--balance-rate", type=float, default=1e-3, help="step of the routers' correction bias")
    parser.add_argument("--validate-every", type=int, default=100, help="steps between validations")
    args = parser.parse_args()
    if args.evaluate:
        recompute(args.evaluate, args.device)
    elif args.plot:
        plot(args.plot)
    else:
        train(args)


if __name__ == "__main__":
    main()
