"""The tensors of one step, and the builder that keeps block tables between steps.

Work per sequence and step does not grow with its context: only block ids that are new since the last step are copied.
Knows nothing of models, sampling or text.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vkit.block_table import BlockTable
from vkit.cache.groups import CacheGroup, CacheKind
from vkit.cache.store import TensorStore
from vkit.decode_inputs import DecodeInputs, DecodeShape
from vkit.kernels import PagedBatch, StateBatch
from vkit.plan_arrays import (
    IntArray,
    Shares,
    TokenRun,
    axis_positions,
    last_rows,
    spans_of,
    state_targets,
    token_ids_of,
)
from vkit.sampled import SampledTokens
from vkit.sequence import Plan, ScheduledSequence, Sequence, SequenceStatus
from vkit.staging import Staging, packed_bytes

T = TypeVar("T")

_FEW = 16
"""Sequences up to which a decoding step is put together number by number."""
_UNKNOWN = -1
"""Stands for the id of a token that only the device knows."""


@dataclass(slots=True)
class MediaRows:
    """Tokens of a step that stand for a piece of a picture or of sound, and what a tower made of it."""

    rows: Tensor
    """(M,) int64: tokens of the step, ascending."""
    embeddings: Tensor
    """(M, H): the stream before the first block, in place of an embedding."""
    features: list[Tensor]
    """(M, H) each: for models that add to the stream after some of their first blocks."""


@dataclass(slots=True)
class Batch:
    """What a forward pass reads: T tokens of B sequences, R rows wanted for logits."""

    token_ids: Tensor
    """(T,) int64"""
    positions: Tensor
    """(T,) int64; in a step with `axis_positions` the first row of those."""
    cu_seqlens: Tensor
    """(B + 1,) int32: sequence b owns tokens cu_seqlens[b] .. cu_seqlens[b + 1] - 1."""
    seq_lens: Tensor
    """(B,) int32: tokens in the cache after this step."""
    rows: Tensor
    """(B,) int32: each sequence's row in the block tables, fixed while it runs."""
    is_fresh: Tensor
    """(B,) bool: the sequence starts at position 0, so its state block holds somebody else's past."""
    logits_rows: Tensor
    """(R,) int64: tokens whose logits are wanted."""
    paged: list[PagedBatch | None]
    """Per cache group; None for a group that keeps one state per sequence."""
    state_blocks: list[Tensor | None]
    """Per cache group, (B,) int64: the block that holds each sequence's state; None for a group of tokens."""
    store: TensorStore
    host_cu_seqlens: list[int]
    """cu_seqlens on the host."""
    state_targets: list[Tensor | None] | None = None
    """Per cache group, (T,) int64: the block that the state after each token goes to, -1 where it is not kept; None for
    a group of tokens. None where nothing is verified: then states are replaced in place."""
    verified: list[int] = field(default_factory=list)
    """Sequences with drafts, where states are kept per token."""
    axis_positions: Tensor | None = None
    """(3, T) int64: position in time, row and column, in a step that computes a prompt in which they differ."""
    media: MediaRows | None = None
    spans: list[list[tuple[int, int]]] | None = None
    """Per sequence, the positions (first, beyond) of each run of tokens that see each other in both directions, past
    ones included; None in a step that computes no such token."""
    taps: dict[int, Tensor | None] | None = None
    """Layers whose streams a drafter asked for, to be filled with them (T, H)."""
    memo: dict[object, object] = field(default_factory=dict)
    """What layers derive from the above once per step."""

    def kv(self, layer: int) -> tuple[Tensor, Tensor, PagedBatch]:
        """K cache, V cache and the sequences' places in them, for an attention layer."""
        k, v, group = self.store.kv[layer]
        paged = self.paged[group]
        assert paged is not None
        return k, v, paged

    def latents(self, layer: int) -> tuple[Tensor, PagedBatch]:
        """The cache of a layer that keeps one vector per token (N, S, 1, C), and the sequences' places in it."""
        paged = self.paged[self.store.group_of[layer]]
        assert paged is not None
        return self.store.tensors[layer]["latent"], paged

    def paged_tensors(self, layer: int) -> tuple[dict[str, Tensor], PagedBatch]:
        """All tensors (N, S, ...) that a layer keeps per token, by name, and the sequences' places in them."""
        paged = self.paged[self.store.group_of[layer]]
        assert paged is not None
        return self.store.tensors[layer], paged

    def states(self, layer: int) -> tuple[dict[str, Tensor], StateBatch]:
        """The state tensors of a recurrent layer by name, (N, ...) each, and which entry is each sequence's."""
        blocks = self.state_blocks[self.store.group_of[layer]]
        assert blocks is not None
        targets = None if self.state_targets is None else self.state_targets[self.store.group_of[layer]]
        states = StateBatch(blocks, self.is_fresh, self.cu_seqlens, self.host_cu_seqlens, targets, self.verified)
        return self.store.tensors[layer], states


