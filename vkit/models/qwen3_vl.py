"""Qwen3-VL: Qwen3 beside a vision tower, whose deeper features join the stream after the first blocks.

Source: Qwen Team 2025, Qwen3-VL; Meng et al. 2024, DeepStack.
"""

from __future__ import annotations

from collections.abc import Mapping

from vkit.models.qwen3 import Qwen3ForCausalLM
from vkit.models.qwen_vision import WithQwenTower


class Qwen3VLForConditionalGeneration(WithQwenTower, Qwen3ForCausalLM):
    """Qwen3-VL, dense."""

    names: Mapping[str, str] = {"model": "model.language_model"}
