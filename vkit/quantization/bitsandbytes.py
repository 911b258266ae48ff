"""bitsandbytes: four-bit codes of a table of floats (NF4 or FP4) and the largest magnitude of each block of inputs.

The magnitudes may be quantised themselves: eight-bit codes of a table, a scale for 256 of them, one offset. They are
opened when a layer is loaded, at 32 bits for a block of 64 inputs; the codes stay as they are in the file.

Source: Dettmers et al. 2023, QLoRA; file layout of the library's `QuantState`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vkit.errors import ModelLoadError
from vkit.kernels import ScaledMatrix
from vkit.kernels.scaled import CODE_VALUES
from vkit.quantization.scheme import FLOATS, Declaration, LayerFormat, LayerHeader, spellings

_NUM_VALUES, _NUM_NESTED_VALUES = 16, 256
_STORAGE = (torch.uint8, *FLOATS)
"""Types that codes are stored as; some programs want them to look like floats."""


@dataclass(frozen=True)
class FourBitFormat(LayerFormat):
    """`weight` (out · in / 2 bytes, 1), and under it `absmax`, `quant_map`, `nested_…`, `quant_state`."""

    kind: Literal["nf4", "fp4"]
    storage: torch.dtype
    name = "bitsandbytes"

    @property
    def signature(self) -> frozenset[str]:
        """What describes a weight."""
        return frozenset(
            {"weight.absmax", "weight.quant_map", *(f"weight.{_state_name(kind)}" for kind in CODE_VALUES)}
        )

    def check(self, layer: LayerHeader) -> tuple[int, int]:
        """(rows, columns) of the weight."""
        suffix = f"weight.{_state_name(self.kind)}"
        layer.take(suffix, [torch.uint8], ndim=1)
        state = _State.read(layer, suffix)
        if state.kind != self.kind:
            layer.refuse(suffix, f"says quant_type {state.kind!r:.40}, and the configuration {self.kind!r}")
        rows, columns = state.shape
        blocks = rows * layer.groups(columns, state.block)
        if columns % 2:
            layer.refuse(suffix, f"says shape ({rows}, {columns}), whose rows do not fill whole bytes")
        layer.take("weight", [self.storage], (math.ceil(rows * columns / 2 / self.storage.itemsize), 1))
        layer.take("weight.quant_map", [torch.float32], (_NUM_VALUES,))
        if state.nested_block:
            layer.take("weight.absmax", [torch.uint8], (blocks,))
            layer.take("weight.nested_absmax", [torch.float32], (-(-blocks // state.nested_block),))
            layer.take("weight.nested_quant_map", [torch.float32], (_NUM_NESTED_VALUES,))
        else:
            layer.take("weight.absmax", [torch.float32], (blocks,))
        return rows, columns

    def build(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> ScaledMatrix:
        """The weight."""
        rows, columns = shape
        expected = torch.tensor(CODE_VALUES[self.kind])
        if not torch.allclose(tensors["weight.quant_map"], expected, rtol=0.0, atol=1e-6):
            raise ModelLoadError(f"weight.quant_map is not the table of {self.kind}")
        state = _State.parse(tensors[f"weight.{_state_name(self.kind)}"])
        scales = tensors["weight.absmax"]
        if state.nested_block:
            larger = tensors["weight.nested_absmax"].repeat_interleave(state.nested_block)[: scales.shape[0]]
            scales = tensors["weight.nested_quant_map"][scales.int()] * larger + state.nested_offset
        codes = tensors["weight"].view(torch.uint8).flatten()[: rows * columns // 2].view(rows, columns // 2)
        block = columns // (scales.shape[0] // rows)
        return ScaledMatrix(self.kind, codes, scales.view(rows, -1), shape, (1, block))


@dataclass(frozen=True)
class _State:
    """What the JSON text beside a weight says."""

    kind: str
    shape: tuple[int, int]
    block: int
    nested_block: int
    """0: the magnitudes are float32."""
    nested_offset: float

    @classmethod
    def read(cls, layer: LayerHeader, suffix: str) -> _State:
        """The checked text of a layer.

        Raises:
            ModelLoadError: it is no such text.
        """
        try:
            return cls.parse(layer.load(suffix))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            layer.refuse(suffix, f"is not what the library writes: {error!r:.100}")

    @classmethod
    def parse(cls, text: Tensor) -> _State:
        """Read the text (N,) uint8.

        Raises:
            ValueError, TypeError, KeyError: it lacks something or says something else.
        """
        value: dict[str, Any] = json.loads(bytes(text.tolist()))
        rows, columns = value["shape"]
        nested_block = value.get("nested_blocksize", 0)
        sizes = (rows, columns, value["blocksize"])
        if (
            any(type(size) is not int or size < 1 for size in sizes)
            or type(nested_block) is not int
            or nested_block < 0
        ):
            raise ValueError(f"sizes {(*sizes, nested_block)}")
        offset = float(value["nested_offset"]) if nested_block else 0.0
        return cls(value["quant_type"], (rows, columns), value["blocksize"], nested_block, offset)


class BitsAndBytesScheme:
    """Every linear layer but `lm_head` and those inside the modules of `llm_int8_skip_modules`, in four bits."""

    name = "bitsandbytes"

    def __init__(self, declared: Declaration) -> None:
        """Read the declaration.

        Raises:
            ModelLoadError: eight bits, or another type of codes.
        """
        if declared.flag("load_in_8bit", default=False) or not declared.flag("load_in_4bit", default=False):
            declared.refuse("only load_in_4bit true is supported: eight-bit weights of bitsandbytes are not read")
        storage = declared.one_of("bnb_4bit_quant_storage", [_type_name(dtype) for dtype in _STORAGE], "uint8")
        kind = declared.one_of("bnb_4bit_quant_type", CODE_VALUES, "fp4")
        self._format = FourBitFormat(kind, getattr(torch, storage))
        self._plain = declared.names("llm_int8_skip_modules")

    def format_of(self, layer: str) -> LayerFormat | None:
        """The format of a layer."""
        names = [f".{name}." for name in spellings(layer)]
        return None if any(f".{part}." in name for part in self._plain for name in names) else self._format


def _state_name(kind: str) -> str:
    return f"quant_state.bitsandbytes__{kind}"


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
