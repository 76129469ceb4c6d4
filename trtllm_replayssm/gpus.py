# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine, asked of the driver: neither torch nor a CUDA toolkit is needed."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_DRIVER = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


@dataclass(frozen=True)
class GPU:
    name: str
    capability: tuple[int, int]  # compute capability

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


def found() -> list[GPU]:
    """In the driver's order, as CUDA_VISIBLE_DEVICES leaves them; [] where there is no driver."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_gpu(driver, index) for index in range(count.value)]


def _gpu(driver: ctypes.CDLL, index: int) -> GPU:
    device, name, numbers = ctypes.c_int(), ctypes.create_string_buffer(256), []
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        numbers.append(value.value)
    return GPU(name.value.decode(), tuple(numbers))
