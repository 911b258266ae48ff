"""Directories in the Hugging Face layout: config.json beside one or more safetensors files.

Source: safetensors format: u64 header length, JSON header, tensor data; little-endian.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from vkit.errors import CheckpointError, ModelLoadError
from vkit.loaders.checkpoint import Checkpoint, TensorInfo, some_names
from vkit.loaders.storage import Storage, open_storage
from vkit.loaders.tensors import TensorFiles
from vkit.quantization import Weight
from vkit.quantization.scheme import Declaration, LayerFormat, LayerHeader, Scheme, StoredTensor, is_usually_plain
from vkit.quantization.schemes import SCHEMES

logger = logging.getLogger("vkit.loaders")

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MODEL_OPT_FILE, OLD_QUANTIZATION_FILE = "hf_quant_config.json", "quantize_config.json"
"""Where a scheme is declared that config.json says nothing of."""
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}

_CACHE_SCALE = re.compile(r"(.*\.)?([kv]_scale|kv_scale|[kv]_proj\.output_scale)")
_NARROW = frozenset(
    {torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu}
)
"""Types of codes: a matrix of one is no weight without scales."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies; `offset` counts from the start of the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int
    storage: Storage


@dataclass(frozen=True, slots=True)
class _PackedLayer:
    """A quantised layer: the tensors that together are its weight."""

    name: str
    format: LayerFormat
    shape: tuple[int, int]
    suffixes: tuple[str, ...]
    num_bytes: int


