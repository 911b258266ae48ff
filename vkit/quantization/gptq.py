"""GPTQ: codes of 2, 3, 4 or 8 bits packed along the inputs, a scale and a zero point for each group of inputs.

With act-order the inputs of a group need not be neighbours: `g_idx` names each input's group.
Source: Frantar et al. 2022, GPTQ; layout of AutoGPTQ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vkit.errors import ModelLoadError
from vkit.kernels import ScaledMatrix
from vkit.kernels.reference.scaled_linear import unpack_words
from vkit.quantization.scheme import FLOATS, Declaration, LayerFormat, LayerHeader

WIDTHS = (2, 3, 4, 8)


@dataclass(frozen=True)
class GptqFormat(LayerFormat):
    """`qweight` (in · bits / 32, out), `qzeros` (groups, out · bits / 32), `scales` (groups, out), `g_idx` (in,)."""

    bits: int
    group_size: int
    is_shuffled: bool
    zero_offset: int
    """What is added to a stored zero point."""
    name = "gptq"
    signature = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def check(self, layer: LayerHeader) -> tuple[int, int]:
        """(rows, columns) of the weight."""
        words, rows = layer.take("qweight", [torch.int32], ndim=2)
        columns = words * 32 // self.bits
        if columns * self.bits != words * 32:
            layer.refuse("qweight", f"has {words} words a column, no whole number of {self.bits}-bit codes")
        groups = layer.groups(columns, self.group_size)
        layer.take("qzeros", [torch.int32], (groups, -(-rows * self.bits // 32)))
        layer.take("scales", FLOATS, (groups, rows))
        if self.is_shuffled or layer.has("g_idx"):
            layer.take("g_idx", [torch.int32, torch.int64], (columns,))
        return rows, columns

    def build(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> ScaledMatrix:
        """The weight.

        Raises:
            ModelLoadError: `g_idx` names a group that is not there.
        """
        rows, columns = shape
        scales = tensors["scales"].T
        stored = unpack_words(tensors["qzeros"], self.bits, rows).T
        zeros = ((stored + self.zero_offset) & ((1 << self.bits) - 1)).to(torch.uint8)
        block = (1, columns // scales.shape[1])
        return ScaledMatrix(
            "words",
            tensors["qweight"].T,
            scales,
            shape,
            block,
            bits=self.bits,
            zeros=zeros,
            group_index=group_index(tensors.get("g_idx"), columns, block[1]),
        )


def group_index(stored: Tensor | None, columns: int, group_size: int) -> Tensor | None:
    """Each input's group as int32, or None if they are in order.

    Raises:
        ModelLoadError: a group that is not there.
    """
    if stored is None or torch.equal(stored.long(), torch.arange(columns) // group_size):
        return None
    if int(stored.min()) < 0 or int(stored.max()) >= columns // group_size:
        raise ModelLoadError(
            f"g_idx names groups {int(stored.min())}..{int(stored.max())}, expected 0..{columns // group_size - 1}"
        )
    return stored.to(torch.int32)


class GptqScheme:
    """Every linear layer, with exceptions by regular expression; the head only on request."""

    name = "gptq"

    def __init__(self, declared: Declaration) -> None:
        """Read the declaration.

        Raises:
            ModelLoadError: another width or format.
        """
        self._declared = declared
        checkpoint_format = declared.one_of("checkpoint_format", ["gptq", "gptq_v2"], "gptq")
        self._zero_offset = 1 if checkpoint_format == "gptq" else 0
        self._has_head = declared.flag("lm_head", default=False)
        self._exceptions: list[tuple[re.Pattern[str], LayerFormat | None]] = []
        for pattern, changes in declared.mapping("dynamic").items():
            self._exceptions.append(self._exception(pattern, changes))
        self._format = self._format_for(declared)

    def format_of(self, layer: str) -> LayerFormat | None:
        """The format of a layer: the first exception that matches, or the one of all."""
        for pattern, exception in self._exceptions:
            if pattern.match(layer):
                return exception
        if layer.rpartition(".")[2] == "lm_head" and not self._has_head:
            return None
        return self._format

    def _exception(self, pattern: str, changes: object) -> tuple[re.Pattern[str], LayerFormat | None]:
        try:
            compiled = re.compile(pattern.removeprefix("-:").removeprefix("+:"))
        except re.error as error:
            self._declared.refuse(f"dynamic: {pattern!r} is not a regular expression: {error}")
        if pattern.startswith("-:"):
            return compiled, None
        if not isinstance(changes, dict):
            self._declared.refuse(f"dynamic: {pattern!r} must have an object, got {changes!r:.100}")
        return compiled, self._format_for(Declaration(self._declared.file, {**self._declared.keys, **changes}))

    def _format_for(self, declared: Declaration) -> GptqFormat:
        return GptqFormat(
            declared.one_of("bits", WIDTHS),
            declared.integer("group_size", 128),
            declared.flag("desc_act", default=False),
            self._zero_offset,
        )
