"""GGUF files, single or split, as checkpoints: Hugging Face names and values over lazily mapped tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from vkit.errors import CheckpointError, ModelLoadError
from vkit.loaders.checkpoint import Checkpoint, TensorInfo, some_names
from vkit.loaders.gguf_architectures import ARCHITECTURES, GGUFArchitecture
from vkit.loaders.gguf_config import MetadataReader
from vkit.loaders.gguf_header import GGUFHeader, TensorEntry, read_header
from vkit.loaders.names import TensorName
from vkit.loaders.storage import Storage, open_storage
from vkit.loaders.tensors import TensorFiles
from vkit.loaders.transforms import Part, Transform, latent_matrices
from vkit.quantization import BlockWeight, QuantizedTensor

PLAIN_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
CONSUMED_BY_CONFIG = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tensors whose numbers are part of the configuration."""

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor entry and the file it lies in."""

    entry: TensorEntry
    storage: Storage


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a Hugging Face tensor comes from and what is done to it on the way."""

    placed: _Placed
    transform: Transform | None = None
    part: Part | None = None
    scale: _Placed | None = None
    values: _Placed | None = None
    """The other half of a latent attention's matrices, where a file keeps them apart."""


class GGUFCheckpoint(Checkpoint):
    """One GGUF model.

    Tensors of F32, F16, BF16 and the integer types load as torch tensors, everything else as QuantizedTensor (vectors
    excepted: they are dequantised). `config["dtype"]` is that of the matrices, and absent when they are packed.
    """

    format: Literal["safetensors", "gguf"] = "gguf"

    def __init__(self, path: Path, *, use_mmap: bool = True) -> None:
        """Open `path`, any part of a split file standing for all of them.

        Raises:
            CheckpointError: a file is missing or damaged.
            ModelLoadError: the architecture cannot be loaded.
        """
        self.path = path
        self._storages, header, self._placed = _open_parts(path, use_mmap=use_mmap)
        self.weight_files = tuple(storage.path for storage in self._storages)
        self.gguf_metadata = header.metadata
        part = _PART_NAME.fullmatch(path.name)
        self.name = part[1] if part else path.name.removesuffix(".gguf")
        self.generation_config: dict[str, Any] = {}
        self.quantization = "gguf"
        architecture_name, architecture = _architecture(path, header)
        entries = {name: placed.entry for name, placed in self._placed.items()}
        reader = MetadataReader(path, architecture_name, header.metadata, entries, self._vector)
        self.config = architecture.config(reader)
        dtype = _matrix_dtype(entries)
        if dtype is not None:
            self.config["dtype"] = dtype
        self._sources = self._name_sources(architecture)

    def tensor_names(self) -> set[str]:
        """Hugging Face names; a tensor that the architecture has no name for keeps its GGUF name."""
        return set(self._sources)

    def tensor_info(self, name: str) -> TensorInfo:
        """Shape, type and size of a tensor."""
        source = self._source(name)
        entry = source.placed.entry
        if source.values is not None:
            return self._latent_info(name, entry, source.values.entry)
        shape, num_bytes = entry.shape, entry.num_bytes
        qtype = entry.block.name if _stays_packed(entry) else None
        dtype = PLAIN_DTYPES.get(entry.block.name, torch.float32) if qtype is None else None
        if source.part is not None:
            num_bytes = num_bytes // shape[0] * source.part.length
            shape = shape[1:] if source.part.is_row else (source.part.length, *shape[1:])
        elif source.transform is not None:
            shape = source.transform.shape(shape, self.config)
            if source.transform.dtype is not None:
                dtype, qtype = source.transform.dtype, None
        return TensorInfo(name, shape, dtype, qtype, num_bytes)

    def load(self, name: str) -> BlockWeight:
        """The tensor in Hugging Face layout; a view of the file wherever no value or row had to move."""
        source = self._source(name)
        weight = _read(source.placed)
        if source.values is not None:
            return latent_matrices(weight, _read(source.values), self.config["kv_lora_rank"])
        if source.scale is not None and isinstance(weight, QuantizedTensor):
            weight = replace(weight, scale=_scale(source.scale, weight))
        if source.part is not None:
            return _rows_of(weight, source.part)
        if source.transform is not None:
            weight = source.transform.apply(weight, self.config)
            if source.transform.copies:
                source.placed.storage.release_pages(source.placed.entry.offset, source.placed.entry.num_bytes)
        return weight

    def release_pages(self) -> None:
        """Let the operating system take back the memory of everything mapped so far."""
        for storage in self._storages:
            storage.release_pages()

    def close(self) -> None:
        """End loading. Tensors already loaded stay valid."""
        for storage in self._storages:
            storage.close()

    def _latent_info(self, name: str, keys: TensorEntry, values: TensorEntry) -> TensorInfo:
        num_heads, value_dim, rank = values.shape
        key_dim = keys.shape[2] if keys.shape[1] == rank else keys.shape[1]
        num_bytes = keys.num_bytes + values.num_bytes
        return TensorInfo(name, (num_heads * (key_dim + value_dim), rank), torch.float32, None, num_bytes)

    def _source(self, name: str) -> _Source:
        source = self._sources.get(name)
        if source is None:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        return source

    def _vector(self, gguf_name: str) -> list[float]:
        placed = self._placed[gguf_name]
        if _stays_packed(placed.entry) or len(placed.entry.shape) > 1:
            raise CheckpointError(f"{self.path}: tensor {gguf_name!r} is not a vector: {list(placed.entry.shape)}")
        weight = _read(placed)
        assert isinstance(weight, torch.Tensor)
        values: list[float] = weight.to(torch.float32).reshape(-1).tolist()
        return values

    def _name_sources(self, architecture: GGUFArchitecture) -> dict[str, _Source]:
        scales = self._scales(architecture)
        inner = CONSUMED_BY_CONFIG | {f"{base}.{kind}" for base in scales for kind in ("scale", "input_scale")}
        sources: dict[str, _Source] = {}
        for gguf_name, placed in self._placed.items():
            if gguf_name in inner or architecture.is_synthetic(gguf_name):
                continue
            if gguf_name.endswith((".attn_k_b.weight", ".attn_v_b.weight")):
                sources |= self._latent_sources(architecture, gguf_name, placed)
                continue
            scale = scales.get(gguf_name.removesuffix(".weight"))
            for hf_name, source in self._named(architecture, gguf_name, placed, scale):
                if hf_name in sources:
                    other = sources[hf_name].placed.entry.name
                    raise CheckpointError(f"{self.path}: tensors {other!r} and {gguf_name!r} are both {hf_name!r}")
                sources[hf_name] = source
        return sources

    def _latent_sources(self, architecture: GGUFArchitecture, gguf_name: str, placed: _Placed) -> dict[str, _Source]:
        """The matrices from latent vectors to keys and values as one tensor, for the keys' half of them."""
        is_keys = gguf_name.endswith(".attn_k_b.weight")
        layer = gguf_name.rpartition(".attn_")[0]
        other = self._placed.get(f"{layer}.attn_{'v' if is_keys else 'k'}_b.weight")
        named = architecture.names.find(f"{layer}.attn_kv_b.weight")
        if other is None or named is None or len(placed.entry.shape) != 3:
            raise CheckpointError(f"{self.path}: tensor {gguf_name!r} has no partner, or is no stack of matrices")
        return {named.hf_name: _Source(placed, values=other)} if is_keys else {}

    def _scales(self, architecture: GGUFArchitecture) -> dict[str, _Placed | None]:
        """For each packed weight, by its name without `.weight`: the tensor of scales beside it, if there is one.

        An `input_scale` beside it belongs to activations of four bits; ours stay in floating point, so it has no use.
        """
        return {
            base: self._placed.get(f"{base}.scale")
            for base, placed in ((name.removesuffix(".weight"), placed) for name, placed in self._placed.items())
            if _stays_packed(placed.entry) and architecture.names.find(f"{base}.scale") is None
        }

    def _named(
        self, architecture: GGUFArchitecture, gguf_name: str, placed: _Placed, scale: _Placed | None
    ) -> list[tuple[str, _Source]]:
        """The Hugging Face tensors that one GGUF tensor becomes."""
        name = architecture.names.find(gguf_name)
        if name is None:
            return [(gguf_name, _Source(placed))]
        try:
            return _named_sources(architecture, name, placed, scale, self.config)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: tensor {gguf_name!r}: {error}") from error


