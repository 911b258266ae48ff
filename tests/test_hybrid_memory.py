"""Memory of models that keep states beside tokens, at the sizes of published configurations; no weights are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from vkit.config import EngineArgs
from vkit.description import describe_model
from vkit.device import find_device
from vkit.facts import DeviceFacts, ModelFacts
from vkit.models.base import ModelCheckpoint

GIB = 2**30

QWEN35_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000.0,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
GEMMA3_27B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 262208,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 168,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
}


@dataclass
class Headers:
    """A checkpoint of which only the configuration exists."""

    config: dict[str, Any]
    path: Path = Path("model")
    name: str = "model"
    format: str = "safetensors"
    num_weight_bytes: int = 54 * 10**9
    generation_config: dict[str, Any] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return str(self.config["architectures"][0])


def facts_of(config: dict[str, Any]) -> ModelFacts:
    checkpoint: ModelCheckpoint = Headers(config)  # type: ignore[assignment]
    args = EngineArgs(model="model", device="cpu", kv_cache_dtype="bfloat16")
    return describe_model(checkpoint, args, find_device("cpu")).facts  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def qwen() -> ModelFacts:
    return facts_of(QWEN35_27B)


def cache_bytes(facts: ModelFacts, num_tokens: int) -> int:
    """What one sequence takes, the null block left out."""
    block_size = facts.block_size_for(32)
    return facts.blocks_for(num_tokens, block_size, 2048) * facts.bytes_per_block(block_size)


def test_a_block_of_tokens_fills_the_page_of_a_state(qwen: ModelFacts) -> None:
    token = 2 * 4 * 256 * 2
    state = 48 * 128 * 128 * 4 + (2 * 16 * 128 + 48 * 128) * 3 * 4  # the convolution state is as wide as activations
    block_size = qwen.block_size_for(32)
    assert {group.bytes_per_unit for group in qwen.cache_groups} == {token, state}
    assert block_size == math.ceil(state / token / 16) * 16
    assert [group.num_layers for group in qwen.cache_groups] == [16, 16, 16, 16]
    assert qwen.bytes_per_block(block_size) == 16 * block_size * token
    assert qwen.block_size_for(4096) == 4096, "more than a state's worth may be asked for"


@pytest.mark.parametrize("num_tokens", [4096, 32768, 262144])
def test_hybrid_memory_is_near_what_is_kept(qwen: ModelFacts, num_tokens: int) -> None:
    kept = sum(
        group.num_layers * group.bytes_per_unit * (1 if group.kind == "state" else num_tokens)
        for group in qwen.cache_groups
    )
    assert kept <= cache_bytes(qwen, num_tokens) <= 1.15 * kept


def test_a_window_frees_most_layers() -> None:
    """Ten layers of 62 keep everything; blocks as wide as the 52 others would take five times as much."""
    gemma = facts_of(GEMMA3_27B)
    per_layer = 2 * 16 * 128 * 2
    kept = 10 * 131072 * per_layer + 52 * (1023 + 2048) * per_layer
    assert cache_bytes(gemma, 131072) <= 1.1 * kept


def test_the_raised_block_size_is_what_the_engine_uses(qwen: ModelFacts) -> None:
    device = DeviceFacts("cpu", 512 * GIB, 500 * GIB, 2)
    config = EngineArgs(model="model", max_model_len=32768).resolve(qwen, device)
    assert config.block_size == qwen.block_size_for(32)
    assert any("--block-size raised from 32" in note for note in config.notes)
    assert config.num_blocks * qwen.bytes_per_block(config.block_size) < 16 * GIB
