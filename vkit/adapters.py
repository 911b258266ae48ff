"""LoRA adapters in PEFT's layout: a folder with adapter_config.json and adapter_model.safetensors.

Everything an adapter says is either honoured or refused by name. Loading reads files and checks them against the
model; which request uses which adapter is decided elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vkit.errors import CheckpointError, InvalidRequest, ModelLoadError
from vkit.layers import (
    AdapterSwitch,
    AdapterTarget,
    AdapterWeights,
    Module,
    NamedHead,
    Placement,
    adapt,
    adapter_targets,
)
from vkit.loaders import open_checkpoint
from vkit.models import check_tensors, create_model
from vkit.models.base import CausalLM, ModelCheckpoint, ModelConfig

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 4096

_PREFIX = r"(?:base_model\.model\.)?(.+)\."
_KEY = re.compile(_PREFIX + r"lora_(?:([AB])(?:\.default)?\.weight|embedding_([AB])(?:\.default)?)")
_BASE_KEY = re.compile(_PREFIX + r"base_layer\.weight")
"""PEFT keeps a copy of a token table or head that an adapter changes beside it."""
_ROWS_AT_ONCE = 4096
_MAX_ROUNDING, _MAX_PACKING = 0.005, 0.25
"""Largest difference of a copy from the weight, as parts of it: bfloat16 makes some 0.002, two bits some 0.2."""
_UNSUPPORTED = {
    "use_dora": "weight-decomposed adapters (DoRA)",
    "use_qalora": "QA-LoRA",
    "lora_bias": "biases of adapters",
    "modules_to_save": "whole modules beside the adapter",
    "layer_replication": "replicated layers",
    "target_parameters": "adapters of bare parameters",
    "trainable_token_indices": "trained token embeddings",
    "alora_invocation_tokens": "adapters that begin at a token (aLoRA)",
    "arrow_config": "routed adapters",
}
"""Keys that must be unset -> what they would mean."""
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations after which the adapter belongs to a changed base model."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded adapter."""

    name: str
    path: str
    key: str
    """Name and digest of the weights: what cached keys and values depend on."""
    weights: AdapterWeights = field(repr=False)


def open_adapters(checkpoint: ModelCheckpoint, config: ModelConfig, modules: Mapping[str, Path]) -> AdapterRegistry:
    """The adapters of a model that is not loaded yet: `modules` by name, checked against its tensor list.

    Raises:
        ModelLoadError: as `build_model`.
        InvalidRequest, CheckpointError: an adapter that cannot be used.
    """
    model = create_model(checkpoint, config)
    check_tensors(model, checkpoint)  # also settles in which form projections are stored
    prefix, decoder = _decoder_of(model)
    placement = Placement(torch.device(config.device), getattr(torch, config.dtype))
    head = _head_of(model)
    targets = adapter_targets(decoder, prefix, head)
    stored = checkpoint.tensor_names()
    names = {name: model.stored_name(f"{name}.weight", stored) for name in targets}
    tied = head[0] if head is not None and head[1].is_tied else None
    if tied is not None:
        names[tied] = next(names[name] for name, target in targets.items() if target.is_table)
    registry = AdapterRegistry(targets, placement, BaseWeights(checkpoint.path, names), tied_head=tied)
    for name, path in modules.items():
        registry.load(name, path)
    return registry


def let_listen(model: CausalLM, switch: AdapterSwitch) -> None:
    """Have the layers of a model with weights ask `switch` which adapters are in use."""
    prefix, decoder = _decoder_of(model)
    adapt(decoder, prefix, switch, _head_of(model))


def _head_of(model: CausalLM) -> NamedHead | None:
    """The head, of a model whose answers come from it."""
    if model.embeds:
        return None
    (name,) = (prefix.removesuffix(".") for prefix, module in model.walk() if module is model.lm_head)
    return name, model.lm_head


