# SPDX-License-Identifier: Apache-2.0
"""ReplaySSM under `trtllm-serve` (TensorRT-LLM's PyTorch backend), for `nemotron_h` models.

`trtllm-serve --custom_module_dirs "$(trtllm-replayssm trtllm-module-dir)"` imports the directory that `MODULE_DIR`
names. The option puts the directory's parent first on `sys.path`, in the server and in its workers, so the directory
lies alone there: a neighbour would shadow installed packages. It registers a model class under the architecture's own
name; that is what carries this package into the workers, which import the classes that they are sent.

    upstream.json   the facts about TensorRT-LLM that all this rests on, and which profile needs which
    probe.py        tells the profile of the installed TensorRT-LLM by looking, not by version
    settings.py     the TRTLLM_REPLAYSSM_* variables
    install.py      the patches: mixer class, its decode kernels, the cache manager
    decode.py       ReplaySSM over the states of one cache manager
    shadow.py       the stock kernel beside ours, now and then
    model.py        what the directory imports: installs, and holds the registered class

Nothing here is imported before it is asked for; only model.py needs TensorRT-LLM.
"""

from pathlib import Path

MODULE_DIR = Path(__file__).parent / "custom_modules" / "trtllm_replayssm_serve"
