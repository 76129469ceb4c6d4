# SPDX-License-Identifier: Apache-2.0
"""Doubles of the parts of TensorRT-LLM that trtllm_serve touches, one set a profile, on the CPU.

Written from the recorded facts alone (names, arguments, tensors, who calls what when), with the stock kernels in plain
torch. Nothing in here knows of ReplaySSM. `scripts/upstream_check.py` puts the real files in their place.
"""

import sys
from pathlib import Path
from types import ModuleType

PYEXECUTOR, MAMBA = "tensorrt_llm._torch.pyexecutor", "tensorrt_llm._torch.modules.mamba"
MANAGER, MIXER = f"{PYEXECUTOR}.mamba_cache_manager", f"{MAMBA}.mamba2_mixer"
MODEL, LOGGER = "tensorrt_llm._torch.models.modeling_nemotron_h", "tensorrt_llm.logger"


class Logger:
    """Keeps (level, text) of what it is told."""

    def __init__(self):
        self.lines: list[tuple[str, str]] = []

    def __getattr__(self, level):
        return lambda text, **_: self.lines.append((level, text))


def make_module(name: str) -> ModuleType:
    """An empty module in sys.modules, with the packages that it lies in."""
    if name not in sys.modules:
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(make_module(parent), child, module)
    return sys.modules[name]


def run_file(name: str, path: Path, source: str | None = None) -> ModuleType:
    """The module `name` made of a file's text (or of `source` in its place): new classes each time."""
    module = make_module(name)
    exec(compile(path.read_text() if source is None else source, str(path), "exec"), vars(module))
    return module


def make_model(mixer: ModuleType, has_mtp: bool):
    """modeling_nemotron_h: looks up Mamba2Mixer when a layer is built, and registers the last class of a name."""
    model, registry = make_module(MODEL), {}

    def register_auto_model(name):
        def register(cls):
            registry[name] = cls
            return cls

        return register

    model.MODEL_CLASS_MAPPING, model.register_auto_model = registry, register_auto_model
    model.Mamba2Mixer = mixer.Mamba2Mixer
    model.NemotronHForCausalLM = register_auto_model("NemotronHForCausalLM")(type("NemotronHForCausalLM", (), {}))
    if has_mtp:
        model.NemotronHMTP = type("NemotronHMTP", (), {})


def make_package(profile: str):
    """A tensorrt_llm of profile "A", "B" or "C" in sys.modules; `drop_package` takes it out again."""
    here = Path(__file__).parent
    make_module(LOGGER).logger = Logger()
    run_file(MANAGER, here / f"manager_{profile.lower()}.py")
    make_model(run_file(MIXER, here / f"mixer_{profile.lower()}.py"), profile != "A")


def drop_package():
    """Forgets tensorrt_llm, and what of trtllm_serve has bound it."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "tensorrt_llm" or name.startswith("trtllm_replayssm.integrations.trtllm_serve"):
            del sys.modules[name]
