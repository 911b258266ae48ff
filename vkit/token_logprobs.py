"""Log-probabilities, or logits, of chosen and of likeliest tokens, from rows over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from vkit.types import WHOLE_VOCABULARY, Logprob, PositionLogprobs


def position_logprobs(values: Tensor, chosen: list[int], widths: list[int]) -> list[PositionLogprobs]:
    """For each row: the chosen token, then the `widths[row]` largest. values (R, V): log-probabilities or logits."""
    ids = torch.tensor(chosen, dtype=torch.int64, device=values.device).unsqueeze(1)
    own = values.gather(1, ids)
    ranks: list[int] = (values >= own).sum(1).tolist()
    own_values: list[float] = own.squeeze(1).tolist()
    widest = max(widths)
    top_values: list[list[float]] = [[]] * len(chosen)
    top_ids: list[list[int]] = top_values  # type: ignore[assignment]
    if widest:
        top = values.topk(widest, dim=1)
        top_values, top_ids = top.values.tolist(), top.indices.tolist()
    return [
        [
            Logprob(token_id, own_values[row], ranks[row]),
            *(Logprob(top_ids[row][i], top_values[row][i], i + 1) for i in range(widths[row])),
        ]
        for row, token_id in enumerate(chosen)
    ]


def scored_ids(values: Tensor, token_ids: tuple[int, ...]) -> PositionLogprobs:
    """The entries of the given ids in one row (V,)."""
    own = values[torch.tensor(token_ids, device=values.device)]
    ranks = (values.unsqueeze(0) >= own.unsqueeze(1)).sum(1).tolist()
    return [Logprob(*entry) for entry in zip(token_ids, own.tolist(), ranks, strict=True)]


def num_top(wanted: int | None, vocab_size: int) -> int:
    """How many of the largest a request wants, of a vocabulary of that size."""
    if wanted is None:
        return 0
    return vocab_size if wanted == WHOLE_VOCABULARY else min(wanted, vocab_size)
