# SPDX-License-Identifier: Apache-2.0
"""Values on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Callable

import torch


def later(values: torch.Tensor) -> Callable[[], list]:
    """`values` as they are at this place of the stream, which goes on. The call of what is returned waits for them."""
    if not values.is_cuda:
        here = values.tolist()
        return lambda: here
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    there.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(values.device))

    def wait() -> list:
        arrived.synchronize()
        return there.tolist()

    return wait
