"""Hidden states to one vector per prompt: the sampler's counterpart in an engine that embeds.

Source: sentence-transformers' pooling modes; Kusupati et al. 2022 (shortened embeddings).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from vkit.errors import CheckpointError, InvalidRequest, ModelLoadError
from vkit.sequence import Plan, StepSamples

Pooling = Literal["last", "mean", "cls"]
POOLINGS: tuple[Pooling, ...] = ("last", "mean", "cls")

POOLING_FILE = "1_Pooling/config.json"
_MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_MIN_NORM = 1e-12


class PoolingCheckpoint(Protocol):
    """The part of a checkpoint that says how it pools."""

    @property
    def path(self) -> Any:
        """Where it lies."""

    @property
    def config(self) -> dict[str, Any]:
        """Keys of config.json."""


@dataclass(frozen=True, slots=True)
class EmbeddingForm:
    """What an embedding model's vectors are like."""

    pooling: Pooling
    size: int
    """Numbers in a whole vector."""
    shorter_sizes: tuple[int, ...] | None = ()
    """Sizes that a request may ask for beside the whole; None: any smaller one."""

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises:
        InvalidRequest: the model's vectors do not come in this size.
        """
        if dimensions is None or dimensions == self.size:
            return
        if isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= self.size:
            raise InvalidRequest(
                f"dimensions: must be between 1 and {self.size}, got {dimensions!r}", param="dimensions"
            )
        if self.shorter_sizes is None or dimensions in self.shorter_sizes:
            return
        allowed = ", ".join(str(size) for size in (*self.shorter_sizes, self.size))
        raise InvalidRequest(
            f"dimensions: {dimensions} asked for, this model was trained for {allowed}", param="dimensions"
        )


def embedding_form(checkpoint: PoolingCheckpoint, hidden_size: int) -> EmbeddingForm:
    """How a checkpoint pools and which sizes its vectors have.

    The pooling is `pooling_type` in the configuration (GGUF files bring it), else what sentence-transformers' files
    say, else the last token.

    Raises:
        ModelLoadError: a pooling that is not computed.
        CheckpointError: a file that cannot be read.
    """
    config = checkpoint.config
    pooling = config.get("pooling_type") or _stored_pooling(checkpoint) or "last"
    if pooling not in POOLINGS:
        raise ModelLoadError(f"pooling {pooling!r} is not supported", remedy=f"known: {', '.join(POOLINGS)}")
    sizes = config.get("matryoshka_dimensions")
    shorter: tuple[int, ...] | None = None if config.get("is_matryoshka") is True else ()
    if isinstance(sizes, list) and all(type(size) is int and size >= 1 for size in sizes):
        shorter = tuple(sorted(size for size in sizes if size < hidden_size))
    elif sizes is not None:
        raise ModelLoadError(f"config.json: matryoshka_dimensions must be a list of sizes, got {sizes!r}")
    return EmbeddingForm(cast("Pooling", pooling), hidden_size, shorter)


def _stored_pooling(checkpoint: PoolingCheckpoint) -> str | None:
    path = checkpoint.path / POOLING_FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable: {error}") from None
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{path}: expected a JSON object")
    modes = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelLoadError(f"{path}: pooling {', '.join(modes) or 'none'} is not supported")
    return _MODES[modes[0]]


def shortened(vector: Sequence[float], dimensions: int | None) -> list[float]:
    """The first `dimensions` numbers, scaled to length 1 again; the whole vector for None."""
    if dimensions is None or dimensions >= len(vector):
        return list(vector)
    part = vector[:dimensions]
    norm = math.sqrt(math.fsum(value * value for value in part))
    return [value / max(norm, _MIN_NORM) for value in part]


class Pooler:
    """Stands where an engine that generates has its sampler: ends each sequence with its vector."""

    can_forbid = False

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._kept: dict[str, tuple[Tensor, int]] = {}
        """Per sequence id of a prompt that runs in several steps: sum (or first row), and rows in it."""

    @property
    def needs_all_rows(self) -> bool:
        """Whether a prompt's every token counts, so that none may be taken from the prefix cache."""
        return self._pooling != "last"

    def begin_masks(self, plan: Plan) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Nothing runs."""

    def sample(self, hidden: Tensor, plan: Plan) -> StepSamples:
        """Take in a step's rows (R, H); sequences whose prompt is complete get their embedding."""
        for sequence_id in plan.finished_ids:
            self._kept.pop(sequence_id, None)
        samples = StepSamples([[] for _ in plan.scheduled], [None for _ in plan.scheduled])
        rows = torch.split(hidden, [item.num_logits for item in plan.scheduled])
        for index, (item, own) in enumerate(zip(plan.scheduled, rows, strict=True)):
            sequence = item.sequence
            if item.start == 0:
                self._kept.pop(sequence.id, None)  # it begins, perhaps once more
            if self.needs_all_rows and item.num_logits:
                own = self._taken_in(sequence.id, own)
            if not item.samples:
                continue
            self._kept.pop(sequence.id, None)
            vector = torch.nn.functional.normalize(own[-1].double(), dim=0, eps=_MIN_NORM).float()
            if not bool(torch.isfinite(vector).all()):
                samples.num_corrupted += 1
                samples.errors[index] = "the embedding holds values that are not finite"
                continue
            sequence.embedding = vector.tolist()
            samples.complete.add(index)
        return samples

    def _taken_in(self, sequence_id: str, rows: Tensor) -> Tensor:
        """The pooled row so far (1, H), these rows included."""
        before, count = self._kept.get(sequence_id, (None, 0))
        if self._pooling == "cls":
            pooled = rows[0].clone() if before is None else before
        else:
            total = rows.double().sum(0)
            pooled = total if before is None else before + total
        count += len(rows)
        self._kept[sequence_id] = (pooled, count)
        return (pooled / count if self._pooling == "mean" else pooled)[None]
