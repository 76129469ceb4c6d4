# SPDX-License-Identifier: Apache-2.0
"""Everything that a graph can do wrong with a plugin node ends in one readable line and no plan: never in a crash.

Each case is a network of one node, parsed and built by TensorRT-RTX in a process of its own."""

import graph
import pytest
from registry import in_child

D, H, K, PROJECTED, INNER = graph.D, graph.H, graph.K, graph.PROJECTED, graph.H * graph.P
AT_LEAST = "in: expected shape [rows, tokens, at least 384], "
_, TABLE = graph.pool()
NOTHING = None

# plugin, input that is replaced ([type, shape], or NOTHING: it and all after it are left out), what is said
INPUTS = [
    ("ReplaySsmPlan", 0, ["int64", ["B"]], "slots: expected INT32, got INT64"),
    ("ReplaySsmPlan", 0, ["int32", ["B", 1]], "slots: expected shape [rows], got [?, 1]"),
    ("ReplaySsmPlan", 3, ["fp32", ["B", "S"]], "token_ids: expected INT32 or INT64, got FP32"),
    ("ReplaySsmPlan", 3, ["int64", ["B"]], "token_ids: expected shape [rows, tokens], got [?]"),
    (
        "ReplaySsmPlan",
        3,
        ["int64", [graph.ROWS + 1, "S"]],
        "token_ids: expected shape [rows, tokens], rows 6, got [7, ",
    ),
    ("ReplaySsmPlan", 4, ["int32", [TABLE - 16]], f"table: expected shape [{TABLE}], "),
    ("ReplaySsmPlan", 4, ["int64", [1]], "table: expected INT32, got INT64"),
    ("ReplaySsmPlan", 1, NOTHING, "inputs: expected 5 (slots, tokens, accepted, token_ids, table), got 1"),
    ("ReplayCausalConv", 0, ["int32", ["W", 1]], "plan: expected shape [words of a plan of those rows], got [?, 1]"),
    ("ReplayCausalConv", 0, ["int32", [32]], "plan: expected 16 words, those of a plan of 0 rows, got 32"),
    ("ReplayCausalConv", 2, ["fp16", ["B", "S", PROJECTED]], "in: expected BF16 (the activation), got FP16"),
    (
        "ReplayCausalConv",
        2,
        ["bf16", ["B", "S", INNER + D - 1]],
        "in: expected shape [rows, tokens, at least 384], ",
    ),
    (
        "ReplayCausalConv",
        2,
        ["bf16", ["S", PROJECTED]],
        "in: expected shape [rows, tokens, at least 384], got [?, 388]",
    ),
    ("ReplayCausalConv", 3, ["fp32", [D, 1, K]], "weight: expected shape [320, 4], "),
    ("ReplayCausalConv", 4, ["int32", [D]], "bias: expected FP32, BF16 or FP16, got INT32"),
    ("ReplayCausalConv", 5, ["fp32", [graph.SLOTS, 6464]], "state: expected INT32, got FP32"),
    ("ReplayCausalConv", 5, ["int32", [graph.SLOTS + 1, 6464]], "state: expected shape [100000, "),
    ("ReplayCausalConv", 5, NOTHING, "inputs: expected 6 (plan, table, in, weight, bias, state), got 5"),
    ("ReplaySsmFlush", 1, ["int32", [TABLE + 16]], f"table: expected shape [{TABLE}], "),
    ("ReplaySsmFlush", 2, ["fp32", [H + 1]], "A_log: expected shape [4], got [5]"),
    ("ReplaySsmFlush", 2, NOTHING, "inputs: expected 4 (plan, table, A_log, state), got 2"),
    ("ReplaySsmFlush", 3, ["int32", [graph.SLOTS]], "state: expected shape [100000, "),
    ("ReplaySsmStep", 2, ["bf16", ["B", "S", D + 1]], "xBC: expected shape [rows, tokens, 320], "),
    ("ReplaySsmStep", 3, ["bf16", ["B", "T", PROJECTED]], "dt: expected shape [rows, tokens, at least 388], "),
    ("ReplaySsmStep", 4, ["fp32", [1]], "A_log: expected shape [4], got [1]"),
    ("ReplaySsmStep", 6, ["int32", [H]], "dt_bias: expected FP32, BF16 or FP16, got INT32"),
    ("ReplaySsmStep", 2, NOTHING, "inputs: expected 8 (plan, table, xBC, dt, A_log, D, dt_bias, state), got 2"),
]


def refused(plugin, inputs, outputs, changes, expected):
    result, _ = in_child("graph:node_report", plugin, inputs, outputs, changes)
    errors = [message for severity, message in result["log"] if severity in ("ERROR", "INTERNAL_ERROR")]
    assert not result["built"]
    ours = [message for message in errors if message.startswith(f"{plugin} 'it': ")]
    assert ours and expected in ours[0], errors
    assert "\n" not in ours[0]


