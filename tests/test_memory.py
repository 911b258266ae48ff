"""The cache is what a card has left beside what was measured: an invented card, whose figures the tests choose."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recorder import CallRecorder
from vkit import LLM, SamplingParams, loading, memory, resident
from vkit.config import EngineArgs
from vkit.device import Device
from vkit.errors import OutOfMemoryPreflight
from vkit.facts import DeviceFacts, ModelFacts
from vkit.memory import SLACK_BYTES, MemoryProfile, exercise_sampler, largest_plan, profile_memory
from vkit.pool_size import size_pool

GOLDENS = Path(__file__).resolve().parents[2] / "shared" / "goldens" / "models"
MIB = 1 << 20
GIB = 1 << 30


@dataclass
class InventedCard:
    """Tensors take what `weights` and `step` say; each capture takes `first`, or `next` where one was made before."""

    total: int = 8 * GIB
    others: int = GIB
    weights: int = 2 * GIB
    step: int = 512 * MIB
    libraries: int = 300 * MIB
    captures: tuple[int, ...] = (100 * MIB, 3 * MIB)
    recorder: CallRecorder = field(default_factory=CallRecorder)
    has_run: bool = False
    num_releases: int = 0

    def allocated(self) -> int:
        return self.weights + MIB

    def reset_peak(self) -> None:
        self.has_run = False

    def peak(self) -> int:
        assert self.has_run, "a peak is that of a step that was run"
        return self.allocated() + self.step

    def reserved(self) -> int:
        taken = self.recorder.num_recorded
        return self.allocated() + sum(self.captures[:1] * min(1, taken)) + self.captures[1] * max(0, taken - 1)

    def used(self) -> int:
        return self.others + self.libraries + self.reserved()

    def release(self) -> None:
        self.num_releases += 1


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> InventedCard:
    """A card in place of the host, as far as memory goes."""
    card = InventedCard()
    device = Device("cpu", "invented", card.total, card.total - card.others, 1, frozenset({"float32"}))
    monkeypatch.setattr(loading, "find_device", lambda asked: device)
    monkeypatch.setattr(resident, "meter_for", lambda device: card)
    monkeypatch.setattr(resident, "recorder_for", lambda device: card.recorder)
    run = memory.exercise_sampler

    def watched(logits: torch.Tensor) -> None:
        run(logits)
        card.has_run = True

    monkeypatch.setattr(memory, "exercise_sampler", watched)
    return card


def opened(folder: Path, **settings: Any) -> LLM:
    for source in (GOLDENS / "byte_tokenizer", GOLDENS / "llama"):
        shutil.copytree(source, folder, dirs_exist_ok=True)
    chosen = {"dtype": "float32", "max_model_len": 96, "block_size": 16, "max_num_seqs": 4, "kv_cache_dtype": "float32"}
    return LLM(str(folder), **{**chosen, **settings})


def test_the_cache_fills_what_the_measurements_leave(
    card: InventedCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A cache of gigabytes is not made here: what would be made is looked at, and a small one is.
    asked: list[int] = []
    make = resident.ResidentModel._make_runner

    def small(self: Any, num_blocks: int, worker: Any) -> Any:
        asked.append(num_blocks)
        return make(self, min(num_blocks, 20), worker)

    monkeypatch.setattr(resident.ResidentModel, "_make_runner", small)
    with opened(tmp_path, gpu_memory_utilization=0.75) as llm:
        settings = llm._loaded.settings
        (output,) = llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=3))
    assert len(output.outputs[0].token_ids) == 3
    sizes = 3  # one, two and four rows, all for contexts of up to 96 tokens
    taken = card.weights + MIB + card.step + card.libraries + 100 * MIB + (sizes - 1) * 3 * MIB + SLACK_BYTES
    left = int(0.75 * card.total) - card.others - taken
    config = json.loads((tmp_path / "config.json").read_text())
    heads, width = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]
    per_block = config["num_hidden_layers"] * 2 * 16 * heads * config.get("head_dim", width) * 4
    assert asked == [1, left // per_block], "the null block alone while measuring, then all that fits"
    assert settings["num_blocks"] == left // per_block
    assert card.num_releases >= 4


def test_what_does_not_fit_beside_the_measurements_is_refused_naming_the_flag(
    card: InventedCard, tmp_path: Path
) -> None:
    card.step = 3 * GIB
    with pytest.raises(OutOfMemoryPreflight, match=r"--gpu-memory-utilization 0\.5: .* would fit"):
        opened(tmp_path, gpu_memory_utilization=0.5)
    card.step = 6 * GIB
    with pytest.raises(OutOfMemoryPreflight, match=r"weights 2.00 GiB \+ activations 6\.[0-9]+ GiB"):
        opened(tmp_path, num_blocks=100)


def facts(**changes: Any) -> ModelFacts:
    values: dict[str, Any] = {
        "name": "m", "architecture": "A", "format": "safetensors", "dtype": "bfloat16", "max_model_len": 4096,
        "num_weight_bytes": 4 * GIB, "cache_groups": (), "num_activation_bytes": 100 * MIB,
        "activation_bytes_per_token": 20_000, "activation_bytes_per_seq": 100_000,
    }  # fmt: skip
    return ModelFacts(**{**values, **changes})


def test_measurements_take_the_place_of_estimates() -> None:
    profile = MemoryProfile(weights=5 * GIB, activations=300 * MIB, graphs=200 * MIB, other=44 * MIB)
    measured = profile.measured(facts())
    assert measured.num_weight_bytes == 5 * GIB
    assert measured.num_activation_bytes == 800 * MIB
    assert (measured.activation_bytes_per_token, measured.activation_bytes_per_seq) == (160_000, 800_000)
    assert profile.total == 5 * GIB + 800 * MIB


def test_a_share_that_others_hold_part_of_is_refused_with_both_numbers() -> None:
    device = DeviceFacts("cuda", 80 * GIB, 50 * GIB, 8)
    args = EngineArgs(model="m", gpu_memory_utilization=0.9)
    with pytest.raises(OutOfMemoryPreflight) as caught:
        size_pool(args, facts(), device, 4096, 2048)
    message = str(caught.value)
    assert "--gpu-memory-utilization 0.9: 72.00 GiB of 80.00 GiB are asked for, 50.00 GiB are free" in message
    assert "other processes hold 30.00 GiB" in message
    assert "--gpu-memory-utilization 0.62 would fit" in message
    size_pool(EngineArgs(model="m", gpu_memory_utilization=0.62), facts(), device, 4096, 2048)
    size_pool(EngineArgs(model="m", num_blocks=0), facts(), device, 4096, 2048)  # not asked for: what is free is taken


@pytest.mark.parametrize(
    ("budget", "seqs", "max_model_len", "counts"),
    [(10, 4, 100, [3, 3, 2, 2]), (2048, 2, 16, [16, 16]), (3, 8, 100, [1, 1, 1]), (5, 1, 100, [5])],
)
def test_the_largest_step_has_all_its_tokens_in_the_null_block(
    budget: int, seqs: int, max_model_len: int, counts: list[int]
) -> None:
    plan = largest_plan(2, 4, budget, seqs, max_model_len)
    assert [item.num_tokens for item in plan.scheduled] == counts
    assert all(item.num_logits == 1 and item.start == 0 for item in plan.scheduled)
    for item in plan.scheduled:
        assert item.sequence.block_ids == [[0] * -(-item.num_tokens // 4)] * 2


def test_where_nothing_is_captured_nothing_is_counted() -> None:
    class Runner:
        graphs = None
        num_groups = 1
        is_closed = False

        def forward(self, plan: Any) -> torch.Tensor:
            card.has_run = True
            return torch.zeros(len(plan.scheduled), 7)

        def close(self) -> None:
            self.is_closed = True

    card, runner = InventedCard(), Runner()
    found = profile_memory(
        card, lambda: runner, used_before=card.others, block_size=4, max_num_batched_tokens=8, max_num_seqs=2,
        max_model_len=16, samples=False,
    )  # fmt: skip
    assert found == MemoryProfile(card.weights + MIB, card.step, 0, card.libraries)
    assert runner.is_closed


def test_the_sampler_is_exercised_on_every_row() -> None:
    exercise_sampler(torch.randn(3, 50))


def test_a_host_measures_nothing() -> None:
    assert memory.meter_for(torch.device("cpu")) is None
