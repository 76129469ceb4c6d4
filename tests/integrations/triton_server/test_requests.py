# SPDX-License-Identifier: Apache-2.0
"""What clients get from a real tritonserver: texts, streams, errors, their slots back."""

import itertools
import random
import threading
import time
from pathlib import Path

import psutil
import pytest
from runtime.prompts import PROMPTS

from trtllm_replayssm.integrations.triton_server.interface import ENSEMBLE, LLMAPI
from trtllm_replayssm.runtime import SamplingParams

from .bad_requests import JSON, TENSORS, tensors_of
from .clients import Client, InferenceServerException
from .serving import DEADLINE, SOAK, Launched, ended, write_repository
from .solo import assert_solo, solo

pytestmark = pytest.mark.timeout(DEADLINE + 60)

PROMPT = PROMPTS[0]
SHORT = SamplingParams(max_tokens=8)


def test_text(any_server, device):
    expected = solo(PROMPT, SamplingParams(max_tokens=24), device)
    status, answer = any_server.generate(text_input=PROMPT, sampling_param_max_tokens=24)
    assert (status, answer["text_output"], answer["finish_reason"]) == (200, expected.text, expected.finish_reason)
    assert answer["num_input_tokens"] == len(expected.prompt)
    assert answer["num_output_tokens"] == len(expected.tokens) == 24
    assert 0 < answer["total_accepted_draft_tokens"] <= answer["total_draft_tokens"] <= 3 * answer["num_decode_steps"]
    # A draft may stand beyond the text's end.
    assert 0 <= 1 + answer["num_decode_steps"] + answer["total_accepted_draft_tokens"] - 24 <= 3
    assert answer["arrival_time_ns"] < answer["first_token_time_ns"] < answer["last_token_time_ns"] <= time.time_ns()
    with Client(any_server.grpc) as client:
        assert client.generate(PROMPT, sampling_param_max_tokens=24).text == expected.text
    assert "model 'tensorrt_llm': mode replay, 32 sequences at once, on" in any_server.log.read_text()


def test_ensemble_text(any_server, device):
    expected = solo(PROMPT, SamplingParams(max_tokens=24), device)
    status, answer = any_server.generate("ensemble", text_input=PROMPT, max_tokens=24, stop_words=[""], end_id=-1)
    assert (status, answer["text_output"], answer["sequence_index"]) == (200, expected.text, 0)
    status, answer = any_server.generate("ensemble", text_input=PROMPT, max_tokens=24, exclude_input_in_output=False)
    assert (status, answer["text_output"]) == (200, PROMPT + expected.text)
    with Client(any_server.grpc, ENSEMBLE) as client:
        assert client.generate(PROMPT, max_tokens=24).text == expected.text


def test_streams(any_server, device):
    """llmapi streams the text so far, ensemble what is new; the last response has the statistics."""
    expected = solo(PROMPT, SamplingParams(max_tokens=24), device).text
    events = list(any_server.stream(text_input=PROMPT, sampling_param_max_tokens=24, streaming=True))
    texts = [event["text_output"] for event in events]
    assert len(texts) > 4 and texts[-1] == expected
    assert all(
        later.startswith(text) and len(later) > len(text) for text, later in zip(texts, texts[1:-1], strict=False)
    )
    assert "finish_reason" not in events[0] and events[-1]["num_output_tokens"] == 24

    events = list(any_server.stream("ensemble", text_input=PROMPT, max_tokens=24, stream=True))
    assert len(events) > 4 and "".join(event["text_output"] for event in events) == expected

    for interface, options in (
        (LLMAPI, {"sampling_param_max_tokens": 24, "streaming": True}),
        (ENSEMBLE, {"max_tokens": 24, "stream": True}),
    ):
        with Client(any_server.grpc, interface) as client:
            answers = list(client.stream(PROMPT, **options))
        assert [answer.final for answer in answers] == [False] * (len(answers) - 1) + [True]
        assert len(answers) > 4
        assert (answers[-1].text if interface.cumulative else "".join(answer.text for answer in answers)) == expected


def test_stop_strings_and_short_names(server):
    """Keys that are no input are request parameters: they mean the input whose name they end."""
    text = solo(PROMPT, SamplingParams(max_tokens=24)).text
    word = text.split()[2]
    expected = solo(PROMPT, SamplingParams(max_tokens=24, stop=(word,)))
    status, answer = server.generate(text_input=PROMPT, max_tokens=24, sampling_param_stop=[word])
    assert (status, answer["text_output"], answer["finish_reason"]) == (200, expected.text, "stop")
    assert word not in answer["text_output"]


def test_200_clients_get_the_texts_of_solo_runs(any_server, device):
    """Mixed lengths, draft settings and sampling, over 32 slots; a third of them streams."""
    rng = random.Random(3)
    kinds = []
    for index in range(50):
        greedy = index % 2 == 0
        params = SamplingParams(
            max_tokens=rng.randrange(2, 28),
            temperature=0.0 if greedy else 0.7,
            top_p=1.0 if greedy else 0.9,
            seed=index,
        )
        kinds.append((PROMPTS[index % len(PROMPTS)], params))
    for kind in kinds:
        solo(*kind, device)
    before = any_server.metrics()
    texts, errors = {}, []
    start = threading.Barrier(200)

    def ask(index: int) -> None:
        prompt, params = kinds[index % 50]
        try:
            with Client(any_server.grpc) as client:
                start.wait(60)
                answer = client.generate(
                    prompt,
                    sampling_param_max_tokens=params.max_tokens,
                    sampling_param_temperature=params.temperature,
                    sampling_param_top_p=params.top_p,
                    sampling_param_seed=params.seed,
                    sampling_param_draft_tokens=index // 50,
                    streaming=index % 3 == 0,
                )
            texts[index] = answer.text
            if index < 50:
                assert answer.values["total_draft_tokens"] == 0
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for index, text in texts.items():
        assert_solo(*kinds[index % 50], text, device)
    after = any_server.metrics_when(lambda metrics: ended(metrics) - ended(before) == 200)
    assert len(texts) == 200
    generated = 4 * sum(len(solo(*kind, device).tokens) for kind in kinds)
    assert abs(after["generated_tokens_total"] - before["generated_tokens_total"] - generated) <= 40
    assert after["accepted_draft_tokens_total"] > before["accepted_draft_tokens_total"]