class SafetensorsCheckpoint(Checkpoint):
    """A directory with config.json and model.safetensors, or the shards that model.safetensors.index.json names.

    The tensors of a quantised layer appear as one, its `weight`; the configuration says which layers are.
    """

    format: Literal["safetensors", "gguf"] = "safetensors"

    def __init__(self, path: Path, *, use_mmap: bool = True) -> None:
        """Open the directory `path` and check the header of every shard.

        Raises:
            CheckpointError: a file is missing or damaged.
            ModelLoadError: the weights are quantised by a scheme that cannot be loaded, or lack tensors of it.
        """
        self.path = path
        self.name = os.path.basename(os.path.abspath(path))
        self.gguf_metadata = None
        self.config = _read_object(path / "config.json", remedy="pass the folder holding config.json")
        generation = path / "generation_config.json"
        self.generation_config = _read_object(generation) if generation.exists() else {}
        scheme = _declared_scheme(path, self.config)
        self.quantization = None if scheme is None else scheme.name
        self._storages: list[Storage] = []
        self._entries: dict[str, _Entry] = {}
        for shard in self._shards():
            self._add(open_storage(shard, use_mmap=use_mmap))
        self._check_index()
        declarations = [path / name for name in (MODEL_OPT_FILE, OLD_QUANTIZATION_FILE) if (path / name).is_file()]
        self.weight_files = (*(storage.path for storage in self._storages), *declarations)
        self._packed: dict[str, _PackedLayer] = {}
        self._hidden = {name for name in self._entries if _CACHE_SCALE.fullmatch(name)}
        if scheme is not None:
            self._pack(scheme)

    def tensor_names(self) -> set[str]:
        """Names of all tensors in all shards, those of a quantised layer as one."""
        return {*(self._entries.keys() - self._hidden), *self._packed}

    def tensor_info(self, name: str) -> TensorInfo:
        """Shape, type and size of a tensor."""
        packed = self._packed.get(name)
        if packed is not None:
            return TensorInfo(name, packed.shape, None, packed.format.name, packed.num_bytes)
        entry = self._entry(name)
        return TensorInfo(name, entry.shape, entry.dtype, None, entry.num_bytes)

    def load(self, name: str) -> Weight:
        """The tensor as the file has it, a view of the mapping; codes and scales of a quantised layer."""
        packed = self._packed.get(name)
        if packed is None:
            return self._stored(self._entry(name))
        tensors = {suffix: self._stored(self._entries[f"{packed.name}.{suffix}"]) for suffix in packed.suffixes}
        try:
            return packed.format.build(tensors, packed.shape)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self.path}: {packed.name}: {error}") from None

    @staticmethod
    def _stored(entry: _Entry) -> torch.Tensor:
        data = entry.storage.tensor(entry.offset, entry.num_bytes)
        # The format does not promise alignment; torch wants numbers at multiples of their size.
        aligned = data if data.data_ptr() % entry.dtype.itemsize == 0 else data.clone()
        return aligned.view(entry.dtype).reshape(entry.shape)

    def release_pages(self) -> None:
        """Let the operating system take back the memory of everything mapped so far."""
        for storage in self._storages:
            storage.release_pages()

    def close(self) -> None:
        """End loading. Tensors already loaded stay valid."""
        for storage in self._storages:
            storage.close()

    def _pack(self, scheme: Scheme) -> None:
        """Find the quantised layers and make one tensor of each.

        Raises:
            ModelLoadError: a layer lacks a tensor, has one of another shape, or is quantised against the declaration.
        """
        layers: dict[str, dict[str, _Entry]] = {}
        for name, entry in self._entries.items():
            layer, suffix = _layer_and_suffix(name)
            layers.setdefault(layer, {})[suffix] = entry
        for name, entries in layers.items():
            layer_format = scheme.format_of(name)
            if layer_format is not None and _is_stored_in(layer_format, name, entries):
                self._add_packed(name, entries, layer_format)
        for name in self._entries.keys() - self._hidden:
            entry = self._entries[name]
            if entry.dtype in _NARROW and len(entry.shape) in (2, 3):
                kind = str(entry.dtype).removeprefix("torch.")
                raise ModelLoadError(f"{self.path}: {name} is {kind}, and the configuration declares no format for it")
        logger.info("%s: %d layers stay packed as %s declares", self.path, len(self._packed), scheme.name)

    def _add_packed(self, name: str, entries: dict[str, _Entry], layer_format: LayerFormat) -> None:
        stored = {suffix: StoredTensor(entry.shape, entry.dtype) for suffix, entry in entries.items()}
        header = LayerHeader(str(self.path), name, stored, lambda suffix: self._stored(entries[suffix]))
        shape = layer_format.check(header)
        num_bytes = sum(entries[suffix].num_bytes for suffix in header.taken)
        layer = _PackedLayer(name, layer_format, shape, tuple(header.taken), num_bytes)
        self._packed[f"{name}.weight"] = layer
        self._hidden.update(f"{name}.{suffix}" for suffix in header.taken)

    def cache_scales(self) -> dict[str, float]:
        """What the file says cached keys and values of each layer should be divided by, by the names it uses."""
        names = [name for name in self._entries if _CACHE_SCALE.fullmatch(name)]
        return {name: self._stored(self._entries[name]).float().max().item() for name in names}

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None or name in self._hidden:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        return entry

    def _shards(self) -> list[Path]:
        """The files that hold the weights; a complete model in one file wins over an index."""
        self._weight_map: dict[str, str] = {}
        single, index = self.path / SINGLE_FILE, self.path / INDEX_FILE
        if single.exists():
            _check_beside(single, index)
            return [single]
        if not index.exists():
            _refuse_no_weights(self.path)
        self._weight_map = _read_weight_map(index)
        shards = [self.path / name for name in sorted(set(self._weight_map.values()))]
        missing = {shard.name for shard in shards if not shard.is_file()}
        if missing:
            raise CheckpointError(f"{self.path}: shards that {INDEX_FILE} names are missing: {some_names(missing)}")
        return shards

    def _add(self, storage: Storage) -> None:
        self._storages.append(storage)
        for name, entry in _read_header(storage).items():
            if name in self._entries:
                other = self._entries[name].storage.path.name
                raise CheckpointError(f"{storage.path}: tensor {name!r} is also in {other}")
            self._entries[name] = entry

    def _check_index(self) -> None:
        wrong = {
            f"{name} ({shard})"
            for name, shard in self._weight_map.items()
            if name not in self._entries or self._entries[name].storage.path.name != shard
        }
        if wrong:
            raise CheckpointError(
                f"{self.path}: tensors are not in the shard that {INDEX_FILE} names: {some_names(wrong)}"
            )


