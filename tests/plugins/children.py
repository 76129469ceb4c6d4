# SPDX-License-Identifier: Apache-2.0
"""What tests run in processes of their own."""

import graph
from registry import NAMESPACE, PLUGINS, Registry, bindings

from trtllm_replayssm import plugins


def creators(flavor):
    """Every plugin of the library, created in both phases."""
    registry = Registry(flavor)
    trt = registry.trt
    listed = [c for c in registry.registry.all_creators if c.plugin_namespace == NAMESPACE]
    created = []
    for plugin in PLUGINS:
        creator = registry.creator(plugin)
        for phase in (trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME):
            made = registry.create(plugin, graph.fields(plugin), phase)
            core = made.get_capability_interface(trt.PluginCapabilityType.CORE)
            build = made.get_capability_interface(trt.PluginCapabilityType.BUILD)
            created.append(
                [
                    [core.plugin_name, core.plugin_version, core.plugin_namespace],
                    [field.name for field in creator.field_names],
                    [build.interface_info.kind, build.interface_info.major, build.num_outputs],
                ]
            )
    return {"listed": [[c.name, c.plugin_version] for c in listed], "created": created, "errors": registry.errors()}


def refusal(flavor):
    registry = Registry(flavor)
    changed = graph.fields("ReplaySsmFlush", head_dim=12)
    made = registry.create("ReplaySsmFlush", changed, registry.trt.TensorRTPhase.BUILD)
    return made is None, registry.errors(), plugins.last_error()


def public_entry_point(flavor):
    """What a user writes: a registry and trtllm_replayssm.plugins, twice."""
    trt = bindings(flavor)
    registry = trt.get_plugin_registry()
    before = plugins.missing(registry)
    plugins.register(registry)
    plugins.register(registry)
    return before, plugins.missing(registry)


def preloaded(flavor):
    registry = bindings(flavor).get_plugin_registry()
    names = [c.name for c in registry.all_creators if c.plugin_namespace == NAMESPACE]
    return sorted(names), plugins.missing(registry)
