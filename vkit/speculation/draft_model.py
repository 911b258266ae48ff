"""Drafting with a smaller model of the same vocabulary."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from vkit import kernels
from vkit.batch import Batch, BatchBuilder
from vkit.models import CausalLM
from vkit.plan_arrays import TokenRun
from vkit.speculation.drafter import Growing, ObservedStep, extend, finished_drafts, growing
from vkit.speculation.proposer import Drafts


class ModelDrafter:
    """Runs the draft model over every step's tokens and the one sampled, then over each draft."""

    needs_hidden = False
    tapped_layers: tuple[int, ...] = ()

    def __init__(
        self, model: CausalLM, num_drafts: int, *, is_probabilistic: bool, device: str, is_eager: bool
    ) -> None:
        """`is_eager`: nothing is recorded."""
        self._num_drafts = num_drafts
        self._is_probabilistic = is_probabilistic
        run = partial(_logits_of, model)  # of the model and not of this drafter, which would hold itself
        self._step = run if is_eager else kernels.wrap_step(torch.device(device).type, run)

    def draft(self, step: ObservedStep, builder: BatchBuilder) -> list[Drafts]:
        """Drafts for each item; keys and values are written for all its tokens that stand."""
        rows = growing(step, builder, self._num_drafts)
        by_item = {row.index: row for row in rows}
        runs = []
        for index, item in enumerate(step.items):
            token_ids = item.sequence.token_ids[item.start : item.start + item.num_tokens - item.num_drafts]
            if item.samples:
                token_ids = token_ids + step.emitted[index]
            if index not in by_item:
                token_ids = token_ids[: step.num_computed(index) - item.start]
            if not item.sequence.is_finished:
                runs.append(TokenRun(item.sequence, item.start, token_ids, int(index in by_item)))
        active: list[Growing] = rows
        while runs:
            logits = self._step(builder.build_runs(runs))
            if not active:
                break
            extend(active, logits, is_probabilistic=self._is_probabilistic)
            active = [row for row in active if len(row.token_ids) < row.num_wanted]
            runs = [TokenRun(row.sequence, row.position + len(row.token_ids), row.token_ids[-1:], 1) for row in active]
        return finished_drafts(rows, len(step.items))


def _logits_of(model: CausalLM, batch: Batch) -> Tensor:
    hidden = model.forward(batch)
    return model.compute_logits(kernels.embedding(batch.logits_rows, hidden))
