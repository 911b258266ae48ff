"""DeepSeek-V4: several residual streams, a window of keys beside compressed entries, experts chosen by hash or score.

Layers keep the last tokens in one cache group and, where they compress, their entries in another; the second has layer
numbers of its own after the first's. Source: DeepSeek-AI 2026 (V4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vkit import kernels
from vkit.batch import Batch
from vkit.cache.groups import LayerCacheSpec
from vkit.errors import ModelLoadError
from vkit.layers import Embedding, Linear, LMHead, Module, Placement, RMSNorm, RopeSpec, TensorSlot
from vkit.layers.compressed_attention import (
    HEAVY,
    SLIDING,
    SPARSE,
    CompressedAttention,
    CompressedShape,
    TableRotary,
    Tensors,
)
from vkit.models.base import CausalLM, ModelConfig
from vkit.models.hf_config import HFConfig
from vkit.quantization import QuantizedTensor, ScaledMatrix, Weight

KIND_OF_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}
NUM_HASH_LAYERS = 3


class LimitedMLP(Module):
    """w2( silu(min(w1 x, L)) · clamp(w3 x, −L, L) )."""

    def __init__(self, hidden_size: int, width: int, limit: float) -> None:
        self.w1, self.w3 = Linear(hidden_size, width), Linear(hidden_size, width)
        self.w2 = Linear(width, hidden_size)
        self._limit = limit

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, H) -> (T, H)."""
        return self.w2(kernels.limited_silu_and_mul(self.w1(x), self.w3(x), self._limit))


class LimitedExperts(Module):
    """The routed experts, one by one (`3.w1.weight`) or stacked (`w1.weight`)."""

    def __init__(self, num_experts: int, hidden_size: int, width: int, limit: float) -> None:
        self._num_experts, self._limit = num_experts, limit
        self._shapes = {"w1": (width, hidden_size), "w3": (width, hidden_size), "w2": (hidden_size, width)}
        self._is_stacked = False
        self._matrices: list[kernels.ExpertMatrix] = []

    def choose_form(self, is_stored: Callable[[str], bool]) -> None:
        """Stacked or one by one."""
        self._is_stacked = is_stored("w1.weight")

    def slots(self) -> list[TensorSlot]:
        """The tensors of the form chosen."""
        if self._is_stacked:
            return [TensorSlot(f"{name}.weight", (self._num_experts, *shape)) for name, shape in self._shapes.items()]
        return [
            TensorSlot(f"{expert}.{name}.weight", shape)
            for expert in range(self._num_experts)
            for name, shape in self._shapes.items()
        ]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take every expert's weights as they are stored."""
        self._matrices = [self._matrix(name, tensors, placement) for name in self._shapes]

    def _matrix(self, name: str, tensors: Mapping[str, Weight], placement: Placement) -> kernels.ExpertMatrix:
        if self._is_stacked:
            weight = placement.matrix(tensors[f"{name}.weight"])
            if isinstance(weight, QuantizedTensor):
                scales = None if weight.scale is None else weight.scale.expand(self._num_experts)
                return kernels.ExpertMatrix(tuple(weight.data.unbind(0)), weight.qtype, scales)
            assert isinstance(weight, Tensor), "codes with scales have two dimensions"
            return kernels.ExpertMatrix(tuple(weight.unbind(0)))
        each = [placement.matrix(tensors[f"{expert}.{name}.weight"]) for expert in range(self._num_experts)]
        plain = tuple(weight for weight in each if isinstance(weight, Tensor | ScaledMatrix))
        if len(plain) != len(each):
            raise ModelLoadError(f"experts' {name}: blocks one by one are not supported, only stacked")
        return kernels.ExpertMatrix(plain)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x (T, H), weights and ids (T, k) -> (T, H)."""
        gate, up, down = self._matrices
        return kernels.run_limited_experts(x, weights, ids, gate, up, down, self._limit)


class RootRouter(Module):
    """Logits of the experts; the choice by score and bias, or by a table of token ids."""

    def __init__(self, config: HFConfig, hidden_size: int, *, is_hashed: bool) -> None:
        self._top_k = config.integer("num_experts_per_tok")
        self._scale = config.number("routed_scaling_factor", default=1.0)
        self._is_hashed = is_hashed
        self.logits = _InlineLinear(hidden_size, config.num_experts)
        vocab_size = config.integer("vocab_size")
        self.choice = Tensors(tid2eid=(vocab_size, self._top_k)) if is_hashed else Tensors(bias=(config.num_experts,))

    def __call__(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, H), token_ids (T,) -> weights and ids (T, k)."""
        chosen = kernels.embedding(token_ids, self.choice["tid2eid"]) if self._is_hashed else None
        bias = None if self._is_hashed else self.choice["bias"]
        return kernels.route_by_root(self.logits(x), bias, chosen, self._top_k, self._scale)


