"""Drafting a block at once: a small model that attends to features of the target's own layers (DFlash), and the same
with a bias between neighbouring tokens (DSpark).

The target's streams after some of its layers, joined and projected, give keys and values of the context in every draft
layer; the draft never runs the context's tokens. It runs one block: the last token, then masks. Full attention sees the
whole block, sliding windows look back only.

Source: Chen, Liang and Liu 2026, "DFlash: block diffusion for flash speculative decoding".
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import torch
from torch import Tensor

from vkit import kernels
from vkit.batch import Batch, BatchBuilder
from vkit.cache.groups import CacheKind
from vkit.errors import ModelLoadError
from vkit.kernels import PagedBatch
from vkit.layers import (
    Attention,
    Decoder,
    Embedding,
    GatedMLP,
    Linear,
    LMHead,
    Module,
    PreNormLayer,
    RMSNorm,
    RotaryEmbedding,
)
from vkit.models import CausalLM, HFConfig
from vkit.models.base import ModelConfig
from vkit.models.qwen2 import window_of
from vkit.plan_arrays import TokenRun
from vkit.speculation.drafter import Growing, ObservedStep, finished_drafts, growing
from vkit.speculation.proposer import Drafts


class BlockAttention(Attention):
    """Attention of a draft layer, over context that others computed and a block of its own."""

    def write_context(self, features: Tensor, batch: Batch) -> None:
        """Keys and values of the context tokens of a step of the target, from their features (T, H)."""
        q, k, v = self.project(features)
        _, k = self._positioned(q, k, batch)
        k_cache, v_cache, paged = batch.kv(self.layer)
        kernels.write_kv(k, v.view(v.shape[0], -1, self._head_dim), k_cache, v_cache, paged.slot_mapping)


class MarkovHead(Module):
    """How likely each token is after the one before it, beside what the block says: of low rank."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        self.markov_w1 = Embedding(vocab_size, rank)
        self.markov_w2 = Linear(rank, vocab_size)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids (R,) -> (R, V)."""
        return self.markov_w2(self.markov_w1(token_ids))


class BlockDraft(CausalLM):
    """The draft model. Embedding and head are the target's, unless its checkpoint brings its own."""

    ignored_tensors = (
        r"(model\.)?confidence_head\..*",
        r"(model\.)?mask_embedding.*",
        r"t2d",
        r"(model\.)?mask_hidden",
    )

    def __init__(
        self,
        config: HFConfig,
        options: ModelConfig,
        target: CausalLM,
        *,
        has_markov_head: bool,
        stored: Set[str] = frozenset(),
    ) -> None:
        """`stored`: names of the checkpoint's tensors."""
        super().__init__(config, options)
        self.names = {"own_head": "lm_head"}
        self._target = target
        self.num_layers = config.integer("num_hidden_layers")
        self._width = config.integer("hidden_size")
        self.block_size, self.mask_token_id, self.tapped_layers = _block_settings(config)
        self._rotary = RotaryEmbedding(config.rope(options.max_model_len))
        self.fc = Linear(len(self.tapped_layers) * width_of(target), self._width)
        self.hidden_norm = self._make_norm(self._width)
        self.layers = [self._make_layer(layer) for layer in range(self.num_layers)]
        self.norm = self._make_norm(self._width)
        vocab_size = config.integer("vocab_size")
        self.markov_head = (
            MarkovHead(vocab_size, config.integer("markov_rank", default=256)) if has_markov_head else None
        )
        has_embedding = self.stored_name("embed_tokens.weight", stored) in stored
        self.embed_tokens = Embedding(vocab_size, self._width) if has_embedding else None
        has_head = self.stored_name("lm_head.weight", stored) in stored
        self.own_head = LMHead(self._width, vocab_size) if has_head else None

    @property
    def lm_head(self) -> LMHead:  # type: ignore[override]  # the target's, and no part of this tree
        """The target's head."""
        return self._target.lm_head

    def stored_name(self, name: str, stored: Set[str]) -> str:
        """With or without a leading "model."."""
        longer = f"model.{name}"
        return longer if longer in stored else name

    def _make_norm(self, width: int) -> RMSNorm:
        return RMSNorm(width, self.config.number("rms_norm_eps", default=1e-6))

    def _make_layer(self, layer: int) -> PreNormLayer:
        config, width = self.config, self._width
        bias = config.flag("attention_bias", default=False)
        attention = BlockAttention(
            layer,
            width,
            config.integer("num_attention_heads"),
            config.num_kv_heads,
            config.head_dim,
            rotary=self._rotary,
            bias=bias,
            output_bias=bias,
            window=window_of(config, layer),
            q_norm=self._make_norm(config.head_dim),
            k_norm=self._make_norm(config.head_dim),
        )
        activation = config.activation("hidden_act", default="silu")
        mlp = GatedMLP(width, config.integer("intermediate_size"), activation=activation)
        return PreNormLayer(attention, mlp, self._make_norm(width), self._make_norm(width))

    def write_context(self, taps: list[Tensor], batch: Batch) -> None:
        """Keys and values of a step's tokens in every layer, from the target's streams (T, H) each."""
        features = self.hidden_norm(self.fc(kernels.concat(taps)))
        for layer in self.layers:
            attention = layer.self_attn
            assert isinstance(attention, BlockAttention)
            attention.write_context(features, batch)

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states (T, H) after the final norm, of blocks."""
        embed = self.embed_tokens or _decoder_of(self._target).embed_tokens
        hidden, residual = embed(batch.token_ids), None
        seen = _seen_whole(batch)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, seen)
        return self.norm.add(hidden, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Scores of the block's hidden states (R, H) -> (R, V) float32."""
        return self._target.compute_logits(hidden) if self.own_head is None else self.own_head(hidden).float()


