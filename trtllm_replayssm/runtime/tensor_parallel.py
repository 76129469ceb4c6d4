# SPDX-License-Identifier: Apache-2.0
"""One model on several ranks, each with a part of every layer.

A rank has whole heads and groups of the Mamba layers, whole attention heads, and an equal part of the hidden units of
feed-forward layers and experts. Embeddings, head, norms, router and latent projections are on every rank. What leaves a
mixer is a sum over the ranks, taken in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from .. import MambaGeometry
from .model_config import CheckpointError, ModelConfig
from .weights import Weights

ROW_PARALLEL = ("out_proj", "o_proj", "down_proj")  # whose columns are shared out; each rank adds their bias


@dataclass(frozen=True)
class RankSlice:
    """The part of a layer that a tensor-parallel rank has: whole heads, and the groups that these need.

    Where there are fewer groups than ranks, neighbouring ranks have copies of one group.
    """

    tp: int
    rank: int
    heads: range
    groups: range

    @classmethod
    def of(cls, whole: MambaGeometry, tp: int, rank: int) -> RankSlice:
        """ValueError names the sizes that do not divide."""
        if not 0 <= rank < tp:
            raise ValueError(f"rank is {rank}, expected 0..{tp - 1}")
        heads, groups = whole.num_heads, whole.num_groups
        if heads % tp:
            raise ValueError(f"{heads} Mamba heads cannot be divided among {tp} tensor-parallel ranks")
        if groups % tp and tp % groups:
            raise ValueError(
                f"{groups} groups of B and C can be neither divided among {tp} tensor-parallel ranks nor copied to them"
            )
        first, count = rank * heads // tp, heads // tp
        mine = max(1, groups // tp)
        first_group = rank * groups // tp
        return cls(tp, rank, range(first, first + count), range(first_group, first_group + mine))

    def geometry(self, whole: MambaGeometry) -> MambaGeometry:
        """Sizes of the rank's part."""
        return MambaGeometry(
            num_heads=len(self.heads),
            head_dim=whole.head_dim,
            num_groups=len(self.groups),
            state_dim=whole.state_dim,
            conv_kernel=whole.conv_kernel,
        )

    def conv_channels(self, whole: MambaGeometry) -> tuple[range, range, range]:
        """Channels of the convolution, section by section: x, B, C. A flat slice would mix them."""
        inner = whole.num_heads * whole.head_dim
        x = range(self.heads.start * whole.head_dim, self.heads.stop * whole.head_dim)
        first, last = (group * whole.state_dim for group in (self.groups.start, self.groups.stop))
        each = whole.num_groups * whole.state_dim
        return x, range(inner + first, inner + last), range(inner + each + first, inner + each + last)

    def in_proj_rows(self, whole: MambaGeometry) -> tuple[range, ...]:
        """Rows of in_proj, section by section: z, x, B, C, dt."""
        x, b, c = self.conv_channels(whole)
        inner = whole.num_heads * whole.head_dim
        steps = inner + whole.conv_channels
        moved = (range(rows.start + inner, rows.stop + inner) for rows in (x, b, c))
        return (x, *moved, range(steps + self.heads.start, steps + self.heads.stop))


class TensorParallel:
    """A rank's part of a model.

    Attributes:
        model: with the rank's own sizes. first_head: its first Mamba head among all ranks'.

    Raises:
        CheckpointError: a size that does not divide.
    """

    def __init__(self, whole: ModelConfig, group: dist.ProcessGroup):
        self._whole, self._group = whole, group
        self._tp, self._rank = dist.get_world_size(group), dist.get_rank(group)
        sizes = ("mamba_heads", "mamba_groups", "attention_heads", "intermediate_size", "expert_size")
        own = {}
        for name in (*sizes, "shared_expert_size"):
            size = getattr(whole, name)
            if size is not None and size % self._tp:
                raise CheckpointError(f"{name} {size} cannot be divided among {self._tp} tensor-parallel ranks")
            own[name] = size and size // self._tp
        if whole.kv_heads:
            if whole.kv_heads % self._tp and self._tp % whole.kv_heads:
                raise CheckpointError(
                    f"kv_heads {whole.kv_heads} can be neither divided among {self._tp} tensor-parallel ranks nor "
                    "copied to them"
                )
            own["kv_heads"] = max(1, whole.kv_heads // self._tp)
        self.model = replace(whole, **own)
        self._slice = RankSlice.of(whole.geometry, self._tp, self._rank)
        self.first_head = self._slice.heads.start

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x, overwritten by its sum over the ranks: the same bits on each."""
        dist.all_reduce(x, group=self._group)
        return x

    def read(self, weights: Weights, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The rank's part of tensor `name`, as Weights.read."""
        values = weights.read(name, dtype, torch.device("cpu"))
        axis, spans = self._spans(name, values.shape)
        parts = [values.narrow(axis, span.start, len(span)) for span in spans]
        return torch.cat(parts, axis).to(device)

    def _spans(self, name: str, shape: torch.Size) -> tuple[int, list[range]]:
        """(dimension, elements along it)."""
        inner = name.partition(".mixer.")[2]
        tensor = inner.split(".")[-2] if "." in inner else inner  # "in_proj" of "in_proj.weight", "A_log"
        whole, part = self._whole.geometry, self._slice
        if tensor == "in_proj":
            return 0, list(part.in_proj_rows(whole))
        if tensor == "conv1d":
            return 0, list(part.conv_channels(whole))
        if tensor in ("k_proj", "v_proj"):
            heads, head_dim = self._whole.kv_heads, self._whole.head_dim
            first = self._rank * heads // self._tp
            return 0, [range(first * head_dim, (first + self.model.kv_heads) * head_dim)]
        if tensor in ("A_log", "D", "dt_bias", "norm", "q_proj", "up_proj"):
            return 0, [self._share(shape[0])]
        if tensor in ROW_PARALLEL and name.endswith(".weight"):
            return 1, [self._share(shape[1])]
        return 0, [range(shape[0])]

    def _share(self, size: int) -> range:
        return range(self._rank * size // self._tp, (self._rank + 1) * size // self._tp)
