# SPDX-License-Identifier: Apache-2.0
"""The trtllm-serve adapter on TensorRT-LLM's own files: cache manager, Mamba2Metadata and Mamba2Mixer.

    python scripts/upstream_check.py CHECKOUT [--device cuda] [--steps 500] [--output RESULT.json]

CHECKOUT is a checkout of NVIDIA/TensorRT-LLM at any commit, or a folder with just these files of one:

    tensorrt_llm/_torch/pyexecutor/mamba_cache_manager.py   (or pyexecutor/kv_cache/…)
    tensorrt_llm/_torch/modules/mamba/mamba2_mixer.py
    tensorrt_llm/_torch/modules/mamba/mamba2_metadata.py    (a double serves in its place where it is missing)

Nothing of TensorRT-LLM needs to be installed or built: what the files import besides one another is replaced, base
classes (KV cache managers) by empty ones, kernels by plain torch (tests/integrations/trtllm_serve/stock_kernels.py).
The same random server loop as in the tests then runs three times against the float64 oracle: stock, with ReplaySSM,
and on a GPU also with steps captured in CUDA graphs. On the CPU the files' "cuda" is read as "cpu". Where CHECKOUT has
TensorRT-LLM's tests of the manager (tests/unittest/_torch/executor/test_mamba_cache_manager.py), those that need no C++
are run too: all with the stock manager, and with ReplaySSM all but those that look at states which it leaves out.
"""

import argparse
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "integrations" / "trtllm_serve")]

import doubles  # noqa: E402
import pytest  # noqa: E402
import stock_kernels  # noqa: E402
import torch  # noqa: E402
from doubles import shared  # noqa: E402
from serving import DUMMY_ID, IDLE_ID, MAPPING, WARM_UP, Server  # noqa: E402

from trtllm_replayssm import MambaGeometry  # noqa: E402

ADAPTER = "trtllm_replayssm.integrations.trtllm_serve"
TENSORRT_LLM = "tensorrt_llm/_torch"
FILES = {
    doubles.MANAGER: ["pyexecutor/mamba_cache_manager.py", "pyexecutor/kv_cache/mamba_cache_manager.py"],
    f"{doubles.MAMBA}.mamba2_metadata": ["modules/mamba/mamba2_metadata.py"],
    doubles.MIXER: ["modules/mamba/mamba2_mixer.py"],
}


TESTS = "tests/unittest/_torch/executor/test_mamba_cache_manager.py"
OF_STOCK_STATES = "cpp", "update_mamba_states", "replay"  # in names of tests: of C++, intermediate_ssm, native replay
GEOMETRIES = {
    "small": MambaGeometry(num_heads=4, head_dim=16, num_groups=2, state_dim=64),
    "super-tp8": MambaGeometry(num_heads=16, head_dim=64, num_groups=1, state_dim=128),
    "nano-4b-tp8": MambaGeometry(num_heads=12, head_dim=80, num_groups=1, state_dim=128),
}
BOUNDS = {"float32": 5e-6, "bfloat16": 6e-3, "float16": 1e-3}  # of the relative error of all outputs


class Empty:
    """In place of a class or function that these files name but that the loop never needs."""

    def __init__(self, *_, **__):
        pass

    def __class_getitem__(cls, _):
        return cls

    HALF = None


class Resources(Empty):
    """In place of BaseResourceManager. The loop needs only the Mamba half of a manager."""

    def prepare_resources(self, *_, **__):
        pass

    free_resources = add_dummy_requests = shutdown = update_resources = prepare_resources


class KVCacheManager(Resources):
    pass


class Mapping(SimpleNamespace):
    def __init__(self, **sizes):
        super().__init__(**(vars(MAPPING) | sizes))


def get_pp_layers(num_layers, mapping, layer_mask=None):
    return shared.local_layers(layer_mask or [True] * num_layers), num_layers


def copy_to_device_if_changed(target, source):
    target[: len(source)].copy_(source)


def extract_transpose_xbc_prefill(zxbcdt, tokens, start, width):
    return zxbcdt[:tokens, start : start + width].transpose(0, 1).contiguous()


def fused_split_rearrange_after_conv1d(xbc, inner, groups, state_dim, heads, head_dim):
    x, B, C = xbc.transpose(0, 1)[None].split([inner, groups * state_dim, groups * state_dim], -1)
    return x.unflatten(-1, (heads, head_dim)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))


