"""Probabilities read off a finished request. Pure functions over outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vkit.types import RequestOutput


@dataclass(frozen=True, slots=True)
class LabelScores:
    """How likely each label token is to come next."""

    probabilities: dict[int, float]
    """Over the labels alone or over the vocabulary, as asked."""
    logprobs: dict[int, float]
    """Over the whole vocabulary, in nats."""
    num_prompt_tokens: int

    @property
    def score(self) -> float:
        """Probability of the first label."""
        return next(iter(self.probabilities.values()))


def continuation_logprob(output: RequestOutput, num_tokens: int) -> float:
    """Log-probability of the prompt's last `num_tokens` tokens given those before, in nats."""
    positions = output.prompt_logprobs
    assert positions is not None, "the request asked for prompt log-probabilities"
    return math.fsum(position[0].logprob for position in positions[-num_tokens:] if position is not None)


def label_scores(output: RequestOutput, *, apply_softmax: bool) -> LabelScores:
    """The labels' probabilities at the first output position of a request with `logprob_token_ids`."""
    positions = output.outputs[0].logprobs
    assert positions, "the request asked for log-probabilities"
    logprobs = {entry.token_id: entry.logprob for entry in positions[0][1:]}
    weights = {token_id: math.exp(value) for token_id, value in logprobs.items()}
    if apply_softmax:
        largest = max(logprobs.values())
        weights = {token_id: math.exp(value - largest) for token_id, value in logprobs.items()}
    total = math.fsum(weights.values()) if apply_softmax else 1.0
    return LabelScores(
        probabilities={token_id: weight / total for token_id, weight in weights.items()},
        logprobs=logprobs,
        num_prompt_tokens=len(output.prompt_token_ids),
    )
