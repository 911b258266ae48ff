"""The schemes by the name under which configurations declare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vkit.quantization.awq import AwqScheme
from vkit.quantization.bitsandbytes import BitsAndBytesScheme
from vkit.quantization.compressed_tensors import CompressedTensorsScheme
from vkit.quantization.fp8 import Fp8Scheme
from vkit.quantization.gptq import GptqScheme
from vkit.quantization.modelopt import ModelOptScheme
from vkit.quantization.scheme import Declaration, Scheme

SCHEMES: Mapping[str, Callable[[Declaration], Scheme]] = {
    "awq": AwqScheme,
    "bitsandbytes": BitsAndBytesScheme,
    "compressed-tensors": CompressedTensorsScheme,
    "fp8": Fp8Scheme,
    "gptq": GptqScheme,
    "modelopt": ModelOptScheme,
}
"""quant_method -> what reads its declaration."""
