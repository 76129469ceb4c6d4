# SPDX-License-Identifier: Apache-2.0
"""What a served model runs with: the `parameters` of its config.pbtxt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from .interface import INTERFACES

BACKENDS = ("embedded",)


@dataclass(frozen=True)
class Settings:
    """checkpoint: the directory that `backend` runs. interface: a name among INTERFACES. The rest: arguments of
    runtime.Engine, None for its defaults.

    ValueError names a parameter whose value cannot be meant.
    """

    checkpoint: str
    backend: str = "embedded"
    interface: str = "llmapi"
    mode: str | None = None
    device: str | None = None
    dtype: str | None = None
    max_batch: int | None = None
    context: int | None = None
    prefill_chunk: int | None = None
    window: int | str | None = None
    checkpoint_format: str | None = None
    read_copy: str | None = None
    speculation: str | None = None
    draft_tokens: int | None = None
    adaptive: bool | None = None
    deterministic: bool | None = None

    def __post_init__(self):
        for name, known in (("backend", BACKENDS), ("interface", INTERFACES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}")
        if self.speculation is None and (self.draft_tokens is not None or self.adaptive is not None):
            raise ValueError("draft_tokens and adaptive need speculation, mtp or ngram")

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> Settings:
        """From the strings of a config.pbtxt. ValueError also names a parameter that is unknown or missing."""
        kinds = {field.name: field.type for field in fields(cls)}
        if unknown := [name for name in parameters if name not in kinds]:
            raise ValueError(f"parameter {unknown[0]!r} is unknown, expected among {', '.join(kinds)}")
        if not parameters.get("checkpoint"):
            raise ValueError("parameter 'checkpoint' is missing, expected a directory")
        return cls(**{name: _parse(name, kinds[name], value) for name, value in parameters.items()})

    def parameters(self) -> dict[str, str]:
        """What `read` takes; nothing for defaults that Engine has."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in given.items()
            if value is not None
        }

    def engine(self):
        """The engine, loaded. Raises what runtime.Engine raises."""
        from ...runtime import Engine

        options = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("backend", "interface"):
            del options[name]
        return Engine(options.pop("checkpoint"), **{k: v for k, v in options.items() if v is not None})


def _parse(name: str, kind: str, value: str):
    if "int" in kind and not (name == "window" and value == "auto"):
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"parameter {name!r} is {value!r}, expected an integer") from None
    if "bool" in kind:
        if value not in ("true", "false"):
            raise ValueError(f"parameter {name!r} is {value!r}, expected true or false")
        return value == "true"
    return value
