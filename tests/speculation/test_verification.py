"""Drafts drawn at random leave the distribution of what comes out as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.fakes import GuessingProposer, hashed_logits, make_engine, make_request, run
from vkit.sequence import Sequence
from vkit.speculation.proposer import Drafts
from vkit.speculation.verification import num_accepted, verify_drawn
from vkit.types import OutputKind, SamplingParams

VOCAB = 6
NUM_DRAWS = 20_000
CRITICAL = {5: 20.52, 15: 37.70}
"""Of chi-square at a chance of one in a thousand, by degrees of freedom."""


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    assert not counts[probabilities == 0].any(), "something impossible was drawn"
    kept = expected > 0
    return float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())


@pytest.mark.parametrize(
    ("drafts", "chosen", "expected"),
    [([], [4], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 9, 3], 1), ([1, 2], [9, 2, 3], 0)],
)
def test_num_accepted(drafts: list[int], chosen: list[int], expected: int) -> None:
    assert num_accepted(drafts, chosen) == expected


@pytest.mark.parametrize("kind", ["near", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("far", "narrow"))])
def test_rejection_sampling_has_the_target_distribution(kind: str) -> None:
    """First tokens follow p, whatever q is; so does the token after a draft that stood."""
    rng = np.random.default_rng(3)
    p = rng.dirichlet(np.ones(VOCAB))
    q = {
        "near": 0.7 * p + 0.3 * rng.dirichlet(np.ones(VOCAB)),
        "far": np.roll(p, 2),
        "narrow": np.eye(VOCAB)[int(p.argmax())] * 0.9 + 0.1 / VOCAB,
    }[kind]
    processed = torch.tensor(np.log(p), dtype=torch.float32).expand(2, VOCAB)
    probs = torch.tensor(q, dtype=torch.float32).unsqueeze(0)
    counts = np.zeros(VOCAB, np.int64)
    num_stood = 0
    for seed in range(NUM_DRAWS):
        sequence = Sequence("s", [1, 2], 1, SamplingParams(), 0.0, seed=seed)
        draft = int(rng.choice(VOCAB, p=q))
        tokens = verify_drawn(processed, probs, [draft], [0, 5], sequence)
        counts[tokens[0]] += 1
        assert tokens[1:] == ([5] if len(tokens) == 2 else [])
        num_stood += len(tokens) - 1
    assert chi_square(counts, p) < CRITICAL[VOCAB - 1]
    share = np.minimum(p, q).sum()
    assert abs(num_stood / NUM_DRAWS - share) < 5 * np.sqrt(share * (1 - share) / NUM_DRAWS)


class FixedRunner:
    """A model whose logits depend on the position alone."""

    def prepare(self, plan: object) -> object:
        return plan

    def execute(self, plan: object) -> torch.Tensor:
        rows = [
            hashed_logits(item.start + item.num_tokens - item.num_logits + row, VOCAB)
            for item in plan.scheduled  # type: ignore[attr-defined]
            for row in range(item.num_logits)
        ]
        return torch.from_numpy(np.stack(rows))


@pytest.mark.parametrize(
    ("is_drawn", "num_draws"),
    [(False, 4000), (True, 4000), *(pytest.param(drawn, NUM_DRAWS, marks=pytest.mark.slow) for drawn in (False, True))],
)
def test_pairs_of_tokens_through_the_engine(is_drawn: bool, num_draws: int) -> None:
    """The second and third token, with top_k and a temperature: jointly distributed as without drafts."""
    params = SamplingParams(
        temperature=0.8, top_k=4, max_tokens=4, n=200, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY
    )
    rng = np.random.default_rng(5)
    q = rng.dirichlet(np.ones(VOCAB), size=2).astype(np.float32)

    def guess(sequence: Sequence) -> Drafts:
        drafts = [int(rng.choice(VOCAB, p=row / row.sum())) for row in q.astype(np.float64)]
        return Drafts(drafts, torch.from_numpy(q) if is_drawn else None)

    proposer = GuessingProposer(guess, max_drafts=2)
    limits = {"max_num_seqs": 200, "max_num_batched_tokens": 1024}
    engine = make_engine(FixedRunner(), num_blocks=1000, vocab_size=VOCAB, proposer=proposer, limits=limits)
    counts = np.zeros((VOCAB, VOCAB), np.int64)
    for repeat in range(num_draws // 200):
        engine.add_request(make_request(engine, [1, 2], params, name=f"{repeat}"))
        (output,) = run(engine)
        for completion in output.outputs:
            counts[tuple(completion.token_ids[1:3])] += 1
    expected = []
    for position in (2, 3):
        x = hashed_logits(position, VOCAB).astype(np.float64) / 0.8
        x[x < np.sort(x)[-4]] = -np.inf
        weights = np.exp(x - x.max())
        expected.append(weights / weights.sum())
    joint = np.outer(*expected)
    assert counts.sum() == num_draws
    assert chi_square(counts.ravel(), joint.ravel()) < CRITICAL[15]
    stats = engine.scheduler.draft_stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_draft_tokens >= 2 * num_draws
