# SPDX-License-Identifier: Apache-2.0
"""The model class for `trtllm-build --model_cls_file`: TensorRT-LLM's attention and MLP, our plugins for Mamba-2.

The runtime gives a recurrent layer the address of its slots (state_io host_pointer) and each sequence's lengths, from
which the plan follows (plan_mode lengths): prompts and decode steps both go through the plugins, which leave nothing to
TensorRT-LLM's own convolution and scan. Layer, parameter and input names are those of checkpoint.py and contract.json.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import tensorrt as trt
from tensorrt_llm._common import default_net
from tensorrt_llm._utils import str_dtype_to_trt
from tensorrt_llm.functional import (
    AttentionMaskType,
    PositionEmbeddingType,
    Tensor,
    cast,
    gather_last_token_logits,
    recv,
    send,
    silu,
    split,
)
from tensorrt_llm.layers import (
    MLP,
    Attention,
    AttentionParams,
    ColumnLinear,
    Embedding,
    KeyValueCacheParams,
    RmsNorm,
    RowLinear,
)
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.models.modeling_utils import PretrainedModel, get_kv_cache_type_from_legacy
from tensorrt_llm.module import Module, ModuleList
from tensorrt_llm.parameter import Parameter
from tensorrt_llm.plugin import current_all_reduce_helper

from ... import MambaGeometry, ReplayConfig, SlotLayout, plugins
from ...builder.engine_config import ACTIVATIONS
from .checkpoint import HEAD_SIZE, SLOT_UNIT, read_block
from .network import add_plugin

plugins.register(trt.get_plugin_registry())


class Replay:
    """What the checkpoint's "replayssm" block says for one rank. geometry: of the rank's share of a layer."""

    def __init__(self, config):
        block = read_block(config)
        tp, whole = config.mapping.tp_size, block["geometry"]
        self.layers: tuple[str, ...] = tuple(block["layers"])
        self.mamba_bias, self.mlp_bias = block["mamba_bias"], block["mlp_bias"]
        self.dt_limit = tuple(math.inf if limit is None else limit for limit in block["time_step_limit"])
        self.geometry = MambaGeometry(
            **{**whole, "num_heads": whole["num_heads"] // tp, "num_groups": whole["num_groups"] // tp}
        )
        self.config = ReplayConfig(
            window=block["window"],
            max_step_tokens=1,
            checkpoint=block["checkpoint_format"],
            read_copy=block["read_copy"],
            activation=ACTIVATIONS[config.dtype],
            seed=int(block["seed"]),
        )
        self.first_head = config.mapping.tp_rank * self.geometry.num_heads
        stride = SlotLayout(self.geometry, self.config).slot_stride
        per_slot = 4 * (config.rnn_hidden_size // config.rnn_head_size) * config.rnn_head_size * config.state_size
        if not stride == per_slot == block["rank_slot_bytes"] or config.rnn_head_size != HEAD_SIZE:
            raise ValueError(
                f"config.json: the runtime would keep {per_slot} bytes a slot (state_size {config.state_size}), "
                f"expected {stride} (state_size {stride // SLOT_UNIT}): convert the checkpoint again with this "
                "trtllm-replayssm"
            )

    def fields(self, num_slots: int) -> dict:
        """Fields that all plugins have."""
        geometry, config = self.geometry, self.config
        return {
            "num_heads": geometry.num_heads,
            "head_dim": geometry.head_dim,
            "num_groups": geometry.num_groups,
            "state_dim": geometry.state_dim,
            "conv_kernel": geometry.conv_kernel,
            "window": config.window,
            "max_step_tokens": 1,
            "checkpoint": config.checkpoint,
            "read_copy": config.read_copy,
            "activation": config.activation,
            "seed": str(config.seed),
            "num_slots": num_slots,
            "state_io": "host_pointer",
            "plan_mode": "lengths",
            "num_layers": self.layers.count("mamba"),
        }


@dataclass(frozen=True)
class Step:
    """What the layers of one network share. plan, table: None on a stage without Mamba layers."""

    fields: dict
    plan: Tensor | None
    table: Tensor | None
    request_types: Tensor
    prompt_lengths: Tensor
    states: dict[int, Tensor]
    use_cache: bool
    kv_cache_params: object
    attention_params: object


class MambaMixer(Module):
    """layer: index among the model's layers; number: among its Mamba layers."""

    def __init__(self, config, replay: Replay, layer: int, number: int):
        super().__init__()
        self.replay, self.layer, self.number = replay, layer, number
        geometry, mapping, tp = replay.geometry, config.mapping, config.mapping.tp_size
        heads, channels = geometry.num_heads, geometry.conv_channels
        self.inner = heads * geometry.head_dim
        self.in_proj = ColumnLinear(
            in_features=config.hidden_size,
            out_features=tp * (self.inner + channels + heads),
            bias=replay.mamba_bias,
            dtype=config.dtype,
            tp_group=mapping.tp_group,
            tp_size=tp,
            gather_output=False,
        )
        self.conv_weight = Parameter(shape=(channels, geometry.conv_kernel), dtype=config.dtype)
        self.conv_bias = Parameter(shape=(channels,), dtype=config.dtype)
        self.A_log = Parameter(shape=(heads,), dtype="float32")
        self.D = Parameter(shape=(heads,), dtype="float32")
        self.dt_bias = Parameter(shape=(heads,), dtype="float32")
        self.norm = RmsNorm(
            normalized_shape=self.inner, num_groups=geometry.num_groups, eps=config.norm_epsilon, dtype=config.dtype
        )
        self.out_proj = RowLinear(
            in_features=tp * self.inner,
            out_features=config.hidden_size,
            bias=replay.mamba_bias,
            dtype=config.dtype,
            tp_group=mapping.tp_group,
            tp_size=tp,
        )

    def forward(self, x: Tensor, step: Step) -> Tensor:
        projected = self.in_proj(x)  # z | x | B | C | dt
        state, geometry, name = step.states[self.layer], self.replay.geometry, f"replayssm.{self.layer}."
        fields = {**step.fields, "layer": self.number, "slot_stride": 0}
        lengths = [step.request_types, step.prompt_lengths]
        xBC, order = add_plugin(
            "ReplayCausalConv",
            name + "conv",
            [step.plan, step.table, projected, self.conv_weight.value, self.conv_bias.value, *lengths, state],
            {**fields, "in_offset": self.inner},
            2,
        )
        (order,) = add_plugin(
            "ReplaySsmFlush",
            name + "flush",
            [step.plan, step.table, self.A_log.value, order, state],
            {**fields, "first_head": self.replay.first_head},
            1,
        )
        (y,) = add_plugin(
            "ReplaySsmStep",
            name + "step",
            [step.plan, step.table, xBC, projected, self.A_log.value, self.D.value, self.dt_bias.value]
            + [*lengths, order, state],
            {
                **fields,
                "first_head": self.replay.first_head,
                "dt_offset": self.inner + geometry.conv_channels,
                "dt_min": float(self.replay.dt_limit[0]),
                "dt_max": float(self.replay.dt_limit[1]),
            },
            1,
        )
        rest = geometry.conv_channels + geometry.num_heads
        gate, _ = split(projected, [self.inner, rest], dim=-1)
        return self.out_proj(self.norm(y * silu(gate)))


