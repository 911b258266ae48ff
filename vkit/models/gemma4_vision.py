"""What Gemma 4 sees and hears with: the vision tower, and the unified export's embeddings of pixels and samples.

Source: Gemma Team 2026 (published configuration and weights of Gemma 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vkit import kernels
from vkit.errors import ModelLoadError
from vkit.layers import Activation, LayerNorm, Linear, Module, Placement, RMSNorm, TensorSlot
from vkit.layers.vision import Tower, axis_angles, block_order, cosines_and_sines, raster, rotate_in_order
from vkit.models.hf_config import HFConfig
from vkit.quantization import LinearMethod, Weight, linear_method_for

Grid = tuple[int, int, int]


class ClippedLinear(Module):
    """y = x Wᵀ, input and output brought into ranges that the file gives, if it gives any."""

    def __init__(self, in_features: int, out_features: int, *, is_clipped: bool) -> None:
        self._shape = (out_features, in_features)
        self._is_clipped = is_clipped
        self._name = "linear.weight"
        self._limits: dict[str, float] = {}
        self._method: LinearMethod

    def choose_form(self, is_stored: Callable[[str], bool]) -> None:
        """The weight may lie under `linear` or directly here."""
        if is_stored("weight") and not is_stored("linear.weight"):
            self._name = "weight"

    def slots(self) -> list[TensorSlot]:
        """The weight, and the ends of both ranges."""
        ends = [TensorSlot(f"{side}_{end}", ()) for side in ("input", "output") for end in ("min", "max")]
        return [TensorSlot(self._name, self._shape), *(ends if self._is_clipped else [])]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take all of them."""
        self._method = linear_method_for(placement.matrix(tensors[self._name]))
        for name in sorted(set(tensors) - {self._name}):
            self._limits[name] = placement.vector(tensors[name], torch.float32).item()

    def __call__(self, x: Tensor) -> Tensor:
        """x (n, in) -> (n, out)."""
        limits = self._limits
        if not limits:
            return self._method.apply(x, None)
        y = self._method.apply(kernels.clamp(x, limits["input_min"], limits["input_max"]), None)
        return kernels.clamp(y, limits["output_min"], limits["output_max"])


class GemmaPatches(Module):
    """Patches to the tower's width, and a table of positions per axis."""

    def __init__(self, num_features: int, width: int, num_positions: int) -> None:
        self.input_proj = Linear(num_features, width)
        self._shape = (2, num_positions, width)
        self._tables: list[Tensor]

    def slots(self) -> list[TensorSlot]:
        """position_embedding_table."""
        return [TensorSlot("position_embedding_table", self._shape)]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take both tables."""
        self._tables = list(placement.vector(tensors["position_embedding_table"]))

    def __call__(self, patches: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Patches (n, F) with values 0..1 at columns x and rows y -> (n, C)."""
        spread = kernels.add(kernels.scale(patches, 2.0), patches.new_full((patches.shape[-1],), -1.0))
        hidden = self.input_proj(spread)
        for table, places in zip(self._tables, (x, y), strict=True):
            hidden = kernels.add(hidden, kernels.embedding(places, table))
        return hidden