class _InlineLinear(Linear):
    """A weight named as if it were its parent's own."""

    is_inline = True


class RootMoE(Module):
    """Routed experts beside a shared one."""

    def __init__(self, config: HFConfig, hidden_size: int, *, is_hashed: bool) -> None:
        width = config.integer("moe_intermediate_size")
        limit = config.number("swiglu_limit", default=float("inf"))
        num_shared = config.integer("n_shared_experts", default=1)
        self.gate = RootRouter(config, hidden_size, is_hashed=is_hashed)
        self.experts = LimitedExperts(config.num_experts, hidden_size, width, limit)
        self.shared_experts = LimitedMLP(hidden_size, num_shared * width, limit)

    def __call__(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """x (T, H), token_ids (T,) -> (T, H)."""
        return kernels.add(self.experts(x, *self.gate(x, token_ids)), self.shared_experts(x))


class HyperLayer(Module):
    """One block: both sublayers read a mixture of the streams and write to all of them."""

    def __init__(self, attn: CompressedAttention, ffn: RootMoE, shape: CompressedShape) -> None:
        count, hidden = shape.num_streams, shape.hidden_size
        rows = 2 * count + count * count
        self.attn_norm, self.ffn_norm = RMSNorm(hidden, shape.eps), RMSNorm(hidden, shape.eps)
        self.attn, self.ffn = attn, ffn
        self.hyper = Tensors(
            **{
                f"hc_{part}_{name}": size
                for part in ("attn", "ffn")
                for name, size in (("fn", (rows, count * hidden)), ("base", (rows,)), ("scale", (3,)))
            }
        )
        self._shape = shape

    def __call__(self, streams: Tensor, batch: Batch) -> Tensor:
        """streams (T, N, H) -> the same after this block."""
        streams = self._around(streams, "attn", lambda x: self.attn(self.attn_norm(x), batch))
        return self._around(streams, "ffn", lambda x: self.ffn(self.ffn_norm(x), batch.token_ids))

    def _around(self, streams: Tensor, part: str, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        shape = self._shape
        pre, post, mix = kernels.hyper_weights(
            streams,
            self.hyper[f"hc_{part}_fn"],
            self.hyper[f"hc_{part}_base"],
            self.hyper[f"hc_{part}_scale"],
            iterations=shape.iterations,
            hyper_eps=shape.hyper_eps,
            norm_eps=shape.eps,
        )
        return kernels.hyper_leave(streams, sublayer(kernels.hyper_enter(streams, pre)), post, mix)


class HyperDecoder(Module):
    """Embedding, blocks over several streams, their union, the final norm."""

    is_inline = True
    names: Mapping[str, str] = {"embed_tokens": "embed"}

    def __init__(self, embed_tokens: Embedding, layers: list[HyperLayer], shape: CompressedShape) -> None:
        self.embed_tokens, self.layers = embed_tokens, layers
        self.norm = RMSNorm(shape.hidden_size, shape.eps)
        count = shape.num_streams
        self.head = Tensors(hc_head_fn=(count, count * shape.hidden_size), hc_head_base=(count,), hc_head_scale=(1,))
        self._shape = shape

    def __call__(self, batch: Batch) -> Tensor:
        """Hidden states (T, H)."""
        shape = self._shape
        streams = kernels.spread_streams(self.embed_tokens(batch.token_ids), shape.num_streams)
        for layer in self.layers:
            streams = layer(streams, batch)
        fn, base, scale = (self.head[f"hc_head_{name}"] for name in ("fn", "base", "scale"))
        pre = kernels.hyper_head_weights(streams, fn, base, scale, hyper_eps=shape.hyper_eps, norm_eps=shape.eps)
        return self.norm(kernels.hyper_enter(streams, pre))


class DeepseekV4ForCausalLM(CausalLM):
    """The model."""

    names: Mapping[str, str] = {"lm_head": "head"}

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        super().__init__(config, options)
        self.num_layers = config.integer("num_hidden_layers")
        self.shape = shape_of(config)
        vocab_size = config.integer("vocab_size")
        main, compressed = (TableRotary(spec) for spec in self._ropes())
        self._attentions: list[CompressedAttention] = []
        layers = []
        for layer, (kind, rate) in enumerate(layer_kinds(config, self.num_layers)):
            if kind != SLIDING and (
                self.shape.head_dim % rate or self.shape.index_dim % (rate if kind == SPARSE else 1)
            ):
                raise ModelLoadError(f"config.json: an entry for {rate} tokens does not divide the widths of heads")
            rotary = main if kind == SLIDING else compressed
            attention = CompressedAttention(layer, self.num_layers + layer, self.shape, kind, rate, rotary)
            self._attentions.append(attention)
            layers.append(HyperLayer(attention, self._mlp(layer), self.shape))
        self.model = HyperDecoder(Embedding(vocab_size, self.shape.hidden_size), layers, self.shape)
        self.ropes = Ropes(main, compressed)
        self.lm_head = LMHead(
            self.shape.hidden_size,
            vocab_size,
            tied_to=self.model.embed_tokens if config.is_tied(default=False) else None,
        )

    def cache_specs(self) -> list[LayerCacheSpec | None]:
        """The windows of all layers, then the entries of all layers."""
        dtype: torch.dtype = getattr(torch, self.options.kv_cache_dtype)
        specs = [attention.specs(dtype) for attention in self._attentions]
        return [window for window, _ in specs] + [entries for _, entries in specs]

    def _ropes(self) -> tuple[RopeSpec, RopeSpec]:
        """The plain rope of sliding layers, and the stretched one of layers that compress."""
        config, options = self.config, self.options
        newer = config.mapping("rope_parameters")
        width = self.shape.rope_dim
        limits = config.integer("max_position_embeddings", default=options.max_model_len), options.max_model_len
        base = newer.get("main", newer).get("rope_theta") or config.number("rope_theta", default=10000.0)
        main = RopeSpec(width, width, float(base), *limits, is_interleaved=True)
        scaling: dict[str, Any] = {**config.mapping("rope_scaling"), **newer.get("compress", {})}
        kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
        base = scaling.get("rope_theta") or config.number("compress_rope_theta", default=160000.0)
        scaling["attention_factor"] = 1.0
        return main, RopeSpec(width, width, float(base), *limits, kind=kind, scaling=scaling, is_interleaved=True)

    def _mlp(self, layer: int) -> RootMoE:
        types = self.config.values.get("mlp_layer_types")
        num_hashed = self.config.integer("num_hash_layers", default=NUM_HASH_LAYERS)
        is_hashed = types[layer] == "hash_moe" if isinstance(types, list) else layer < num_hashed
        if self.config.text("scoring_func", default="sqrtsoftplus") != "sqrtsoftplus":
            raise ModelLoadError("config.json: scoring_func other than sqrtsoftplus is not supported")
        return RootMoE(self.config, self.shape.hidden_size, is_hashed=is_hashed)


class Ropes(Module):
    """Both tables; they have no tensors, only the moment to be built."""

    def __init__(self, main: TableRotary, compressed: TableRotary) -> None:
        self.main, self.compressed = main, compressed


def shape_of(config: HFConfig) -> CompressedShape:
    """The widths a configuration gives."""
    return CompressedShape(
        hidden_size=config.integer("hidden_size"),
        num_heads=config.integer("num_attention_heads"),
        head_dim=config.integer("head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        q_rank=config.integer("q_lora_rank"),
        out_groups=config.integer("o_groups"),
        out_rank=config.integer("o_lora_rank"),
        window=config.integer("sliding_window"),
        index_heads=config.integer("index_n_heads"),
        index_dim=config.integer("index_head_dim"),
        index_top_k=config.integer("index_topk"),
        num_streams=config.integer("hc_mult", default=4),
        iterations=config.integer("hc_sinkhorn_iters", default=20),
        hyper_eps=config.number("hc_eps", default=1e-6),
        eps=config.number("rms_norm_eps", default=1e-6),
    )


def layer_kinds(config: HFConfig, num_layers: int) -> list[tuple[str, int]]:
    """Kind of attention and tokens per entry of every layer."""
    types = config.layer_types(num_layers)
    if types is None:
        ratios = config.values.get("compress_ratios")
        if not isinstance(ratios, list) or len(ratios) < num_layers or not set(ratios) <= KIND_OF_RATIO.keys():
            raise ModelLoadError(f"config.json: compress_ratios must list 0, 4 or 128 for each of {num_layers} layers")
        types = [KIND_OF_RATIO[ratio] for ratio in ratios[:num_layers]]
    rates = {SPARSE: 4, HEAVY: 128, **config.mapping("compress_rates"), SLIDING: 1}
    unknown = set(types) - rates.keys()
    if unknown:
        raise ModelLoadError(f"config.json: layer_types names {sorted(unknown)}, known are {sorted(rates)}")
    return [(kind, int(rates[kind])) for kind in types]