def _decoder_of(model: CausalLM) -> tuple[str, Module]:
    """The part of a model that adapters may change beside its head (towers are not), and its tensors' prefix."""
    decoder: object = model.model
    for prefix, module in model.walk():
        if module is decoder:
            return prefix, module
    raise ModelLoadError(f"{type(model).__name__} has no layers that an adapter could change")


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """The model's own weights, for comparing with the copies that adapters bring."""

    path: Path
    names: Mapping[str, str]
    """Target -> its tensor in the checkpoint."""

    def check(self, file: Path, target: str, tensor: str, stored: Any) -> None:
        """Refuse an adapter whose copy of a weight is not the model's.

        Raises:
            CheckpointError: it is another weight, of another vocabulary or trained on.
        """
        checkpoint = open_checkpoint(self.path)
        try:
            own, copy = checkpoint.load(self.names[target]), stored.get_slice(tensor)
            shape = tuple(copy.get_shape())
            if shape != tuple(own.shape):
                raise CheckpointError(f"{file}: {tensor} has shape {shape}, the model needs {tuple(own.shape)}")
            apart = size = 0.0
            for start in range(0, shape[0], _ROWS_AT_ONCE):
                rows = torch.arange(start, min(shape[0], start + _ROWS_AT_ONCE))
                mine = own[rows].float() if isinstance(own, Tensor) else own.rows(rows).dequantize(torch.float32)
                apart += float((copy[start : start + len(rows)].float() - mine).square().sum())
                size += float(mine.square().sum())
        finally:
            checkpoint.close()
        # Packed weights are only near what they were made of.
        most = _MAX_ROUNDING if isinstance(own, Tensor) else _MAX_PACKING
        if not apart <= most**2 * size:
            raise CheckpointError(
                f"{file}: {tensor} is not the model's own {target}: the adapter belongs to a changed base model"
            )


