"""A small checkpoint through runner, cache and the CUDA kernels on the processor: what a step reaches of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vkit import kernels
from vkit.kernels import dispatch
from vkit.kernels.cuda import backend
from vkit.kernels.triton.backend import pack
from vkit.loaders import open_checkpoint
from vkit.models import build_model
from vkit.runner import Runner
from vkit.sequence import Plan, ScheduledSequence, Sequence
from vkit.types import SamplingParams

GOLDENS = Path(__file__).resolve().parents[4] / "shared" / "goldens" / "models"


@dataclasses.dataclass(frozen=True)
class Options:
    """The part of EngineConfig that models and runners read."""

    device: str = "cpu"
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "bfloat16"
    max_model_len: int = 128
    block_size: int = 16
    max_num_seqs: int = 4


@pytest.fixture(autouse=True)
def _offered_for_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backend as cards have it; weights are laid out as Triton, the next one, lays them out."""
    monkeypatch.setattr(backend, "_is_built", lambda: True)
    offered = dispatch.Backend("cuda", "cpu", backend.find, pack=pack)
    monkeypatch.setitem(dispatch._backends, "cpu", [*dispatch.backends("cpu"), offered])
    with kernels.using_backend("cpu", "cuda"):
        yield


def logits_of(checkpoint: Any, token_ids: list[int], prompt_len: int) -> torch.Tensor:
    """Logits after each token from the end of the prompt on, computed one token at a time."""
    options = Options()
    runner = Runner(build_model(checkpoint, options), options, 20)  # type: ignore[arg-type]
    blocks = [list(range(1, 9)) for _ in runner.store.groups]
    sequence = Sequence("a", token_ids, len(token_ids), SamplingParams(temperature=0.0), 0.0, block_ids=blocks)
    rows, start = [], 0
    for step, stop in enumerate(range(prompt_len, len(token_ids) + 1)):
        sequence.num_computed_tokens = stop
        share = ScheduledSequence(sequence, start, stop - start, 1, True)
        rows.append(runner.forward(Plan(step, [share], [])).clone())
        start = stop
    return torch.cat(rows).float()


def test_a_gguf_file(host_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    start = type(host_library).start
    monkeypatch.setattr(
        type(host_library), "start", lambda self, name, *rest: (started.append(name), start(self, name, *rest))
    )
    golden = load_file(GOLDENS / "llama" / "golden.safetensors")
    token_ids = golden["input_ids"][:9].tolist()
    checkpoint = open_checkpoint(GOLDENS / "llama" / "model-q8_0.gguf")
    found = logits_of(checkpoint, token_ids, 5)
    assert set(started) == {"rms_norm", "packed", "decode"}
    with kernels.using_backend("cpu", "reference"):
        expected = logits_of(checkpoint, token_ids, 5)
    recorded = golden["logits"][4 : 4 + len(found)]
    spread = float(recorded.max() - recorded.min())
    plain_error = float((expected - recorded).abs().max())
    assert float((found - recorded).abs().max()) <= max(2 * plain_error, 0.02 * spread)
