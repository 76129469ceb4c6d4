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
    """Microseconds, a row of panels a geometry: against batch, a line for all that differs by batch only; and as bars
    what was measured at one batch.
    """
    geometries = kernel_lines(records)
    single = {
        geometry: {f"{name}, batch {p[0]['batch']}": p[0]["us"] for name, p in lines.items() if len(p) == 1}
        for geometry, lines in geometries.items()
    }
    height = sum(max(4.0, 0.22 * len(bars) + 1) for bars in single.values())
    figure, panels = matplotlib().subplots(
        len(geometries), 2, figsize=(13, height), layout="constrained", squeeze=False
    )
    for (lined, barred), (geometry, lines) in zip(panels, geometries.items(), strict=True):
        lined.set_prop_cycle(color=matplotlib().get_cmap("tab20").colors)
        for name, points in lines.items():
            if len(points) > 1:
                points = sorted(points, key=lambda record: record["batch"])
                lined.plot([p["batch"] for p in points], [p["us"] for p in points], marker="o", ms=3, label=name)
        lined.set(xscale="log", yscale="log", xlabel="batch", ylabel="µs a layer and step", title=geometry)
        lined.grid(alpha=0.3)
        if lined.lines:  # below, since lines fill the panel
            lined.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.12))
        lined.set_visible(bool(lined.lines))
        bars = dict(sorted(single[geometry].items(), reverse=True))
        barred.barh(range(len(bars)), bars.values())
        barred.set_yticks(range(len(bars)), bars, fontsize="x-small")
        barred.set(xlabel="µs a layer and step", title=geometry)
        barred.set_visible(bool(bars))
    figure.suptitle(f"Mamba-2 layer, {_where(records)}")
    return _png(figure)


def kernel_lines(records: list[dict]) -> dict[str, dict[str, list[dict]]]:
    """geometry -> all else that a record of `bench kernel` has besides its batch, in words -> such records. Where steps
    found their tokens is said if there are both ways. (Older records don't say: in tensors.)
    """
    lines: dict[str, dict[str, list[dict]]] = {}
    ways = {record.get("tokens_in", "tensors") for record in records if record["mode"] == "replay"}
    for record in records:
        name = f"{record['mode']}, T = {record['tokens']}, {record['checkpoint']}:{record['read_copy']}"
        if record["mode"].endswith("replay"):
            name += f", L = {record['window']}"
        if record["mode"] == "replay" and len(ways) > 1:
            name += f", x and B in {record.get('tokens_in', 'tensors')}"
        if record.get("with_conv"):
            name += ", with convolution"
        if not record["flushes"]:
            name += ", no flush"
        lines.setdefault(record["geometry"], {}).setdefault(name, []).append(record)
    return lines


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
        labels = [f"{bar['context']}\n{_way(bar)}" for bar in bars]
        axes.set_xticks(range(len(bars)), labels, fontsize="x-small", rotation=90 if len(bars) > 4 else 0)
        axes.set(ylabel="ms a step", title=f"batch {batch}", xlabel="context, mode")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(parts))
    figure.suptitle(f"{records[0]['model']}: a decode step, {_where(records)}")
    return _png(figure)


def _way(record: dict) -> str:
    """The mode, and the formats of its state unless it is FP32 alone."""
    formats = record["checkpoint"] + (f":{record['read_copy']}" if record["read_copy"] != "none" else "")
    return record["mode"] if formats == "fp32" else f"{record['mode']}, {formats}"


def draw_serve(records: list[dict]) -> bytes:
    """Tokens a second against the number of clients, a line a way of decoding."""
    figure, axes = matplotlib().subplots(figsize=(6.5, 4.8), layout="constrained")
    for way in dict.fromkeys(map(_way, records)):
        points = sorted((r for r in records if _way(r) == way), key=lambda record: record["batch"])
        axes.plot([p["batch"] for p in points], [p["tokens_per_second"] for p in points], marker="o", ms=3, label=way)
        for point in points:
            if point["concurrency"] < point["batch"]:
                at = point["batch"], point["tokens_per_second"]
                axes.annotate(f"{point['concurrency']} fit", at, ha="right", va="bottom", fontsize="x-small")
    axes.set(xscale="log", xlabel="clients", ylabel="tokens per second", title=f"{records[0]['model']}")
    axes.set_xticks(sorted({record["batch"] for record in records}), sorted({record["batch"] for record in records}))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.suptitle(_where(records))
    return _png(figure)


PICTURES = {"kernel": draw_kernel, "prefill": draw_prefill, "step": draw_step, "serve": draw_serve}
