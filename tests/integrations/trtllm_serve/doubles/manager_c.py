# SPDX-License-Identifier: Apache-2.0
"""mamba_cache_manager of profile C: a facade over the Python manager, one slot for all padding, dummies marked."""

import torch

from doubles.shared import CUDA_GRAPH_DUMMY_REQUEST_ID, Speculative, shapes_of


class PythonMambaCacheManager(Speculative):
    def __init__(self, d_state, d_conv, num_heads, n_groups, head_dim, num_layers, max_batch_size, spec_state_size,
                 mapping, dtype, ssm_cache_dtype, layer_mask=None, speculative_num_draft_tokens=None,
                 model_type="nemotron_hybrid", use_replay_state_update=False,
                 mamba_ssm_stochastic_rounding=False):  # fmt: skip
        shapes = shapes_of(d_state, d_conv, num_heads, n_groups, head_dim, mapping)
        self._use_replay_state_update = use_replay_state_update
        self._make_states(shapes, max_batch_size, layer_mask, dtype, ssm_cache_dtype, speculative_num_draft_tokens,
                          spec_state_size, lambda *shape, dtype: torch.zeros(shape, dtype=dtype))  # fmt: skip
        self._make_slots(max_batch_size)
        self._padding_slot = self.mamba_cache_free_blocks.pop()
        self._idle_slot = self.mamba_cache_free_blocks.pop() if mapping.enable_attention_dp else None
        self._dummy_request_ids = set()
        self._dummy_request_mask = torch.zeros(max_batch_size, dtype=torch.bool)

    @property
    def use_replay_state_update(self):
        return self._use_replay_state_update

    def get_max_resource_count(self):
        return len(self.state_indices) - 1 - (self._idle_slot is not None)

    def add_dummy_requests(self, request_ids):
        self._dummy_request_ids.update(request_ids)
        low = CUDA_GRAPH_DUMMY_REQUEST_ID - (self.speculative_num_draft_tokens or 0)
        for request_id in request_ids:
            slot = self._idle_slot if request_id < low else self._padding_slot
            self.mamba_cache_index[request_id] = slot

    def free_resources(self, request):
        self._dummy_request_ids.discard(request.py_request_id)
        slot = self.mamba_cache_index.get(request.py_request_id)
        if slot in (self._padding_slot, self._idle_slot):  # never anybody else's
            self.mamba_cache_index.pop(request.py_request_id, None)
        else:
            super().free_resources(request)

    def get_state_indices(self, request_ids, is_padding):
        dummies = [rid in self._dummy_request_ids or pad for rid, pad in zip(request_ids, is_padding, strict=True)]
        self._dummy_request_mask.zero_()
        self._dummy_request_mask[: len(dummies)] = torch.tensor(dummies)
        return [self.mamba_cache_index[request_id] for request_id in request_ids]

    def update_mamba_states(self, attn_metadata, num_accepted_tokens, state_indices, accepted_leaf_positions=None):
        self._promote(attn_metadata, num_accepted_tokens, state_indices)


class MambaCacheManager:
    """MambaCacheManager of C: delegates."""

    def __init__(self, d_state, d_conv, num_heads, n_groups, head_dim, num_layers, max_batch_size, spec_state_size,
                 mapping, dtype, ssm_cache_dtype, layer_mask=None, stream=None,
                 speculative_num_draft_tokens=None, model_type="nemotron_hybrid",
                 use_replay_state_update=False, mamba_ssm_stochastic_rounding=False):  # fmt: skip
        self._impl = PythonMambaCacheManager(
            d_state, d_conv, num_heads, n_groups, head_dim, num_layers, max_batch_size, spec_state_size, mapping,
            dtype, ssm_cache_dtype, layer_mask, speculative_num_draft_tokens, model_type, use_replay_state_update,
            mamba_ssm_stochastic_rounding)  # fmt: skip

    def prepare_resources(self, scheduled_batch):
        self._impl.prepare_resources(scheduled_batch)

    def free_resources(self, request):
        self._impl.free_resources(request)

    def add_dummy_requests(self, request_ids):
        self._impl.add_dummy_requests(request_ids)

    def get_state_indices(self, request_ids=None, is_padding=None):
        return self._impl.get_state_indices(request_ids, is_padding)

    def is_speculative(self):
        return self._impl.is_speculative()

    def mamba_layer_cache(self, layer_idx):
        return self._impl.mamba_layer_cache(layer_idx)

    def get_ssm_states(self, layer_idx):
        return self._impl.get_ssm_states(layer_idx)

    def get_max_resource_count(self):
        return self._impl.get_max_resource_count()

    def shutdown(self):
        self._impl.shutdown()

    def update_mamba_states(self, attn_metadata, num_accepted_tokens, state_indices, accepted_leaf_positions=None):
        if self._impl.is_speculative():
            self._impl.update_mamba_states(attn_metadata, num_accepted_tokens, state_indices, accepted_leaf_positions)


class MixedMambaHybridCacheManager(MambaCacheManager):
    def __init__(
        self,
        mamba_d_state,
        mamba_d_conv,
        mamba_num_heads,
        mamba_n_groups,
        mamba_head_dim,
        mamba_num_layers,
        mamba_layer_mask,
        mamba_cache_dtype,
        mamba_ssm_cache_dtype,
        kv_cache_config,
        kv_cache_type,
        *,
        max_batch_size,
        mapping,
        spec_config=None,
        **kv,
    ):
        drafts = None if spec_config is None else spec_config.tokens_per_gen_step - 1
        replay = kv.get("use_replay_state_update", False)
        rounding = kv.get("mamba_ssm_stochastic_rounding", False)
        MambaCacheManager.__init__(
            self,
            mamba_d_state,
            mamba_d_conv,
            mamba_num_heads,
            mamba_n_groups,
            mamba_head_dim,
            mamba_num_layers,
            max_batch_size + 1 + mapping.enable_attention_dp,
            max_batch_size,
            mapping,
            mamba_cache_dtype,
            mamba_ssm_cache_dtype,
            mamba_layer_mask,
            speculative_num_draft_tokens=drafts,
            use_replay_state_update=replay,
            mamba_ssm_stochastic_rounding=rounding,
        )


class CppMambaHybridCacheManager:
    """States inside of the KV pool."""

    def __init__(self):
        pass


class MambaHybridCacheManagerV2:
    """States in pages, which move."""

    def __init__(self, *_, **__):
        pass