class Layer(Module):
    """Pre-norm residual layer. attention: index among the stage's attention layers."""

    def __init__(self, config, replay: Replay, layer: int, attention: int):
        super().__init__()
        self.kind, self.dtype, mapping = replay.layers[layer], config.dtype, config.mapping
        common = dict(dtype=config.dtype, tp_group=mapping.tp_group, tp_size=mapping.tp_size)
        self.input_layernorm = RmsNorm(
            normalized_shape=config.hidden_size, num_groups=1, eps=config.norm_epsilon, dtype=config.dtype
        )
        if self.kind == "mamba":
            self.mamba = MambaMixer(config, replay, layer, replay.layers[:layer].count("mamba"))
        elif self.kind == "attention":
            self.attention = Attention(
                local_layer_idx=attention,
                hidden_size=config.hidden_size,
                attention_head_size=config.head_size,
                num_attention_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                max_position_embeddings=config.max_position_embeddings,
                attention_mask_type=AttentionMaskType.causal,
                bias=False,
                position_embedding_type=PositionEmbeddingType.learned_absolute,
                tp_rank=mapping.tp_rank,
                quant_mode=config.quant_mode,
                **common,
            )
        elif self.kind == "mlp":
            self.mlp = MLP(
                hidden_size=config.hidden_size,
                ffn_hidden_size=config.intermediate_size,
                hidden_act=config.hidden_act,
                bias=replay.mlp_bias,
                quant_mode=config.quant_mode,
                **common,
            )
        else:
            raise ValueError(f"layer {layer} is {self.kind!r}: not to be had on TensorRT-LLM 1.2's engine path")

    def forward(self, residual: Tensor, step: Step) -> Tensor:
        """The sum of the layers is kept in fp32, like the embedded runtime's."""
        x = self.input_layernorm(cast(residual, self.dtype))
        if self.kind == "mamba":
            x = self.mamba(x, step)
        elif self.kind == "mlp":
            x = self.mlp(x)
        else:
            x = self.attention(
                x,
                use_cache=step.use_cache,
                kv_cache_params=step.kv_cache_params,
                attention_params=step.attention_params,
            )
            if step.use_cache:  # beside it what the cache holds then, which is paged
                x = x[0]
        return residual + cast(x, "float32")


