# SPDX-License-Identifier: Apache-2.0
"""The JSON file of a run: a list of records, one a case, whole after every case."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import torch

from ..measurement import write_atomically


class InvalidRun(ValueError):
    """A measurement that did not measure what it says: nothing of it is recorded."""


class Records:
    """What a run measured, written to `file` (None: nowhere) after each case.

    A run that finds records of its own GPU and commit there goes on after them; others stay. ValueError: the file is
    not such a list.

    Attributes:
        mine: the records of this run's cases, kept or measured, in the order they were asked for.
        where: the GPU's name, or "cpu".
    """

    def __init__(self, file: Path | None, device: torch.device, commit: str, command: str):
        self.file, self.mine, self._command = file, [], command
        self._where = {
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "device": device.type,
            "commit": commit,
        }
        self.where = self._where["gpu"] or device.type
        self._all = read_records(file) if file is not None and file.exists() else []

    def kept(self, case: dict) -> dict | None:
        """The record of an earlier run of `case`: one whose fields are equal to all of these, GPU and commit."""
        wanted = case | self._where
        for record in self._all:
            if all(record.get(name, ...) == value for name, value in wanted.items()):
                self.mine.append(record)
                return record
        return None

    def add(self, case: dict, figures: dict) -> dict:
        """Writes down what `case` measured, with its origin, and returns the record."""
        origin = {"date": datetime.date.today().isoformat(), "command": self._command}
        record = case | figures | self._where | origin
        self._all.append(record)
        self.mine.append(record)
        if self.file is not None:
            write_atomically(self.file, (json.dumps(self._all, indent=1) + "\n").encode())
        return record


def read_records(file: Path) -> list[dict]:
    """The records in `file`. ValueError: it holds something else."""
    try:
        records = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: not the JSON of a benchmark: {error}; name another file or delete it") from None
    if not isinstance(records, list) or not all(isinstance(record, dict) and "bench" in record for record in records):
        raise ValueError(f"{file}: expected a list of benchmark records; name another file or delete it")
    return records
