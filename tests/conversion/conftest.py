"""Logits of a model file through the paged cache, and goldens with a tokenizer beside them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vkit.cache.groups import CacheKind
from vkit.loaders import open_checkpoint
from vkit.models import build_model
from vkit.runner import Runner
from vkit.sequence import Plan, ScheduledSequence, Sequence
from vkit.types import SamplingParams

MODELS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"


@dataclass(frozen=True)
class Options:
    """The part of EngineConfig that models and runners read."""

    device: str = "cpu"
    dtype: str = "float32"
    kv_cache_dtype: str = "float32"
    max_model_len: int = 128
    block_size: int = 16
    max_num_seqs: int = 1


def prompt_logits(path: Path, prompt: list[int]) -> torch.Tensor:
    """Logits (T, V) of every position of a prompt."""
    options = Options()
    runner = Runner(build_model(open_checkpoint(path), options), options, 64)
    blocks = iter(range(1, 64))
    tables = [
        [next(blocks) for _ in range(1 if group.kind is CacheKind.STATE else -(-len(prompt) // options.block_size))]
        for group in runner.store.groups
    ]
    sequence = Sequence("a", list(prompt), len(prompt), SamplingParams(temperature=0.0), 0.0, block_ids=tables)
    sequence.num_computed_tokens = len(prompt)
    return runner.forward(Plan(0, [ScheduledSequence(sequence, 0, len(prompt), len(prompt), True)]))


@pytest.fixture
def logits_of() -> Callable[[Path, list[int]], torch.Tensor]:
    return prompt_logits


@pytest.fixture
def models() -> Path:
    """The folder of goldens."""
    return MODELS


@pytest.fixture
def golden_tensors() -> Callable[[str], dict[str, torch.Tensor]]:
    return lambda name: load_file(MODELS / name / "golden.safetensors")


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a golden with the byte tokenizer in it."""

    def copy(name: str) -> Path:
        folder = tmp_path / f"{name}-source"
        folder.mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(MODELS / name / file, folder / file)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(MODELS / "byte_tokenizer" / file, folder / file)
        return folder

    return copy