class NemotronH(Module):
    """The layers of a stage; the first one embeds, the last one norms."""

    def __init__(self, config, replay: Replay):
        super().__init__()
        mapping = self.mapping = config.mapping
        self.dtype = config.dtype
        self.stage = list(mapping.pp_layers(config.num_hidden_layers))
        if mapping.is_first_pp_rank():
            self.vocab_embedding = Embedding(
                num_embeddings=config.vocab_size, embedding_dim=config.hidden_size, dtype=config.dtype
            )
        kinds = [replay.layers[layer] for layer in self.stage]
        self.layers = ModuleList(
            [Layer(config, replay, layer, kinds[:place].count("attention")) for place, layer in enumerate(self.stage)]
        )
        if mapping.is_last_pp_rank():
            self.ln_f = RmsNorm(
                normalized_shape=config.hidden_size, num_groups=1, eps=config.norm_epsilon, dtype=config.dtype
            )

    def forward(self, input_ids: Tensor | None, hidden_states: Tensor | None, step: Step) -> Tensor:
        if self.mapping.is_first_pp_rank():
            hidden_states = self.vocab_embedding(input_ids)
        else:
            hidden_states = recv(hidden_states, self.mapping.prev_pp_rank())
        hidden_states = cast(hidden_states, "float32")
        for layer in self.layers:
            hidden_states = layer(hidden_states, step)
        hidden_states = cast(hidden_states, self.dtype)
        if self.mapping.is_last_pp_rank():
            return self.ln_f(hidden_states)
        return send(hidden_states, self.mapping.next_pp_rank())


