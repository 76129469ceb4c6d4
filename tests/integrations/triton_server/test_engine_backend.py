# SPDX-License-Identifier: Apache-2.0
"""An engine folder on the real server, its graphs run by ONNX's reference evaluator: the embedded runtime's texts."""

import threading

from runtime.prompts import PROMPTS

from trtllm_replayssm.builder import EngineConfig, build
from trtllm_replayssm.integrations.triton_server.repository import write_model
from trtllm_replayssm.integrations.triton_server.settings import Settings
from trtllm_replayssm.runtime import SamplingParams

from .clients import Client
from .serving import TINY, Launched
from .solo import assert_solo

CONFIG = EngineConfig(
    max_batch=4,
    max_seq_len=160,
    draft_tokens=3,
    max_prefill_tokens=16,
    window=8,
    dtype="float32",
    state_io="same_pointer",
)


def test_engine_folder(tmp_path):
    build(TINY, tmp_path / "engine", CONFIG, plans=False)
    settings = Settings(str(tmp_path / "engine"), backend="engine", executor="reference", speculation="mtp")
    write_model(tmp_path / "models", "tensorrt_llm", settings)
    texts, errors = {}, []

    def ask(index: int) -> None:
        try:
            with Client(server.grpc) as client:
                options = {"streaming": index % 2 == 0, "sampling_param_draft_tokens": index % 4}
                texts[index] = client.generate(PROMPTS[index], sampling_param_max_tokens=10 + index, **options)
        except Exception as error:
            errors.append(error)

    with Launched(tmp_path / "models", tmp_path / "log") as server:
        threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        status, answer = server.generate(text_input=PROMPTS[0], max_tokens=161)
        metrics = server.metrics_when(lambda metrics: metrics["requests_total length"] == 9)
    assert errors == []
    for index, answer_of in texts.items():
        assert_solo(PROMPTS[index], SamplingParams(max_tokens=10 + index), answer_of.text)
    assert status == 400 and "more than the context of 160" in answer["error"]
    assert metrics["slots"] == 4 and metrics["flushes_total"] > 0 and metrics["accepted_draft_tokens_total"] > 5
