# SPDX-License-Identifier: Apache-2.0
"""Writes model repositories: a folder for each model, with config.pbtxt and versions."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .interface import INTERFACES, Interface
from .settings import Settings

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,127}", re.ASCII)
_MODEL = """\
# Written by `trtllm-replayssm triton-repo`. The package must be installed in the Python that Triton's stub uses: the
# first python3 in PATH. Nothing is imported from the folder that the server was started in, which the stub puts first.
import sys

sys.path[:] = [path for path in sys.path if path]
from trtllm_replayssm.integrations.triton_server.model import TritonPythonModel  # noqa: E402, F401
"""


def write_model(repository: Path, name: str, settings: Settings) -> Path:
    """Writes REPO/name and returns it.

    Raises:
        CheckpointError, BundleError: the directory is incomplete or not understood.
        ValueError: a name that cannot be a folder and a part of an address, or a setting that the model cannot have.
        FileExistsError: there is such a model already.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"name is {name!r}, expected letters, digits, '_', '-' and '.', the first a letter or digit")
    settings.check()
    with new_model(repository, name) as folder:
        write_config(folder, _config(name, settings))
        (folder / "1").mkdir()
        (folder / "1" / "model.py").write_text(_MODEL)
    return repository / name


@contextmanager
def new_model(repository: Path, name: str) -> Iterator[Path]:
    """A folder to fill, which becomes REPO/name at the end and vanishes on an error."""
    target = repository / name
    if target.exists():
        raise FileExistsError(f"{target}: exists already")
    repository.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=repository))
    try:
        yield folder
        folder.chmod(0o755)
        os.rename(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def write_config(folder: Path, config) -> None:
    """config: a ModelConfig message, so that whatever is written follows Triton's schema."""
    from google.protobuf import text_format

    (folder / "config.pbtxt").write_text(text_format.MessageToString(config))


def parse_config(text: str, source: str):
    """The ModelConfig message of a config.pbtxt. ValueError names `source` and what does not follow the schema."""
    from google.protobuf import text_format

    try:
        return text_format.Parse(text, model_config_pb2().ModelConfig())
    except text_format.ParseError as error:
        raise ValueError(f"{source}: no model configuration: {error}") from None


def model_config_pb2():
    try:
        from tritonclient.grpc import model_config_pb2 as schema
    except ImportError as error:
        raise ImportError(f"Triton's schema is missing ({error}): pip install 'trtllm-replayssm[triton]'") from None
    return schema


def _config(name: str, settings: Settings):
    schema = model_config_pb2()
    interface: Interface = INTERFACES[settings.interface]
    config = schema.ModelConfig(name=name, backend="python", max_batch_size=1 if interface.batched else 0)
    config.model_transaction_policy.decoupled = True
    # One instance, whose engine batches: the server hands every request over at once.
    config.instance_group.add(count=1, kind=schema.ModelInstanceGroup.KIND_CPU)
    for each in interface.inputs:
        # Without a batch dimension a text is any number of texts, of which the model takes one.
        several = each.many or (each.required and not interface.batched)
        config.input.add(
            name=each.name,
            data_type=_type(schema, each.type),
            dims=[-1 if several else 1],
            optional=not each.required,
        )
    for each in interface.outputs:
        text = each.type == "STRING"
        config.output.add(name=each.name, data_type=_type(schema, each.type), dims=[-1 if text else 1])
    for key, value in settings.parameters().items():
        config.parameters[key].string_value = value
    return config


def _type(schema, name: str) -> int:
    return schema.DataType.Value(f"TYPE_{name}")
