"""Products on tiles (AMX): run with tiles made of loops on any processor with AVX-512, and compiled for real ones."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vkit.kernels.cpu import library as library_module
from vkit.kernels.cpu.library import Library
from vkit.kernels.cpu.ops import Operations
from vkit.kernels.cpu.sources import LEVEL_FLAGS, compiler_calls
from vkit.kernels.cpu.weights import PACKED_FORMATS

FOLDER = Path(library_module.__file__).parent
FORMATS = sorted(PACKED_FORMATS)


@pytest.fixture
def tiled(emulated: Library | None) -> Operations:
    if emulated is None:
        pytest.skip("the loops need AVX-512 with VNNI and BF16")
    return Operations(emulated, {})


@pytest.fixture
def plain(library: Library) -> Operations:
    """The level below."""
    library.use_level("avx512vnni")
    return Operations(library, {})


def random_weight(golden: dict[str, Tensor], qtype: str, rows: int, inputs: int) -> Tensor:
    raw, values = golden[f"{qtype}.raw"], golden[f"{qtype}.values"].double()
    raw = raw[values.isfinite().all(1) & (values.abs().amax(1) < 1e6)]
    return raw[torch.randint(0, len(raw), (rows, max(1, inputs // values.shape[1])))].flatten(1)


@pytest.mark.parametrize("qtype", FORMATS)
@pytest.mark.parametrize("count", [1, 3])
def test_quantised_product_has_the_bits_of_the_level_below(
    qtype: str, count: int, tiled: Operations, plain: Operations, golden_blocks: dict[str, Tensor]
) -> None:
    """Every height of piece, several that share opened weights, blocks that do not fill the last opening."""
    tiled.library.set_num_threads(count)
    for rows, inputs, tokens in ((37, 96, 1), (16, 32, 9), (50, 288, 24), (33, 512, 83), (64, 1280, 147)):
        data = random_weight(golden_blocks, qtype, rows, inputs)
        columns = data.shape[1] * golden_blocks[f"{qtype}.values"].shape[1] // golden_blocks[f"{qtype}.raw"].shape[1]
        x, bias = torch.randn(tokens, columns), torch.randn(rows)
        got = tiled.quantized_linear(x, data, qtype, bias)
        assert torch.equal(got, plain.quantized_linear(x, data, qtype, bias))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (16, 30), (37, 32), (50, 100), (80, 544)])
def test_bfloat16_product(rows: int, columns: int, count: int, tiled: Operations) -> None:
    tiled.library.set_num_threads(count)
    weight, bias = torch.randn(rows, columns).bfloat16(), torch.randn(rows)
    x = torch.randn(147, columns)
    y = tiled.linear(x, weight, bias)
    rounded = x.bfloat16().double()
    spread = (rounded.square() @ weight.double().square().T).sqrt().clamp_min(1e-30)
    error = (y - bias - rounded @ weight.double().T) / spread
    assert error.abs().max() < 2e-6
    # A row has the same bits in any company: tall pieces in pairs, single ones, each of the lower heights.
    for tokens in (1, 2, 4, 8, 16, 31, 32, 64, 100):
        assert torch.equal(tiled.linear(x[:tokens], weight, bias), y[:tokens]), tokens
    assert torch.equal(tiled.linear(x[60:61], weight, bias), y[60:61])


def test_subnormal_numbers_count_as_zero(tiled: Operations) -> None:
    """As the instruction has it: the loops must not be kinder than the processor."""
    weight = torch.full((16, 32), 2.0**-130).bfloat16()
    assert torch.equal(tiled.linear(torch.ones(4, 32), weight), torch.zeros(4, 16))


def test_real_tiles_are_built(library: Library) -> None:
    """The library that is shipped holds the instructions, whatever this processor has."""
    objdump = shutil.which("objdump")
    if objdump is None or not any("-DVK_TILES" in flags for _, flags in compiler_calls(FOLDER)):
        pytest.skip("no objdump, or not x86-64")
    text = subprocess.run([objdump, "-d", str(library.path)], check=True, capture_output=True, text=True).stdout
    for instruction in ("ldtilecfg", "tileloadd", "tilestored", "tdpbsud", "tdpbf16ps", "tilerelease"):
        assert f"\t{instruction}" in text, instruction


def test_a_machine_without_tiles_refuses_them_by_name(library: Library) -> None:
    if library.can_run("amx"):
        pytest.skip("this processor has tiles")
    assert "amx" in LEVEL_FLAGS
    with pytest.raises(ValueError, match=r"VKIT_CPU_LEVEL=amx: this processor runs scalar"):
        library.use_level("amx")