class BlockDrafter:
    """Keeps the context's keys and values, and drafts a block in one forward pass."""

    needs_hidden = False

    def __init__(self, model: BlockDraft, num_drafts: int) -> None:
        self._model = model
        self._num_drafts = num_drafts
        self.tapped_layers = model.tapped_layers

    def draft(self, step: ObservedStep, builder: BatchBuilder) -> list[Drafts]:
        """Drafts for each item."""
        model = self._model
        model.write_context(step.taps, step.batch)
        # With a Markov head the last token's own place scores the first draft, else the first mask's does.
        num_masks_more = 0 if model.markov_head is not None else 1
        rows = growing(step, builder, self._num_drafts, num_slots_more=num_masks_more)
        if rows:
            runs = []
            for row in rows:
                masks = [model.mask_token_id] * (row.num_wanted - 1 + num_masks_more)
                runs.append(TokenRun(row.sequence, row.position, [step.emitted[row.index][-1], *masks], row.num_wanted))
            batch = builder.build_runs(runs)
            hidden = model.forward(batch)
            logits = model.compute_logits(kernels.embedding(batch.logits_rows, hidden))
            self._pick(rows, runs, logits)
        return finished_drafts(rows, len(step.items))

    def _pick(self, rows: list[Growing], runs: list[TokenRun], logits: Tensor) -> None:
        """The most likely token of each place, from the left. logits (sum of wanted drafts, V)."""
        head = self._model.markov_head
        first = 0
        for row, run in zip(rows, runs, strict=True):
            own = logits[first : first + row.num_wanted]
            first += row.num_wanted
            if head is None:
                row.token_ids.extend(own.argmax(dim=1).tolist())
                continue
            before = run.token_ids[0]
            for place in range(row.num_wanted):
                bias = head(torch.tensor([before], device=own.device))[0]
                before = int((own[place] + bias.float()).argmax())
                row.token_ids.append(before)


def check_target(target: CausalLM, layers: tuple[int, ...]) -> None:
    """Whether streams can be taken from these layers of the target.

    Raises:
        ModelLoadError: they cannot.
    """
    decoder = _decoder_of(target)
    if type(decoder).__call__ is not Decoder.__call__:
        raise ModelLoadError(f"{type(target).__name__}: the streams of this architecture's layers cannot be tapped")
    beyond = [layer for layer in layers if not 0 <= layer < target.num_layers]
    if beyond:
        raise ModelLoadError(f"target_layer_ids {beyond} name no layers of a model of {target.num_layers}")


def _decoder_of(target: CausalLM) -> Decoder:
    decoder = target.model
    if not isinstance(decoder, Decoder):
        raise ModelLoadError(f"{type(target).__name__}: the streams of this architecture's layers cannot be tapped")
    return decoder


def width_of(target: CausalLM) -> int:
    """Width of the target's stream."""
    return _decoder_of(target).embed_tokens.shape[1]


def _block_settings(config: HFConfig) -> tuple[int, int, tuple[int, ...]]:
    """Block size, mask token and the target's layers to tap, from the top level or from dflash_config."""
    inner = HFConfig(config.mapping("dflash_config"))

    def integer(key: str) -> int:
        found = config.optional_integer(key)
        return inner.integer(key) if found is None else found

    layers = config.values.get("target_layer_ids", inner.values.get("target_layer_ids"))
    if not isinstance(layers, list) or not layers or not all(type(layer) is int for layer in layers):
        raise ModelLoadError(f"config.json: target_layer_ids must list layers of the target, got {layers!r}")
    return integer("block_size"), integer("mask_token_id"), tuple(layers)


def _seen_whole(batch: Batch) -> Batch:
    """The batch with every token of a block seen by all of it, in the groups that keep all tokens.

    Each token becomes a sequence of its own that ends with its block: causality then hides nothing.
    """
    paged = [
        group if group is None or batch.store.groups[index].kind is not CacheKind.FULL else _token_by_token(group)
        for index, group in enumerate(batch.paged)
    ]
    return replace(batch, paged=paged)


def _token_by_token(group: PagedBatch) -> PagedBatch:
    bounds = group.host_cu_seqlens
    owners = [b for b in range(len(bounds) - 1) for _ in range(bounds[b + 1] - bounds[b])]
    index = torch.tensor(owners, dtype=torch.int64, device=group.rows.device)
    return PagedBatch(
        group.block_table,
        group.rows[index],
        group.slot_mapping,
        group.seq_lens[index],
        torch.arange(len(owners) + 1, dtype=torch.int32, device=group.rows.device),
        [group.host_rows[b] for b in owners],
        [group.host_seq_lens[b] for b in owners],
        list(range(len(owners) + 1)),
    )
