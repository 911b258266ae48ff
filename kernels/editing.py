"""Edits of logits rows before a token is chosen: masks of bits, and penalties of tokens that were used."""

from __future__ import annotations

import torch
from torch import Tensor

from vkit.kernels.dispatch import ops


def mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Make ids impossible whose bit is not set. logits (R, V) float32 is written in place, in `rows` (B,) int64.

    words (B, ceil(V / 32)) int32: bit i of word w is id 32 w + i.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    _check_logits("mask_tokens", logits)
    expected = (rows.shape[0], -(-logits.shape[1] // 32))
    if words.shape != expected or words.dtype is not torch.int32:
        raise ValueError(f"mask_tokens: words {tuple(words.shape)} {words.dtype}, expected {expected} int32")
    ops(logits).mask_tokens(logits, rows, words)


def penalise(logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, owners: Tensor, penalties: Tensor) -> None:
    """Make used tokens less likely, in place. logits (R, V) float32; rows (B,) int64: which have used tokens.

    ids (M,) int64: those of all rows, each once per row; counts (M,) float32: how often each is in the output, 0 if
    in the prompt alone; owners (M,) int32: which of `rows` each belongs to. penalties (B, 3) float32: repetition r,
    frequency f and presence p: x / r if x > 0 else x r, then x − f count, then x − p if count > 0.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    _check_logits("penalise", logits)
    for label, value, dtype in (
        ("ids", ids, torch.int64),
        ("counts", counts, torch.float32),
        ("owners", owners, torch.int32),
    ):
        if value.shape != ids.shape or value.dtype is not dtype:
            raise ValueError(
                f"penalise: {label} {tuple(value.shape)} {value.dtype}, expected {tuple(ids.shape)} {dtype}"
            )
    if penalties.shape != (rows.shape[0], 3):
        raise ValueError(f"penalise: penalties {tuple(penalties.shape)}, expected ({rows.shape[0]}, 3)")
    ops(logits).penalise(logits, rows, ids, counts, owners, penalties)


def _check_logits(name: str, logits: Tensor) -> None:
    if logits.dtype is not torch.float32 or logits.ndim != 2:
        raise ValueError(f"{name}: logits {tuple(logits.shape)} {logits.dtype}, expected (R, V) float32")
