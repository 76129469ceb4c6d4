# SPDX-License-Identifier: Apache-2.0
"""Which TensorRT-LLM this is, told by what it has. The facts are data (upstream.json)."""

import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


class Mismatch(RuntimeError):
    """This TensorRT-LLM, or how it is set up, is none that ReplaySSM fits into. The text says what differs."""


def facts() -> dict:
    """The content of upstream.json."""
    return json.loads((Path(__file__).parent / "upstream.json").read_text())


@dataclass(frozen=True)
class Upstream:
    """The TensorRT-LLM found.

    Attributes:
        profile: "A", "B" or "C" (upstream.json tells what they are).
        model, mixer, manager: its modules.
        holder: the class whose instances hold the Mamba states.
    """

    profile: str
    model: ModuleType
    mixer: ModuleType
    manager: ModuleType

    @property
    def holder(self) -> type:
        names = ("PythonMambaCacheManager", "MambaCacheManager")
        for name in names:
            if hasattr(self.manager, name):
                return getattr(self.manager, name)
        raise Mismatch(f"TensorRT-LLM: expected {' or '.join(names)} in {self.manager.__name__}, found neither")

    def require_instance(self, holder):
        """What a manager must have once it is made.

        Raises:
            Mismatch: an attribute that upstream.json lists for this profile is missing.
        """
        for fact in facts()["instances"]:
            if self.profile in fact["profiles"] and not hasattr(holder, fact["attribute"]):
                text = f"expected {type(holder).__name__} to have {fact['attribute']}, {fact['why']}; it has none"
                raise Mismatch(f"profile {self.profile}: {text}")


def switches(profile: str, environment: Mapping[str, str]) -> dict[str, str]:
    """TensorRT-LLM's own variables that must stand one way, with their values.

    Raises:
        Mismatch: `environment` has another value of one.
    """
    known = facts()["environment"] if profile == "C" else {}
    for name, switch in known.items():
        if (given := environment.get(name, switch["needed"])) != switch["needed"]:
            raise Mismatch(f"{name}: expected {switch['needed']} ({switch['why']}), got {given!r}")
    return {name: switch["needed"] for name, switch in known.items()}


def probe() -> Upstream:
    """Looks at the installed TensorRT-LLM.

    Raises:
        Mismatch: no profile's facts hold; the text names the first that does not.
    """
    known = facts()
    modules = {name: _first_module(paths) for name, paths in known["modules"].items()}
    upstream = Upstream(_profile(modules), **modules)
    for fact in known["facts"]:
        if upstream.profile in fact["profiles"]:
            _require(modules[fact["module"]], fact, upstream.profile)
    return upstream


def _profile(modules: dict[str, ModuleType]) -> str:
    """By speculative state, MTP module and native replay. Other combinations are no profile."""
    holder = Upstream("", **modules).holder
    found = {
        "NemotronHMTP": hasattr(modules["model"], "NemotronHMTP"),
        "update_mamba_states": hasattr(holder, "update_mamba_states"),
        "use_replay_state_update": hasattr(holder, "use_replay_state_update"),
    }
    profiles = {(False, False, False): "A", (True, True, False): "B", (True, True, True): "C"}
    if tuple(found.values()) not in profiles:
        text = ", ".join(f"{name} {'found' if there else 'missing'}" for name, there in found.items())
        raise Mismatch(f"TensorRT-LLM: expected profile A, B or C, got one with {text}")
    return profiles[tuple(found.values())]


def _first_module(paths: list[str]) -> ModuleType:
    for path in paths:
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise
    raise Mismatch(f"TensorRT-LLM: expected a module {' or '.join(paths)}, found none")


def _require(module: ModuleType, fact: dict, profile: str):
    found = module
    for part in fact["attribute"].split("."):
        found = getattr(found, part, None)
        if found is None:
            raise Mismatch(f"profile {profile}: expected {fact['attribute']} in {module.__name__}, found none")
    if "parameters" in fact:
        names = list(inspect.signature(found).parameters)
        missing = [name for name in fact["parameters"] if name not in names]
        if missing:
            raise Mismatch(
                f"profile {profile}: expected {module.__name__}.{fact['attribute']} to take {', '.join(missing)}, "
                f"it takes {', '.join(names)}"
            )