# ---- bad requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", JSON)
def test_bad_input_is_400(server, kind):
    inputs, message = JSON[kind]
    status, answer = server.generate(**inputs)
    assert status == 400
    assert message in answer["error"]


@pytest.mark.parametrize("kind", [*JSON, *TENSORS])
def test_bad_input_is_refused_on_a_stream(server, kind):
    """With a message only, unless the stream asks for statuses (test_statuses.py). What follows on it is answered."""
    with Client(server.grpc) as client:
        tensors, message = tensors_of(client, kind)
        client.send(tensors)
        with pytest.raises(InferenceServerException) as error:
            client.receive(30)
        assert message in error.value.message()
        assert client.generate(PROMPT, sampling_param_max_tokens=8).text == solo(PROMPT, SHORT).text


def test_json_that_the_server_cannot_read(server):
    """Its own answers, before the model sees anything."""
    bodies = b"{", b'{"text_input": 5}', b'{"text_input": "a", "sampling_param_max_tokens": "many"}'
    for body in bodies:
        status, _ = server.post("/v2/models/tensorrt_llm/generate", body)
        assert status == 500, body
    status, answer = server.generate(text_input=PROMPT, max_token=5)
    assert status == 400 and answer["error"].startswith("max_token: no input of this model")
    assert server.generate("nobody", text_input=PROMPT)[0] == 404


def test_bad_requests_harm_nobody(server):
    """A text streams on while all kinds of nonsense come in by HTTP and gRPC."""
    params = SamplingParams(max_tokens=120, stop_tokens=())
    before = server.metrics()["requests_total refused"]
    with Client(server.grpc) as client, Client(server.grpc) as other:
        answers = client.stream(PROMPT, sampling_param_max_tokens=120, streaming=True)
        texts = [next(answers).text]
        for kind in JSON:
            assert server.generate(**JSON[kind][0])[0] == 400
            texts.append(next(answers).text)
        for kind in [*JSON, *TENSORS]:
            other.send(tensors_of(other, kind)[0])
            with pytest.raises(InferenceServerException):
                other.receive(30)
        texts += [answer.text for answer in answers]
    assert_solo(PROMPT, params, texts[-1])
    seen = 2 * len(JSON) + len(TENSORS) - 1  # of all but the dtype, which the server itself refuses
    server.metrics_when(lambda metrics: metrics["requests_total refused"] - before >= seen)


def test_stop_request_ends_the_text_of_its_id(server):
    with Client(server.grpc) as client, Client(server.grpc) as other:
        answers = client.stream(PROMPT, id="one", sampling_param_max_tokens=480, streaming=True)
        next(answers)
        other.send(other.tensors(text_input="", stop=True), id="one")
        with pytest.raises(InferenceServerException, match="cancelled"):
            list(answers)
    server.metrics_when(lambda metrics: metrics["slots_in_use"] == 0)


# ---- the server ------------------------------------------------------------------------------------------------------


def test_only_loopback_listens_and_taken_ports_are_refused(server, tmp_path):
    process = psutil.Process(server.pid_of("tritonserver"))
    listening = [each.laddr for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
    assert sorted(address.port for address in listening) == sorted(server.ports)
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    second = Launched(write_repository(tmp_path / "models"), tmp_path / "log", ports=server.ports)
    try:
        assert second.wait() == 2
    finally:
        second.end()
    assert f"http port {server.ports[0]} on 127.0.0.1: Address already in use" in (tmp_path / "log").read_text()
    assert server.generate(text_input=PROMPT, max_tokens=4)[0] == 200


def test_memory_is_flat(server):
    """With every fourth request refused."""
    processes = [psutil.Process(server.pid_of(name)) for name in ("tritonserver", "triton_python_backend_stub")]
    lengths = itertools.cycle((1, 4, 9))
    with Client(server.grpc) as client:

        def ask(requests: int) -> list[float]:
            """Requests, 16 at a time, every fourth refused. Resident MiB of server and stub then."""
            for _ in range(requests // 16):
                for index in range(16):
                    tokens = -1 if index % 4 == 3 else next(lengths)
                    client.send(client.tensors(text_input=PROMPT, sampling_param_max_tokens=tokens))
                for _ in range(16):
                    try:
                        client.receive(60)
                    except InferenceServerException as error:
                        assert "max_tokens is -1" in error.message()
            return [process.memory_info().rss / 2**20 for process in processes]

        early = min(SOAK // 2, 1008) // 16 * 16
        before, after = ask(early), ask((SOAK - early) // 16 * 16)
    shared = sum(path.stat().st_size for path in Path("/dev/shm").glob(f"replayssm_{server.launcher}_*")) / 2**20
    requests = f"{early} and {SOAK // 16 * 16} requests"
    print(f"{requests}: resident MiB of server and stub {before} -> {after}, shared {shared:.1f} MiB")
    assert all(late - early < 4 for early, late in zip(before, after, strict=True))
    assert shared <= 4  # two models, and what prompts of 1 MB made them grow by
