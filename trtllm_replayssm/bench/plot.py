# SPDX-License-Identifier: Apache-2.0
"""Pictures of benchmark records, as PNG bytes."""

from __future__ import annotations

import io

from ..measurement import matplotlib


def _png(figure) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    matplotlib().close(figure)
    return image.getvalue()


def _where(records: list[dict]) -> str:
    first = records[0]
    return f"{first['gpu'] or first['device']}, {first['date']}"


def draw_kernel(records: list[dict]) -> bytes:
    """Microseconds against batch, a panel a geometry, a line a mode and what else differs."""
    geometries = list(dict.fromkeys(record["geometry"] for record in records))
    figure, panels = matplotlib().subplots(
        1, len(geometries), figsize=(6.5 * len(geometries), 4.8), layout="constrained", squeeze=False
    )
    for axes, geometry in zip(panels[0], geometries, strict=True):
        lines: dict[str, list[dict]] = {}
        for record in records:
            if record["geometry"] == geometry:
                lines.setdefault(kernel_line(record), []).append(record)
        for name, points in lines.items():
            points = sorted(points, key=lambda record: record["batch"])
            axes.plot([p["batch"] for p in points], [p["us"] for p in points], marker="o", ms=3, label=name)
        axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="µs a layer and step", title=geometry)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(f"Mamba-2 layer, {_where(records)}")
    return _png(figure)


def kernel_line(record: dict) -> str:
    """What a record of `bench kernel` has besides geometry and batch, in words."""
    name = f"{record['mode']}, T = {record['tokens']}, {record['checkpoint']}:{record['read_copy']}"
    if record["mode"] == "replay":
        name += f", L = {record['window']}"
    return name if record["flushes"] else name + ", no flush"


def draw_prefill(records: list[dict]) -> bytes:
    """Microseconds against the tokens of a prompt, a line a geometry and mode."""
    figure, axes = matplotlib().subplots(figsize=(6.5, 4.8), layout="constrained")
    lines: dict[str, list[dict]] = {}
    for record in records:
        name = f"{record['geometry']}, {record['mode']}, {record['checkpoint']}:{record['read_copy']}"
        lines.setdefault(name, []).append(record)
    for name, points in lines.items():
        points = sorted(points, key=lambda record: record["tokens"])
        axes.plot([p["tokens"] for p in points], [p["us"] for p in points], marker="o", ms=3, label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="µs a layer", title=_where(records))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return _png(figure)


def draw_step(records: list[dict]) -> bytes:
    """Stacked parts of a step, a panel a batch: bars by context, conventional and replay side by side."""
    batches = sorted({record["batch"] for record in records})
    parts = tuple(records[0]["parts_us"])
    figure, panels = matplotlib().subplots(
        1, len(batches), figsize=(4.2 * len(batches), 4.8), layout="constrained", squeeze=False
    )
    colors = dict(zip(parts, matplotlib().get_cmap("tab10").colors, strict=False))
    for axes, batch in zip(panels[0], batches, strict=True):
        bars = sorted(
            (record for record in records if record["batch"] == batch), key=lambda r: (r["context"], r["mode"])
        )
        base = [0.0] * len(bars)
        for part in parts:
            heights = [bar["parts_us"][part] / 1e3 for bar in bars]
            axes.bar(range(len(bars)), heights, bottom=base, color=colors[part], label=part, width=0.75)
            base = [low + height for low, height in zip(base, heights, strict=True)]
        labels = [f"{bar['context']}\n{bar['mode'][:6]}" for bar in bars]
        axes.set_xticks(range(len(bars)), labels, fontsize="x-small", rotation=90 if len(bars) > 6 else 0)
        axes.set(ylabel="ms a step", title=f"batch {batch}", xlabel="context, mode")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(parts))
    figure.suptitle(f"{records[0]['model']}: a decode step, {_where(records)}")
    return _png(figure)


def draw_serve(records: list[dict]) -> bytes:
    """Tokens a second against the number of clients, a line a way of decoding."""
    figure, axes = matplotlib().subplots(figsize=(6.5, 4.8), layout="constrained")
    for mode in dict.fromkeys(record["mode"] for record in records):
        points = sorted((r for r in records if r["mode"] == mode), key=lambda record: record["batch"])
        axes.plot([p["batch"] for p in points], [p["tokens_per_second"] for p in points], marker="o", ms=3, label=mode)
        for point in points:
            if point["concurrency"] < point["batch"]:
                axes.annotate(
                    f"{point['concurrency']} fit", (point["batch"], point["tokens_per_second"]), fontsize="x-small"
                )
    axes.set(xscale="log", xlabel="clients", ylabel="tokens per second", title=f"{records[0]['model']}")
    axes.set_xticks(sorted({record["batch"] for record in records}), sorted({record["batch"] for record in records}))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.suptitle(_where(records))
    return _png(figure)


PICTURES = {"kernel": draw_kernel, "prefill": draw_prefill, "step": draw_step, "serve": draw_serve}
