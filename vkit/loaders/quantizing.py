"""Weights in another form than the files have: plain ones in eight bits, GGUF blocks expanded, as they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from vkit.config import QUANTIZATIONS
from vkit.errors import UsageError
from vkit.kernels import ScaledMatrix
from vkit.loaders.checkpoint import Checkpoint, TensorInfo
from vkit.quantization import Weight
from vkit.quantization.inputs import FP8_TOKEN
from vkit.quantization.scheme import is_usually_plain

AT_LOAD = "fp8"
"""The scheme that a plain checkpoint can be brought into while it is read."""
MAX_E4M3 = 448.0
SCALE_BYTES = 4


def quantized_as(checkpoint: Checkpoint, asked: str | None) -> Checkpoint:
    """The checkpoint, if it is stored as asked; a plain one in eight-bit floats, if that is asked.

    Raises:
        UsageError: it is stored otherwise.
    """
    if asked is None or asked == checkpoint.quantization:
        return checkpoint
    if checkpoint.quantization is None and asked == AT_LOAD:
        return Fp8Checkpoint(checkpoint)
    stored = checkpoint.quantization or "not quantised"
    able = f"leave the flag out; known are {', '.join(QUANTIZATIONS)}"
    if checkpoint.quantization is None:
        able = f"only {AT_LOAD} can be made of plain weights as they are read"
    raise UsageError(f"--quantization: {asked} was asked for, but {checkpoint.name} is {stored}", remedy=able)


class _Changed(Checkpoint):
    """A checkpoint whose weights `load` returns in another form."""

    def __init__(self, stored: Checkpoint, quantization: str | None) -> None:
        """Takes over `stored`, and closes it."""
        self._stored = stored
        self.path, self.name, self.format = stored.path, stored.name, stored.format
        self.weight_files = stored.weight_files
        self.config, self.generation_config = stored.config, stored.generation_config
        self.gguf_metadata, self.quantization = stored.gguf_metadata, quantization

    def tensor_names(self) -> set[str]:
        """All tensors of the files."""
        return self._stored.tensor_names()

    def preprocessor_config(self, kind: Literal["image", "video"]) -> Mapping[str, Any]:
        """How media are to be prepared."""
        return self._stored.preprocessor_config(kind)

    def release_pages(self) -> None:
        """Let the operating system take back the memory of everything mapped so far."""
        self._stored.release_pages()

    def close(self) -> None:
        """End loading."""
        self._stored.close()


class ExpandedCheckpoint(_Changed):
    """A GGUF file whose blocks load as plain numbers of one dtype: more memory, and products by plain torch."""

    def __init__(self, packed: Checkpoint, dtype: torch.dtype) -> None:
        """`dtype`: what blocks become. What the file has as plain numbers stays as it is."""
        super().__init__(packed, None)
        self._dtype = dtype

    def tensor_info(self, name: str) -> TensorInfo:
        """Shape, type and size as loaded."""
        info = self._stored.tensor_info(name)
        if not info.is_packed:
            return info
        return TensorInfo(name, info.shape, self._dtype, None, math.prod(info.shape) * self._dtype.itemsize)

    def load(self, name: str) -> Weight:
        """The tensor, expanded."""
        weight = self._stored.load(name)
        return weight if isinstance(weight, torch.Tensor) else weight.dequantize(self._dtype)


class Fp8Checkpoint(_Changed):
    """A plain checkpoint whose linear weights load as E4M3 with a scale for each output.

    Activations are rounded to E4M3 with a scale for each token. Embeddings, norms, routers and the like stay as they
    are. Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning.
    """

    def __init__(self, plain: Checkpoint) -> None:
        """Takes over `plain`."""
        super().__init__(plain, AT_LOAD)

    def tensor_info(self, name: str) -> TensorInfo:
        """Shape, type and size as loaded."""
        info = self._stored.tensor_info(name)
        if not self._is_rounded(info):
            return info
        rows, columns = info.shape
        return TensorInfo(name, info.shape, None, AT_LOAD, rows * columns + SCALE_BYTES * rows)

    def load(self, name: str) -> Weight:
        """The tensor; a linear weight as codes and scales."""
        weight = self._stored.load(name)
        if not self._is_rounded(self._stored.tensor_info(name)):
            return weight
        assert isinstance(weight, torch.Tensor)
        return to_fp8(weight)

    @staticmethod
    def _is_rounded(info: TensorInfo) -> bool:
        layer, _, suffix = info.name.rpartition(".")
        is_matrix = len(info.shape) == 2 and info.dtype is not None and info.dtype.is_floating_point
        return suffix == "weight" and is_matrix and not is_usually_plain(layer)


def to_fp8(weight: torch.Tensor) -> ScaledMatrix:
    """`weight` (out, in) as E4M3 codes with a scale max|row| / 448 for each row; a row of zeros has scale 1."""
    rows, columns = weight.shape
    values = weight.to(torch.float32)
    scales = values.abs().amax(1, keepdim=True) / MAX_E4M3
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = (values / scales).clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)
    return ScaledMatrix("bytes", codes, scales, (rows, columns), (1, columns), inputs=FP8_TOKEN.build({}))