class AdapterRegistry:
    """The adapters of one model, by name. Safe to use from several threads; requests keep what they began with."""

    def __init__(
        self, targets: Mapping[str, AdapterTarget], placement: Placement, base: BaseWeights, *, tied_head: str | None
    ) -> None:
        """`tied_head`: the name of a head that multiplies by the token table."""
        self._targets = targets
        self._base, self._tied_head = base, tied_head
        self._by_tail = _tails(targets)
        self._placement = placement
        self._adapters: dict[str, Adapter] = {}
        self._lock = threading.Lock()

    def names(self) -> tuple[str, ...]:
        """Names of what is loaded, oldest first."""
        return tuple(self._adapters)

    def find(self, name: str) -> Adapter:
        """The adapter of that name.

        Raises:
            InvalidRequest: there is none.
        """
        adapter = self._adapters.get(name)
        if adapter is None:
            known = ", ".join(self._adapters) or "none is loaded"
            raise InvalidRequest(f"lora: no adapter is called {name!r} (loaded: {known})", param="lora")
        return adapter

    def load(self, name: str, path: Path) -> Adapter:
        """Read an adapter and serve it under `name`.

        Raises:
            InvalidRequest: the name is empty or taken.
            CheckpointError: files missing or damaged, or an adapter for another model, or of an unsupported kind.
        """
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"lora_name: expected a non-empty string, got {name!r}", param="lora_name")
        if name in self._adapters:
            raise InvalidRequest(f"lora_name: {name!r} is loaded already; unload it first", param="lora_name")
        adapter = self._read(name, path)
        with self._lock:
            if name in self._adapters:
                raise InvalidRequest(f"lora_name: {name!r} is loaded already; unload it first", param="lora_name")
            self._adapters[name] = adapter
        return adapter

    def unload(self, name: str) -> None:
        """Forget an adapter; requests under way finish with it.

        Raises:
            InvalidRequest: there is none of that name.
        """
        with self._lock:
            self.find(name)
            del self._adapters[name]

    def _read(self, name: str, path: Path) -> Adapter:
        config = _read_config(path)
        scale_of = _scales(path, config)
        file = path / WEIGHTS_FILE
        if not file.is_file():
            pickled = " (adapter_model.bin is a pickle, which is never loaded)" if _has_pickle(path) else ""
            raise CheckpointError(f"{file}: no such file{pickled}", remedy="save the adapter as safetensors")
        try:
            with safe_open(file, "pt") as stored:
                pairs, modules = self._checked_pairs(file, stored)
                _check_promises(path / CONFIG_FILE, config, modules)
                self._check_tying(path / CONFIG_FILE, config, pairs)
                weights = self._joined(file, stored, pairs, scale_of)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not readable: {error}") from None
        digest = hashlib.sha256(file.read_bytes() + (path / CONFIG_FILE).read_bytes()).hexdigest()[:32]
        return Adapter(name, str(path), f"{name}:{digest}", weights)

    def _checked_pairs(self, file: Path, stored: Any) -> tuple[dict[str, tuple[str, str]], dict[str, int]]:
        """Target name -> names of its A and B, all shapes checked by the header; and the file's modules -> rank."""
        found: dict[str, dict[str, str]] = {}
        modules: dict[str, int] = {}
        copies: dict[str, str] = {}
        for tensor in stored.keys():  # noqa: SIM118  (not a mapping)
            if (copy := _BASE_KEY.fullmatch(tensor)) is not None:
                copies[self._target_name(file, copy[1])] = tensor
                continue
            match = _KEY.fullmatch(tensor)
            if match is None:
                raise CheckpointError(f"{file}: {tensor} is not part of a LoRA adapter")
            target = self._target_name(file, match[1])
            if self._targets[target].is_table != (match[3] is not None):
                layout = "lora_embedding_A and _B" if self._targets[target].is_table else "lora_A and lora_B"
                raise CheckpointError(f"{file}: {tensor}: an adapter of {target} has {layout}")
            found.setdefault(target, {})[match[2] or match[3]] = tensor
            if (match[2] or match[3]) == "A":
                modules[match[1]] = next(iter(stored.get_slice(tensor).get_shape()), 0)
        if not found:
            raise CheckpointError(f"{file}: it holds no tensors")
        for target, tensor in copies.items():
            self._base.check(file, target, tensor, stored)
        pairs: dict[str, tuple[str, str]] = {}
        for target, parts in found.items():
            if len(parts) != 2:
                missing = "A" if "A" not in parts else "B"
                raise CheckpointError(f"{file}: {target} has no lora_{missing}")
            self._check_shapes(file, stored, target, parts["A"], parts["B"])
            pairs[target] = parts["A"], parts["B"]
        return pairs, modules

    def _check_tying(self, file: Path, config: Mapping[str, Any], pairs: Mapping[str, tuple[str, str]]) -> None:
        is_shared = any(name == self._tied_head or self._targets[name].is_table for name in pairs)
        if is_shared and self._tied_head is not None and config.get("ensure_weight_tying"):
            raise CheckpointError(
                f"{file}: ensure_weight_tying: one adapter for a token table and the head tied to it is not supported"
            )

    def _target_name(self, file: Path, name: str) -> str:
        if name in self._targets:
            return name
        tail = self._by_tail.get(_tail(name))
        if tail is None:
            raise CheckpointError(f"{file}: the model has no layer {name} that an adapter could change")
        return tail

    def _check_shapes(self, file: Path, stored: Any, target: str, down: str, up: str) -> None:
        expected = self._targets[target]
        shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in (down, up)}
        rank = shapes[down][0] if shapes[down] else 0
        if not 1 <= rank <= MAX_RANK:
            raise CheckpointError(f"{file}: {down} has shape {shapes[down]}, expected a rank of 1 to {MAX_RANK}")
        for name, shape in ((down, (rank, expected.in_features)), (up, (expected.out_features, rank))):
            if shapes[name] != shape:
                raise CheckpointError(f"{file}: {name} has shape {shapes[name]}, the model needs {shape}")

    def _joined(
        self, file: Path, stored: Any, pairs: Mapping[str, tuple[str, str]], scale_of: Callable[[str, int], float]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """One A and one B per layer: those of its projections, side by side; A of a token table by its rows."""
        by_layer: dict[str, list[tuple[AdapterTarget, Tensor, Tensor]]] = {}
        for target_name, (down_name, up_name) in pairs.items():
            target = self._targets[target_name]
            down, up = (_finite(file, name, stored.get_tensor(name)) for name in (down_name, up_name))
            up = up * scale_of(target_name, down.shape[0])
            if target.row_order is not None:
                up = up[target.row_order]
            by_layer.setdefault(target.key, []).append((target, down, up))
        joined = {}
        for key, parts in by_layer.items():
            if parts[0][0].is_table:
                (_, down, up), *_ = parts
                joined[key] = self._placed(down.T), self._placed(up)
                continue
            up = torch.zeros(parts[0][0].total, sum(len(down) for _, down, _ in parts))
            column = 0
            for target, down, part in parts:
                up[target.start : target.start + target.out_features, column : column + len(down)] = part
                column += len(down)
            joined[key] = self._placed(torch.cat([down for _, down, _ in parts])), self._placed(up)
        return joined

    def _placed(self, matrix: Tensor) -> Tensor:
        return matrix.to(self._placement.device, self._placement.dtype).contiguous()


def _finite(file: Path, name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        raise CheckpointError(f"{file}: {name} is {tensor.dtype}, expected a floating type")
    tensor = tensor.float()
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{file}: {name} holds values that are not finite")
    return tensor


def _has_pickle(path: Path) -> bool:
    return (path / "adapter_model.bin").is_file()


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{file}: {error.strerror or error}", remedy="pass the folder of a PEFT adapter"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    if values.get("peft_type") != "LORA":
        raise CheckpointError(f"{file}: peft_type is {values.get('peft_type')!r}, only LORA is supported")
    for key, meaning in _UNSUPPORTED.items():
        if values.get(key):
            raise CheckpointError(f"{file}: {key}: {meaning} are not supported")
    if values.get("bias", "none") != "none":
        raise CheckpointError(f"{file}: bias is {values['bias']!r}, only 'none' is supported")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_BASE_CHANGING):
        raise CheckpointError(f"{file}: init_lora_weights {start!r} changes the base model; convert the adapter first")
    return values


def _check_promises(file: Path, config: Mapping[str, Any], modules: Mapping[str, int]) -> None:
    """Refuse a configuration that the tensors contradict. `modules`: those of the weights, and their ranks."""
    _check_ranks(file, config, modules)
    wanted = config.get("target_modules")
    if isinstance(wanted, list):
        for name in wanted:
            if not any(module == name or module.endswith(f".{name}") for module in modules):
                raise CheckpointError(f"{file}: target_modules names {name!r}, but {WEIGHTS_FILE} holds no such module")
    elif isinstance(wanted, str) and wanted != "all-linear":
        try:
            is_met = any(re.fullmatch(wanted, module) for module in modules)
        except re.error as error:
            raise CheckpointError(f"{file}: target_modules {wanted!r} is no pattern: {error}") from None
        if not is_met:
            raise CheckpointError(f"{file}: target_modules {wanted!r} matches no module of {WEIGHTS_FILE}")
    elif wanted is not None and not isinstance(wanted, str):
        raise CheckpointError(f"{file}: target_modules must be a list of names or a pattern, got {wanted!r}")


def _check_ranks(file: Path, config: Mapping[str, Any], modules: Mapping[str, int]) -> None:
    patterns = config.get("rank_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{file}: rank_pattern must be an object, got {patterns!r}")
    for name, rank in modules.items():
        pattern = next((key for key in patterns if _matches(key, name)), None)
        where, promised = ("r", config.get("r")) if pattern is None else (f"rank_pattern {pattern}", patterns[pattern])
        if promised is not None and promised != rank:
            raise CheckpointError(f"{file}: {where} is {promised!r}, but {name} has rank {rank} in {WEIGHTS_FILE}")


def _scales(path: Path, config: Mapping[str, Any]) -> Callable[[str, int], float]:
    """(target's name, its rank) -> what its product is multiplied by: alpha / r, or alpha / √r (rank-stabilised)."""
    patterns = config.get("alpha_pattern") or {}
    alphas = {"": config.get("lora_alpha"), **(patterns if isinstance(patterns, dict) else {"alpha_pattern": None})}
    for key, alpha in alphas.items():
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            where = f"alpha_pattern {key}" if key else "lora_alpha"
            raise CheckpointError(f"{path / CONFIG_FILE}: {where} must be a number, got {alpha!r}")
    is_stabilised = config.get("use_rslora") is True

    def scale_of(name: str, rank: int) -> float:
        alpha = next((alphas[key] for key in alphas if key and _matches(key, name)), alphas[""])
        return float(alpha) / (math.sqrt(rank) if is_stabilised else rank)

    return scale_of


def _matches(pattern: str, name: str) -> bool:
    """As PEFT reads its patterns: a whole name, or its last parts."""
    try:
        return re.fullmatch(rf"(.*\.)?({pattern})", name) is not None
    except re.error:
        return name == pattern or name.endswith(f".{pattern}")


def _tail(name: str) -> str:
    """The part of a name from its layer number on, by which models that only wrap another agree."""
    return name[name.rfind("layers.") :] if "layers." in name else name


def _tails(targets: Mapping[str, AdapterTarget]) -> dict[str, str]:
    """Tail -> the one target that ends in it."""
    found: dict[str, list[str]] = {}
    for name in targets:
        found.setdefault(_tail(name), []).append(name)
    return {tail: names[0] for tail, names in found.items() if len(names) == 1}
