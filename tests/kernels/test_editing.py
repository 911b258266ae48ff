"""Masks and penalties of logits rows, against the rules written out token by token."""

from __future__ import annotations

import pytest
import torch

from vkit import kernels


def test_masked_tokens_become_impossible(backend: str) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (2, 4), dtype=torch.int32)
    logits = torch.randn(3, 101)
    expected = logits.clone()
    for place, row in enumerate((2, 0)):
        for token in range(101):
            if not (int(words[place, token // 32]) >> (token % 32)) & 1:
                expected[row, token] = -torch.inf
    kernels.mask_tokens(logits, torch.tensor([2, 0]), words)
    assert torch.equal(logits, expected)


def test_penalties_of_each_used_token(backend: str) -> None:
    logits = torch.randn(3, 50)
    expected = logits.clone()
    rows, penalties = torch.tensor([2, 0]), torch.tensor([(1.3, 0.5, 0.25), (0.8, -0.1, 1.0)])
    used = [(0, 7, 0), (0, 9, 3), (1, 7, 1), (1, 49, 0), (1, 0, 2)]
    for owner, token, count in used:
        repetition, frequency, presence = penalties[owner]
        x = expected[rows[owner], token]
        x = x / repetition if x > 0 else x * repetition
        expected[rows[owner], token] = x - frequency * count - presence * (count > 0)
    owners, ids, counts = (torch.tensor(column) for column in zip(*used, strict=True))
    kernels.penalise(logits, rows, ids, counts.float(), owners.to(torch.int32), penalties)
    torch.testing.assert_close(logits, expected)
    assert torch.equal(logits[1], expected[1])


def test_arguments_are_checked() -> None:
    logits, rows, ids = torch.zeros(2, 40), torch.tensor([1]), torch.tensor([3])
    with pytest.raises(ValueError, match=r"mask_tokens: words \(1, 1\) torch.int32, expected \(1, 2\) int32"):
        kernels.mask_tokens(logits, rows, torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"mask_tokens: logits \(2, 40\) torch.float16, expected \(R, V\) float32"):
        kernels.mask_tokens(logits.half(), rows, torch.zeros(1, 2, dtype=torch.int32))
    owners = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"penalise: counts \(1,\) torch.int64, expected \(1,\) torch.float32"):
        kernels.penalise(logits, rows, ids, ids, owners, torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"penalise: penalties \(1, 2\), expected \(1, 3\)"):
        kernels.penalise(logits, rows, ids, torch.ones(1), owners, torch.zeros(1, 2))
