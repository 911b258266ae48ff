"""ModelOpt's algorithms: FP8 and NVFP4, one for all layers or each layer its own; exceptions are globs."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from vkit.quantization.fp8 import Fp8Format
from vkit.quantization.inputs import FP8_STATIC, FP8_TOKEN, NVFP4_MULTIPLIED
from vkit.quantization.nvfp4 import GROUP, model_opt_format
from vkit.quantization.scheme import Declaration, LayerFormat, spellings

ALGORITHMS: dict[str, Callable[[], LayerFormat]] = {
    "FP8": lambda: Fp8Format("tensor", FP8_STATIC),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda: Fp8Format("channel", FP8_TOKEN),
    "FP8_PB_WO": lambda: Fp8Format("block", None),
    "NVFP4": lambda: model_opt_format(NVFP4_MULTIPLIED),
    "NVFP4_AWQ": lambda: model_opt_format(NVFP4_MULTIPLIED, has_pre_scale=True),
    "W4A16_NVFP4": lambda: model_opt_format(None),
}
"""quant_algo -> the format of a layer."""

MIXED = "MIXED_PRECISION"


class ModelOptScheme:
    """`quant_method: modelopt`, or hf_quant_config.json."""

    name = "modelopt"

    def __init__(self, declared: Declaration) -> None:
        """Read the declaration.

        Raises:
            ModelLoadError: an unknown algorithm, or another group size.
        """
        nested = declared.mapping("quantization")
        self._declared = declared = Declaration(declared.file, {**declared.keys, **nested})
        self._plain = declared.names("exclude_modules", "ignore")
        algorithm = declared.one_of("quant_algo", [*ALGORITHMS, MIXED])
        self._layers: dict[str, LayerFormat] | None = None
        if algorithm == MIXED:
            layers = declared.mapping("quantized_layers")
            self._layers = {name: self._layer(name, settings) for name, settings in layers.items()}
        else:
            self._format = self._format_for(declared)

    def format_of(self, layer: str) -> LayerFormat | None:
        """The format of a layer."""
        names = spellings(layer)
        if any(fnmatchcase(name, pattern) for pattern in self._plain for name in names):
            return None
        if self._layers is None:
            return self._format
        return next((self._layers[name] for name in names if name in self._layers), None)

    def _layer(self, name: str, settings: object) -> LayerFormat:
        if not isinstance(settings, dict):
            self._declared.refuse(f"quantized_layers: {name!r} must have an object, got {settings!r:.100}")
        return self._format_for(Declaration(f"{self._declared.file}: quantized_layers: {name}", settings))

    @staticmethod
    def _format_for(declared: Declaration) -> LayerFormat:
        algorithm = declared.one_of("quant_algo", ALGORITHMS)
        if "NVFP4" in algorithm:
            declared.one_of("group_size", [GROUP], GROUP)
        return ALGORITHMS[algorithm]()
