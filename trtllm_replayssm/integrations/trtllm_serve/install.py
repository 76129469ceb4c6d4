# SPDX-License-Identifier: Apache-2.0
"""Puts ReplaySSM into TensorRT-LLM. Installing twice, or in any order with other imports, is as good as once.

Patched, each by name (upstream.json):
- the class `Mamba2Mixer` that models look up: a subclass that tells the kernels which step they belong to. Projections,
  convolution, prefill and norm stay stock;
- the decode kernels in the mixer's module: inside of such a step ReplaySSM answers, elsewhere the stock kernel;
- the cache manager's constructor: makes the rings before the KV pool takes the rest of the memory, so that they are
  counted, and leaves out the per-draft states (`intermediate_ssm`), which nothing reads any more;
- its update_mamba_states: commits, and promotes the convolution window;
- its prepare_resources and shutdown: find requests whose prompt was processed elsewhere, look at the error word, tell
  the traffic.

A manager is touched only where mixers of ours were built; other hybrid models in the process stay stock.
"""

import inspect
import os
import threading
import warnings
from dataclasses import replace
from functools import wraps

import torch

from .decode import Head, ReplayDecoder, States
from .log import logger
from .probe import Mismatch, Upstream, facts, probe, switches
from .settings import Settings

ARCHITECTURE = "NemotronHForCausalLM"
_DECODER = "_replayssm"  # where a manager keeps its ReplayDecoder
_MARK = "_replayssm_patched"
_step = threading.local()


def install(module: str, name: str) -> type | None:
    """Probes, patches and registers.

    Args:
        module, name: where the caller keeps the result, so that it can be sent to workers by reference.

    Returns:
        the registered model class; None if ReplaySSM is switched off, or TensorRT-LLM stays stock after a mismatch.

    Raises:
        ValueError: a TRTLLM_REPLAYSSM* variable that is none or has no such value.
        Mismatch: TensorRT-LLM does not fit, and the settings refuse a fallback.
    """
    settings = Settings.of(os.environ)
    if not settings.enabled:
        logger.info("ReplaySSM is switched off by TRTLLM_REPLAYSSM=0")
        return None
    try:
        upstream = probe()
        os.environ.update(switches(upstream.profile, os.environ))
    except Mismatch as error:
        _refuse(settings, error)
        return None
    if not hasattr(upstream.mixer, _MARK):
        _patch_kernels(upstream, settings)
        _patch_managers(upstream, settings)
        upstream.model.Mamba2Mixer = _mixer_class(upstream, settings)
        setattr(upstream.mixer, _MARK, upstream.model.Mamba2Mixer)
        logger.info(f"ReplaySSM: TensorRT-LLM has profile {upstream.profile}: {facts()['profiles'][upstream.profile]}")
    stock = upstream.model.NemotronHForCausalLM
    model = type(name, (stock,), {"__module__": module, "__doc__": "nemotron_h, decoding with ReplaySSM."})
    return upstream.model.register_auto_model(ARCHITECTURE)(model) or model


def _refuse(settings: Settings, error: Mismatch):
    """Raises, or warns loudly."""
    if not settings.fall_back:
        raise Mismatch(f"{error} (TRTLLM_REPLAYSSM_ON_MISMATCH=fallback decodes with the stock kernels instead)")
    text = f"ReplaySSM is OFF, the stock kernels decode: {error}"
    logger.warning(text)
    warnings.warn(text, stacklevel=3)


# ---- the mixer -----------------------------------------------------------------------------------------------------


