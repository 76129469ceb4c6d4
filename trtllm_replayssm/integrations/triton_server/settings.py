# SPDX-License-Identifier: Apache-2.0
"""What a served model runs with: the `parameters` of its config.pbtxt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ...runtime.engine import Engine, check_arguments, named_device, replay_config
from ...runtime.engine_runner import EXECUTORS, EngineRunner, check_drafts
from .interface import INTERFACES

BACKENDS = ("embedded", "engine")
_OF_ENGINE_FOLDERS = (
    "model",
    "backend",
    "interface",
    "max_waiting",
    "executor",
    "speculation",
    "draft_tokens",
    "adaptive",
)


@dataclass(frozen=True)
class Settings:
    """model: the directory that `backend` runs, a checkpoint ("embedded") or an engine folder ("engine"). interface: a
    name among INTERFACES. max_waiting: requests in line for a slot; more are refused. executor: of an engine folder.
    The rest: arguments of runtime.Engine or EngineRunner, None for their defaults. As a parameter `allow` is its
    modules with blanks between them.

    ValueError names a parameter whose value cannot be meant.
    """

    model: str
    backend: str = "embedded"
    interface: str = "llmapi"
    max_waiting: int = 1024
    executor: str | None = None
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
    allow: tuple[str, ...] = ()

    def __post_init__(self):
        for name, known in (("backend", BACKENDS), ("interface", INTERFACES), ("executor", (None, *EXECUTORS))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(filter(None, known))}")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting is {self.max_waiting}, expected at least 0")
        if self.backend == "engine":
            decided = [name for name in self.parameters() if name not in _OF_ENGINE_FOLDERS]
            if decided:
                raise ValueError(f"{decided[0]}: the engine folder says that already")
        elif self.executor is not None:
            raise ValueError("executor needs backend engine")
        if self.speculation is None and (self.draft_tokens is not None or self.adaptive is not None):
            raise ValueError("draft_tokens and adaptive need speculation, mtp or ngram")
        if bad := [module for module in self.allow if module.split() != [module]]:
            raise ValueError(f"allow is {bad[0]!r}, expected a module, or a glob of modules, without blanks")
        if self.backend == "embedded":
            check_arguments(**self._with_defaults())
        if self.device is not None:
            named_device(self.device)

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> Settings:
        """From the strings of a config.pbtxt. ValueError also names a parameter that is unknown or missing."""
        kinds = {field.name: field.type for field in fields(cls)}
        if unknown := [name for name in parameters if name not in kinds]:
            raise ValueError(f"parameter {unknown[0]!r} is unknown, expected among {', '.join(kinds)}")
        if not parameters.get("model"):
            raise ValueError("parameter 'model' is missing, expected a directory")
        return cls(**{name: _parse(name, kinds[name], value) for name, value in parameters.items()})

    def parameters(self) -> dict[str, str]:
        """What `read` takes; nothing for defaults that Engine has."""
        return {name: _format(value) for name, value in self._given().items()}

    def _given(self) -> dict:
        return {name: value for name, value in vars(self).items() if value not in (None, ())}

    def _with_defaults(self) -> dict:
        return Engine.__init__.__kwdefaults__ | self._given()

    def engine(self):
        """Loads it. Raises what runtime.Engine or EngineRunner raises."""
        options = self._given()
        make = {"embedded": Engine, "engine": EngineRunner}[options.pop("backend")]
        del options["interface"], options["max_waiting"]
        return make(options.pop("model"), **options)

    def check(self) -> None:
        """Looks at the directory without loading it. CheckpointError or BundleError names what is wrong, ValueError a
        parameter that does not go with it.
        """
        from ...builder import bundle
        from ...runtime.model_config import ModelConfig
        from ...runtime.mtp import MTP
        from ...runtime.tokenizer import Tokenizer
        from ...runtime.weights import Weights

        if self.backend == "engine":
            check_drafts(bundle.read(self.model), self.speculation, self.draft_tokens)
        else:
            config, full = ModelConfig.read(self.model), self._with_defaults()
            formats = full["window"], full["checkpoint_format"], full["read_copy"]
            replay_config(config, self.dtype or config.dtype, check_arguments(**full), *formats)
            weights = Weights(self.model, config, self.allow)
            if self.speculation == "mtp":
                MTP.require(self.model, config, weights)
        Tokenizer(self.model)


def _format(value) -> str:
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    if "tuple" in kind:
        return tuple(value.split())
    return value
