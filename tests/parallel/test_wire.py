"""Plans that went over the wire: engines whose runner sees nothing else give the recorded continuations."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from vkit import LLM, SamplingParams
from vkit.media import MediaInput, PlacedMedia
from vkit.parallel.wire import PlanReader, PlanWriter
from vkit.runner import PreparedStep, Runner
from vkit.sequence import Plan, ScheduledSequence, Sequence

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
SMALL: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8}

needs_goldens = pytest.mark.skipif(not GOLDENS.is_dir(), reason="needs the shared goldens")


def cases(name: str) -> list[tuple[list[int], list[int]]]:
    golden = load_file(GOLDENS / name / "golden.safetensors")
    return [(golden[f"input_ids{part}"].tolist(), golden[f"greedy{part}"].tolist()) for part in ("", "_b")]


@pytest.fixture
def plans_are_sent(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Every runner runs what a reader makes of the bytes a writer sent; gives how many bytes those were."""
    prepare = Runner.prepare
    ends: dict[int, tuple[PlanWriter, PlanReader]] = {}
    num_bytes = 0

    def send(self: Runner, plan: Plan, sampled: object = None) -> PreparedStep:
        assert sampled is None, "nothing is launched ahead here"
        nonlocal num_bytes
        writer, reader = ends.setdefault(id(self), (PlanWriter(), PlanReader()))
        data = pickle.dumps(writer.write(plan))
        num_bytes += len(data)
        read = reader.read(pickle.loads(data))
        assert not {id(item.sequence) for item in read.scheduled} & {id(item.sequence) for item in plan.scheduled}
        return prepare(self, read)

    monkeypatch.setattr(Runner, "prepare", send)
    return lambda: num_bytes


@needs_goldens
@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("llama", {"max_num_batched_tokens": 8}),
        ("llama", {"num_blocks": 22, "max_model_len": 80, "enable_prefix_caching": False}),
        ("llama", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
        ("gemma3", {"async_scheduling": True, "max_num_batched_tokens": 16, "num_blocks": 192}),
        ("qwen3_5", {"num_blocks": 300, "enable_prefix_caching": True}),
        ("qwen3_5", {"num_blocks": 300, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ],
    ids=["chunks", "preemption", "drafts", "windows ahead", "states", "states under verification"],
)
def test_continuations_are_the_recorded_ones(
    name: str, keywords: dict[str, Any], plans_are_sent: Callable[[], int]
) -> None:
    work = cases(name)
    params = SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True)
    path, tokenizer = str(GOLDENS / name), str(GOLDENS / "byte_tokenizer")
    with LLM(path, tokenizer=tokenizer, threads=1, **{**SMALL, **keywords}) as llm:
        for _ in range(2):
            outputs = llm.generate([prompt for prompt, _ in work] * 3, params)
            assert [output.outputs[0].token_ids for output in outputs] == [expected[:13] for _, expected in work] * 3
        (preempted,) = [family for family in llm.metrics() if family.name == "vllm:num_preemptions"]
    assert plans_are_sent() > 0
    if keywords.get("num_blocks") == 22:
        assert preempted.samples[0].value > 0


@needs_goldens
def test_a_step_of_a_long_sequence_is_a_short_message() -> None:
    sequence = Sequence("a", list(range(20000)), 20000, SamplingParams(), 0.0, block_ids=[list(range(1, 1251))])
    writer, sizes = PlanWriter(), []
    for start in (19998, 19999):
        share = ScheduledSequence(sequence, start, 1, 1, True)
        sizes.append(len(pickle.dumps(writer.write(Plan(start, [share])))))
    assert sizes[1] < 1000 < sizes[0]


def test_pictures_are_sent_once() -> None:
    """The item's features go with the order to encode it, and not with the sequence."""

    features = np.ones((1000, 100), np.float32)
    item = MediaInput("image", b"d", features, (1, 10, 100), 4, (7, 7, 7, 7), 7)
    sequence = Sequence("a", [7] * 6, 6, SamplingParams(), 0.0, media=(PlacedMedia(item, ((0, 4),)),), block_ids=[[1]])
    writer, reader = PlanWriter(), PlanReader()
    plan = Plan(0, [ScheduledSequence(sequence, 0, 6, 1, True)])
    plan.media.encode.append(item)
    first = pickle.dumps(writer.write(plan))
    assert features.nbytes < len(first) < 1.1 * features.nbytes
    read = reader.read(pickle.loads(first))
    assert np.array_equal(read.media.encode[0].features, features)
    assert read.scheduled[0].sequence.media[0].spans == ((0, 4),)
    second = pickle.dumps(writer.write(Plan(1, [ScheduledSequence(sequence, 5, 1, 1, True)])))
    assert len(second) < 1000
