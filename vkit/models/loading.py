"""Fills a model with a checkpoint's tensors, after checking that the two lists of names and shapes agree."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Set
from dataclasses import dataclass

import torch

from vkit.errors import CheckpointError
from vkit.layers import Attention, Placement, TensorSlot
from vkit.models.base import CausalLM, ModelCheckpoint, ProgressCallback
from vkit.quantization import QuantizedTensor, Weight

logger = logging.getLogger("vkit.models")

_ALWAYS_IGNORED = (r".*rotary_emb\.inv_freq", r".*\.masked_bias", r"mtp\..*")
_NAMES_SHOWN = 8


def check_tensors(model: CausalLM, checkpoint: ModelCheckpoint) -> None:
    """Compare what the model expects with what the file lists; reads no weights.

    Raises:
        CheckpointError: missing tensors, wrong shapes, or tensors nobody would read; names them.
    """
    stored = checkpoint.tensor_names()
    modules = list(model.walk())
    for prefix, module in modules:
        module.choose_form(_IsStored(model, stored, prefix))
    expected = [
        (model.stored_name(prefix + slot.name, stored), slot) for prefix, module in modules for slot in module.slots()
    ]
    missing = [name for name, slot in expected if name not in stored and not slot.is_optional]
    if missing:
        raise CheckpointError(f"{checkpoint.path}: missing tensors: {_listed(missing)}")
    for name, slot in expected:
        if name in stored:
            _check_shape(checkpoint, name, slot)
    unused = sorted(set(stored) - {name for name, _ in expected})
    unread = [name for name in unused if not _is_ignorable(model, name)]
    if unread:
        raise CheckpointError(
            f"{checkpoint.path}: tensors that {checkpoint.architecture} does not use: {_listed(unread)}",
            remedy="the file is damaged or made for another architecture",
        )


def load_weights(model: CausalLM, checkpoint: ModelCheckpoint, progress: ProgressCallback | None = None) -> None:
    """Give every layer its tensors. Weights stay packed, and stay views of the file where the device is the host.

    Raises:
        CheckpointError: as `check_tensors`.
    """
    check_tensors(model, checkpoint)
    stored = checkpoint.tensor_names()
    placement = Placement(torch.device(model.options.device), model.dtype)
    total, done = checkpoint.num_weight_bytes, 0
    for prefix, module in model.walk():
        tensors: dict[str, Weight] = {}
        for slot in module.slots():
            name = model.stored_name(prefix + slot.name, stored)
            if name in stored:
                tensors[slot.name] = checkpoint.load(name)
                done += tensors[slot.name].nbytes
        module.set_tensors(tensors, placement)
        if tensors and progress is not None:
            progress(min(done, total), total)
    if model.ranks.size > 1:
        checkpoint.release_pages()  # shares are copies
    _warn_of_second_head(model, checkpoint)
    _take_cache_scales(model, checkpoint)
    if progress is not None:
        progress(total, total)


@dataclass(frozen=True, slots=True)
class _IsStored:
    """Whether the checkpoint holds a tensor of the layer with this prefix."""

    model: CausalLM
    stored: Set[str]
    prefix: str

    def __call__(self, name: str) -> bool:
        return self.model.stored_name(self.prefix + name, self.stored) in self.stored


def _check_shape(checkpoint: ModelCheckpoint, name: str, slot: TensorSlot) -> None:
    shape = tuple(checkpoint.tensor_info(name).shape)
    if shape != slot.shape:
        raise CheckpointError(f"{checkpoint.path}: {name} has shape {shape}, the configuration means {slot.shape}")


def _is_ignorable(model: CausalLM, name: str) -> bool:
    patterns: Iterable[str] = (*_ALWAYS_IGNORED, *model.ignored_tensors)
    if any(re.fullmatch(pattern, name) for pattern in patterns):
        return True
    if model.lm_head.is_tied and name in _head_names(model):
        return True
    layer = re.match(r"(?:.*\.)?layers\.(\d+)\.", name)
    return layer is not None and int(layer.group(1)) in _draft_layers(model)


def _draft_layers(model: CausalLM) -> range:
    """Layers after the model's own that only predict further tokens ahead; there are those the configuration names."""
    num_drafts = model.config.optional_integer("num_nextn_predict_layers") or 0
    return range(model.num_layers, model.num_layers + num_drafts)


_CACHE_SCALE_NAMES = {
    part: (f"{part}_scale", f"attn.{part}_scale", f"{part}_proj.{part}_scale", f"{part}_proj.output_scale", "kv_scale")
    for part in ("k", "v")
}


def _take_cache_scales(model: CausalLM, checkpoint: ModelCheckpoint) -> None:
    """Give attention layers the scales of an fp8 cache; say so when there are none, or when they are of no use."""
    read = getattr(checkpoint, "cache_scales", None)
    found: dict[str, float] = {} if read is None else read()
    is_fp8 = model.options.kv_cache_dtype.startswith("float8")
    if found and not is_fp8:
        logger.warning("%s: scales of cached keys and values are not used: the cache is not fp8", checkpoint.path)
    if not is_fp8:
        return
    num_scaled = 0
    for prefix, module in model.walk():
        if not isinstance(module, Attention) or not module.takes_cache_scales:
            continue
        scales = [
            next((found[prefix + name] for name in names if prefix + name in found), None)
            for names in (_CACHE_SCALE_NAMES["k"], _CACHE_SCALE_NAMES["v"])
        ]
        module.k_scale, module.v_scale = (scale if scale is not None and scale > 0 else 1.0 for scale in scales)
        num_scaled += any(scale is not None for scale in scales)
    if num_scaled == 0:
        logger.warning(
            "%s: no scales for an fp8 cache here: keys and values are rounded to fp8 with scale 1.0", checkpoint.path
        )


def _warn_of_second_head(model: CausalLM, checkpoint: ModelCheckpoint) -> None:
    """A tied model uses the embedding; say so when the file brings a head that differs."""
    heads = _head_names(model) & set(checkpoint.tensor_names()) if model.lm_head.is_tied else set()
    if not heads:
        return
    name = heads.pop()
    embedding = model.lm_head.tied_weight
    if not _equal(model.lm_head.share_of(checkpoint.load(name)), embedding):
        logger.warning("%s: %s differs from the embedding and is ignored: the model is tied", checkpoint.path, name)


def _head_names(model: CausalLM) -> set[str]:
    return {f"{prefix}weight" for prefix, module in model.walk() if module is model.lm_head}


def _equal(one: Weight, other: Weight) -> bool:
    if isinstance(one, QuantizedTensor) and isinstance(other, QuantizedTensor):
        return one.qtype == other.qtype and torch.equal(one.data, other.data)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one.to(other.device, other.dtype), other)
    return False


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
