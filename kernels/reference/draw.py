"""Drawing tokens at random from logits: temperature, min_p, top_k, top_p, then a race of exponential noise.

A vocabulary is wide and almost all of it never matters, so rows are looked at in chunks first: the maxima of the chunks
bound what can survive, and only chunks that can are looked into. All bounds drop only what the exact rules would drop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from vkit.kernels.draw_rules import DrawRules, Truncation
from vkit.kernels.reference.noise import chunk_noise, exponential_noise

CHUNK = 64
"""Tokens per chunk; also the group size of `draw_plain`, so changing it changes what seeds give."""


@dataclass(frozen=True, slots=True)
class Survivors:
    """What is left of each row: logits over temperature (R, C), and token ids (R, C) int32; dropped cells are -inf."""

    values: Tensor
    token_ids: Tensor


def largest(logits: Tensor) -> tuple[list[int], list[float]]:
    """Index and value of each row's largest."""
    if logits.device.type == "cpu":
        # numpy's argmax is vectorised: 8 us against 57 us for a row of 49,152 (one AVX2 core, 2026).
        values = logits.numpy()
        ids = values.argmax(axis=1)
        return ids.tolist(), values[range(len(ids)), ids].tolist()
    best = logits.argmax(dim=1)
    return best.tolist(), logits.gather(1, best.unsqueeze(1)).squeeze(1).tolist()


def largest_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Index and value of each row's largest, as tensors."""
    values, ids = logits.max(dim=1)
    return ids, values