def _named_sources(
    architecture: GGUFArchitecture,
    name: TensorName,
    placed: _Placed,
    scale: _Placed | None,
    config: Mapping[str, Any],
) -> list[tuple[str, _Source]]:
    shape = placed.entry.shape
    split = architecture.splits.get(name.base)
    if split is not None:
        parts = split(name.hf_base, shape, config)
        return [(f"{part.hf_base}.{name.suffix}", _Source(placed, part=part, scale=scale)) for part in parts]
    transform = architecture.transforms.get(name.base)
    if transform is not None:
        transform.shape(shape, config)
    return [(name.hf_name, _Source(placed, transform=transform, scale=scale))]


def _architecture(path: Path, header: GGUFHeader) -> tuple[str, GGUFArchitecture]:
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{path}: metadata key 'general.architecture' is missing or no string")
    if name == "clip":
        raise ModelLoadError(
            f"{path}: this is a vision projector (GGUF architecture 'clip'), not a language model",
            remedy="pass the language model's file, and this one with --mmproj",
        )
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise ModelLoadError(f"{path}: this GGUF file holds {kind!r:.80}, expected 'model'")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelLoadError(f"{path}: GGUF architecture {name[:80]!r} is not supported", remedy=f"supported: {known}")
    return name, architecture


def _stays_packed(entry: TensorEntry) -> bool:
    """Whether a tensor loads as QuantizedTensor: block types of two or three dimensions."""
    return entry.block.num_elements > 1 and len(entry.shape) in (2, 3)