def _mixer_class(upstream: Upstream, settings: Settings) -> type:
    stock = upstream.mixer.Mamba2Mixer

    class ReplayMamba2Mixer(stock):
        """A Mamba2Mixer whose decode kernel is ReplaySSM."""

        built = 0
        rounds = False  # whether a configuration asks for stochastic rounding

        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            ReplayMamba2Mixer.built += 1
            for given in (*arguments, *named.values()):
                asked = getattr(getattr(given, "quant_config", None), "mamba_ssm_stochastic_rounding", False)
                ReplayMamba2Mixer.rounds = ReplayMamba2Mixer.rounds or bool(asked)
            self._head = None

        def post_load_weights(self):
            inherited = getattr(super(), "post_load_weights", None)
            if inherited:
                inherited()
            self._head = None

        def forward(self, hidden_states, attn_metadata, mamba_metadata, *arguments, **named):
            if torch.compiler.is_compiling():
                raise Mismatch("torch_compile_config: expected none, ReplaySSM's steps are not traced")
            decoder, holder = _decoder_of(attn_metadata.kv_cache_manager, settings)
            call = (hidden_states, attn_metadata, mamba_metadata, *arguments)
            if decoder is None:
                return super().forward(*call, **named)
            layer = holder.mamba_layer_offsets[self.layer_idx]
            contexts = attn_metadata.num_contexts
            slots = _slots(attn_metadata, mamba_metadata)[:contexts]
            if contexts and layer == 0:
                decoder.adopt(slots)
            _step.current = (self, decoder, holder, layer, contexts)
            try:
                result = super().forward(*call, **named)
            finally:
                _step.current = None
            if contexts:
                decoder.refresh(layer, slots)
            return result

        def head(self) -> Head:
            """The weights as our ops take them: A_log of A = -exp(A_log)."""
            if self._head is None:
                self._head = Head(torch.log(-self.A.detach().float()), self.D.detach(), self.dt_bias.detach())
            return self._head

    return ReplayMamba2Mixer


def _decoder_of(manager, settings: Settings) -> tuple[ReplayDecoder | None, object]:
    """The decoder of a cache manager, and the object that holds the states (a facade has it as `_impl`)."""
    holder = getattr(manager, "_impl", manager)
    if not hasattr(holder, _DECODER):
        known = "a Python or Mixed cache manager, made after the model"
        _refuse(settings, Mismatch(f"kv_cache_manager: expected {known}, got {type(manager).__name__}"))
        setattr(holder, _DECODER, None)
    return getattr(holder, _DECODER), holder


def _slots(attn_metadata, mamba_metadata) -> torch.Tensor:
    """Slots of the batch's rows, contexts first, where the mixer of this TensorRT-LLM takes them from."""
    slots = getattr(mamba_metadata, "state_indices", None)
    return attn_metadata.kv_cache_manager.get_state_indices() if slots is None else slots


# ---- its kernels ---------------------------------------------------------------------------------------------------


def _patch_kernels(upstream: Upstream, settings: Settings):
    known = facts()
    for name in known["decode_kernels"]:
        if hasattr(upstream.mixer, name):
            setattr(upstream.mixer, name, _decode_kernel(getattr(upstream.mixer, name), settings))
    for name, reason in known["other_kernels"].items():
        if hasattr(upstream.mixer, name):
            setattr(upstream.mixer, name, _refused_kernel(getattr(upstream.mixer, name), reason))


def _decode_kernel(stock, settings: Settings):
    @wraps(stock)
    def selective_state_update(state, x, dt, A, B, C, D=None, *positional, **named):
        current = getattr(_step, "current", None)
        if current is None:
            return stock(state, x, dt, A, B, C, D, *positional, **named)
        if positional or not named.get("dt_softplus"):
            raise Mismatch("selective_state_update: expected seven positional arguments and dt_softplus, got others")
        mixer, decoder, holder, layer, contexts = current
        rounds = decoder.pool.config.checkpoint == "fp16_sr"
        if named.get("rand_seed") is not None and not rounds and settings.stochastic_rounding == "auto":
            raise Mismatch(
                "selective_state_update: got a rand_seed, for stochastic rounding, of which neither the mixer's "
                "configuration nor the cache manager has told: set TRTLLM_REPLAYSSM_STOCHASTIC_ROUNDING to 1 or 0"
            )
        slots = named["state_batch_indices"]
        rows = slots.numel()
        dummies = getattr(holder, "_dummy_request_mask", None)
        if dummies is not None:
            dummies = dummies[contexts : contexts + rows]
        out, z = named.get("out"), named.get("z")
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)

        def shadow(states, slots, result):
            alone = {"disable_state_update": True} if x.dim() == 4 else {}
            stock(states, x, dt, A, B, C, D, dt_bias=named["dt_bias"], dt_softplus=True, state_batch_indices=slots,
                  out=result, **alone)  # fmt: skip

        decoder.step(layer, mixer.head(), x, dt[..., 0], B, C, slots, dummies, out, shadow)
        if z is not None:
            out.copy_(out.float() * torch.nn.functional.silu(z.float()))
        return out

    return selective_state_update


