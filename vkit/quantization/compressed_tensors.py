"""compressed-tensors: groups of layers, each with its own way of storing weights and rounding activations.

A layer belongs to the first group one of whose targets names it: a regular expression after `re:`, a module's name,
or the class `Linear`. The ignore list, of the same kind, comes before all groups.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vkit.quantization.fp8 import Fp8Format, block_size
from vkit.quantization.inputs import NVFP4_DIVIDED, InputFormat
from vkit.quantization.integers import ByteIntegers, PackedIntegers
from vkit.quantization.mxfp import MxFormat
from vkit.quantization.nvfp4 import compressed_format
from vkit.quantization.scheme import Declaration, LayerFormat, is_linear, spellings

logger = logging.getLogger("vkit.quantization")

FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_LINEAR = "Linear"


@dataclass(frozen=True)
class _Group:
    targets: list[str]
    format: LayerFormat


class CompressedTensorsScheme:
    """`quant_method: compressed-tensors`."""

    name = "compressed-tensors"

    def __init__(self, declared: Declaration) -> None:
        """Read the declaration.

        Raises:
            ModelLoadError: something in it has no loader.
        """
        self._declared = declared
        for key in ("sparsity_config", "transform_config"):
            value = declared.keys.get(key)
            if value and not (isinstance(value, dict) and value.get("format") == "dense"):
                declared.refuse(f"{key} is not supported: {'sparse' if key[0] == 's' else 'transformed'} weights")
        declared.one_of("quantization_status", ["compressed"], "compressed")
        self._ignored = self._targets("ignore", declared.names("ignore"))
        groups = declared.mapping("config_groups")
        if not groups:
            declared.refuse("config_groups is missing or empty")
        self._groups = [self._group(name, group) for name, group in groups.items()]

    def format_of(self, layer: str) -> LayerFormat | None:
        """The format of a layer."""
        if any(_names(target, layer) for target in self._ignored):
            return None
        for group in self._groups:
            if any(_names(target, layer) for target in group.targets):
                return group.format
        return None

    def _group(self, name: str, group: Any) -> _Group:
        where = f"{self._declared.file}: {name}"
        if not isinstance(group, dict):
            self._declared.refuse(f"{name} must be an object, got {group!r:.100}")
        declared = Declaration(where, group)
        targets = self._targets(f"{name}: targets", declared.names("targets"))
        for target in targets:
            if not target.startswith("re:") and "." not in target and target[:1].isupper() and target != _LINEAR:
                declared.refuse(f"target {target!r} is not supported (supported classes: {_LINEAR})")
        if group.get("output_activations"):
            declared.refuse("output_activations are not supported")
        outer = self._declared.keys.get("format")
        layout = group.get("format") or (None if outer == "mixed-precision" else outer)
        if layout not in FORMATS:
            declared.refuse(f"format {layout!r} is not supported (supported: {', '.join(FORMATS)})")
        weights = Declaration(f"{where}: weights", declared.mapping("weights"))
        inputs = declared.mapping("input_activations")
        return _Group(targets, _format(layout, weights, Declaration(f"{where}: input_activations", inputs)))

    def _targets(self, key: str, targets: list[str]) -> list[str]:
        for target in targets:
            if target.startswith("re:"):
                try:
                    re.compile(target[3:])
                except re.error as error:
                    self._declared.refuse(f"{key}: {target!r} is not a regular expression: {error}")
        return targets


def _names(target: str, layer: str) -> bool:
    if target == _LINEAR:
        return is_linear(layer)
    if target.startswith("re:"):
        return any(re.match(target[3:], name) for name in spellings(layer))
    return not spellings(target).isdisjoint(spellings(layer))


def _format(layout: str, weights: Declaration, inputs: Declaration) -> LayerFormat:
    """What a group's two argument objects mean."""
    kind = weights.one_of("type", ["int", "float"], "int")
    bits = weights.integer("num_bits", 8)
    if weights.flag("dynamic", default=False):
        weights.refuse("dynamic weights are not supported")
    if layout == "nvfp4-pack-quantized":
        _expect(weights, type="float", num_bits=4, group_size=16)
        return compressed_format(_nvfp4_inputs(inputs))
    if layout in ("mxfp4-pack-quantized", "mxfp8-quantized"):
        is_fp4 = layout[4] == "4"
        _expect(weights, type="float", num_bits=4 if is_fp4 else 8, group_size=32)
        if inputs.keys:
            logger.warning("%s: not applied: products of %s weights take activations as they are", inputs.file, layout)
        return MxFormat(is_fp4)
    rounding = _inputs(inputs)
    if layout == "pack-quantized":
        _expect(weights, type="int")
        weights.one_of("num_bits", range(2, 9))
        strategy = weights.one_of("strategy", ["group", "channel"])
        order = weights.one_of("actorder", [None, "weight", "group", "static", "dynamic"])
        is_shuffled = order in ("group", "dynamic")
        size = _group_size(weights) if strategy == "group" else None
        return PackedIntegers(bits, size, weights.flag("symmetric", default=True), is_shuffled, rounding)
    if {"int-quantized": "int", "float-quantized": "float"}.get(layout, kind) != kind:
        weights.refuse(f"type {kind!r} does not fit format {layout}")
    if kind == "float":
        return _floats(weights, rounding)
    if not 2 <= bits <= 8:
        weights.refuse(f"num_bits {bits} is not supported (supported: 2..8)")
    strategy = weights.one_of("strategy", ["tensor", "channel", "group"])
    size = _group_size(weights) if strategy == "group" else None
    return ByteIntegers(strategy, size, weights.flag("symmetric", default=True), rounding)


