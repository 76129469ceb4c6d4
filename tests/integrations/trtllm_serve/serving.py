# SPDX-License-Identifier: Apache-2.0
"""A server's loop over TensorRT-LLM's cache manager and mixers, and the float64 oracle of what they must give.

Each step a random mixture: new prompts in chunks, decoding of one token or verification of drafts with random
acceptance, padding, requests that end, are pre-empted and come again, slots that change hands. The projections are the
identity, so a token's hidden state is z | x | B | C | dt, and every Mamba layer is fed the same ones.
"""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import oracle
import torch

from trtllm_replayssm import MambaGeometry

LAYER_MASK = [True, False, True, False]  # which layers of the model are Mamba layers
DUMMY_ID = (1 << 64) - 1
IDLE_ID = DUMMY_ID - 1000  # of what a rank without requests decodes under attention data parallelism
WARM_UP = 80  # steps before the first CUDA graph
MAPPING = SimpleNamespace(
    tp_size=1, tp_rank=0, pp_size=1, pp_rank=0, rank=0, enable_attention_dp=False, gpus_per_node=1, world_size=1
)


class Request:
    """A sequence, and the oracle's state of it in every Mamba layer."""

    is_dummy = False

    def __init__(self, request_id: int, prompt: np.ndarray, layers: int, state_shape):
        self.py_request_id = request_id
        self.pending = prompt  # hidden states [tokens, ...] still to be prefilled
        self.history = prompt[:0]
        self.states = [np.zeros(state_shape) for _ in range(layers)]

    def restart(self):
        """Pre-empted: all of it is a prompt again."""
        self.pending = np.concatenate([self.history, self.pending])
        self.history = self.history[:0]
        self.states = [np.zeros_like(state) for state in self.states]