def _refused_kernel(stock, reason: str):
    @wraps(stock)
    def refused(*arguments, **named):
        if getattr(_step, "current", None) is not None:
            raise Mismatch(f"{stock.__name__} was called in place of selective_state_update: {reason}")
        return stock(*arguments, **named)

    return refused


# ---- the cache manager ---------------------------------------------------------------------------------------------


def _patch_managers(upstream: Upstream, settings: Settings):
    holder = upstream.holder
    holder.__init__ = _constructor(holder, upstream, settings)
    holder.prepare_resources = _prepare_resources(holder.prepare_resources, settings)
    holder.shutdown = _shutdown(holder.shutdown)
    if upstream.profile == "A":
        hybrid = upstream.manager.MambaHybridCacheManager
        hybrid.__init__ = _without_speculation(hybrid.__init__, upstream)
    else:
        holder.update_mamba_states = _update_mamba_states(holder.update_mamba_states)
    for name, reason in facts()["refused_managers"].items():
        refused = getattr(upstream.manager, name, None)
        if refused is not None:
            refused.__init__ = _refused_constructor(refused, reason, upstream, settings)


def _built(upstream: Upstream) -> bool:
    """Whether this process has mixers of ours."""
    return upstream.model.Mamba2Mixer.built > 0


def _constructor(holder: type, upstream: Upstream, settings: Settings):
    stock = holder.__init__
    signature = inspect.signature(stock)

    @wraps(stock)
    def __init__(self, *arguments, **named):
        if not _built(upstream):
            return stock(self, *arguments, **named)
        call = signature.bind(self, *arguments, **named)
        call.apply_defaults()
        given = dict(call.arguments)
        drafts, rows = given.get("speculative_num_draft_tokens"), given.get("spec_state_size")
        if drafts is not None:
            call.arguments["spec_state_size"] = 0  # of per-draft states, and of the windows, which are made below
        stock(*call.args, **call.kwargs)
        try:
            upstream.require_instance(self)
            if given.get("use_replay_state_update"):
                raise Mismatch("the native replay is on: set TRTLLM_USE_MAMBA_REPLAY=0")
            if drafts is not None and given["mapping"].pp_size > 1:
                ranks = given["mapping"].pp_size
                raise Mismatch(f"MTP: expected pp_size 1, got {ranks}: are all ranks told what was accepted? Not known")
            if drafts is not None:
                self.spec_state_size = rows
                self.mamba_cache = _with_windows(self.mamba_cache, rows, drafts + 1)
            states = _states_of(self)
            decoder = None
            if len(states.ssm):
                states.conv.zero_()  # padding requests read slots that no prompt has filled
                states.ssm.zero_()
                rounding = bool(given.get("mamba_ssm_stochastic_rounding")) or upstream.model.Mamba2Mixer.rounds
                decoder = ReplayDecoder(states, (drafts or 0) + 1, rounding, _first_head(given, states), settings)
                _tell(decoder)
        except Mismatch as error:
            _refuse(settings, error)
            decoder = None
        if decoder is None:  # refused, or a pipeline rank of attention layers only
            stock(self, *arguments, **named)
        setattr(self, _DECODER, decoder)
        return None

    return __init__


def _with_windows(cache, rows: int, tokens: int):
    """The manager's dataclass with convolution windows [layers, rows, tokens, channels, K-1]."""
    conv = cache.conv
    shape = (conv.shape[0], rows, tokens, *conv.shape[2:])
    return replace(cache, intermediate_conv_window=torch.zeros(shape, dtype=conv.dtype, device=conv.device))


def _states_of(holder) -> States:
    cache = getattr(holder, "mamba_cache", None)
    if cache is None:
        return States(holder.conv_states, holder.ssm_states, None)
    return States(cache.conv, cache.temporal, getattr(cache, "intermediate_conv_window", None))


def _first_head(given: dict, states: States) -> int:
    mapping = given["mapping"]
    return 0 if mapping.enable_attention_dp else mapping.tp_rank * states.ssm.shape[2]