def _matrix_dtype(entries: Mapping[str, TensorEntry]) -> str | None:
    """Name of the type that most matrix bytes have, or None when it is a packed one."""
    sizes: dict[str, int] = {}
    for entry in entries.values():
        if len(entry.shape) >= 2:
            sizes[entry.block.name] = sizes.get(entry.block.name, 0) + entry.num_bytes
    largest = max(sizes, key=lambda kind: sizes[kind], default="F32")
    dtype = PLAIN_DTYPES.get(largest)
    return str(dtype).removeprefix("torch.") if dtype is not None and dtype.is_floating_point else None


def _read(placed: _Placed) -> BlockWeight:
    """The tensor as the file has it."""
    entry = placed.entry
    data = placed.storage.tensor(entry.offset, entry.num_bytes)
    dtype = PLAIN_DTYPES.get(entry.block.name)
    if dtype is not None:
        # An alignment below the element size is legal; torch wants numbers at multiples of their size.
        aligned = data if data.data_ptr() % dtype.itemsize == 0 else data.clone()
        return aligned.view(dtype).reshape(entry.shape)
    if len(entry.shape) in (2, 3):
        return QuantizedTensor(data.reshape(*entry.shape[:-1], -1), entry.block.name, entry.shape)
    num_elements = entry.num_bytes // entry.block.num_bytes * entry.block.num_elements
    row = QuantizedTensor(data.reshape(1, -1), entry.block.name, (1, num_elements))
    return row.dequantize().reshape(entry.shape)


def _scale(placed: _Placed, weight: QuantizedTensor) -> torch.Tensor:
    """The float32 scales of a packed weight: () or (experts,)."""
    scale = _read(placed)
    num_experts = weight.shape[0] if weight.ndim == 3 else 1
    if not isinstance(scale, torch.Tensor) or scale.numel() not in (1, num_experts):
        raise CheckpointError(
            f"{placed.storage.path}: tensor {placed.entry.name!r} of shape {list(placed.entry.shape)}, "
            f"expected one scale or one for each of {num_experts} experts"
        )
    scale = scale.to(torch.float32).reshape(-1)
    return scale if weight.ndim == 3 and scale.numel() == num_experts else scale[0]


def _rows_of(weight: BlockWeight, part: Part) -> BlockWeight:
    if isinstance(weight, QuantizedTensor):
        rows: BlockWeight = weight.narrow(part.start, part.length)
    else:
        rows = weight.narrow(0, part.start, part.length)
    if not part.is_row:
        return rows
    return (rows.dequantize() if isinstance(rows, QuantizedTensor) else rows).squeeze(0)


def _open_parts(path: Path, *, use_mmap: bool) -> tuple[list[Storage], GGUFHeader, dict[str, _Placed]]:
    """All files of a checkpoint, the header of the first (it alone holds the metadata), and every tensor."""
    paths = _part_paths(path)
    missing = {part.name for part in paths if not part.is_file()}
    if missing:
        raise CheckpointError(f"{path}: other parts of the split file are missing: {some_names(missing)}")
    storages = [open_storage(part, use_mmap=use_mmap) for part in paths]
    headers = [read_header(storage) for storage in storages]
    _check_split(paths, headers)
    placed: dict[str, _Placed] = {}
    for storage, header in zip(storages, headers, strict=True):
        for name, entry in header.tensors.items():
            if name in placed:
                raise CheckpointError(f"{storage.path}: tensor {name!r} is also in {placed[name].storage.path.name}")
            placed[name] = _Placed(entry, storage)
    return storages, headers[0], placed


