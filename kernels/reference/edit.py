"""Edits of logits rows: masks of bits, and penalties of used tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """−inf where a bit is not set."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = (words.unsqueeze(-1) >> shifts).bitwise_and_(1).flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill_(~allowed, -math.inf)


def penalise(logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, owners: Tensor, penalties: Tensor) -> None:
    """Repetition, then frequency, then presence, of each used token."""
    own = owners.to(torch.int64)
    at = (rows[own], ids)
    repetition, frequency, presence = penalties[own].unbind(1)
    values = logits[at]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[at] = values - frequency * counts - presence * (counts > 0)
