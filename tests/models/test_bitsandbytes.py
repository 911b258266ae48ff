"""bitsandbytes in four bits, judged by tables from their formulas, a writer of our own, and the library itself."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vkit.errors import ModelLoadError
from vkit.kernels import ScaledMatrix
from vkit.kernels.scaled import CODE_VALUES
from vkit.loaders import open_checkpoint
from vkit.models import build_model
from vkit.quantization.cutting import can_take_columns, take_columns

BASE = "quant/ct_int4"
"""The tiny model whose layers are written anew."""
DOWN = "model.layers.1.mlp.down_proj"
NESTED_BLOCK = 256


def spread(first: float, count: int) -> list[float]:
    """Normal quantiles from `first` to one half, the last left out."""
    quantiles = [first + (0.5 - first) * place / count for place in range(count)]
    return [NormalDist().inv_cdf(quantile) for quantile in quantiles]


def nf4() -> list[float]:
    """QLoRA, section 3: equal shares of a normal distribution on both sides, with a zero; the largest is one."""
    first = 0.9677083
    values = sorted([*spread(first, 8), 0.0, *(-value for value in spread(first, 7))])
    return [value / max(values) for value in values]


def fp4() -> list[float]:
    """Sign, two bits of exponent, one of mantissa; twelve is the largest, and the smallest is a sixteenth."""

    def value(code: int) -> float:
        exponent, half = code >> 1, 1 + (code & 1) / 2
        return (0.0, 0.0625)[code] if exponent == 0 else half * {1: 8, 2: 4, 3: 2}[exponent]

    return [sign * value(code) / 12 for sign in (1, -1) for code in range(8)]


TABLES = {"nf4": nf4(), "fp4": fp4()}


@pytest.mark.parametrize("kind", TABLES)
def test_tables(kind: str) -> None:
    assert CODE_VALUES[kind] == pytest.approx(TABLES[kind], abs=1e-6)


def quantise(
    weight: Tensor, kind: str, block: int = 64, *, nested: bool, storage: str = "uint8"
) -> tuple[dict[str, Tensor], Tensor]:
    """A layer's tensors as the library writes them, and the weight they stand for, computed apart."""
    rows, columns = weight.shape
    table = np.array(CODE_VALUES[kind], np.float32)
    blocks = weight.numpy().reshape(-1, block)
    largest = np.abs(blocks).max(1)
    scales, tensors = largest, {"absmax": torch.from_numpy(largest)}
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [rows, columns]}
    if nested:
        steps = np.linspace(-1, 1, 256, dtype=np.float32) ** 3
        offset = float(np.float32(largest.mean()))
        padded = np.pad(largest - np.float32(offset), (0, -len(largest) % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
        outer = np.abs(padded).max(1) + np.float32(1e-3)
        codes = np.abs((padded / outer[:, None])[..., None] - steps).argmin(-1).astype(np.uint8)
        scales = ((steps[codes] * outer[:, None]).reshape(-1)[: len(largest)] + np.float32(offset)).astype(np.float32)
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
        tensors["absmax"] = torch.from_numpy(codes.reshape(-1)[: len(largest)].copy())
        tensors |= {"nested_absmax": torch.from_numpy(outer), "nested_quant_map": torch.from_numpy(steps)}
    codes = np.abs((blocks / scales[:, None])[..., None] - table).argmin(-1).astype(np.uint8)
    flat = codes.reshape(-1)
    packed = torch.from_numpy(flat[::2] << 4 | flat[1::2]).view(getattr(torch, storage))
    tensors["quant_map"] = torch.from_numpy(table)
    tensors[f"quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    dense = torch.from_numpy((table[codes] * scales[:, None]).reshape(rows, columns))
    return {"": packed.unsqueeze(1), **{f".{name}": tensor for name, tensor in tensors.items()}}, dense


Written = Callable[..., tuple[Path, Path]]


@functools.cache
def layers(path: Path, kind: str, options: tuple[tuple[str, Any], ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of both checkpoints."""
    base = open_checkpoint(path)
    packed, dense = {}, {}
    for name in sorted(base.tensor_names()):
        weight: Any = base.load(name)
        if isinstance(weight, ScaledMatrix):
            layer, dense[name] = quantise(weight.dequantize(), kind, **{"nested": True, **dict(options)})
            packed |= {name + suffix: tensor for suffix, tensor in layer.items()}
        else:
            packed[name] = dense[name] = weight.clone()
    return packed, dense


@pytest.fixture
def written(tmp_path: Path, golden_path: Callable[[str], Path]) -> Written:
    """A checkpoint in four bits, and the same with the values it stands for."""

    def write(
        kind: str = "nf4",
        *,
        change: Callable[[dict[str, Tensor]], None] | None = None,
        keys: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[Path, Path]:
        packed, dense = (dict(tensors) for tensors in layers(golden_path(BASE), kind, tuple(options.items())))
        if change is not None:
            change(packed)
        config = json.loads((golden_path(BASE) / "config.json").read_text())
        declared = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
        declared |= {"bnb_4bit_quant_type": kind, "bnb_4bit_quant_storage": options.get("storage", "uint8")}
        folders = []
        for number, (tensors, scheme) in enumerate([(packed, {**declared, **(keys or {})}), (dense, None)]):
            folder = tmp_path / str(number)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
            folders.append(folder)
        return folders[0], folders[1]

    return write


OPTIONS: dict[str, dict[str, Any]] = {
    "nf4, nested": {"kind": "nf4"},
    "nf4": {"kind": "nf4", "nested": False},
    "fp4, nested": {"kind": "fp4"},
    "fp4 in blocks of 32": {"kind": "fp4", "nested": False, "block": 32},
    "nf4 as bfloat16": {"kind": "nf4", "storage": "bfloat16"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_values_are_those_written(name: str, written: Written) -> None:
    """Every value bit by bit, codes still in the file's bytes."""
    packed, dense = (open_checkpoint(folder) for folder in written(**OPTIONS[name]))
    assert packed.quantization == "bitsandbytes"
    assert packed.tensor_names() == dense.tensor_names()
    names = [name for name in packed.tensor_names() if packed.tensor_info(name).is_packed]
    assert len(names) == 14
    for tensor in names:
        weight: Any = packed.load(tensor)
        expected: Any = dense.load(tensor)
        assert packed.tensor_info(tensor).shape == tuple(expected.shape)
        assert torch.equal(weight.dequantize(), expected)
        index = torch.tensor([3, 0, 3])
        assert torch.equal(weight.rows(index).dequantize(), expected[index])
        assert can_take_columns(weight, [(64, 128)])
        assert not can_take_columns(weight, [(1, 128)])
        assert torch.equal(take_columns(weight, [(64, 128)]).dequantize(), expected[:, 64:128])  # type: ignore[union-attr]
        again: Any = packed.load(tensor)
        assert weight.codes.data_ptr() == again.codes.data_ptr()
        # Blocks of 64 in four bits and a float32; the file has a byte for that where they are nested.
        assert weight.nbytes <= (1.1 if "32" not in name else 1.0) * packed.tensor_info(tensor).nbytes


@pytest.mark.parametrize("backend", ["reference", "native"], indirect=True)
@pytest.mark.parametrize("name", ["nf4, nested", "fp4 in blocks of 32"])
@pytest.mark.usefixtures("backend")
def test_a_model_answers_as_its_values_do(
    name: str, written: Written, make_driver: Callable[..., Any], make_options: Callable[..., Any]
) -> None:
    found = []
    for folder in written(**OPTIONS[name]):
        options = make_options(block_size=4)
        driver = make_driver(build_model(open_checkpoint(folder), options), options)
        sequence = driver.start("a", list(range(5, 25)))
        share = driver.share(sequence, 64, all_logits=True)
        found.append(driver.run([share])[0])
    assert (found[0] - found[1]).abs().max() < 1e-4 * (found[1].max() - found[1].min())


def without(suffix: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{DOWN}.weight.{suffix}"]

    return change


def with_state(**keys: Any) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        name = f"{DOWN}.weight.quant_state.bitsandbytes__nf4"
        state = {**json.loads(bytes(tensors[name].tolist())), **keys}
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    ("keys", "change", "message"),
    [
        ({"load_in_8bit": True, "load_in_4bit": False}, None, "only load_in_4bit true is supported"),
        ({"load_in_4bit": False}, None, "only load_in_4bit true is supported"),
        ({"bnb_4bit_quant_type": "int4"}, None, r"bnb_4bit_quant_type 'int4' is not supported \(supported: nf4, fp4\)"),
        ({"bnb_4bit_quant_storage": "int64"}, None, "bnb_4bit_quant_storage 'int64' is not supported"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, None, r"\.weight is uint8, expected bfloat16"),
        ({"bnb_4bit_quant_type": "fp4"}, None, r"quant_state\.bitsandbytes__fp4 is missing"),
        ({"llm_int8_skip_modules": ["mlp.down_proj"]}, None, r"down_proj\.weight is uint8, and the configuration"),
        ({}, without("absmax"), rf"{DOWN}\.weight\.absmax is missing"),
        ({}, without("nested_absmax"), rf"{DOWN}\.weight\.nested_absmax is missing"),
        ({}, without("quant_state.bitsandbytes__nf4"), rf"{DOWN}\.weight\.quant_state\.bitsandbytes__nf4 is missing"),
        ({}, with_state(quant_type="fp4"), "says quant_type 'fp4', and the configuration 'nf4'"),
        ({}, with_state(shape=[128, 64]), rf"{DOWN}\.weight has shape"),
        ({}, with_state(shape=[128]), "is not what the library writes"),
        ({}, with_state(blocksize=0), "is not what the library writes"),
        ({}, with_state(blocksize=96), "group size 96 does not divide"),
        ({}, with_state(nested_offset=None), "is not what the library writes"),
    ],
)
def test_refused(keys: dict[str, Any], change: Any, message: str, written: Written) -> None:
    packed, _ = written(keys=keys, change=change)
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(packed)


def test_another_table_is_refused(written: Written, make_options: Callable[..., Any]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.weight.quant_map"] = torch.linspace(-1, 1, 16)

    packed, _ = written(change=change)
    with pytest.raises(ModelLoadError, match=rf"{DOWN}: weight\.quant_map is not the table of nf4"):
        build_model(open_checkpoint(packed), make_options())


def test_modules_left_out_are_plain(written: Written) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{DOWN}.")]:
            del tensors[name]
        tensors[f"{DOWN}.weight"] = torch.zeros(128, 320)

    packed, _ = written(change=change, keys={"llm_int8_skip_modules": ["lm_head", "layers.1.mlp"]})
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.(gate|up)_proj\.weight is uint8"):
        open_checkpoint(packed)
    packed, _ = written(change=change, keys={"llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp.down_proj"]})
    assert not open_checkpoint(packed).tensor_info(f"{DOWN}.weight").is_packed


@pytest.mark.judge
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", TABLES)
def test_the_library_agrees(kind: str, nested: bool, written: Written, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, _ = written(kind)
    weights = {}
    tensors: dict[str, Tensor] = {}
    checkpoint = open_checkpoint(packed)
    for name in checkpoint.tensor_names():
        weight: Any = checkpoint.load(name)
        if not isinstance(weight, ScaledMatrix):
            tensors[name] = weight
            continue
        dense = torch.randn(weight.shape)
        codes, state = functional.quantize_4bit(dense, blocksize=64, quant_type=kind, compress_statistics=nested)
        tensors[name] = codes
        tensors |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
        weights[name] = functional.dequantize_4bit(codes, state)
    folder = tmp_path / "library"
    folder.mkdir()
    shutil.copy(packed / "config.json", folder)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    again = open_checkpoint(folder)
    for name, expected in weights.items():
        found: Any = again.load(name)
        assert torch.equal(found.dequantize(), expected)
