"""Golden checkpoints and a scheduler small enough to be obviously right."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from vkit import kernels
from vkit.cache.groups import CacheKind
from vkit.cache.media import MediaCache
from vkit.loaders import open_checkpoint
from vkit.media import PlacedPrompt
from vkit.models import CausalLM, build_model
from vkit.runner import Runner
from vkit.sequence import Plan, ScheduledSequence, Sequence
from vkit.types import SamplingParams


def shared_folder() -> Path:
    """../shared beside the repository."""
    return Path(__file__).resolve().parents[3] / "shared"


@dataclass(frozen=True)
class Options:
    """The part of EngineConfig that models and runners read."""

    device: str = "cpu"
    dtype: str = "float32"
    kv_cache_dtype: str = "float32"
    max_model_len: int = 128
    block_size: int = 16
    max_num_seqs: int = 4


class TinyCheckpoint:
    """A safetensors file and a config.json, shaped like a Checkpoint; tensors may be replaced or removed."""

    def __init__(self, path: Path, dtype: torch.dtype | None = None, **config: Any) -> None:
        self.path = path
        self.config = {**json.loads((path / "config.json").read_text()), **config}
        self.architecture = self.config["architectures"][0]
        self.tensors = load_file(path / "model.safetensors")
        if dtype is not None:
            self.tensors = {name: tensor.to(dtype) for name, tensor in self.tensors.items()}

    @property
    def num_weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def tensor_names(self) -> set[str]:
        return set(self.tensors)

    def tensor_info(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def load(self, name: str) -> torch.Tensor:
        return self.tensors[name]


TOLERANCE = 5e-4
"""How far a logit may be from a golden's."""


@dataclass(frozen=True)
class Continuation:
    """What a model made of a prompt: logits (prompt tokens, vocabulary) and the most likely tokens after it."""

    logits: torch.Tensor
    token_ids: list[int]


@dataclass
class Golden:
    """A golden's tensors: prompt, logits at each of its positions, greedy continuation, for two prompts."""

    name: str
    tensors: dict[str, torch.Tensor]

    def prompt(self, suffix: str = "") -> list[int]:
        return self.tensors[f"input_ids{suffix}"].tolist()

    def logits(self, suffix: str = "") -> torch.Tensor:
        return self.tensors[f"logits{suffix}"]

    def greedy(self, suffix: str = "") -> list[int]:
        return self.tensors[f"greedy{suffix}"].tolist()

    def check(self, results: dict[str, Continuation], **names: str) -> None:
        """`names`: name of a result -> what its tensors are called, with X for "logits" and "greedy" (X, X_b, mm_X)."""
        assert set(results) == set(names)
        for key, name in names.items():
            expected = self.tensors[name.replace("X", "logits")]
            torch.testing.assert_close(results[key].logits, expected, atol=TOLERANCE, rtol=0)
            assert results[key].token_ids == self.tensors[name.replace("X", "greedy")].tolist()


@pytest.fixture(scope="session")
def golden_path() -> Callable[[str], Path]:
    def path(name: str) -> Path:
        return shared_folder() / "goldens" / "models" / name

    return path