class ReplayNemotronHForCausalLM(PretrainedModel):
    """A `nemotron_h` model without MoE layers, of a checkpoint that `trtllm-replayssm convert` wrote."""

    def __init__(self, config):
        super().__init__(config)
        self.config, self.replay = config, Replay(config)
        self.dtype = str_dtype_to_trt(config.dtype)
        self.logits_dtype = str_dtype_to_trt(config.logits_dtype)
        self.transformer = NemotronH(config, self.replay)
        if config.mapping.is_last_pp_rank():
            self.lm_head = ColumnLinear(
                in_features=config.hidden_size,
                out_features=config.vocab_size,
                bias=False,
                dtype=config.dtype,
                tp_group=config.mapping.tp_group,
                tp_size=config.mapping.tp_size,
                gather_output=True,
            )

    def forward(
        self,
        input_ids,
        hidden_states,
        last_token_ids,
        slot_mapping,
        sequence_length,
        context_lengths,
        host_context_lengths,
        host_request_types,
        rnn_states,
        use_cache,
        kv_cache_params,
        attention_params,
        gather_context_logits,
        num_slots,
    ):
        """Everything by the names that prepare_inputs gives."""
        plan = table = None
        fields = self.replay.fields(num_slots)
        if rnn_states:
            plan, table = add_plugin(
                "ReplaySsmPlan",
                "replayssm.plan",
                [slot_mapping, host_request_types, context_lengths, sequence_length, last_token_ids],
                fields,
                2,
            )
            # Its first words are the error word: which row was refused, and why.
            table.mark_output("replayssm_status", str_dtype_to_trt("int32"))
        step = Step(
            fields=fields,
            plan=plan,
            table=table,
            request_types=host_request_types,
            prompt_lengths=host_context_lengths,
            states=rnn_states,
            use_cache=use_cache,
            kv_cache_params=kv_cache_params,
            attention_params=attention_params,
        )
        hidden_states = self.transformer(input_ids, hidden_states, step)
        if not self.config.mapping.is_last_pp_rank():
            hidden_states.mark_output("hidden_states_output", self.dtype)
            return hidden_states
        if not gather_context_logits:
            hidden_states = gather_last_token_logits(hidden_states, last_token_ids, True)
        logits = self.lm_head(hidden_states)
        logits.mark_output("logits", self.logits_dtype)
        return logits

    def prepare_inputs(
        self,
        max_batch_size,
        max_input_len,
        max_seq_len,
        max_num_tokens,
        use_cache=True,
        max_beam_width=1,
        opt_num_tokens=None,
        opt_batch_size=0,
        prompt_embedding_table_size=0,
        max_draft_len=0,
        speculative_decoding_draft_tokens_external=False,
        gather_context_logits=False,
        lora_target_modules=None,
    ):
        """The engine's inputs, and what else forward takes, by name.

        Raises:
            ValueError: an option that the C++ runtime refuses for recurrent models, or that would corrupt states there.
        """
        net, mapping = default_net().plugin_config, self.config.mapping
        kinds = [self.replay.layers[layer] for layer in self.transformer.stage]
        attention = "attention" in self.replay.layers
        _require(
            max_beam_width == 1, "max_beam_width", max_beam_width, 1, "RNN based model doesn't support beam search"
        )
        _require(
            max_draft_len == 0 and not speculative_decoding_draft_tokens_external,
            "max_draft_len",
            max_draft_len,
            0,
            "RNN based model doesn't support speculative decoding",
        )
        _require(
            max_num_tokens >= max_input_len,
            "max_num_tokens",
            max_num_tokens,
            f"at least max_input_len {max_input_len}",
            "a prompt is one piece: RNN based model doesn't support Chunked Context",
        )
        _require(prompt_embedding_table_size == 0, "prompt tuning", prompt_embedding_table_size, 0, "not in this model")
        _require(not lora_target_modules, "LoRA", lora_target_modules, "none", "not in this model")
        flags = {"paged_state": True, "remove_input_padding": True, "mamba_conv1d_plugin": True}
        if attention:
            flags |= {"paged_kv_cache": True, "gpt_attention_plugin": True, "use_paged_context_fmha": False}
        for flag, expected in flags.items():
            why = "the C++ runtime needs it" if expected else "reused KV blocks would skip tokens that the state needs"
            given = getattr(net, flag)
            _require(bool(given) == expected, flag, given, "enable" if expected else "disable", why)

        profiles, ranges = self.get_profiles_ranges(
            max_batch_size=max_batch_size,
            max_beam_width=1,
            max_input_len=max_input_len,
            max_num_tokens=max_num_tokens,
            max_draft_len=0,
            opt_batch_size=opt_batch_size,
            opt_num_tokens=opt_num_tokens,
            enable_ctx_gen_opt_profiles=False,
            multiple_profiles=net.multiple_profiles,
            kv_cache_type=get_kv_cache_type_from_legacy(use_cache, net.paged_kv_cache),
        )
        rows, tokens = ("batch_size_beam_width", ranges["bb_range"]), ("num_tokens", ranges["num_tokens_range"])
        if mapping.tp_size > 1:
            current_all_reduce_helper().set_workspace_tensor(mapping, profiles)

        def of_rows(name: str, dimension=rows) -> Tensor:
            return Tensor(name=name, dtype=trt.int32, shape=[-1], dim_range=OrderedDict([dimension]))

        inputs = {"input_ids": None, "hidden_states": None}
        if mapping.is_first_pp_rank():
            inputs["input_ids"] = of_rows("input_ids", tokens)
        else:
            hidden = ("hidden_size", [self.config.hidden_size] * profiles)
            inputs["hidden_states"] = Tensor(
                name="hidden_states_input",
                dtype=self.dtype,
                shape=[-1, self.config.hidden_size],
                dim_range=OrderedDict([tokens, hidden]),
            )
        kv_cache_params = attention_params = None
        if "attention" in kinds:
            given = self._attention_inputs(
                kinds.count("attention"), max_batch_size, max_input_len, max_seq_len, use_cache, profiles
            )
            names = ("sequence_length", "context_lengths", "host_context_lengths", "host_request_types")
            lengths = {name: given.pop(name) for name in names}
            perf = {name: given.pop(name) for name in ("host_runtime_perf_knobs", "host_context_progress")}
            attention_params = AttentionParams(**lengths, **perf, max_context_length=max_input_len)
            kv_cache_params = KeyValueCacheParams(**given)
        else:
            names = ("sequence_length", "context_lengths", "host_context_lengths", "host_request_types")
            lengths = {name: of_rows(name) for name in names}
        one = OrderedDict([("buffer_count", [1] * profiles)])
        states = {
            layer: Tensor(name=f"rnn_state_ptr_{layer}", dtype=str_dtype_to_trt("int64"), shape=[1], dim_range=one)
            for layer, kind in zip(self.transformer.stage, kinds, strict=True)
            if kind == "mamba"
        }
        slots = of_rows("slot_mapping", ("batch_size", ranges["bb_range"])) if states else None
        return {
            **inputs,
            **lengths,
            "last_token_ids": of_rows("last_token_ids", ("batch_size_last_token_ids", ranges["bbd_range"])),
            "slot_mapping": slots,
            "rnn_states": states,
            "use_cache": use_cache,
            "kv_cache_params": kv_cache_params,
            "attention_params": attention_params,
            "gather_context_logits": gather_context_logits,
            # Micro batches: the stages of a pipeline, or two where the runtime overlaps steps.
            "num_slots": max_batch_size * max(mapping.pp_size, 2),
        }

    def _attention_inputs(self, layers, max_batch_size, max_input_len, max_seq_len, use_cache, profiles) -> dict:
        """As if there were no pipeline and no other layers: upstream counts attention layers among `num_layers` here,
        and among all layers there."""
        net, mapping, config = default_net().plugin_config, self.config.mapping, self.config
        stage = Mapping(world_size=mapping.tp_size, rank=mapping.tp_rank, tp_size=mapping.tp_size, pp_size=1)
        given = self.prepare_attention_inputs(
            max_batch_size=max_batch_size,
            max_beam_width=1,
            max_input_len=max_input_len,
            max_seq_len=max_seq_len,
            num_kv_heads=config.num_key_value_heads,
            head_size=config.head_size,
            num_layers=layers,
            kv_dtype=str_dtype_to_trt(config.kv_dtype),
            num_profiles=profiles,
            enable_ctx_gen_opt_profiles=False,
            remove_input_padding=True,
            use_gpt_attention_plugin=net.gpt_attention_plugin,
            kv_cache_type=get_kv_cache_type_from_legacy(use_cache, net.paged_kv_cache),
            tokens_per_block=net.tokens_per_block,
            mapping=stage,
            streamingllm=net.streamingllm,
        )
        given.pop("attention_mask", None)
        return given


def _require(good: bool, name: str, given, expected, why: str) -> None:
    if not good:
        raise ValueError(f"{name}: expected {expected}, got {given} ({why})")