def _read_object(path: Path, *, remedy: str | None = None) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        value = json.loads(path.read_text("utf-8"), object_pairs_hook=_unique_pairs)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: no {path.name} here", remedy=remedy) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _check_beside(single: Path, index: Path) -> None:
    """Refuse an index beside a whole model in one file, if it names files that are not there: one of both is wrong.

    Raises:
        CheckpointError: names the missing files.
    """
    if not index.exists():
        return
    named = set(_read_weight_map(index).values())
    missing = {name for name in named if not (index.parent / name).is_file()}
    if missing:
        raise CheckpointError(
            f"{index.parent}: shards that {index.name} names are missing beside {single.name}: {some_names(missing)}",
            remedy=f"complete the download, or remove {index.name} if {single.name} is the whole model",
        )


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: expected an object 'weight_map' of tensor and file names")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index}: weight_map[{name!r}] is {shard!r}, expected a file name")
    return weight_map


def _refuse_no_weights(path: Path) -> NoReturn:
    others = {file.name for file in path.iterdir() if file.suffix in (".gguf", ".bin", ".pt", ".pth", ".safetensors")}
    if not others:
        raise CheckpointError(f"{path}: no {SINGLE_FILE} or {INDEX_FILE} here", remedy="the download may be incomplete")
    remedy = "pass the .gguf file itself" if any(name.endswith(".gguf") for name in others) else None
    raise CheckpointError(f"{path}: no {SINGLE_FILE} or {INDEX_FILE} here, only {some_names(others)}", remedy=remedy)


def _declared_scheme(path: Path, config: dict[str, Any]) -> Scheme | None:
    """The scheme that config.json or a file beside it declares; None for plain weights.

    Raises:
        ModelLoadError: no such scheme, or a variant of it that cannot be loaded.
    """
    text_config = config.get("text_config")
    for place in (config, text_config if isinstance(text_config, dict) else {}):
        keys = place.get("quantization_config")
        if keys is not None:
            return _scheme(path / "config.json", keys)
    model_opt = path / MODEL_OPT_FILE
    if model_opt.exists():
        keys = _read_object(model_opt).get("quantization")
        if keys is not None:
            return _scheme(model_opt, {"quant_method": "modelopt", **keys} if isinstance(keys, dict) else keys)
    old = path / OLD_QUANTIZATION_FILE
    return _scheme(old, _read_object(old)) if old.exists() else None


def _scheme(source: Path, keys: Any) -> Scheme:
    name = keys.get("quant_method") if isinstance(keys, dict) else None
    if not isinstance(name, str):
        name = "of no name (no 'quant_method')"
    if name not in SCHEMES:
        raise ModelLoadError(
            f"{source}: quantisation scheme {name} is not supported",
            remedy=f"supported: {', '.join(SCHEMES)}, or a GGUF file",
        )
    return SCHEMES[name](Declaration(str(source), keys))


def _layer_and_suffix(name: str) -> tuple[str, str]:
    """The module a tensor belongs to, and its name there; what describes a weight further is the module's too."""
    layer, mark, rest = name.partition(".weight.")
    if mark:
        return layer, f"weight.{rest}"
    layer, _, suffix = name.rpartition(".")
    return layer, suffix


def _is_stored_in(layer_format: LayerFormat, name: str, entries: dict[str, _Entry]) -> bool:
    """Whether a layer that the configuration does not exclude must be stored in its format.

    Lists of exceptions forget heads, routers and the like, and never name embeddings and norms.
    """
    if not layer_format.signature.isdisjoint(entries):
        return True
    weight = entries.get("weight")
    return weight is not None and len(weight.shape) == 2 and not is_usually_plain(name)