def _part_paths(path: Path) -> list[Path]:
    name = _PART_NAME.fullmatch(path.name)
    if name is None:
        return [path]
    number, count = int(name[2]), int(name[3])
    if not 1 <= number <= count:
        raise CheckpointError(f"{path}: part {number} of {count} by its name, expected 1 to {count}")
    return [path.with_name(f"{name[1]}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]


def _check_split(paths: list[Path], headers: list[GGUFHeader]) -> None:
    """Refuse parts that disagree with their names or with each other."""
    is_split_by_name = _PART_NAME.fullmatch(paths[0].name) is not None
    for index, (path, header) in enumerate(zip(paths, headers, strict=True)):
        count, number = header.metadata.get("split.count"), header.metadata.get("split.no")
        if not is_split_by_name:
            if count not in (None, 0, 1):
                raise CheckpointError(
                    f"{path}: holds part {number!r:.80} of {count!r:.80}, but is not named NAME-00001-of-0000N.gguf",
                    remedy="give all parts back their names",
                )
            return
        if (count, number) != (len(paths), index):
            raise CheckpointError(
                f"{path}: split.no {number!r:.80} and split.count {count!r:.80}, "
                f"expected {index} and {len(paths)} by the file's name"
            )
    total, found = headers[0].metadata.get("split.tensors.count"), sum(len(header.tensors) for header in headers)
    if is_split_by_name and total != found:
        raise CheckpointError(f"{paths[0]}: split.tensors.count is {total!r:.80}, but the parts hold {found} tensors")


ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
"""Prefix of metadata keys with the true row-major shape of a tensor that was only re-blocked to whole blocks."""


class GGUFTensors(TensorFiles):
    """Tensors of a GGUF file under the names it has, whatever architecture it claims."""

    format: Literal["safetensors", "gguf"] = "gguf"

    def __init__(self, path: Path, *, use_mmap: bool = True) -> None:
        self.path = path
        self.is_sharded = False
        self._storages, header, self._placed = _open_parts(path, use_mmap=use_mmap)
        self.weight_files = tuple(storage.path for storage in self._storages)
        self.metadata: Mapping[str, Any] = header.metadata
        self._shapes = {name: self._true_shape(name) for name in self._placed}

    def names(self) -> set[str]:
        """All tensors."""
        return set(self._placed)

    def info(self, name: str) -> TensorInfo:
        """True shape, type and size; a tensor that had to be re-blocked counts as float32."""
        entry = self._entry(name).entry
        is_packed = _stays_packed(entry) and self._shapes[name] == entry.shape
        dtype = None if is_packed else PLAIN_DTYPES.get(entry.block.name, torch.float32)
        return TensorInfo(name, self._shapes[name], dtype, entry.block.name if is_packed else None, entry.num_bytes)

    def load(self, name: str, shape: Sequence[int] | None = None) -> BlockWeight:
        """The tensor in its true shape, or in `shape`."""
        placed = self._entry(name)
        wanted = self._shapes[name] if shape is None else tuple(shape)
        if math.prod(wanted) != math.prod(placed.entry.shape):
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is {list(placed.entry.shape)}, expected {list(wanted)}"
            )
        weight = _read(placed)
        if tuple(weight.shape) == wanted:
            return weight
        return (weight.dequantize() if isinstance(weight, QuantizedTensor) else weight).reshape(wanted)

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """What the header says about each tensor."""
        return {name: placed.entry for name, placed in self._placed.items()}

    def release_pages(self) -> None:
        """Drop all tensors' pages."""
        for storage in self._storages:
            storage.release_pages()

    def release(self, name: str) -> None:
        """Drop the tensor's pages."""
        placed = self._entry(name)
        placed.storage.release_pages(placed.entry.offset, placed.entry.num_bytes)

    def close(self) -> None:
        """End loading."""
        for storage in self._storages:
            storage.close()

    def _entry(self, name: str) -> _Placed:
        placed = self._placed.get(name)
        if placed is None:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        return placed

    def _true_shape(self, name: str) -> tuple[int, ...]:
        stored = self._placed[name].entry.shape
        key = ORIGINAL_SHAPE + name
        if key not in self.metadata:
            return stored
        try:
            shape = tuple(int(side) for side in self.metadata[key])
        except (TypeError, ValueError):
            shape = ()
        if math.prod(shape) != math.prod(stored) or not shape or min(shape) < 1:
            raise CheckpointError(f"{self.path}: {key} is {list(shape)}, but the tensor holds {list(stored)}")
        return shape
