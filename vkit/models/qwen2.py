"""Qwen2: Llama with biases on queries, keys and values, and a window on the later layers if asked for.

Source: Yang et al. 2024, Qwen2 Technical Report.
"""

from __future__ import annotations

from vkit.layers import Attention
from vkit.models.hf_config import HFConfig
from vkit.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 and Qwen2.5."""

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        window = window_of(self.config, layer)
        return Attention(layer, *self.attention_shape, rotary=self.rotary, bias=True, window=window)


def window_of(config: HFConfig, layer: int) -> int | None:
    """The window of a layer: none unless `use_sliding_window`, then on the layers from `max_window_layers` on."""
    if not config.flag("use_sliding_window", default=False):
        return None
    types = config.layer_types(layer + 1)
    is_sliding = types[layer] == "sliding_attention" if types else layer >= config.integer("max_window_layers")
    return config.integer("sliding_window") if is_sliding else None