def _floats(weights: Declaration, rounding: InputFormat | None) -> Fp8Format:
    _expect(weights, num_bits=8)
    if not weights.flag("symmetric", default=True):
        weights.refuse("asymmetric floats are not supported")
    strategy = weights.one_of("strategy", ["tensor", "channel", "block"])
    if strategy != "block":
        return Fp8Format(strategy, rounding)
    size = block_size(weights, "block_structure", weights.keys.get("block_structure"))
    return Fp8Format("block", rounding, size)


def _inputs(inputs: Declaration) -> InputFormat | None:
    """The rounding of activations to eight bits, or None if they stay as they are."""
    if not inputs.keys:
        return None
    _expect(inputs, num_bits=8)
    kind = inputs.one_of("type", ["int", "float"])
    is_symmetric = inputs.flag("symmetric", default=True)
    if kind == "float" and not is_symmetric:
        inputs.refuse("asymmetric floats are not supported")
    name: Literal["int8", "e4m3"] = "int8" if kind == "int" else "e4m3"
    if not inputs.flag("dynamic", default=False):
        inputs.one_of("strategy", ["tensor"])
        return InputFormat(name, "static", is_symmetric=is_symmetric)
    strategy = inputs.one_of("strategy", ["token", "tensor", "group"])
    if strategy == "group":
        size = _group_size(inputs)
        return InputFormat(name, "token" if size is None else "group", size or 0, is_symmetric)
    return InputFormat(name, "token" if strategy == "token" else "tensor", is_symmetric=is_symmetric)


def _nvfp4_inputs(inputs: Declaration) -> InputFormat | None:
    if not inputs.keys:
        return None
    _expect(inputs, num_bits=4, type="float", group_size=16, dynamic="local")
    return NVFP4_DIVIDED


def _group_size(declared: Declaration) -> int | None:
    """The size of a group; null and -1 mean the whole row."""
    size = declared.keys.get("group_size")
    if size in (None, -1):
        return None
    if type(size) is not int or size < 1:
        declared.refuse(f"group_size must be a positive integer, got {size!r}")
    return size


def _expect(declared: Declaration, **values: Any) -> None:
    expected: Mapping[str, Any] = values
    for key, value in expected.items():
        declared.one_of(key, [value])
