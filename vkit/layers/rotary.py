"""Rotary position embedding: the table of cosines and sines, with every kind of scaling.

Source for the kinds: specifications of the published checkpoints' `rope_scaling` / `rope_parameters` keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkit import kernels
from vkit.errors import ModelLoadError
from vkit.layers.module import Module, Placement
from vkit.quantization import Weight

if TYPE_CHECKING:
    from vkit.batch import Batch

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "frequency_divisors")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How positions become angles."""

    head_dim: int
    width: int
    """Entries of a head that rotate (R)."""
    base: float
    max_position_embeddings: int
    max_model_len: int
    """Positions that can occur; dynamic and longrope choose once by it, so that cached keys stay consistent."""
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)
    is_interleaved: bool = False

    @property
    def original_length(self) -> int:
        """The length the unscaled angles were trained for."""
        return int(self.scaling.get("original_max_position_embeddings") or self.max_position_embeddings)


class RotaryEmbedding(Module):
    """The table of one rope, shared by the layers that use it."""

    def __init__(self, spec: RopeSpec) -> None:
        if spec.kind not in KINDS:
            raise ModelLoadError(f"rope type {spec.kind!r} is not supported (known: {', '.join(KINDS)})")
        self.spec = spec
        self.is_interleaved = spec.is_interleaved
        self.cos_sin: Tensor
        """(max_model_len, R) float32: R/2 cosines, then R/2 sines."""
        self._is_built = False

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Build the table, once for all layers that share it."""
        if not self._is_built:
            self.cos_sin = cos_sin_table(self.spec).to(placement.device)
            self._is_built = True

    def angles(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Positions (T,) and the table they point into."""
        return batch.positions, self.cos_sin


class MultiAxisRotary(RotaryEmbedding):
    """A rope whose pairs turn by the position in time, in rows or in columns of a picture; in text these are equal.

    Source: Wang et al. 2024, Qwen2-VL, section 2.1; the interleaved order: Qwen Team 2025, Qwen3-VL.
    """

    def __init__(self, spec: RopeSpec, sections: Sequence[int], *, is_interleaved: bool) -> None:
        """`sections`: pairs that follow each of the three axes. Interleaved: every third pair, else one after another.

        Raises:
            ModelLoadError: sections that are not three parts of all pairs.
        """
        super().__init__(spec)
        counts = [value if type(value) is int else -1 for value in sections]
        if len(counts) != 3 or min(counts) < 0 or sum(counts) != spec.width // 2:
            raise ModelLoadError(
                f"config.json: mrope_section must list three parts of {spec.width // 2}, got {sections}"
            )
        if is_interleaved:
            axes = [0] * sum(counts)
            for axis in (1, 2):
                axes[axis : 3 * counts[axis] : 3] = [axis] * len(axes[axis : 3 * counts[axis] : 3])
        else:
            axes = [axis for axis, count in enumerate(counts) for _ in range(count)]
        self._pair_axes = axes
        self._axes: Tensor

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Build the table."""
        super().set_tensors(tensors, placement)
        self._axes = torch.tensor(self._pair_axes, device=placement.device)

    def angles(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Positions (T,) and the table they point into."""
        if batch.axis_positions is None:
            return batch.positions, self.cos_sin
        found = batch.memo.get(self)
        if found is None:
            table = kernels.axis_table(self.cos_sin, batch.axis_positions, self._axes)
            found = batch.memo[self] = torch.arange(len(table), device=table.device), table
        pair: tuple[Tensor, Tensor] = found  # type: ignore[assignment]
        return pair


def cos_sin_table(spec: RopeSpec) -> Tensor:
    """(max_model_len, R) float32: row p holds the cosines, then the sines, of position p's angles."""
    frequencies, magnitude = frequencies_of(spec)
    angles = torch.arange(spec.max_model_len, dtype=torch.float32).outer(frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(magnitude)


def frequencies_of(spec: RopeSpec) -> tuple[Tensor, float]:
    """Angle per position of each pair (R/2,) float32, and the factor on cosines and sines."""
    plain = _plain(spec.base, spec.width)
    match spec.kind:
        case "linear":
            return plain / _number(spec, "factor"), 1.0
        case "dynamic":
            return _dynamic(spec), 1.0
        case "llama3":
            return _llama3(spec, plain), 1.0
        case "yarn":
            return _yarn(spec, plain)
        case "longrope":
            return _longrope(spec, plain)
        case "frequency_divisors":
            return plain / _divisors(spec, "divisors"), 1.0
        case "proportional":
            return _proportional(spec), 1.0
        case _:
            return plain, 1.0


def _plain(base: float, width: int) -> Tensor:
    return 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def _dynamic(spec: RopeSpec) -> Tensor:
    length, original = spec.max_model_len, spec.original_length
    if length <= original:
        return _plain(spec.base, spec.width)
    factor = _number(spec, "factor")
    stretch = factor * length / original - (factor - 1)
    return _plain(spec.base * stretch ** (spec.width / (spec.width - 2)), spec.width)


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    factor, original = _number(spec, "factor"), _number(spec, "original_max_position_embeddings")
    low, high = _number(spec, "low_freq_factor"), _number(spec, "high_freq_factor")
    wavelength = 2 * math.pi / plain
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * plain / factor + smooth * plain


def _yarn(spec: RopeSpec, plain: Tensor) -> tuple[Tensor, float]:
    factor, width = _number(spec, "factor"), spec.width
    original = spec.original_length

    def dimension(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.base))

    low = dimension(_number(spec, "beta_fast", 32.0))
    high = dimension(_number(spec, "beta_slow", 1.0))
    if spec.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    index = torch.arange(width // 2, dtype=torch.float32)
    ramp = ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_magnitude(spec, factor)


def _yarn_magnitude(spec: RopeSpec, factor: float) -> float:
    if spec.scaling.get("attention_factor") is not None:
        return _number(spec, "attention_factor")
    mscale, all_dims = spec.scaling.get("mscale"), spec.scaling.get("mscale_all_dim")
    if mscale and all_dims:
        return yarn_mscale(factor, float(mscale)) / yarn_mscale(factor, float(all_dims))
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """The growth of attention's magnitude with the stretch of the context. Source: Peng et al. 2023, eq. 22."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(spec: RopeSpec, plain: Tensor) -> tuple[Tensor, float]:
    original = spec.original_length
    name = "long_factor" if spec.max_model_len > original else "short_factor"
    frequencies = plain / _divisors(spec, name)
    if spec.scaling.get("attention_factor") is not None:
        return frequencies, _number(spec, "attention_factor")
    stretch = spec.max_position_embeddings / original
    return frequencies, 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))


def _proportional(spec: RopeSpec) -> Tensor:
    """The first pairs of a whole head rotate, with exponents over the full width; the others stand still."""
    frequencies = _plain(spec.base, spec.width) / _number(spec, "factor", 1.0)
    frequencies[int(_number(spec, "partial_rotary_factor", 1.0) * spec.width / 2) :] = 0.0
    return frequencies


def _divisors(spec: RopeSpec, key: str) -> Tensor:
    """The listed divisor of each pair's frequency (R/2,)."""
    values = spec.scaling.get(key)
    if not isinstance(values, Sequence) or len(values) != spec.width // 2:
        raise ModelLoadError(f"rope scaling: {key} must list {spec.width // 2} numbers, got {values!r}")
    return torch.tensor(values, dtype=torch.float32)


def _number(spec: RopeSpec, key: str, default: float | None = None) -> float:
    value = spec.scaling.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelLoadError(f"rope scaling of type {spec.kind}: expected a number for {key}, got {value!r}")
    return float(value)
