# SPDX-License-Identifier: Apache-2.0
"""Engines built by TensorRT-RTX without a GPU, in the three ways of passing state and with plans of lengths, and what
the builder refuses.

Two profiles, steps and prompts, so every layer of the network stands twice in the engine."""

import re

import graph
import pytest
from registry import in_child

MIXERS = [f"layer{i}/{part}" for i in range(graph.LAYERS) for part in ("conv", "flush", "step")]


def types_of(layers, name):
    return [kind for kind, names, _ in layers if name in names]


@pytest.mark.parametrize("state_io", ["alias", "same_pointer", "host_pointer", "lengths"])
def test_engine(state_io):
    """A38: every plugin is there, no copy, no scratch for a state, nothing dropped in silence."""
    result, _ = in_child("graph:stack_report", state_io)
    errors = [message for severity, message in result["log"] if severity in ("ERROR", "INTERNAL_ERROR")]
    assert result["built"] and errors == []
    kind = "PluginV3" if state_io == "alias" else "custom_layer"
    for name in ("plan", *MIXERS):
        assert types_of(result["layers"], name) == [kind, kind], name
    assert not any(kind in ("copy", "reformat", "Reformat") for kind, _, _ in result["layers"])

    messages = [message for _, message in result["log"]]
    suspicious = ("Inserting copy", "Unused Input", "not found in plugin node")
    assert [m for m in messages if any(text in m for text in suspicious)] == []
    warnings = [message for severity, message in result["log"] if severity == "WARNING"]
    assert all("has Int64 binding" in warning for warning in warnings), warnings

    slot_stride, _ = graph.pool()
    pool_bytes = graph.LAYERS * graph.SLOTS * slot_stride
    activation = [int(m.split()[3]) for m in messages if m.startswith("Total Activation Memory:")]
    assert len(activation) == 2 and max(activation) < pool_bytes / 100

    if state_io == "alias":
        metadata = {}
        for _, (name, *_), rest in (row for row in result["layers"] if row[0] == "PluginV3"):
            metadata[name] = re.search(r"PluginType: (\w+), .*PluginMetadata: (.*?), TacticValue", rest).groups()
        for name, (plugin, text) in metadata.items():
            own = {} if name == "plan" else {"layer": int(name[5])}
            assert text == " ".join(
                f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}"
                for k, v in graph.fields(plugin, state_io, **own).items()
            )
        assert sorted(metadata) == sorted(["plan", *MIXERS])
        skipped = [m for m in messages if m.startswith("Skipping PluginV3: Only one format combination and one tactic")]
        assert len(skipped) >= len(MIXERS) + 1  # so a builder never runs one to time it