@pytest.fixture(scope="session")
def load_golden(golden_path: Callable[[str], Path]) -> Callable[[str], Golden]:
    def load(name: str) -> Golden:
        with safe_open(golden_path(name) / "golden.safetensors", "pt") as file:
            return Golden(name, {key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118

    return load


@pytest.fixture(scope="session")
def load_model(golden_path: Callable[[str], Path]) -> Callable[..., CausalLM]:
    def load(name: str, options: Options, weight_dtype: torch.dtype | None = None, file: str | None = None) -> CausalLM:
        folder = golden_path(name)
        if weight_dtype is not None:
            return build_model(TinyCheckpoint(folder, weight_dtype), options)
        return build_model(open_checkpoint(folder / file if file else folder), options)

    return load


@dataclass
class Driver:
    """Runs prompts through a runner, chunk by chunk, with blocks handed out in random order and taken back."""

    runner: Runner
    options: Options
    num_blocks: int
    rng: random.Random
    free: list[int] = field(default_factory=list)
    step: int = 0
    finished: list[str] = field(default_factory=list)
    media: MediaCache = field(default_factory=lambda: MediaCache(1 << 20, 1 << 20))

    def __post_init__(self) -> None:
        self.free = list(range(1, self.num_blocks))
        self.rng.shuffle(self.free)

    def start(self, name: str, prompt: list[int] | PlacedPrompt) -> Sequence:
        placed = prompt if isinstance(prompt, PlacedPrompt) else PlacedPrompt(list(prompt))
        return Sequence(
            name,
            list(placed.token_ids),
            len(placed.token_ids),
            SamplingParams(temperature=0.0),
            0.0,
            media=placed.media,
            rope_positions=placed.rope_positions,
            position_delta=placed.position_delta,
            block_ids=[[] for _ in range(len(self.runner.store.groups))],
        )

    def share(self, sequence: Sequence, chunk: int, *, all_logits: bool = False) -> ScheduledSequence:
        """The next `chunk` tokens of a sequence, with blocks for them."""
        start = sequence.num_computed_tokens
        count = self.media.cap(sequence, start, min(chunk, sequence.num_tokens - start))
        self.media.take(sequence, start, count)
        for group, block_ids in zip(self.runner.store.groups, sequence.block_ids, strict=True):
            if group.kind is CacheKind.SLIDING:
                self._give_back(block_ids, max(0, start - group.window + 1) // self.options.block_size)
            if group.kind is CacheKind.STATE:
                block_ids.extend([] if block_ids else [self.free.pop()])
            else:
                while len(block_ids) * self.options.block_size < start + count:
                    block_ids.append(self.free.pop())
        sequence.num_computed_tokens += count
        samples = sequence.num_computed_tokens == sequence.num_tokens
        return ScheduledSequence(sequence, start, count, count if all_logits else int(samples), samples)

    def run(self, shares: list[ScheduledSequence]) -> list[torch.Tensor]:
        """One step; the logits of each share."""
        plan = Plan(self.step, shares, self.finished, media=self.media.take_orders())
        self.media.begin_pass()
        self.step, self.finished = self.step + 1, []
        logits = self.runner.forward(plan).clone()  # valid only until the step after next
        assert logits.dtype == torch.float32
        return list(logits.split([item.num_logits for item in shares]))

    def continue_greedily(
        self, prompts: Mapping[str, list[int] | PlacedPrompt], chunk: int, steps: int = 16
    ) -> dict[str, Continuation]:
        """Prompts admitted one step apart, so that prefill and decode mix, and finished after `steps` tokens."""
        sequences = {name: self.start(name, prompt) for name, prompt in prompts.items()}
        logits: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
        active: list[Sequence] = []
        waiting = list(sequences.values())
        while waiting or active:
            if waiting:
                active.append(waiting.pop(0))
            self.rng.shuffle(active)
            shares = [self.share(sequence, chunk, all_logits=True) for sequence in active]
            shares = [share for share in shares if share.num_tokens]  # none: there is no room for its media yet
            for share, rows in zip(shares, self.run(shares), strict=True):
                sequence = share.sequence
                if sequence.num_output_tokens == 0:
                    logits[sequence.id].append(rows)
                if share.samples:
                    sequence.token_ids.append(int(rows[-1].argmax()))
                if sequence.num_output_tokens == steps:
                    active.remove(sequence)
                    self.finish(sequence)
        return {
            name: Continuation(torch.cat(logits[name]), sequence.token_ids[sequence.num_prompt_tokens :])
            for name, sequence in sequences.items()
        }

    def finish(self, sequence: Sequence) -> None:
        for block_ids in sequence.block_ids:
            self._give_back(block_ids, len(block_ids))
        self.finished.append(sequence.id)
        self.media.give_back(sequence)

    def _give_back(self, block_ids: list[int], count: int) -> None:
        """Free the first blocks, poison what they held, and leave the null block in the table."""
        for index in range(min(count, len(block_ids))):
            if block_ids[index]:
                self.free.insert(self.rng.randrange(len(self.free) + 1), block_ids[index])
                for slab in self.runner.store.slabs:
                    slab[block_ids[index]] = 255  # every float of these bytes is NaN
                block_ids[index] = 0


@pytest.fixture
def make_driver() -> Callable[..., Driver]:
    def make(model: CausalLM, options: Options, num_blocks: int = 200, seed: int = 0) -> Driver:
        runner = Runner(model, options, num_blocks)
        for slab in runner.store.slabs:
            slab.fill_(255)  # reading a slot that was never written shows as NaN
        return Driver(runner, options, num_blocks, random.Random(seed))

    return make


@pytest.fixture
def begin(
    load_golden: Callable[[str], Golden], load_model: Callable[..., CausalLM], make_driver: Callable[..., Driver]
) -> Callable[..., tuple[Golden, Driver]]:
    """A golden and a driver of its model; `options`: those of Options."""

    def start(
        name: str,
        *,
        seed: int = 0,
        file: str | None = None,
        weight_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> tuple[Golden, Driver]:
        chosen = Options(**options)
        return load_golden(name), make_driver(load_model(name, chosen, weight_dtype, file), chosen, seed=seed)

    return start


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """One backend alone, with activations in floating point; indirect parametrisation names it."""
    unavailable = {item.name: item.unavailable for item in kernels.backends("cpu")}
    if unavailable.get(request.param):
        pytest.skip(f"{request.param}: {unavailable[request.param]}")
    num_threads = len(os.sched_getaffinity(0))
    with kernels.using_backend("cpu", request.param):
        kernels.configure("cpu", num_threads=num_threads, is_exact=True)
        yield
        kernels.configure("cpu", num_threads=num_threads, is_exact=False)


@pytest.fixture(scope="session")
def make_options() -> type[Options]:
    return Options


@pytest.fixture
def make_checkpoint(golden_path: Callable[[str], Path]) -> Callable[..., TinyCheckpoint]:
    def make(name: str, **config: Any) -> TinyCheckpoint:
        return TinyCheckpoint(golden_path(name), **config)

    return make
