"""The base of every layer: a tree whose names are the checkpoint's names, and the tensors each leaf expects.

Plain Python objects rather than torch modules: attribute access is on the path of every operation of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vkit.distributed import Ranks
from vkit.quantization import QuantizedTensor, ScaledMatrix, Weight, placed


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor a layer expects: its name below the layer's own, and its shape."""

    name: str
    shape: tuple[int, ...]
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights go and what type activations have."""

    device: torch.device
    dtype: torch.dtype

    def vector(self, value: Weight, dtype: torch.dtype | None = None) -> Tensor:
        """A small dense tensor (norm weight, bias) on the device, in the activations' type unless another is given."""
        dense = value if isinstance(value, torch.Tensor) else value.dequantize()
        return dense.to(self.device, self.dtype if dtype is None else dtype)

    def matrix(self, value: Weight) -> Weight:
        """A large weight on the device, packed if it is packed, and then as the device's kernels want it.

        Under float32 activations a dense weight keeps its own type (and stays a view of the mapped file on a host):
        widening it would double its memory and gain nothing.
        """
        if isinstance(value, QuantizedTensor | ScaledMatrix):
            return placed(value, self.device)
        if self.dtype is torch.float32 and value.dtype in (torch.float16, torch.bfloat16):
            return value.to(self.device)
        return value.to(self.device, self.dtype)


class Module:
    """A layer. Attributes that are modules, or lists of modules, are its children, named as the attribute."""

    names: Mapping[str, str] = {}
    """Attribute name -> checkpoint name, where they differ."""
    is_inline = False
    """Whether the layer's tensors are named as if they were its parent's own."""

    def choose_form(self, is_stored: Callable[[str], bool]) -> None:
        """Settle on one of several ways checkpoints store this layer; names as in `slots`. Called before `slots`."""

    def shard(self, ranks: Ranks) -> None:
        """Be this rank's share from now on, called once, before anything is loaded. What knows no shares is whole on
        every rank, and its children see to themselves.

        Raises:
            CannotShare: so many ranks cannot share this layer.
        """
        for _, child in self.children():
            child.shard(ranks)

    def slots(self) -> list[TensorSlot]:
        """The tensors of this layer itself, children left out; as stored, whatever part of them a rank keeps."""
        return []

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the tensors named in `slots` (optional ones may be missing); also the moment to build tables."""

    def children(self) -> Iterator[tuple[str, Module]]:
        """Direct children with their checkpoint names; private attributes are references, not children."""
        for attribute, value in vars(self).items():
            if attribute.startswith("_"):
                continue
            name = self.names.get(attribute, attribute)
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list):
                yield from ((f"{name}.{i}", item) for i, item in enumerate(value) if isinstance(item, Module))

    def walk(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This layer and all below it, each with the prefix of its tensors' names ("" or ending in a dot)."""
        yield prefix, self
        for name, child in self.children():
            yield from child.walk(prefix if child.is_inline else f"{prefix}{name}.")
