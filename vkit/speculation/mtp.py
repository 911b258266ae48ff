"""Drafting with the head for multi-token prediction that a checkpoint brings.

At position t the head reads the target's hidden state there and the token after it, and scores the token after that.
For more drafts it goes on from its own hidden states and its own tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vkit import kernels
from vkit.batch import BatchBuilder
from vkit.models import CausalLM
from vkit.plan_arrays import TokenRun
from vkit.speculation.drafter import Growing, ObservedStep, extend, finished_drafts, growing
from vkit.speculation.proposer import Drafts


class MTPDrafter:
    """Runs the head over every step's tokens, then alone for each further draft."""

    needs_hidden = True
    tapped_layers: tuple[int, ...] = ()

    def __init__(self, model: CausalLM, num_drafts: int, *, is_probabilistic: bool) -> None:
        assert model.mtp is not None, "the model was built with its head"
        self._model = model
        self._head = model.mtp
        self._num_drafts = num_drafts
        self._is_probabilistic = is_probabilistic

    def draft(self, step: ObservedStep, builder: BatchBuilder) -> list[Drafts]:
        """Drafts for each item; the head's keys and values are written for all tokens of the step."""
        following = [token_id for index in range(len(step.items)) for token_id in step.following_ids(index)]
        batch = step.batch
        hidden = self._head(
            step.hidden, replace(batch, token_ids=torch.tensor(following, device=batch.token_ids.device))
        )
        rows = growing(step, builder, self._num_drafts)
        if rows:
            ends = [batch.host_cu_seqlens[row.index] + row.position - 1 - step.items[row.index].start for row in rows]
            self._grow(rows, hidden[torch.tensor(ends, device=hidden.device)], builder)
        return finished_drafts(rows, len(step.items))

    def _grow(self, rows: list[Growing], hidden: Tensor, builder: BatchBuilder) -> None:
        """All drafts of the rows, from the head's hidden states (R, H) at the last token each has computed."""
        active = rows
        while True:
            extend(active, self._model.compute_logits(hidden), is_probabilistic=self._is_probabilistic)
            kept = [place for place, row in enumerate(active) if len(row.token_ids) < row.num_wanted]
            if not kept:
                return
            active = [active[place] for place in kept]
            runs = [
                TokenRun(row.sequence, row.position - 1 + len(row.token_ids), row.token_ids[-1:], 1) for row in active
            ]
            batch = builder.build_runs(runs)
            rows_kept = torch.tensor(kept, device=hidden.device)
            hidden = self._head(kernels.embedding(rows_kept, hidden), batch)
