"""Cases of the ops that sample: rows of logits are float32 whatever the model computes in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkit.kernels.draw_rules import DrawRules

if TYPE_CHECKING:
    from vkit.kernels.cases import Source

RULES = (
    (0.0, 0, 1.0), (0.0, 0, 0.9), (0.0, 5, 1.0), (0.0, 50, 0.95), (0.1, 0, 1.0), (0.3, 3, 0.7), (0.0, 0, 1e-9),
    (0.0, 4000, 0.999), (0.9, 0, 0.99), (0.0, 1, 1.0), (0.05, 0, 0.95), (0.0, 0, 0.5), (1.0, 0, 1.0), (0.02, 200, 1.0),
)  # fmt: skip
"""min_p, top_k and top_p of rows."""


def cases() -> Iterator[tuple[str, str, Callable[[Source], tuple[Any, ...]]]]:
    """Op, label and arguments of each."""
    for width, spread in ((1, 1.0), (7, 6.0), (640, 1.0), (5000, 0.01)):
        yield "draw", f"{width} tokens, spread {spread}", bound(draw_arguments, width, spread)
    yield "draw", "equal logits", lambda s: _with(draw_arguments(s, 1000, 1.0), torch.zeros(17, 1000, device=s.device))
    yield "draw", "one possible token", _forced_rows
    for width in (1, 100, 5000):
        yield "mask_tokens", f"{width} tokens", bound(_mask_arguments, width)
        yield "penalise", f"{width} tokens", bound(_penalty_arguments, width)


def bound(build: Callable[..., tuple[Any, ...]], *settings: Any) -> Callable[[Source], tuple[Any, ...]]:
    """`build` with what follows the source given now."""
    return lambda s: build(s, *settings)


def logits_of(s: Source, num_rows: int, width: int, spread: float) -> Tensor:
    """Rows with ties and impossible tokens in some, between NaN."""
    wide = torch.full((num_rows, width + 5), math.nan)
    logits = torch.randn(num_rows, width, generator=s.generator) * spread
    logits[::5] = (logits[::5] * 4).round() / 4
    logits[::7, ::3] = -math.inf
    logits[::7, -1] = 0.5
    wide[:, :width] = logits
    return wide.to(s.device)[:, :width]


def draw_arguments(s: Source, width: int, spread: float) -> tuple[Any, ...]:
    """Arguments of `draw` for a row of every rule, in any order."""
    count = len(RULES)
    min_p, top_k, top_p = (list(column) for column in zip(*RULES, strict=True))
    temperatures = (torch.rand(count, generator=s.generator) * 1.5 + 0.3).tolist()
    rules = DrawRules.of(temperatures, min_p, [k if k < width else 0 for k in top_k], top_p, s.device)
    rows = torch.randperm(count + 3, generator=s.generator)[:count]
    keys = torch.randint(-(2**63), 2**63 - 1, (count,), generator=s.generator)
    return logits_of(s, count + 3, width, spread), rows.to(s.device), rules, keys.to(s.device)


def _with(arguments: tuple[Any, ...], logits: Tensor) -> tuple[Any, ...]:
    return logits, *arguments[1:]


def _forced_rows(s: Source) -> tuple[Any, ...]:
    """Rows of every rule with nothing but the lowest number among impossible tokens."""
    logits, rows, rules, keys = draw_arguments(s, 300, 1.0)
    logits[:] = -math.inf
    logits[:, 298] = torch.finfo(torch.float32).min
    return logits, rows, rules, keys


def _mask_arguments(s: Source, width: int) -> tuple[Any, ...]:
    words = torch.randint(-(2**31), 2**31 - 1, (3, -(-width // 32)), generator=s.generator, dtype=torch.int32)
    return logits_of(s, 5, width, 3.0), s.integers(4, 0, 2), words.to(s.device)


def _penalty_arguments(s: Source, width: int) -> tuple[Any, ...]:
    used = [torch.randperm(width, generator=s.generator)[: max(1, width // share)] for share in (1, 3, 2)]
    ids = torch.cat(used)
    counts = torch.randint(0, 4, (len(ids),), generator=s.generator).float()
    owners = torch.repeat_interleave(torch.tensor([len(own) for own in used])).to(torch.int32)
    penalties = torch.tensor([(1.3, 0.5, 0.25), (1.0, 0.0, -1.5), (0.7, 1.1, 0.0)])
    tensors = [x.to(s.device) for x in (ids, counts, owners, penalties)]
    return logits_of(s, 5, width, 3.0), s.integers(4, 0, 2), *tensors