class Server:
    """Args:
    profile: "A", "B" or "C".
    model, manager, metadata: TensorRT-LLM's modules modeling_nemotron_h and mamba_cache_manager, and its class
        Mamba2Metadata.
    drafts: most drafts a step; None: no speculation.
    dtypes: of the model and of its states.
    everything: make all tensors on the device, for doubles, which name none.
    rounding: whether the model's configuration asks for stochastic rounding.
    graphs: capture steps without prompts in CUDA graphs, and replay them.
    attention_dp: one of two ranks that share requests out, not heads; without requests it decodes a dummy.
    more: further arguments of the cache manager.
    """

    def __init__(self, profile, model, manager, metadata, *, drafts=None, max_batch=5, device="cpu", everything=True,
                 graphs=False, attention_dp=False, seed=0, dtypes=(torch.float32, torch.float32), rounding=False,
                 geometry=None, **more):  # fmt: skip
        self.profile, self.drafts, self.max_batch, self.device = profile, drafts, max_batch, torch.device(device)
        self.graphs, self.captured, self.steps = graphs, {}, 0
        shared_out = dict(tp_size=2, tp_rank=1, world_size=2, enable_attention_dp=True) if attention_dp else {}
        self.mapping = SimpleNamespace(**vars(MAPPING) | shared_out)
        self.everything = everything
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.geometry = g = geometry or MambaGeometry(num_heads=4, head_dim=16, num_groups=2, state_dim=64)
        self.dtypes, self.rounding = dtypes, rounding
        self.width = 2 * g.num_heads * g.head_dim + 2 * g.num_groups * g.state_dim + g.num_heads
        sizes = (g.state_dim, g.conv_kernel, g.num_heads, g.num_groups, g.head_dim)
        with self._on_device():
            layers = [layer for layer, is_mamba in enumerate(LAYER_MASK) if is_mamba]
            self.mixers = [self._mixer(model, layer) for layer in layers]
            hybrid = getattr(manager, "MixedMambaHybridCacheManager", None) or manager.MambaHybridCacheManager
            spec_config = None
            if drafts is not None:
                spec_config = SimpleNamespace(max_draft_len=drafts, tokens_per_gen_step=drafts + 1)
            self.manager = hybrid(
                *sizes, len(LAYER_MASK), LAYER_MASK, *dtypes, SimpleNamespace(enable_block_reuse=False), None,
                num_layers=len(LAYER_MASK), layer_mask=[not is_mamba for is_mamba in LAYER_MASK], num_kv_heads=1,
                head_dim=8, tokens_per_block=32, max_seq_len=1024, max_batch_size=max_batch, mapping=self.mapping,
                spec_config=spec_config, **more,
            )  # fmt: skip
            self.metadata = metadata(max_batch, 8)
        self.live: list[Request] = []
        self.most_live = max_batch - 1
        self.waiting: list[Request] = []
        self.next_id = 0
        self.worst = 0.0  # largest relative error of a row so far
        self.finite = True  # so far all outputs of padding were
        self.squares = np.zeros(2)  # of all errors and all expected values
        counted = "prefilled", "decoded", "verified", "padded", "idle", "preempted", "finished"
        self.counts = dict.fromkeys(counted, 0)

    @property
    def error(self) -> float:
        """Relative error of all outputs so far, L2."""
        return float(np.sqrt(self.squares[0] / self.squares[1]))

    def _mixer(self, model, layer):
        g = self.geometry
        mixer = model.Mamba2Mixer(
            d_model=self.width, d_state=g.state_dim, d_conv=g.conv_kernel, nheads=g.num_heads, n_groups=g.num_groups,
            head_dim=g.head_dim, chunk_size=8, layer_idx=layer, dtype=self.dtypes[0],
            config=_model_config(self.mapping, self.dtypes, self.rounding),
        )  # fmt: skip
        heads = g.num_heads
        values = {
            "A": -np.exp(self.numbers.uniform(-4, 2, heads)),
            "D": self.numbers.normal(size=heads),
            "dt_bias": np.log(np.expm1(np.exp(self.numbers.uniform(-6, -0.7, heads)))),
        }
        with torch.no_grad():
            for name, value in values.items():
                getattr(mixer, name).copy_(torch.from_numpy(value))
            weight = self.numbers.normal(size=(g.conv_channels, g.conv_kernel)) / 2
            mixer.conv1d.weight = torch.nn.Parameter(torch.from_numpy(weight).to(self.dtypes[0]).to(self.device), False)
            bias = torch.from_numpy(0.1 * self.numbers.normal(size=g.conv_channels))
            mixer.conv1d.bias = torch.nn.Parameter(bias.to(self.dtypes[0]).to(self.device), False)
        mixer.to(self.device)
        if hasattr(mixer, "post_load_weights"):
            mixer.post_load_weights()
        return mixer

    def _on_device(self):
        return self.device if self.device.type == "cuda" and self.everything else nullcontext()

    # ---- a step ----

    def step(self):
        """Runs one, and raises if an output is not the oracle's."""
        self._admit()
        waits = self.mapping.enable_attention_dp and self._free() > 0 and self.random.random() < 0.2
        contexts, chunks = ([], []) if waits else self._chunks()
        decoding = [request for request in self.live if not len(request.pending) and request not in contexts]
        decoding = [request for request in decoding if not waits and self.random.random() < 0.9]
        verify = self.drafts is not None and self.random.random() < 0.8
        draft_length = 0
        if verify:
            draft_length = self.random.randint(0, self.drafts) if self.profile == "C" else self.drafts
        tokens = draft_length + 1
        idle = self.mapping.enable_attention_dp and self._free() > 0 and not contexts and not decoding
        padding = 1 if idle else self._padding(len(decoding)) if not contexts else 0
        if len(contexts) + len(decoding) + padding == 0:
            return
        dummy = SimpleNamespace(py_request_id=IDLE_ID if idle else DUMMY_ID - draft_length, is_dummy=True)
        ids = [request.py_request_id for request in contexts + decoding]
        requests = list(decoding)
        if idle or self.profile == "A":  # of padding in A the very same dummy request again and again
            requests += [dummy] * padding
        scheduled = SimpleNamespace(context_requests=contexts, generation_requests=requests)
        with self._on_device(), torch.inference_mode():
            if idle and self.profile == "C":
                self.manager.add_dummy_requests([IDLE_ID])
            self.manager.prepare_resources(scheduled)
            if padding and not idle and self.profile == "B":
                self.manager.reorder_state_indices_when_padding_requests(len(decoding), padding)
            if padding and not idle and self.profile == "C":
                self.manager.add_dummy_requests([dummy.py_request_id])
            ids += [dummy.py_request_id] * padding

            drafts = [self._hidden(tokens) for _ in range(len(decoding) + padding)]
            hidden = self._tensor(np.concatenate(chunks + drafts))
            lengths = [len(chunk) for chunk in chunks] + [tokens] * len(drafts)
            attn_metadata = self._attn_metadata(lengths, contexts, ids)
            self.metadata.prepare(attn_metadata)
            accepted = [self.random.randint(1, tokens) for _ in drafts]
            accepted_by_all = torch.tensor([1] * len(contexts) + accepted, dtype=torch.int32, device=self.device)
            run = self._replay if self.graphs and not contexts and self.steps > WARM_UP else self._run
            outputs = run(attn_metadata, hidden, draft_length if verify else None, accepted_by_all)
        self.steps += 1

        first = 0
        outputs = [output.double().cpu().numpy() for output in outputs]
        for request, chunk in zip(contexts, chunks, strict=True):
            self._compare(request, chunk, len(chunk), [output[first : first + len(chunk)] for output in outputs])
            first += len(chunk)
        for request, draft, count in zip(decoding, drafts, accepted, strict=False):
            self._compare(request, draft, count, [output[first : first + tokens] for output in outputs])
            first += tokens
        self.finite = self.finite and all(np.isfinite(output[first:]).all() for output in outputs)
        self.counts["prefilled"] += sum(map(len, chunks))
        self.counts["verified" if verify else "decoded"] += len(decoding)
        self.counts["idle" if idle else "padded"] += padding
        if idle:
            self.manager.free_resources(dummy)
        self._depart()

    def _run(self, attn_metadata, hidden, draft_length, accepted):
        """The forward pass of all Mamba layers, and what the speculative worker does after sampling."""
        spec = {}
        if self.profile != "A":
            spec["spec_metadata"] = None
            if draft_length is not None:
                lengths = dict(max_draft_len=draft_length, runtime_draft_len=draft_length)
                spec["spec_metadata"] = SimpleNamespace(**lengths)
        outputs = [mixer(hidden, attn_metadata, self.metadata, **spec) for mixer in self.mixers]
        if draft_length is not None and attn_metadata.num_seqs > attn_metadata.num_contexts:
            self._accept(attn_metadata, accepted)
        return outputs

    def _replay(self, attn_metadata, hidden, draft_length, accepted):
        """The same out of a CUDA graph, one for each number of rows and draft length."""
        key = attn_metadata.num_seqs, draft_length
        if key not in self.captured:
            inputs = hidden.clone(), accepted.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = self._run(attn_metadata, inputs[0], draft_length, inputs[1])
            self.captured[key] = graph, inputs, outputs
        graph, inputs, outputs = self.captured[key]
        for static, given in zip(inputs, (hidden, accepted), strict=True):
            static.copy_(given)
        graph.replay()
        return outputs

    def _accept(self, attn_metadata, accepted: torch.Tensor):
        slots = (self.metadata.state_indices,) if self.profile == "C" else ()
        self.manager.update_mamba_states(attn_metadata, accepted, *slots)

    def _attn_metadata(self, lengths, contexts, ids):
        count = len(contexts)
        seq_lens = torch.tensor(lengths, device="cpu")
        cached = [len(request.history) for request in contexts]
        return SimpleNamespace(
            num_contexts=count,
            seq_lens=seq_lens,
            seq_lens_cuda=seq_lens.to(self.device),
            num_ctx_tokens=sum(lengths[:count]),
            num_tokens=sum(lengths),
            num_seqs=len(lengths),
            kv_cache_manager=self.manager,
            request_ids=ids,
            kv_cache_params=SimpleNamespace(num_cached_tokens_per_seq=cached + [0] * (len(lengths) - count)),
        )

    # ---- who comes, stays and goes ----

    def _free(self) -> int:
        """Slots that no request has."""
        return len(getattr(self.manager, "_impl", self.manager).mamba_cache_free_blocks)

    def _admit(self):
        if self.random.random() < 0.4 and len(self.live) < self.most_live:
            if not self.waiting:
                prompt = self._hidden(self.random.randint(1, 12))
                g = self.geometry
                shape = (g.num_heads, g.head_dim, g.state_dim)
                self.waiting.append(Request(self.next_id, prompt, len(self.mixers), shape))
                self.next_id += 1
            self.live.append(self.waiting.pop())

    def _chunks(self):
        contexts = [request for request in self.live if len(request.pending)][:2]
        chunks = []
        for request in contexts:
            size = self.random.randint(1, 7)
            chunks.append(request.pending[:size])
            request.pending = request.pending[size:]
        return contexts, chunks

    def _padding(self, decoding: int) -> int:
        most = self.max_batch - decoding
        if self.profile == "A":
            known = DUMMY_ID in self.manager.mamba_cache_index
            most = most if known or self._free() > self.max_batch - 1 - len(self.live) else 0
        if self.profile == "B":
            most = min(most, self._free())
        return self.random.randint(0, most) if decoding else 0

    def _depart(self):
        for request in list(self.live):
            chance = self.random.random()
            if len(request.pending) or chance >= 0.05:
                continue
            self.live.remove(request)
            self.manager.free_resources(request)
            if chance < 0.02 and len(request.history) < 60:
                request.restart()
                self.waiting.append(request)
                self.counts["preempted"] += 1
            else:
                self.counts["finished"] += 1

    # ---- tokens and the oracle ----

    def _hidden(self, count: int) -> np.ndarray:
        """Values that the model's dtype holds exactly."""
        values = torch.from_numpy(self.numbers.normal(size=(count, self.width)))
        return values.to(self.dtypes[0]).double().numpy()

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.dtypes[0]).to(self.device)

    def _compare(self, request, tokens: np.ndarray, accepted: int, outputs: list[np.ndarray]):
        g = self.geometry
        inner = g.num_heads * g.head_dim
        z, raw, dt = np.split(tokens, [inner, inner + g.conv_channels], axis=1)
        before = request.history[-(g.conv_kernel - 1) :, inner : inner + g.conv_channels]
        for layer, (mixer, output) in enumerate(zip(self.mixers, outputs, strict=True)):
            weight, bias, A, D, dt_bias = (
                parameter.detach().double().cpu().numpy()
                for parameter in (mixer.conv1d.weight, mixer.conv1d.bias, mixer.A, mixer.D, mixer.dt_bias)
            )
            x, B, C = np.split(
                oracle.convolve(before, raw, weight, bias), [inner, inner + g.num_groups * g.state_dim], 1
            )
            heads = (len(tokens), g.num_heads, g.head_dim)
            groups = (len(tokens), g.num_groups, g.state_dim)
            scan = (x.reshape(heads), B.reshape(groups), C.reshape(groups), dt, np.log(-A), D, dt_bias)
            y, states = oracle.recur(request.states[layer], *scan)
            expected = y.reshape(len(tokens), inner) * z / (1 + np.exp(-z))
            self.worst = max(self.worst, oracle.relative_error(output, expected))
            self.squares += np.square(output - expected).sum(), np.square(expected).sum()
            request.states[layer] = states[accepted]
        request.history = np.concatenate([request.history, tokens[:accepted]])


def _model_config(mapping, dtypes, rounding: bool):
    rounding = dict(mamba_ssm_stochastic_rounding=rounding, mamba_ssm_philox_rounds=10)
    return SimpleNamespace(
        mapping=mapping,
        quant_config=SimpleNamespace(mamba_ssm_cache_dtype=dtypes[1], quant_mode=None, **rounding),
        get_quant_config=lambda: None,
        skip_create_weights_in_init=False,
        allreduce_strategy=None,
        lora_config=None,
    )
