# SPDX-License-Identifier: Apache-2.0
"""What the server's Prometheus page says of the engine, each value labelled with its model."""

from __future__ import annotations

# Name, kind, meaning, and where statistics, slots in use, waiting requests and slots have it.
_FAMILIES = (
    ("prompt_tokens_total", "COUNTER", "Prompt tokens that passes brought", lambda s: s["prompt_tokens"]),
    ("generated_tokens_total", "COUNTER", "Tokens of texts", lambda s: s["generated_tokens"]),
    ("prefill_steps_total", "COUNTER", "Passes of prompt chunks", lambda s: s["prefill_steps"]),
    ("decode_steps_total", "COUNTER", "Decode steps of a batch", lambda s: s["decode_steps"]),
    ("draft_tokens_total", "COUNTER", "Drafts that steps verified", lambda s: s["acceptance"].drafts),
    ("accepted_draft_tokens_total", "COUNTER", "Drafts that stood", lambda s: s["acceptance"].accepted),
    ("flushes_total", "COUNTER", "Slots whose records were folded into the state", lambda s: _moved(s, "flushes")),
    ("state_read_bytes_total", "COUNTER", "Mamba states read", lambda s: _moved(s, "state_bytes_read")),
    ("state_written_bytes_total", "COUNTER", "Mamba states written", lambda s: _moved(s, "state_bytes_written")),
    ("slots", "GAUGE", "Sequences that can run at once", lambda s: s["slots"]),
    ("slots_in_use", "GAUGE", "Sequences that have a slot", lambda s: s["running"]),
    ("requests_waiting", "GAUGE", "Requests in line for a slot", lambda s: s["waiting"]),
)


def _moved(statistics: dict, name: str) -> int:
    return sum(getattr(statistics[f"{kind}_traffic"], name) for kind in ("prefill", "decode"))


class Metrics:
    """pb_utils: Triton's module, in whose process this runs."""

    def __init__(self, pb_utils, model: str, slots: int):
        self._slots = slots
        self._metrics = []
        self._families = []  # a family that is freed takes its metrics along
        for name, kind, meaning, value in _FAMILIES:
            family = pb_utils.MetricFamily(
                name=f"replayssm_{name}", description=meaning, kind=getattr(pb_utils.MetricFamily, kind)
            )
            self._families.append(family)
            self._metrics.append((kind, family.Metric(labels={"model": model}), value))
        self._requests = pb_utils.MetricFamily(
            name="replayssm_requests_total",
            description="Requests by how they ended",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self._model, self._ended = model, {}
        self._last: dict[int, float] = {}

    def publish(self, statistics: dict, running: int, waiting: int, ended: dict[str, int]) -> None:
        statistics = {**statistics, "slots": self._slots, "running": running, "waiting": waiting}
        for kind, metric, value in self._metrics:
            self._set(kind, metric, value(statistics))
        for reason, count in ended.items():  # last: who sees a request ended sees what it took
            if reason not in self._ended:
                self._ended[reason] = self._requests.Metric(labels={"model": self._model, "outcome": reason})
            self._set("COUNTER", self._ended[reason], count)

    def _set(self, kind: str, metric, value: float) -> None:
        """Each call goes to the server's process: only for what has changed. A counter takes what was added."""
        before = self._last.get(id(metric), 0)
        if value == before:
            return
        if kind == "COUNTER":
            metric.increment(value - before)
        else:
            metric.set(value)
        self._last[id(metric)] = value