def draw(logits: Tensor, rows: Tensor, rules: DrawRules, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids (R,) int64 and largest logits (R,) of the given rows."""
    ids, largest, _ = _draw(logits, rows, rules, keys, None)
    return ids, largest


def draw_with_survivors(logits: Tensor, rows: Tensor, rules: DrawRules, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `draw` gives, and the logits it was drawn from: over temperature, -inf where dropped, (R, V)."""
    processed = torch.empty((rows.shape[0], logits.shape[1]), device=logits.device)
    return _draw(logits, rows, rules, keys, processed)


def _draw(
    logits: Tensor, rows: Tensor, rules: DrawRules, keys: Tensor, processed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.zeros(rows.shape[0], dtype=torch.int64, device=logits.device)
    largest = torch.zeros(rows.shape[0], device=logits.device)
    for block in rules.blocks:
        own, temperatures = logits[rows[block.index]], rules.temperatures[block.index]
        largest[block.index] = own.amax(1)
        if block.truncation is None:
            ids[block.index] = draw_plain(own, temperatures, keys[block.index]).to(torch.int64)
            survivors = own / temperatures[:, None] if processed is not None else own
        else:
            found = truncate(own, temperatures, block.truncation)
            ids[block.index] = race(found, keys[block.index]).to(torch.int64)
            survivors = spread(found, own.shape[1]) if processed is not None else own
        if processed is not None:
            processed[block.index] = survivors
    return ids, largest, logits if processed is None else processed


class ChunkedRows:
    """Logits rows (R, V) with the maxima of their chunks."""

    def __init__(self, logits: Tensor) -> None:
        num_rows, self.vocab_size = logits.shape
        if self.vocab_size % CHUNK:
            logits = pad(logits, (0, -self.vocab_size % CHUNK), value=-math.inf)
        self.cells = logits.reshape(num_rows, -1, CHUNK)
        self.maxima = self.cells.amax(2)
        self.largest = self.maxima.amax(1)

    def weights(self, temperatures: Tensor) -> Tensor:
        """exp((x - largest) / temperature), (R, chunks, CHUNK) float32. temperatures (R,)."""
        shifted = self.cells - self.largest[:, None, None]
        return shifted.mul_(temperatures.reciprocal()[:, None, None]).exp_()

    def above(self, floor: Tensor) -> Survivors:
        """Cells of the chunks that reach a floor (R,), as they are, in order of id; padding is -inf."""
        rows, chunks, places, width = _places(self.maxima >= floor[:, None])
        num_rows = self.maxima.shape[0]
        device = self.maxima.device
        values = torch.full((num_rows, width, CHUNK), -math.inf, device=device)
        token_ids = torch.zeros((num_rows, width, CHUNK), dtype=torch.int32, device=device)
        values[rows, places] = self.cells[rows, chunks]
        first = (chunks * CHUNK).to(torch.int32)
        token_ids[rows, places] = first[:, None] + torch.arange(CHUNK, dtype=torch.int32, device=device)
        return Survivors(values.flatten(1), token_ids.flatten(1))


def draw_plain(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """One token id per row (R,), drawn with probability softmax(logits / temperature). temperatures (R,).

    The race is run between chunks by their sums, then inside the chunk that won: the same distribution as one race
    between all tokens, at the price of a thousandth of the noise.

    Source: the maximum of Gumbel variables with locations x_i is Gumbel with location logsumexp(x) (Maddison, Tarlow
    and Minka 2014, "A* sampling").
    """
    rows = ChunkedRows(logits)
    sums = rows.weights(temperatures).sum(2)
    chunks = (sums.to(torch.float64).log_() - chunk_noise(keys, sums.shape[1]).log_()).argmax(1)
    cells = rows.cells[torch.arange(keys.shape[0], device=logits.device), chunks]
    ids = (chunks * CHUNK)[:, None] + torch.arange(CHUNK, device=logits.device)
    return race(Survivors(cells / temperatures[:, None], ids.to(torch.int32)), keys)


def race(found: Survivors, keys: Tensor) -> Tensor:
    """One token id per row, drawn with probability softmax(values): the largest of value - log(q), q ~ Exp(1).

    The noise belongs to (key, token id), so the choice does not depend on how many impossible cells are carried along.
    """
    scores = found.values.to(torch.float64) - exponential_noise(keys, found.token_ids).log_()
    return found.token_ids.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)


def truncate(logits: Tensor, temperatures: Tensor, rules: Truncation) -> Survivors:
    """What min_p, then top_k, then top_p leave of logits (R, V) over temperatures (R,)."""
    rows = ChunkedRows(logits)
    floor = rows.largest + temperatures * rules.min_p.log()
    if rules.max_top_k:
        floor = torch.maximum(floor, _top_k_bound(rows, rules))
    mass = torch.ones_like(rules.top_p)
    if rules.needs_mass:
        mass = _mass_above(rows, temperatures, floor)
        floor = torch.maximum(floor, _top_p_bound(rows, temperatures, mass, rules))
    found = rows.above(floor)
    if rules.max_top_k:
        floor = torch.maximum(floor, _kth_largest(found.values, rules))
    found = _compact(found, floor)
    values, order = found.values.sort(dim=1, descending=True, stable=True)
    values = values / temperatures[:, None]
    if rules.has_top_p:
        values = _keep_top_p(values, rows.largest / temperatures, mass, rules)
    return Survivors(values, found.token_ids.gather(1, order))


def spread(found: Survivors, vocab_size: int) -> Tensor:
    """Survivors back in full rows (R, V), -inf elsewhere."""
    full = torch.full((found.values.shape[0], vocab_size), -math.inf, device=found.values.device)
    # Padding cells carry id 0 and -inf: the maximum keeps a real value there.
    return full.scatter_reduce_(1, found.token_ids.to(torch.int64), found.values, "amax")


def _places(mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Rows and columns of the set cells, each one's place among its row's, and the longest row's count (at least 1)."""
    counts = mask.sum(1)
    rows, columns = mask.nonzero(as_tuple=True)
    starts = counts.cumsum(0) - counts
    places = torch.arange(rows.shape[0], device=mask.device) - starts[rows]
    return rows, columns, places, max(1, int(counts.max()))


def _compact(found: Survivors, floor: Tensor) -> Survivors:
    """The cells that reach the floor, in the same order, without the others between them."""
    rows, columns, places, width = _places((found.values >= floor[:, None]) & (found.values > -math.inf))
    num_rows = found.values.shape[0]
    values = torch.full((num_rows, width), -math.inf, device=found.values.device)
    token_ids = torch.zeros((num_rows, width), dtype=torch.int32, device=found.values.device)
    values[rows, places] = found.values[rows, columns]
    token_ids[rows, places] = found.token_ids[rows, columns]
    return Survivors(values, token_ids)


def _top_k_bound(rows: ChunkedRows, rules: Truncation) -> Tensor:
    """A value no larger than each row's k-th largest: the k-th largest of the chunks' maxima."""
    return _kth_largest(rows.maxima, rules)


def _kth_largest(values: Tensor, rules: Truncation) -> Tensor:
    """Each row's k-th largest value; -inf where there are fewer, or top_k is off."""
    count = min(rules.max_top_k, values.shape[1])
    leading = values.topk(count, dim=1).values
    kth = leading.gather(1, (rules.top_k - 1).clamp(0, count - 1)[:, None]).squeeze(1)
    return torch.where((rules.top_k > 0) & (rules.top_k <= count), kth, -math.inf)


def _mass_above(rows: ChunkedRows, temperatures: Tensor, floor: Tensor) -> Tensor:
    """Per row, sum of exp((x - largest) / temperature) over the cells that reach the floor; (R,) float64."""
    weights = rows.weights(temperatures)
    if bool((floor > -math.inf).any()):
        weights.masked_fill_(rows.cells < floor[:, None, None], 0.0)
    return weights.sum(2).sum(1, dtype=torch.float64)


def _top_p_bound(rows: ChunkedRows, temperatures: Tensor, mass: Tensor, rules: Truncation) -> Tensor:
    """A value below which everything is dropped: all tokens with less than (1 - p) / V of the mass hold under 1 - p.

    Rows with top_k have no such bound: their mass is that of the survivors, which are few and all needed to know it.
    """
    share = (mass.log() + ((1.0 - rules.top_p) / rows.vocab_size).log()).to(torch.float32)
    bound = rows.largest + temperatures * (share - 1e-3)  # a hair of slack: the exact rule follows
    return torch.where(rules.top_k > 0, -math.inf, bound)


def _keep_top_p(values: Tensor, largest: Tensor, mass: Tensor, rules: Truncation) -> Tensor:
    """Drop, from the small end of each sorted row, while what was dropped sums to at most 1 - p; the first stays."""
    weights = (values - largest[:, None]).to(torch.float64).exp_()
    total = torch.where(rules.top_k > 0, weights.sum(1), mass)
    before = (weights.cumsum(1) - weights) / total[:, None]
    dropped = before >= rules.top_p[:, None]
    dropped &= (rules.top_p < 1.0)[:, None]
    dropped[:, 0] = False
    return values.masked_fill(dropped, -math.inf)
