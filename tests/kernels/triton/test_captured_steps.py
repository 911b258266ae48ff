"""A decoding step of a whole model, as it would be captured on a card: Triton's ops, and plain torch for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.recorder import CallRecorder
from vkit import kernels
from vkit.kernels import dispatch
from vkit.loaders import open_checkpoint
from vkit.models import build_model
from vkit.runner import Runner
from vkit.sequence import Plan, ScheduledSequence, Sequence
from vkit.types import SamplingParams

GOLDENS = Path(__file__).resolve().parents[4] / "shared" / "goldens" / "models"
NAME = "interpreted"


@dataclass(frozen=True)
class Options:
    device: str = "cpu"
    dtype: str = "float32"
    kv_cache_dtype: str = "float32"
    max_model_len: int = 128
    block_size: int = 16
    max_num_seqs: int = 4


@pytest.fixture
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's kernels where a card would have them."""
    from vkit.kernels.triton.ops import OPS

    backends = {kind: list(found) for kind, found in dispatch._backends.items()}
    monkeypatch.setattr(dispatch, "_backends", backends)
    dispatch.register_backend(kernels.Backend(NAME, "cpu", lambda op, dtype: OPS.get(op)))
    with kernels.using_backend("cpu", NAME):
        yield


def decoded(name: str, prompts: list[list[int]], num_tokens: int, recorder: CallRecorder | None) -> tuple[Any, Runner]:
    """Greedy tokens of prompts that decode together, and the runner."""
    runner = Runner(
        build_model(open_checkpoint(GOLDENS / name), Options()), Options(), 100, recorder=recorder, capture_sizes=(4,)
    )
    for slab in runner.store.slabs:
        slab.fill_(255)
    sequences = []
    for index, prompt in enumerate(prompts):
        blocks = [[1 + 4 * index + 8 * group.index + place for place in range(4)] for group in runner.store.groups]
        sequences.append(Sequence(f"{index}", list(prompt), len(prompt), SamplingParams(), 0.0, block_ids=blocks))
    for step in range(num_tokens):
        items = []
        for sequence in sequences:
            start = sequence.num_computed_tokens
            items.append(ScheduledSequence(sequence, start, sequence.num_tokens - start, 1, True))
            sequence.num_computed_tokens = sequence.num_tokens
        logits = runner.forward(Plan(step, items))
        for sequence, token_id in zip(sequences, logits.argmax(1).tolist(), strict=True):
            sequence.token_ids.append(token_id)
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences], runner


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "qwen3_moe"))]
)
@pytest.mark.usefixtures("_interpreted")
def test_a_replay_gives_the_tokens_of_plain_torch(name: str) -> None:
    prompts = [[5, 9, 200], [7, 1, 3, 250, 17, 40]]
    with kernels.using_backend("cpu", "reference"):
        expected, _ = decoded(name, prompts, 3, None)
    recorder = CallRecorder(warm_ups=0, is_strict=True)
    found, runner = decoded(name, prompts, 3, recorder)
    assert runner.graphs is not None
    assert runner.graphs.refusal is None
    assert recorder.num_replayed == 2
    assert found == expected


@pytest.mark.slow
@pytest.mark.usefixtures("_interpreted")
def test_lengths_on_the_host_are_bounds_in_a_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are cut for the longest sequence that the capture allows; parts beyond a sequence's end add nothing."""
    from vkit.kernels.triton import paged

    seen = []
    cut = paged.Cut.of

    def watched(batch: Any, window: int | None, chunk: int, limit: int) -> Any:
        found = cut(batch, window, chunk, limit)
        seen.append(found.num_splits)
        return found

    monkeypatch.setattr(paged.Cut, "of", staticmethod(watched))
    monkeypatch.setattr(paged.paged_attention, "__kwdefaults__", {"chunk": 32, "decode": None})
    prompts = [list(range(2, 40)), [9, 8]]
    with kernels.using_backend("cpu", "reference"):
        expected, _ = decoded("llama", prompts, 3, None)
    found, runner = decoded("llama", prompts, 3, CallRecorder(warm_ups=0, is_strict=True))
    assert runner.graphs is not None
    assert runner.graphs.num_captured == 1
    assert max(seen) == 4  # 128 tokens, the bound, by 32
    assert found == expected
