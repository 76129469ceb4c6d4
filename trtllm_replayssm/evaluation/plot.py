# SPDX-License-Identifier: Apache-2.0
"""The picture of a drift run."""

from __future__ import annotations

import io

from ..measurement import matplotlib


def draw(summaries: dict[str, dict], title: str) -> bytes:
    """PNG: KL divergence against position, both on log axes, with the interval over rows. summaries: configuration ->
    Result.summary(). What is 0 everywhere (the same bits as FP32) is named in the legend only.
    """
    figure, axes = matplotlib().subplots(figsize=(7.5, 4.8), layout="constrained")
    colours = matplotlib().get_cmap("tab20").colors
    axes.set_prop_cycle(color=colours[::2] + colours[1::2])  # the ten usual ones, then ten pale ones
    for name, summary in summaries.items():
        shown = [bucket for bucket in summary["kl_by_bucket"] if bucket["kl"] > 0]
        if not shown:
            axes.plot([], [], label=f"{name} (0)")
            continue
        middle = [(bucket["from"] * bucket["to"]) ** 0.5 for bucket in shown]
        (line,) = axes.plot(middle, [bucket["kl"] for bucket in shown], marker="o", ms=3, label=name)
        if all(bucket["interval"] is not None for bucket in shown):  # of several texts
            floor = min(bucket["kl"] for bucket in shown) / 10  # log axes show no 0
            low, high = ([max(bucket["interval"][side], floor) for bucket in shown] for side in (0, 1))
            axes.fill_between(middle, low, high, color=line.get_color(), alpha=0.2, lw=0)
    axes.set(xscale="log", yscale="log", xlabel="position (tokens)", ylabel="KL from FP32 states (nats per token)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    matplotlib().close(figure)
    return image.getvalue()