@pytest.mark.parametrize("plugin", graph.OUTPUTS)
def test_a_good_node_builds(plugin):
    """What the cases below change one thing of. One node alone chains no state: only Plan and Flush are whole."""
    result, _ = in_child("graph:node_report", plugin, graph.inputs_of(plugin), graph.OUTPUTS[plugin], {})
    errors = [message for severity, message in result["log"] if severity in ("ERROR", "INTERNAL_ERROR")]
    assert result["built"] and errors == []


@pytest.mark.parametrize("plugin, index, given, expected", INPUTS)
def test_wrong_inputs(plugin, index, given, expected):
    inputs = graph.inputs_of(plugin)
    inputs = inputs[:index] if given is NOTHING else [*inputs[:index], given, *inputs[index + 1 :]]
    refused(plugin, inputs, graph.OUTPUTS[plugin], {}, expected)


@pytest.mark.parametrize("plugin", graph.OUTPUTS)
def test_one_input_too_many(plugin):
    inputs = [*graph.inputs_of(plugin), ["int32", [1]]]
    refused(plugin, inputs, graph.OUTPUTS[plugin], {}, f"inputs: expected {len(inputs) - 1} (")


@pytest.mark.parametrize(
    "plugin, index, expected",
    [
        ("ReplaySsmPlan", 0, "ReplaySsmPlan 'it': slots: expected INT32, got FP32"),  # so TensorRT-RTX calls none
        ("ReplayCausalConv", 4, "condition: (input) != nullptr"),
        ("ReplaySsmFlush", 1, "ReplaySsmFlush 'it': table: expected INT32, got FP32"),
        ("ReplaySsmStep", 6, "condition: (input) != nullptr"),
    ],
)
def test_an_input_left_out(plugin, index, expected):
    """There are no optional inputs: where a float may stand, TensorRT itself refuses none."""
    result, _ = in_child("graph:left_out", plugin, index)
    assert not result["parsed"]
    assert expected in next(message for severity, message in result["log"] if severity in ("ERROR", "INTERNAL_ERROR"))


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"window": None}, "window: field is missing"),
        ({"num_slots": 2**33 + 1}, "table: expected shape [48], "),  # ONNX cuts ints to 32 bits
        ({"seed": 7}, "seed: expected a text (CHAR) of 1..64 characters, got type INT32"),
        ({"seed": ""}, "seed: expected decimal digits of 0..18446744073709551615, got ''"),
        ({"layer": "0"}, "layer: expected one integer (INT32 or INT64), got type CHAR"),
        ({"layer": [0, 1]}, "layer: expected one integer (INT32 or INT64), got type INT32, length 2"),
        ({"checkpoint": "fp16_sr2"}, "checkpoint: expected one of 'fp32', 'bf16', "),
        ({"state_io": "Alias"}, "state_io: expected one of 'alias', 'same_pointer', 'host_pointer', got 'Alias'"),
        ({"slot_stride": 256}, "slot_stride: expected 0 (the layout's) or a multiple of 256"),
        ({"max_step_tokens": 9}, "max_step_tokens: expected 1..8"),
    ],
)
def test_wrong_fields(changes, expected):
    refused("ReplaySsmFlush", graph.inputs_of("ReplaySsmFlush"), ["int32"], changes, expected)


@pytest.mark.parametrize("outputs", [["bf16"], ["bf16", "int32", "int32"]])
def test_wrong_number_of_outputs(outputs):
    """A node names every output of its plugin, used or not."""
    result, _ = in_child("graph:node_report", "ReplayCausalConv", graph.inputs_of("ReplayCausalConv"), outputs, {})
    assert not result["parsed"]
    assert any("expected output size is 2" in message for _, message in result["log"])


@pytest.mark.parametrize(
    "graph_fault, built, expected",
    [
        ("two_plugins_alias_one_state", False, "Cannot reformat"),
        ("aliased_state_is_read_elsewhere", False, ""),
        ("alias_feature_is_off", False, "ALIASED_PLUGIN_IO_10_03"),
        ("flush_is_not_consumed", True, ""),
        ("state_is_a_constant", True, ""),
    ],
)
def test_wrong_chains(graph_fault, built, expected):
    """What TensorRT itself does where the rules of the chain are broken. Two it does not tell: a flush that nobody
    consumes is gone, which is why flush hands on its state or its order; and a constant would be written."""
    result, _ = in_child(f"graph:{graph_fault}")
    errors = [message for severity, message in result["log"] if severity in ("ERROR", "INTERNAL_ERROR")]
    assert result["built"] == built and any(expected in error for error in errors) == (not built), errors
    if graph_fault == "flush_is_not_consumed":
        names = {name for _, names, _ in result["layers"] for name in names}
        assert "layer0/step" in names and "layer0/flush" not in names