def _read_header(storage: Storage) -> dict[str, _Entry]:
    """The checked entries of one safetensors file."""
    path = storage.path

    def refuse(fault: str) -> NoReturn:
        raise CheckpointError(f"{path}: {fault}")

    if storage.size < LENGTH_BYTES:
        refuse(f"the file is {storage.size} bytes long, shorter than a safetensors header")
    length = struct.unpack("<Q", storage.header(LENGTH_BYTES)[:LENGTH_BYTES])[0]
    start = LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or start > storage.size:
        refuse(f"header of {length} bytes in a file of {storage.size}: not a safetensors file, or cut short")
    try:
        header = json.loads(bytes(storage.header(start)[LENGTH_BYTES:start]), object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        refuse(f"header is not valid JSON: {error}")
    if not isinstance(header, dict):
        refuse(f"header is a JSON {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    entries = {name: _entry_of(storage, start, name, value) for name, value in header.items()}
    _check_extents(storage, start, entries)
    return entries


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return value


def _entry_of(storage: Storage, start: int, name: str, value: Any) -> _Entry:
    what = f"{storage.path}: tensor {name!r:.100}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise CheckpointError(f"{what}: expected dtype, shape and data_offsets")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{what}: shape {shape!r:.100} and data_offsets {offsets!r:.100} are not lists of sizes")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{what}: unknown dtype {value['dtype']!r:.100}")
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    first, end = offsets
    if end - first != num_bytes:
        raise CheckpointError(f"{what}: data_offsets span {end - first} bytes, expected {num_bytes} for {shape}")
    if start + end > storage.size:
        raise CheckpointError(
            f"{what} ends at byte {start + end}, past the end of the file ({storage.size} bytes): cut short or damaged"
        )
    return _Entry(tuple(shape), dtype, start + first, num_bytes, storage)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_extents(storage: Storage, start: int, entries: dict[str, _Entry]) -> None:
    """Refuse tensors that overlap, and files longer or shorter than their tensors."""
    position = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if entry.offset != position:
            raise CheckpointError(
                f"{storage.path}: tensor {name!r:.100} starts at byte {entry.offset}, "
                f"expected {position} right after the one before"
            )
        position += entry.num_bytes
    if position != storage.size:
        raise CheckpointError(f"{storage.path}: the file has {storage.size} bytes, its tensors end at byte {position}")


def read_shards(index: Path) -> list[Path]:
    """The files that an index names, all there.

    Raises:
        CheckpointError: the index is damaged, or a file is missing.
    """
    shards = [index.parent / name for name in sorted(set(_read_weight_map(index).values()))]
    missing = {shard.name for shard in shards if not shard.is_file()}
    if missing:
        raise CheckpointError(f"{index.parent}: shards that {index.name} names are missing: {some_names(missing)}")
    return shards


class SafetensorsTensors(TensorFiles):
    """Tensors of safetensors files as they are stored."""

    format: Literal["safetensors", "gguf"] = "safetensors"

    def __init__(self, path: Path, files: list[Path], index: Path | None) -> None:
        self.path = path
        self.is_sharded = index is not None
        self.metadata: Mapping[str, Any] = {}
        self._entries: dict[str, _Entry] = {}
        self._storages = [open_storage(file) for file in files]
        for storage in self._storages:
            for name, entry in _read_header(storage).items():
                if name in self._entries:
                    other = self._entries[name].storage.path.name
                    raise CheckpointError(f"{storage.path}: tensor {name!r} is also in {other}")
                self._entries[name] = entry
        if index is not None:
            missing = set(_read_weight_map(index)) - self._entries.keys()
            if missing:
                raise CheckpointError(f"{path}: tensors that {index.name} names are missing: {some_names(missing)}")

    def names(self) -> set[str]:
        """All tensors."""
        return set(self._entries)

    def info(self, name: str) -> TensorInfo:
        """Shape, type and size."""
        entry = self._entry(name)
        return TensorInfo(name, entry.shape, entry.dtype, None, entry.num_bytes)

    def load(self, name: str, shape: Sequence[int] | None = None) -> torch.Tensor:
        """The tensor, a view of the mapping."""
        entry = self._entry(name)
        data = entry.storage.tensor(entry.offset, entry.num_bytes)
        aligned = data if data.data_ptr() % entry.dtype.itemsize == 0 else data.clone()
        tensor = aligned.view(entry.dtype).reshape(entry.shape)
        if shape is None or tuple(shape) == entry.shape:
            return tensor
        if tensor.numel() != math.prod(shape):
            raise CheckpointError(f"{self.path}: tensor {name!r} is {list(entry.shape)}, expected {list(shape)}")
        return tensor.reshape(*shape)

    def release(self, name: str) -> None:
        """Drop the tensor's pages."""
        entry = self._entry(name)
        entry.storage.release_pages(entry.offset, entry.num_bytes)

    def close(self) -> None:
        """End loading."""
        for storage in self._storages:
            storage.close()

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        return entry
