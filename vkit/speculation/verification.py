"""Which drafts stand. What a sequence gets is distributed exactly as without drafts, whatever the drafts are.

A draft that was not drawn at random needs no rule of its own. Each row is sampled as if there were no drafts, with the
noise of its own output position; the draft stands if that is what came out. It so stands with probability p(x), and a
token that replaces it is distributed as p without x: rejection sampling with a one-hot draft distribution. Greedy
output, and seeded output too, are then the same token for token as without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

import numpy as np
import torch
from torch import Tensor

from vkit.kernels.reference.noise import exponential_noise
from vkit.randomness import draw_key, mix64
from vkit.sequence import Sequence

_ACCEPT, _RESIDUAL, _DRAFT = 0x5EED_ACCE, 0x5EED_0E51, 0x5EED_D4AF
"""What tells the draws of one position apart: none may see another's noise."""


def num_accepted(drafts: SequenceABC[int], chosen: SequenceABC[int]) -> int:
    """Leading drafts that equal what was chosen in their place."""
    for place, draft in enumerate(drafts):
        if chosen[place] != draft:
            return place
    return len(drafts)


def draft_key(sequence: Sequence, position: int) -> int:
    """The key of the draw of the draft for output token number `position`, as a signed 64-bit integer."""
    return _key(sequence, _DRAFT, position)


def verify_drawn(
    processed: Tensor, draft_probs: Tensor, drafts: SequenceABC[int], chosen: SequenceABC[int], sequence: Sequence
) -> list[int]:
    """The tokens that a sequence gets whose drafts were drawn at random: those that stand, and one more.

    processed (1 + drafts, V): logits over temperature, -inf where dropped. draft_probs (drafts or more, V): what each
    draft was drawn from. `chosen`: what the target draws in each row; of it the last counts, where all drafts stand.
    Draft x stands with probability min(1, p(x) / q(x)), else a token is drawn from max(p - q, 0), normalised.

    Source: Leviathan, Kalman and Matias 2023, "Fast inference from transformers via speculative decoding", algorithm 1.
    """
    tokens: list[int] = []
    first = sequence.num_output_tokens
    for place, draft in enumerate(drafts):
        target = torch.softmax(processed[place].double(), dim=0)
        drafted = draft_probs[place].to(target.device, torch.float64)
        chance = float(drafted[draft])
        threshold = _uniform(_key(sequence, _ACCEPT, first + place))
        if threshold * chance < float(target[draft]):
            tokens.append(draft)
            continue
        residual = (target - drafted).clamp_min_(0.0)
        if not bool(residual.any()):  # equal but for rounding: what is left of p is p
            residual = target
        return [*tokens, _draw(residual, _key(sequence, _RESIDUAL, first + place))]
    return [*tokens, chosen[-1]]


def _key(sequence: Sequence, purpose: int, position: int) -> int:
    key = draw_key(mix64(purpose) ^ (sequence.seed & (2**64 - 1)), position)
    return key - 2**64 if key >= 2**63 else key


def _uniform(key: int) -> float:
    """A number in [0, 1) that belongs to the key."""
    return ((key & (2**64 - 1)) >> 11) * 2.0**-53


def _draw(weights: Tensor, key: int) -> int:
    """An id with probability proportional to its weight (V,): the largest of weight / Exp(1) noise."""
    ids = torch.arange(weights.shape[0], dtype=torch.int32, device=weights.device)
    keys = torch.from_numpy(np.array([key], dtype=np.int64)).to(weights.device)
    return int((weights / exponential_noise(keys, ids)[0]).argmax())