@dataclass(slots=True, eq=False)
class _Row:
    """What the tables hold for one running sequence."""

    index: int
    sequence: Sequence
    num_preemptions: int
    num_known: list[int]
    """Per group, how many block ids have been copied."""
    last_known: list[int]
    """Per group, the last of them."""


class BatchBuilder:
    """Turns plans into batches. Owns the rows: one per running sequence, given back when it ends or is preempted."""

    def __init__(
        self,
        groups: list[CacheGroup],
        store: TensorStore,
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._store = store
        self._block_size = block_size
        self._device = device
        self._staging = Staging(device)
        is_paged = [group.kind is not CacheKind.STATE for group in groups]
        num_columns = -(-max_model_len // block_size)
        # One row more than sequences: that of padding, whose every block is the null block.
        self._tables = [
            BlockTable(max_num_seqs + 1 if paged else 0, num_columns, device, is_shared=device.type == "cpu")
            for paged in is_paged
        ]
        self._padding_row = max_num_seqs
        self._inputs: DecodeInputs | None = None
        self._paged_groups = [index for index, paged in enumerate(is_paged) if paged]
        self._state_groups = [index for index, paged in enumerate(is_paged) if not paged]
        self._none_fresh = torch.zeros(_FEW, dtype=torch.bool, device=device)
        self._rows: dict[str, _Row] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def build(self, plan: Plan, sampled: SampledTokens | None = None) -> Batch:
        """The tensors of this plan, rows in the order of `plan.scheduled`.

        `sampled`: where the ids of tokens are that the host does not know yet.
        """
        scheduled = plan.scheduled
        row_list, token_ids = self._collect(plan)
        if (
            self._device.type == "cpu"
            and 0 < len(scheduled) <= _FEW
            and _UNKNOWN not in token_ids
            and all(item.num_tokens == item.num_logits == 1 and not item.sequence.media for item in scheduled)
        ):
            return self._build_decode(scheduled, row_list, token_ids)
        return self._build(scheduled, row_list, token_ids, sampled)

    def reserve_decode_inputs(self, capacity: int) -> None:
        """Set memory apart for decoding steps of up to `capacity` sequences that are to be captured."""
        counts = len(self._paged_groups), len(self._state_groups)
        self._inputs = DecodeInputs(capacity, *counts, padding_row=self._padding_row, device=self._device)

    def fill_decode_inputs(self, plan: Plan, size: int, sampled: SampledTokens | None = None) -> None:
        """Put a plan of one token per sequence where captured steps of `size` rows read it; the rest is padding."""
        assert self._inputs is not None, "reserved before"
        scheduled = plan.scheduled
        row_list, token_ids = self._collect(plan)
        rows, starts = np.array(row_list, np.int64), np.array([item.start for item in scheduled], np.int64)
        states = [
            np.array([item.sequence.block_ids[group][item.sequence.state_row] for item in scheduled], np.int64)
            for group in self._state_groups
        ]
        turns = np.array([item.sequence.position_delta for item in scheduled], np.int64)
        arrays = self._inputs.filled(
            size, np.array(token_ids, np.int64), starts, starts + turns, rows, self._slots(rows, starts), states
        )
        self._upload(arrays, self._inputs.memory)
        self._take_sampled(self._inputs.token_ids[: len(rows)], self._unknown(scheduled, token_ids, sampled), sampled)

    def padded(self, shape: DecodeShape) -> Batch:
        """A batch over the memory that `fill_decode_inputs` fills. Lengths on the host are bounds there."""
        assert self._inputs is not None, "reserved before"
        fields, size = self._inputs.fields(shape), shape.num_rows
        paged = [
            PagedBatch(
                self._tables[group].device, fields.rows, slots, fields.seq_lens, fields.cu_seqlens, *fields.hosts()
            )
            for group, slots in zip(self._paged_groups, fields.slots, strict=True)
        ]
        return Batch(
            token_ids=fields.token_ids,
            positions=fields.positions,
            cu_seqlens=fields.cu_seqlens,
            seq_lens=fields.seq_lens,
            rows=fields.rows,
            is_fresh=fields.is_fresh,
            logits_rows=fields.logits_rows,
            paged=self._by_group(self._paged_groups, paged),
            state_blocks=self._by_group(self._state_groups, fields.states),
            store=self._store,
            host_cu_seqlens=list(range(size + 1)),
        )

    def build_runs(self, runs: list[TokenRun]) -> Batch:
        """The tensors of tokens that are no part of a plan, over sequences that were part of the last one."""
        row_list = [self._rows[run.sequence.id].index for run in runs]
        return self._build(runs, row_list, [token_id for run in runs for token_id in run.token_ids], None)

    def capacity(self, sequence: Sequence) -> int:
        """Positions of a sequence that have slots."""
        return min(len(sequence.block_ids[group]) for group in self._paged_groups) * self._block_size

    def _build(
        self, scheduled: Shares, row_list: list[int], token_ids: list[int], sampled: SampledTokens | None
    ) -> Batch:
        rows = np.array(row_list, np.int64)
        starts = np.array([item.start for item in scheduled], np.int64)
        counts = np.array([item.num_tokens for item in scheduled], np.int64)
        wanted = np.array([item.num_logits for item in scheduled], np.int64)
        cu = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=cu[1:])
        positions = np.arange(cu[-1]) + np.repeat(starts - cu[:-1], counts)
        seq_lens = starts + counts
        slots = self._slots(np.repeat(rows, counts), positions)
        states = [
            np.array([item.sequence.block_ids[group][item.sequence.state_row] for item in scheduled], np.int64)
            for group in self._state_groups
        ]
        verified = [b for b, item in enumerate(scheduled) if item.num_drafts] if self._state_groups else []
        targets = [state_targets(scheduled, group) for group in self._state_groups] if verified else []
        axes = (
            axis_positions(scheduled, positions, cu)
            if any(item.sequence.rope_positions is not None for item in scheduled)
            else None
        )
        ids = np.array(token_ids, np.int64)
        assert ids.shape == positions.shape, "a plan names tokens whose ids are not known yet"
        turned = positions if axes is None else axes[0]
        unknown = self._unknown(scheduled, token_ids, sampled)
        narrow = [rows.astype(np.int32), seq_lens.astype(np.int32), cu.astype(np.int32)]
        uploaded = self._upload(
            [*narrow, np.maximum(ids, 0), turned, last_rows(cu, wanted), starts == 0, *slots, *states, *targets]
        )
        narrow_parts, wide = uploaded[:3], uploaded[3:]
        self._take_sampled(wide[0], unknown, sampled)
        hosts = row_list, seq_lens.tolist(), cu.tolist()
        num_paged = len(self._paged_groups)
        return Batch(
            token_ids=wide[0],
            positions=wide[1],
            cu_seqlens=narrow_parts[2],
            seq_lens=narrow_parts[1],
            rows=narrow_parts[0],
            is_fresh=wide[3],
            logits_rows=wide[2],
            paged=self._paged(wide[4 : 4 + num_paged], narrow_parts, hosts),
            state_blocks=self._by_group(self._state_groups, wide[4 + num_paged :][: len(states)]),
            store=self._store,
            host_cu_seqlens=hosts[2],
            state_targets=self._by_group(self._state_groups, wide[4 + num_paged + len(states) :]) if verified else None,
            verified=verified,
            axis_positions=self._of_prompts(scheduled, axes),
            spans=spans_of(scheduled),
        )

    def _of_prompts(self, scheduled: Shares, axes: IntArray | None) -> Tensor | None:
        """The positions of all axes, where a prompt is computed in which they differ."""
        if axes is None or all(
            item.start >= item.sequence.num_prompt_tokens for item in scheduled if item.sequence.media
        ):
            return None
        return self._upload([axes])[0]

    def _build_decode(self, scheduled: list[ScheduledSequence], rows: list[int], token_ids: list[int]) -> Batch:
        """One token of each of a few sequences on a host: the same as the general case in fewer, larger pieces.

        After a step has read all weights, whatever the host does next misses the caches: what counts is how many
        different things it does (one sequence beside a 0.5B model on an EPYC core: 150 us instead of 200).
        """
        size, count = self._block_size, len(scheduled)
        starts = [item.start for item in scheduled]
        seq_lens = [start + 1 for start in starts]
        cu = list(range(count + 1))
        wide = [*token_ids, *starts, *cu[:-1]]
        for group in self._paged_groups:
            host = self._tables[group].host
            wide += [int(host[row, at // size]) * size + at % size for row, at in zip(rows, starts, strict=True)]
        for group in self._state_groups:
            wide += [item.sequence.block_ids[group][item.sequence.state_row] for item in scheduled]
        parts = torch.from_numpy(np.array(wide, np.int64)).split(count)
        narrow = list(torch.from_numpy(np.array([*rows, *seq_lens, *cu], np.int32)).split([count, count, count + 1]))
        num_paged = len(self._paged_groups)
        return Batch(
            token_ids=parts[0],
            positions=parts[1],
            cu_seqlens=narrow[2],
            seq_lens=narrow[1],
            rows=narrow[0],
            is_fresh=self._none_fresh[:count] if min(starts) else parts[1] == 0,
            logits_rows=parts[2],
            paged=self._paged(list(parts[3 : 3 + num_paged]), narrow, (rows, seq_lens, cu)),
            state_blocks=self._by_group(self._state_groups, list(parts[3 + num_paged :])),
            store=self._store,
            host_cu_seqlens=cu,
        )

    def _collect(self, plan: Plan) -> tuple[list[int], list[int]]:
        """Bring the tables up to date; the row of each sequence and the ids of all tokens."""
        for sequence_id in plan.finished_ids:
            self._release(sequence_id)
        scheduled = plan.scheduled
        rows: list[int] = []
        token_ids: list[int] = []
        known_rows, paged_groups = self._rows, self._paged_groups
        for item in scheduled:
            sequence = item.sequence
            row = known_rows.get(sequence.id)
            if row is None or row.sequence is not sequence or row.num_preemptions != sequence.num_preemptions:
                row = self._claim(sequence)
            for group in paged_groups:
                block_ids = sequence.block_ids[group]
                if len(block_ids) != row.num_known[group] or (block_ids and block_ids[-1] != row.last_known[group]):
                    self._copy_blocks(row, group, block_ids)
            rows.append(row.index)
            if item.num_tokens == 1 and not item.num_drafts:
                known = sequence.token_ids
                token_ids.append(known[item.start] if item.start < len(known) else _UNKNOWN)
            else:
                token_ids.extend(token_ids_of(item))
        return rows, token_ids

    def _copy_blocks(self, row: _Row, group: int, block_ids: list[int]) -> None:
        known = row.num_known[group]
        if known > len(block_ids) or (known and block_ids[known - 1] != row.last_known[group]):
            known = 0  # the list did not only grow
        self._tables[group].write(row.index, known, block_ids[known:])
        row.num_known[group] = len(block_ids)
        row.last_known[group] = block_ids[-1] if block_ids else -1

    def _claim(self, sequence: Sequence) -> _Row:
        """A row for a sequence that is new, or whose blocks were taken away since."""
        old = self._rows.pop(sequence.id, None)
        if old is not None:
            self._free.append(old.index)
        if not self._free:
            self._reclaim()
        num_groups = len(self._tables)
        row = _Row(self._free.pop(), sequence, sequence.num_preemptions, [0] * num_groups, [-1] * num_groups)
        self._rows[sequence.id] = row
        return row

    def _release(self, sequence_id: str) -> None:
        row = self._rows.pop(sequence_id, None)
        if row is not None:
            self._free.append(row.index)

    def _reclaim(self) -> None:
        """Take back the rows of sequences that lost their blocks: they begin again when they return."""
        idle = (SequenceStatus.PREEMPTED, SequenceStatus.FINISHED, SequenceStatus.WAITING)
        for sequence_id in [name for name, row in self._rows.items() if row.sequence.status in idle]:
            self._release(sequence_id)
        if not self._free:
            raise RuntimeError(f"more running sequences than the {len(self._rows)} rows of max_num_seqs")

    def _paged(
        self, slots: list[Tensor], narrow: list[Tensor], hosts: tuple[list[int], list[int], list[int]]
    ) -> list[PagedBatch | None]:
        """Per cache group, where its tokens lie."""
        batches = []
        for group, slot_mapping in zip(self._paged_groups, slots, strict=True):
            rows, seq_lens, cu_seqlens = narrow
            batches.append(PagedBatch(self._tables[group].device, rows, slot_mapping, seq_lens, cu_seqlens, *hosts))
        return self._by_group(self._paged_groups, batches)

    def _by_group(self, groups: list[int], values: list[T]) -> list[T | None]:
        """The values at their groups' places, None elsewhere."""
        found = dict(zip(groups, values, strict=True))
        return [found.get(group) for group in range(len(self._tables))]

    def _slots(self, rows: IntArray, positions: IntArray) -> list[IntArray]:
        """Per paged group, the cache slot of every token."""
        blocks, offsets = np.divmod(positions, self._block_size)
        return [
            self._tables[group].host[rows, blocks].astype(np.int64) * self._block_size + offsets
            for group in self._paged_groups
        ]

    def _upload(self, arrays: SequenceABC[NDArray[Any]], into: Tensor | None = None) -> list[Tensor]:
        """The arrays on the device, with whatever changed in the block tables, in one copy."""
        changes = [(table, found) for table in self._tables if (found := table.take_changes()) is not None]
        flat = [array for _, found in changes for array in found]
        if into is not None and packed_bytes([*arrays, *flat]) > into.shape[0]:
            uploaded = [*self._staging.upload(arrays, into), *self._staging.upload(flat)]
        else:
            uploaded = self._staging.upload([*arrays, *flat], into)
        for index, (table, _) in enumerate(changes):
            places, block_ids = uploaded[len(arrays) + 2 * index :][:2]
            table.apply(places, block_ids)
        return uploaded[: len(arrays)]

    @staticmethod
    def _unknown(
        scheduled: Shares, token_ids: list[int], sampled: SampledTokens | None
    ) -> tuple[list[int], list[int]] | None:
        """Tokens of the step whose ids only the device knows, and their rows among what was sampled."""
        if _UNKNOWN not in token_ids:
            return None
        assert sampled is not None, "a plan names tokens whose ids are not known yet"
        places: list[int] = []
        rows: list[int] = []
        place = 0
        for item in scheduled:
            if token_ids[place] == _UNKNOWN:
                places.append(place)
                rows.append(sampled.rows[item.sequence.id])
            place += item.num_tokens
        return places, rows

    def _take_sampled(
        self, token_ids: Tensor, unknown: tuple[list[int], list[int]] | None, sampled: SampledTokens | None
    ) -> None:
        """Write the ids that only the device knows to their places in token_ids (T,)."""
        if unknown is None or sampled is None:
            return
        places, rows = self._staging.upload([np.array(part, np.int64) for part in unknown])
        if len(rows) == len(token_ids):
            torch.index_select(sampled.ids, 0, rows, out=token_ids)
        else:
            token_ids.index_copy_(0, places, sampled.ids.index_select(0, rows))
