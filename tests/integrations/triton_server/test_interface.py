# SPDX-License-Identifier: Apache-2.0
"""Reading requests, without a server."""

import json

import numpy as np
import pytest

from trtllm_replayssm.integrations.triton_server.interface import ENSEMBLE, INTERFACES, LLMAPI, NUMPY_TYPES
from trtllm_replayssm.integrations.triton_server.settings import Settings
from trtllm_replayssm.runtime import SamplingParams


def read(interface, parameters=None, **inputs):
    kinds = {each.name: NUMPY_TYPES[each.type] for each in interface.inputs}
    tensors = []
    for name, value in inputs.items():
        values = [each.encode() if isinstance(each, str) else each for each in np.atleast_1d(value).tolist()]
        array = np.array(values, kinds[name])
        tensors.append((name, array[None] if interface.batched else array))
    return interface.read(tensors, json.dumps(parameters or {}))


def test_every_input_of_llmapi():
    wish = read(
        LLMAPI,
        text_input="a",
        streaming=True,
        sampling_param_max_tokens=7,
        sampling_param_temperature=0.5,
        sampling_param_top_k=3,
        sampling_param_top_p=0.75,
        sampling_param_seed=2**64 - 1,
        sampling_param_stop=["x", "", "yz"],
        sampling_param_draft_tokens=2,
        sampling_param_best_of=1,
    )
    expected = SamplingParams(7, temperature=0.5, top_k=3, top_p=0.75, seed=2**64 - 1, stop=("x", "yz"), draft_tokens=2)
    assert (wish.prompt, wish.stream, wish.stop_request, wish.echo, wish.params) == ("a", True, False, False, expected)
    assert read(LLMAPI, text_input="a").params == SamplingParams()


def test_every_input_of_the_ensemble():
    wish = read(
        ENSEMBLE,
        text_input="a",
        max_tokens=7,
        stream=False,
        temperature=1.0,
        top_k=1,
        stop_words=["x"],
        end_id=5,
        num_draft_tokens=0,
        exclude_input_in_output=False,
        bad_words=[""],
        repetition_penalty=1.0,
        length_penalty=2.0,
        min_tokens=1,
    )
    expected = SamplingParams(7, temperature=1.0, top_k=1, stop_tokens=(5,), stop=("x",), draft_tokens=0)
    assert (wish.stream, wish.echo, wish.params) == (False, True, expected)


@pytest.mark.parametrize(
    ("interface", "inputs", "parameters", "message"),
    [
        (ENSEMBLE, {"text_input": "a"}, {}, "max_tokens is missing"),
        (ENSEMBLE, {"text_input": "a", "max_tokens": 1, "beam_width": 2}, {}, "beam_width is 2: not supported"),
        (ENSEMBLE, {"text_input": "a", "max_tokens": 1, "bad_words": ["b"]}, {}, "bad_words is 'b': not supported"),
        (LLMAPI, {"text_input": "a", "sampling_param_presence_penalty": 0.5}, {}, "presence_penalty is 0.5: not"),
        (LLMAPI, {"text_input": "a"}, {"max_tokens": "7"}, "max_tokens is '7', expected an int"),
        (LLMAPI, {"text_input": "a"}, {"max_tokens": True}, "max_tokens is True, expected an int"),
        (LLMAPI, {"text_input": "a"}, {"temperature": "hot"}, "temperature is 'hot', expected a number"),
        (LLMAPI, {}, {"text_input": 5}, "text_input is 5, expected a text"),
        (
            LLMAPI,
            {"text_input": "a"},
            {"temprature": 1},
            "temprature: no input of this model, expected among text_input",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(interface, inputs, parameters, message):
    with pytest.raises((ValueError, TypeError), match=message):
        read(interface, parameters, **inputs)


def test_parameters_with_short_names():
    """What HTTP's `generate` makes of keys that are no input; the server's own pass by."""
    wish = read(LLMAPI, {"max_tokens": 3, "stop": True, "triton_enable_empty_final_response": True}, text_input="a")
    assert wish.params.max_tokens == 3 and wish.stop_request
    assert read(LLMAPI, {"max_tokens": 3}, text_input="a", sampling_param_max_tokens=4).params.max_tokens == 4


@pytest.mark.parametrize("name", INTERFACES)
def test_outputs_have_the_shape_of_the_interface(name):
    interface = INTERFACES[name]
    shape = (1, 1) if interface.batched else (1,)
    for output, value, dtype in (
        ("text_output", "ä", object),
        ("num_output_tokens", 3, "i4"),
        ("acceptance_rate", 0.5, "f4"),
    ):
        array = interface.array(output, value)
        assert array.shape == shape and array.dtype == dtype
        assert array.item() == (value.encode() if isinstance(value, str) else value)


def test_settings_survive_the_config():
    settings = Settings("/models/a", max_batch=4, window="auto", speculation="mtp", draft_tokens=2, adaptive=True)
    assert Settings.read(settings.parameters()) == settings
    assert settings.parameters()["adaptive"] == "true"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "parameter 'model' is missing"),
        ({"deterministic": "1"}, "parameter 'deterministic' is '1', expected true or false"),
        ({"max_batch": ""}, "parameter 'max_batch' is '', expected an integer"),
        ({"max_bach": "3"}, "parameter 'max_bach' is unknown, expected among model, backend"),
        ({"interface": "openai"}, "interface is 'openai', expected one of llmapi, ensemble"),
        ({"backend": "onnx"}, "backend is 'onnx'"),
        ({"draft_tokens": "3"}, "draft_tokens and adaptive need speculation"),
        ({"max_waiting": "-1"}, "max_waiting is -1, expected at least 0"),
        ({"executor": "reference"}, "executor needs backend engine"),
        ({"backend": "engine", "window": "8"}, "window: the engine folder says that already"),
    ],
)
def test_settings_that_cannot_be_meant(parameters, message):
    with pytest.raises(ValueError, match=message):
        Settings.read({"model": "/models/a"} | parameters if parameters else {})
