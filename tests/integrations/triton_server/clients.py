# SPDX-License-Identifier: Apache-2.0
"""The client and its error, for tests. Modules that import them skip where tritonclient is missing."""

import pytest

triton = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient: pip install '.[triton]'")

from tritonclient.utils import InferenceServerException  # noqa: E402

from trtllm_replayssm.integrations.triton_server.client import Client  # noqa: E402

__all__ = ["Client", "InferenceServerException", "triton"]
