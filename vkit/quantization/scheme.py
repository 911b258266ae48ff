"""What the schemes of safetensors checkpoints have in common: how a file declares one, and how a layer is read by it.

A scheme says for every layer, from the configuration alone, in which format it is stored (None: plain). A format knows
the tensors a layer then must have, checks them by their headers, and makes one weight of them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from vkit.errors import ModelLoadError
from vkit.kernels import ScaledMatrix

FLOATS = (torch.float16, torch.bfloat16, torch.float32)

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_EMBEDDING = re.compile(r"embed|^w[tp]e$|norm")
_PLAIN_LEAVES = frozenset(
    {
        *("lm_head", "output", "embed_out", "gate", "router", "shared_expert_gate"),
        *("conv1d", "in_proj_a", "in_proj_b", "in_proj_ba"),
    }
)
_PLAIN_PARTS = frozenset({"mtp", "visual", "vision_tower", "vision_model", "audio_tower"})
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What the header says about one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class LayerHeader:
    """The tensors of one layer by suffix, and which of them its format has taken."""

    file: str
    name: str
    tensors: Mapping[str, StoredTensor]
    load: Callable[[str], Tensor]
    """Reads a tensor; for the few that state shapes."""
    taken: list[str] = field(default_factory=list)

    def has(self, suffix: str) -> bool:
        """Whether the file holds this tensor."""
        return suffix in self.tensors

    def take(
        self, suffix: str, dtypes: Iterable[torch.dtype], *shapes: tuple[int, ...], ndim: int | None = None
    ) -> tuple[int, ...]:
        """The shape of a tensor the format needs, of one of these types and shapes, or of `ndim` dimensions.

        Raises:
            ModelLoadError: it is missing or another.
        """
        stored = self.tensors.get(suffix)
        if stored is None:
            self.refuse(suffix, "is missing, and the declared quantisation needs it")
        if stored.dtype not in (wanted := tuple(dtypes)):
            self.refuse(suffix, f"is {_type(stored.dtype)}, expected {' or '.join(map(_type, wanted))}")
        if shapes and stored.shape not in shapes:
            self.refuse(suffix, f"has shape {stored.shape}, expected {' or '.join(map(str, shapes))}")
        if ndim is not None and len(stored.shape) != ndim:
            self.refuse(suffix, f"has shape {stored.shape}, expected {ndim} dimensions")
        self.taken.append(suffix)
        return stored.shape

    def take_scalar(self, suffix: str) -> None:
        """Take a single float32, of shape [] or [1]."""
        self.take(suffix, FLOATS, (), (1,))

    def leave_out(self, *suffixes: str) -> None:
        """Tensors that belong to the layer and are not needed."""
        self.taken.extend(suffix for suffix in suffixes if suffix in self.tensors)

    def groups(self, columns: int, group_size: int | None) -> int:
        """How many groups of columns there are; None or a size below 1 means one.

        Raises:
            ModelLoadError: the size does not divide the columns.
        """
        if group_size is None or group_size < 1:
            return 1
        if columns % group_size:
            raise ModelLoadError(f"{self.file}: {self.name}: group size {group_size} does not divide {columns} inputs")
        return columns // group_size

    def refuse(self, suffix: str, fault: str) -> NoReturn:
        """Refuse the checkpoint for one of the layer's tensors."""
        raise ModelLoadError(f"{self.file}: {self.name}.{suffix} {fault}")


class LayerFormat(ABC):
    """How one layer's weight is stored."""

    name: str

    @property
    @abstractmethod
    def signature(self) -> frozenset[str]:
        """Suffixes that only a layer stored this way has."""

    @abstractmethod
    def check(self, layer: LayerHeader) -> tuple[int, int]:
        """(rows, columns) of the weight, after taking every tensor of the layer that `build` uses.

        Raises:
            ModelLoadError: a tensor is missing, or of another type or shape.
        """

    @abstractmethod
    def build(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> ScaledMatrix:
        """The weight, from the tensors that `check` took."""


class Scheme(Protocol):
    """How a checkpoint's layers are stored, by its configuration."""

    name: str

    def format_of(self, layer: str) -> LayerFormat | None:
        """The format of the linear layer of this name; None if the configuration leaves it plain.

        Raises:
            ModelLoadError: it has a format that cannot be loaded.
        """


@dataclass(frozen=True, slots=True)
class Declaration:
    """The keys of a scheme in a configuration file."""

    file: str
    keys: Mapping[str, Any]

    def refuse(self, fault: str) -> NoReturn:
        """Refuse the checkpoint for what is declared."""
        raise ModelLoadError(f"{self.file}: {fault}")

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer under `key`."""
        value = self.keys.get(key, default)
        if value is None:
            value = default
        if type(value) is not int:
            self.refuse(f"{key} must be an integer, got {value!r}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """The boolean under `key`."""
        value = self.keys.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(f"{key} must be true or false, got {value!r}")
        return value

    def names(self, *keys: str) -> list[str]:
        """The strings listed under the first of the keys that is there."""
        for key in keys:
            value = self.keys.get(key)
            if value is None:
                continue
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                self.refuse(f"{key} must be a list of names, got {value!r:.100}")
            return value
        return []

    def mapping(self, key: str) -> Mapping[str, Any]:
        """The object under `key`; empty if there is none."""
        value = self.keys.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.refuse(f"{key} must be an object, got {value!r:.100}")
        return value

    def one_of(self, key: str, allowed: Iterable[Any], default: Any = None) -> Any:
        """The value under `key`, if it is one of those allowed."""
        value = self.keys.get(key)
        if value is None:
            value = default
        if value not in (known := list(allowed)):
            self.refuse(f"{key} {value!r} is not supported (supported: {', '.join(map(str, known))})")
        return value


def spellings(name: str) -> set[str]:
    """A module's name with every prefix that configurations write or leave out."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    return {name, *(prefix + name for prefix in _PREFIXES)}


def is_listed(layer: str, names: Iterable[str]) -> bool:
    """Whether a layer, or every part of a fused layer, is in a list of exact names."""
    listed = set(names)
    if spellings(layer) & listed:
        return True
    head, _, leaf = layer.rpartition(".")
    parts = _FUSED.get(leaf, ())
    return bool(parts) and all(spellings(f"{head}.{part}") & listed for part in parts)


def is_linear(layer: str) -> bool:
    """Whether a module with a weight is a linear layer: no embedding and no norm."""
    return _EMBEDDING.search(layer.rpartition(".")[2]) is None


def is_usually_plain(layer: str) -> bool:
    """Whether published files leave this layer unquantised even where their lists forget it."""
    *parts, leaf = layer.split(".")
    return leaf in _PLAIN_LEAVES or not is_linear(layer) or not _PLAIN_PARTS.isdisjoint([*parts, leaf])


def scalar(tensor: Tensor) -> Tensor:
    """A [] or [1] tensor as float32 ()."""
    return tensor.reshape(()).float()


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