class GemmaVisionAttention(Module):
    """Every patch sees all of its picture; head norms on queries, keys and (without weight) values; scores unscaled."""

    def __init__(self, config: HFConfig, is_clipped: bool, eps: float) -> None:
        width, head_dim = config.integer("hidden_size"), config.head_dim
        self._heads, self._kv_heads = config.integer("num_attention_heads"), config.num_kv_heads
        if self._heads != self._kv_heads:
            raise ModelLoadError("config.json: vision_config: num_key_value_heads must equal num_attention_heads")
        inner = self._heads * head_dim
        self.q_proj, self.k_proj, self.v_proj = (ClippedLinear(width, inner, is_clipped=is_clipped) for _ in range(3))
        self.o_proj = ClippedLinear(inner, width, is_clipped=is_clipped)
        self.q_norm, self.k_norm = RMSNorm(head_dim, eps), RMSNorm(head_dim, eps)
        self.v_norm = RMSNorm(head_dim, eps, has_weight=False)
        self._base = float(config.mapping("rope_parameters").get("rope_theta", 100.0))

    def __call__(self, hidden: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """hidden (n, C) -> (n, C)."""
        q, k, v = (
            norm(project(hidden).unflatten(-1, (self._heads, -1)))
            for project, norm in (
                (self.q_proj, self.q_norm),
                (self.k_proj, self.k_norm),
                (self.v_proj, self.v_norm),
            )
        )
        half = q.shape[-1] // 2
        for place, part in ((x, slice(None, half)), (y, slice(half, None))):
            table = cosines_and_sines(axis_angles(place.cpu(), half, self._base)).to(hidden.device)
            rotate_in_order(q[..., part], k[..., part], table)
        return self.o_proj(kernels.segment_attention(q, k, v, [len(hidden)], 1.0).flatten(1))


class ClippedMLP(Module):
    """down( act(gate x) · up x )."""

    def __init__(self, width: int, inner: int, activation: Activation, *, is_clipped: bool) -> None:
        self.gate_proj = ClippedLinear(width, inner, is_clipped=is_clipped)
        self.up_proj = ClippedLinear(width, inner, is_clipped=is_clipped)
        self.down_proj = ClippedLinear(inner, width, is_clipped=is_clipped)
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """x (n, C) -> (n, C)."""
        return self.down_proj(kernels.multiply(kernels.unary(self.gate_proj(x), self._activation), self.up_proj(x)))


class GemmaVisionLayer(Module):
    """A norm before and after each part."""

    def __init__(self, config: HFConfig, is_clipped: bool, eps: float) -> None:
        width = config.integer("hidden_size")
        activation = config.activation("hidden_activation", default="gelu_pytorch_tanh")
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = GemmaVisionAttention(config, is_clipped, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.pre_feedforward_layernorm = RMSNorm(width, eps)
        self.mlp = ClippedMLP(width, config.integer("intermediate_size"), activation, is_clipped=is_clipped)
        self.post_feedforward_layernorm = RMSNorm(width, eps)

    def __call__(self, hidden: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """hidden (n, C) -> (n, C)."""
        attended = self.self_attn(self.input_layernorm(hidden), x, y)
        hidden = kernels.add(hidden, self.post_attention_layernorm(attended))
        out = self.mlp(self.pre_feedforward_layernorm(hidden))
        return kernels.add(hidden, self.post_feedforward_layernorm(out))


class GemmaEncoder(Module):
    """The blocks, under the name the files give them."""

    def __init__(self, layers: list[GemmaVisionLayer]) -> None:
        self.layers = layers


class GemmaVisionTower(Tower):
    """Patches to pooled rows. Names are those below `model.vision_tower.`."""

    def __init__(self, config: HFConfig) -> None:
        """`config`: the keys of vision_config."""
        self.width, depth = config.integer("hidden_size"), config.integer("num_hidden_layers")
        self.patch_size = config.integer("patch_size", default=16)
        self.pooling_size = config.integer("pooling_kernel_size", default=3)
        eps = config.number("rms_norm_eps", default=1e-6)
        is_clipped = config.flag("use_clipped_linears", default=False)
        self.num_positions = config.integer("position_embedding_size", default=10240)
        self.patch_embedder = GemmaPatches(3 * self.patch_size**2, self.width, self.num_positions)
        self.encoder = GemmaEncoder([GemmaVisionLayer(config, is_clipped, eps) for _ in range(depth)])
        self._standardizes = config.flag("standardize", default=False)
        self._bias: Tensor
        self._scale: Tensor

    def slots(self) -> list[TensorSlot]:
        """std_bias and std_scale, if rows are standardised."""
        names = ("std_bias", "std_scale") if self._standardizes else ()
        return [TensorSlot(name, (self.width,)) for name in names]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take both."""
        super().set_tensors(tensors, placement)
        if self._standardizes:
            self._bias = -placement.vector(tensors["std_bias"])
            self._scale = placement.vector(tensors["std_scale"])

    def encode(self, features: Tensor, grid: Grid) -> Tensor:
        """One picture's patches (n, 3 · P²) in raster order -> (n / k², C)."""
        _, rows, columns = grid
        device = self.placement.device
        y, x = (places.to(device) for places in raster(rows, columns))
        hidden = self.patch_embedder(self.placed(features), x, y)
        for layer in self.encoder.layers:
            hidden = layer(hidden, x, y)
        return self._pooled(hidden, rows, columns)

    def _pooled(self, hidden: Tensor, rows: int, columns: int) -> Tensor:
        """Means of k x k patches, times √C."""
        count = self.pooling_size**2
        order = block_order(rows, columns, self.pooling_size).to(hidden.device)
        cells = kernels.embedding(order, hidden).unflatten(0, (-1, count))
        total = cells[:, 0].float()
        for index in range(1, count):
            total = kernels.add(total, cells[:, index].float())
        pooled = kernels.scale(total, self.width**0.5 / count).to(hidden.dtype)
        return kernels.multiply(kernels.add(pooled, self._bias), self._scale) if self._standardizes else pooled


class UnifiedPixels(Tower):
    """Pixels of a whole soft token to a row. Names are those below `model.vision_embedder.`."""

    def __init__(self, config: HFConfig) -> None:
        """`config`: the keys of vision_config."""
        self.width = config.integer("mm_embed_dim")
        self.patch_size = config.integer("patch_size", default=16)
        self.pooling_size = config.integer("pooling_kernel_size", default=3)
        num_features, eps = 3 * (self.patch_size * self.pooling_size) ** 2, 1e-5
        self.num_positions = config.integer("mm_posemb_size")
        self._shape = (self.num_positions, 2, self.width)
        self.patch_ln1 = LayerNorm(num_features, eps)
        self.patch_dense = Linear(num_features, self.width, bias=True)
        self.patch_ln2 = LayerNorm(self.width, eps)
        self.pos_norm = LayerNorm(self.width, eps)
        self._tables: list[Tensor]

    def slots(self) -> list[TensorSlot]:
        """pos_embedding."""
        return [TensorSlot("pos_embedding", self._shape)]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the tables of both axes."""
        super().set_tensors(tensors, placement)
        self._tables = [table.contiguous() for table in placement.vector(tensors["pos_embedding"]).unbind(1)]

    def encode(self, features: Tensor, grid: Grid) -> Tensor:
        """One picture's rows (n, 3 · (P · k)²) -> (n, C)."""
        _, rows, columns = grid
        hidden = self.patch_ln2(self.patch_dense(self.patch_ln1(self.placed(features))))
        for table, places in zip(self._tables, reversed(raster(rows, columns)), strict=True):
            hidden = kernels.add(hidden, kernels.embedding(places.to(hidden.device), table))
        return self.pos_norm(hidden)


class SoftTokens(Tower):
    """Rows of a tower, or samples of sound, to rows of the language model's stream: a norm and a projection."""

    def __init__(self, width: int, out_width: int, eps: float) -> None:
        self.embedding_projection = Linear(width, out_width)
        self._norm = RMSNorm(width, eps, has_weight=False)

    def __call__(self, rows: Tensor) -> Tensor:
        """rows (n, C) -> (n, H)."""
        return self.embedding_projection(self._norm(self.placed(rows)))
