# SPDX-License-Identifier: Apache-2.0
"""Imported in the server and in every worker: patches TensorRT-LLM there and registers the model class.

Workers import this module because `ReplayNemotronHForCausalLM`, sent to them by reference, lives in it.
"""

from .install import install

ReplayNemotronHForCausalLM = install(__name__, "ReplayNemotronHForCausalLM")