def _tell(decoder: ReplayDecoder):
    pool, config = decoder.pool, decoder.pool.config
    logger.info(
        f"ReplaySSM decodes {pool.num_layers} Mamba layers: window {config.window}, up to {config.max_step_tokens} "
        f"tokens a step, state {config.checkpoint} (the manager's own), read copy {config.read_copy}; rings and "
        f"cursors of {pool.num_slots} slots take {(pool.data.numel() + pool.table.numel()) / 2**30:.2f} GiB"
    )


def _update_mamba_states(stock):
    @wraps(stock)
    def update_mamba_states(self, attn_metadata, num_accepted_tokens, *arguments, **named):
        decoder = getattr(self, _DECODER, None)
        if decoder is None:
            return stock(self, attn_metadata, num_accepted_tokens, *arguments, **named)
        if any(argument is not None for argument in arguments[1:]) or named.get("accepted_leaf_positions") is not None:
            raise Mismatch("speculation: expected a chain of drafts, got a tree, whose branches no ring can roll back")
        decoder.accept(attn_metadata.num_contexts, num_accepted_tokens)
        return None

    return update_mamba_states


def _prepare_resources(stock, settings: Settings):
    """Every step, on the host, outside of CUDA graphs."""
    steps = 0

    @wraps(stock)
    def prepare_resources(self, scheduled_batch, *arguments, **named):
        nonlocal steps
        result = stock(self, scheduled_batch, *arguments, **named)
        decoder = getattr(self, _DECODER, None)
        if decoder is not None:
            steps += 1
            _adopt_strangers(self, decoder, scheduled_batch)
            if settings.check and steps % settings.check == 0:
                _check(decoder)
        return result

    return prepare_resources


def _adopt_strangers(holder, decoder: ReplayDecoder, scheduled_batch):
    """Requests that decode here without ever having been a context here (disaggregated serving): their states lie in
    the manager's tensors already.
    """
    slots = holder.mamba_cache_index
    decoder.known.intersection_update(slots)
    decoder.known.update(request.py_request_id for request in scheduled_batch.context_requests)
    strangers = [
        request.py_request_id
        for request in scheduled_batch.generation_requests
        if request.py_request_id not in decoder.known and not getattr(request, "is_dummy", False)
    ]
    if not strangers:
        return
    text = "whose prompt was not processed here: its state is taken from the manager as it lies there"
    logger.warning(f"ReplaySSM: request {strangers[0]} decodes {text} (this is said for the first of a step)")
    decoder.known.update(strangers)
    taken = torch.tensor([slots[name] for name in strangers], dtype=torch.int32, device=decoder.pool.device)
    decoder.adopt(taken)
    for layer in range(decoder.num_layers):
        decoder.refresh(layer, taken)


def _check(decoder: ReplayDecoder):
    try:
        decoder.pool.validate()
    except ValueError as error:
        logger.error(f"ReplaySSM: wrong outputs are possible: {error}")


def _shutdown(stock):
    @wraps(stock)
    def shutdown(self, *arguments, **named):
        decoder = getattr(self, _DECODER, None)
        if decoder is not None:
            _check(decoder)
            counts = decoder.pool.stats()
            told = ("tokens", "flushes", "state_reads", "state_writes", "record_reads", "record_writes")
            logger.info("ReplaySSM, per Mamba layer: " + ", ".join(f"{name} {counts[name]}" for name in told))
            setattr(self, _DECODER, None)
        return stock(self, *arguments, **named)

    return shutdown


def _without_speculation(stock, upstream: Upstream):
    @wraps(stock)
    def __init__(self, *arguments, **named):
        if _built(upstream) and named.get("spec_config") is not None:
            raise Mismatch(
                "MTP: expected a TensorRT-LLM that keeps Mamba states for drafts (1.3 or later), got profile A, whose "
                "verification would run over rejected drafts; remove speculative_config"
            )
        return stock(self, *arguments, **named)

    return __init__


def _refused_constructor(refused: type, reason: str, upstream: Upstream, settings: Settings):
    stock = refused.__init__

    @wraps(stock)
    def __init__(self, *arguments, **named):
        if _built(upstream):
            _refuse(settings, Mismatch(f"{type(self).__name__}: no cache manager for ReplaySSM, {reason}"))
            setattr(self, _DECODER, None)
        return stock(self, *arguments, **named)

    return __init__