REPLACED = {
    "BaseResourceManager": Resources,
    "KVCacheManager": KVCacheManager,
    "KVCacheManagerV2": KVCacheManager,
    "Mapping": Mapping,
    "get_pp_layers": get_pp_layers,
    "copy_to_device_if_changed": copy_to_device_if_changed,
    "CUDA_GRAPH_DUMMY_REQUEST_ID": DUMMY_ID,
    "ATTENTION_DP_DUMMY_REQUEST_ID": IDLE_ID,
    "Linear": shared.Linear,
    "RMSNorm": shared.Norm,
    "TensorParallelMode": SimpleNamespace(COLUMN=None, ROW=None),
    "causal_conv1d_fn": stock_kernels.causal_conv1d_fn,
    "causal_conv1d_update": stock_kernels.causal_conv1d_update,
    "mamba_chunk_scan_combined": stock_kernels.mamba_chunk_scan_combined,
    "selective_state_update": stock_kernels.selective_state_update,
    "extract_transpose_xbc_prefill": extract_transpose_xbc_prefill,
    "fused_split_rearrange_after_conv1d": fused_split_rearrange_after_conv1d,
    "maybe_execute_in_parallel": lambda first, second, *_, **__: (first(), second()),
}


class Replacements(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every module of the packages that are not there, and gives it any name that is asked for."""

    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = ModuleType(spec.name)

        def __getattr__(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return REPLACED.get(name, Empty)

        module.__getattr__ = __getattr__
        return module

    def exec_module(self, module):
        if module.__name__ == "triton":
            module.jit = lambda function: function


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("checkout", type=Path)
    options.add_argument("--device", default="cpu")
    options.add_argument("--steps", type=int, default=500)
    options.add_argument("--drafts", type=int, default=3)
    options.add_argument("--geometry", choices=GEOMETRIES, default="small")
    options.add_argument("--dtype", choices=BOUNDS, default="float32", help="of the model")
    options.add_argument("--state-dtype", choices=BOUNDS, default="float32")
    options.add_argument(
        "--attention-dp", action="store_true", help="a rank that shares requests, not heads, and idles"
    )
    options.add_argument("--commit", default="unknown", help="of this project, for the record")
    options.add_argument("--upstream", default="unknown", help="commits of the files, for the record")
    options.add_argument("--output", type=Path)
    given = options.parse_args()
    on_cpu = given.device == "cpu"
    packages = {"tensorrt_llm", "flashinfer"} | (set() if importlib.util.find_spec("triton") else {"triton"})
    sys.meta_path.insert(0, Replacements(packages))
    REPLACED["prefer_pinned"] = lambda: not on_cpu
    if on_cpu:
        torch.cuda.Stream = torch.cuda.Event = Empty
    torch.compile = lambda *_, **__: lambda function: function  # of update_mamba_states: quicker as it is

    paths = {name: _find(given.checkout, places) for name, places in FILES.items()}
    record = {
        "commit": given.commit,
        "upstream": given.upstream,
        "command": f"python scripts/upstream_check.py CHECKOUT --device {given.device} --steps {given.steps} --drafts "
        f"{given.drafts} --geometry {given.geometry} --dtype {given.dtype} --state-dtype {given.state_dtype}"
        + " --attention-dp"
        * given.attention_dp,
        "date": time.strftime("%Y-%m-%d"),
        "device": "cpu" if on_cpu else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "files": {name: _facts(path) for name, path in paths.items() if path},
        "runs": {},
    }
    modes = {"stock": ("0", False), "replay": ("1", False)} | ({} if on_cpu else {"replay, CUDA graphs": ("1", True)})
    for mode, (switch, graphs) in modes.items():
        os.environ["TRTLLM_REPLAYSSM"] = switch
        _load(paths, on_cpu)
        profile = _profile()
        if switch == "1":
            importlib.import_module(f"{ADAPTER}.model")
        record["profile"] = profile
        record["runs"][mode] = run = _run(profile, given, graphs)
        if (given.checkout / TESTS).is_file() and not graphs:
            run["own_tests"] = _own_tests(given.checkout / TESTS, on_cpu, switch == "0")
        print(f"{mode}: {run}", flush=True)
        doubles.drop_package()
    bound = max(BOUNDS[given.dtype], BOUNDS[given.state_dtype])
    good = all(run["relative_error"] < bound and not _failed(run) for run in record["runs"].values())
    if not on_cpu and not record["runs"]["replay, CUDA graphs"]["captured_graphs"]:
        print(f"no step was captured: more --steps than {WARM_UP} are needed")
        good = False
    record["passed"] = good
    if given.output:
        temporary = given.output.with_suffix(".partial")
        temporary.write_text(json.dumps(record, indent=2) + "\n")
        temporary.replace(given.output)
    print("passed" if good else "FAILED: an output is not the oracle's")
    return 0 if good else 1


def _failed(run: dict) -> list[str]:
    return [name for name, outcome in run.get("own_tests", {}).items() if outcome != "passed"]


def _own_tests(path: Path, on_cpu: bool, stock: bool) -> dict[str, str]:
    """Outcomes by name. State sizes are those that our kernels take."""
    source = path.read_text().replace("d_state=8", "d_state=64").replace("head_dim=8", "head_dim=16")
    if on_cpu:
        source = source.replace('"cuda"', '"cpu"').replace("not torch.cuda.is_available()", "False")
    outcomes = {}

    class Collect:
        def pytest_runtest_logreport(self, report):
            if report.when == "call" or report.outcome != "passed":
                outcomes[report.nodeid.partition("::")[2]] = report.outcome

    skipped = OF_STOCK_STATES[:1] if stock else OF_STOCK_STATES
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_text(source)
        wanted = " and ".join(f"not {word}" for word in skipped)
        pytest.main([str(copy), "-q", "-c", os.devnull, f"--rootdir={folder}", "-p", "no:cacheprovider",
                     "--import-mode=importlib", "-k", wanted],
                    plugins=[Collect()])  # fmt: skip
    return outcomes or {"collection": "failed"}


def _find(checkout: Path, places: list[str]) -> Path | None:
    found = [checkout / TENSORRT_LLM / place for place in places if (checkout / TENSORRT_LLM / place).is_file()]
    if not found and "metadata" not in places[0]:
        raise SystemExit(f"expected {places[0]} under {checkout / TENSORRT_LLM}, found none")
    return found[0] if found else None


def _facts(path: Path) -> dict:
    """git_blob finds the commits that have this text, in a clone: git log --find-object=ID."""
    content = path.read_bytes()
    return {
        "name": path.name,
        "characters": len(content.decode()),
        "sha256": hashlib.sha256(content).hexdigest(),
        "git_blob": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
    }


def _load(paths: dict, on_cpu: bool):
    importlib.import_module(doubles.LOGGER).logger = doubles.Logger()
    for name, path in paths.items():
        if path:
            source = path.read_text()
            if on_cpu:
                source = source.replace('"cuda"', '"cpu"').replace("pin_memory=True", "pin_memory=False")
            module = importlib.import_module(name)
            vars(module).pop("__getattr__", None)
            module.__package__ = name.rpartition(".")[0]
            doubles.run_file(name, path, source)
    manager, mixer = sys.modules[doubles.MANAGER], sys.modules[doubles.MIXER]
    if "use_cpp_mamba_cache_manager" in vars(mixer):  # of another commit than the manager
        mixer.use_cpp_mamba_cache_manager = lambda: False
    metadata = sys.modules.get(f"{doubles.MAMBA}.mamba2_metadata")
    if paths[f"{doubles.MAMBA}.mamba2_metadata"] and on_cpu:  # its kernel's results are read by no kernel here
        metadata.cu_seqlens_to_chunk_indices_offsets_triton = lambda *_, **__: (None, None)
    model = importlib.import_module(doubles.MODEL)
    vars(model).pop("__getattr__", None)
    doubles.make_model(mixer, hasattr(_holder(manager), "update_mamba_states"))


def _holder(manager):
    return getattr(manager, "PythonMambaCacheManager", None) or manager.MambaCacheManager


def _profile() -> str:
    holder = _holder(sys.modules[doubles.MANAGER])
    if not hasattr(holder, "update_mamba_states"):
        return "A"
    return "C" if hasattr(holder, "use_replay_state_update") else "B"


def _run(profile: str, given, graphs: bool) -> dict:
    metadata = vars(sys.modules.get(f"{doubles.MAMBA}.mamba2_metadata") or SimpleNamespace()).get("Mamba2Metadata")
    if metadata is None:
        metadata = lambda rows, chunk: shared.Mamba2Metadata(rows, chunk, profile == "C")  # noqa: E731
    drafts = None if profile == "A" else given.drafts
    start = time.monotonic()
    server = Server(profile, sys.modules[doubles.MODEL], sys.modules[doubles.MANAGER], metadata, drafts=drafts,
                    device=given.device, everything=False, graphs=graphs, attention_dp=given.attention_dp,
                    geometry=GEOMETRIES[given.geometry],
                    dtypes=(getattr(torch, given.dtype), getattr(torch, given.state_dtype)))  # fmt: skip
    holder = getattr(server.manager, "_impl", server.manager)
    for _ in range(given.steps):
        server.step()
    cache = vars(getattr(holder, "mamba_cache", holder))
    run = {
        "steps": given.steps,
        "seconds": round(time.monotonic() - start, 1),
        "relative_error": server.error,
        "worst_relative_error_of_a_row": server.worst,
        "outputs_of_padding_finite": bool(server.finite),
        **server.counts,
        "captured_graphs": len(server.captured),
        "bytes": {
            name: cache[name].numel() * cache[name].element_size()
            for name in ("temporal", "ssm_states", "intermediate_ssm", "intermediate_conv_window")
            if isinstance(cache.get(name), torch.Tensor)
        },
    }
    decoder = getattr(holder, "_replayssm", None)
    if decoder is not None:
        decoder.pool.validate()
        counts = decoder.pool.stats()
        run |= {name: counts[name] for name in ("tokens", "flushes", "state_reads", "state_writes")}
        run["bytes"]["rings and cursors"] = decoder.pool.data.numel() + decoder.pool.table.numel()
        run["same_memory"] = decoder.pool.checkpoint.data_ptr() == server.manager.get_ssm_states(0).data_ptr()
    return run


if __name__ == "__main__":
    sys.exit(main())
