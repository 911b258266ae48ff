"""Native products of codes with scales, as checkpoints of every scheme hold them, at every level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from vkit.kernels.cpu.library import Library
from vkit.kernels.cpu.ops import Operations
from vkit.kernels.reference import OPS
from vkit.kernels.scaled import InputRounding, ScaledMatrix

ROWS, COLUMNS = 40, 256


def words(bits: int, group: int, *, zeros: bool) -> ScaledMatrix:
    codes = torch.randint(-(1 << 31), 1 << 31, (ROWS, COLUMNS * bits // 32)).int()
    scales = (torch.rand(ROWS, COLUMNS // group) / 8).half()
    stored = torch.randint(0, 1 << bits, scales.shape, dtype=torch.uint8) if zeros else None
    return ScaledMatrix(
        "words", codes, scales, (ROWS, COLUMNS), (1, group), bits=bits, zero=1 << (bits - 1), zeros=stored
    )


def awq() -> ScaledMatrix:
    codes = torch.randint(-(1 << 31), 1 << 31, (COLUMNS, ROWS // 8)).int()
    scales = torch.rand(COLUMNS // 128, ROWS).half().T
    zeros = torch.randint(0, 16, (ROWS, COLUMNS // 128), dtype=torch.uint8)
    return ScaledMatrix("awq", codes, scales, (ROWS, COLUMNS), (1, 128), bits=4, zeros=zeros)


def fp8(block: tuple[int, int]) -> ScaledMatrix:
    codes = torch.arange(ROWS * COLUMNS).remainder(254).add(1).to(torch.uint8)  # every value, subnormals included
    codes = torch.where((codes & 127) == 127, 0, codes)[torch.randperm(ROWS * COLUMNS)].view(ROWS, COLUMNS)
    scales = torch.rand(-(-ROWS // block[0]), -(-COLUMNS // block[1])) / 100
    return ScaledMatrix("bytes", codes.view(torch.float8_e4m3fn), scales, (ROWS, COLUMNS), block)


def int8(group: int) -> ScaledMatrix:
    codes = torch.randint(-128, 128, (ROWS, COLUMNS), dtype=torch.int8)
    return ScaledMatrix("bytes", codes, torch.rand(ROWS, COLUMNS // group), (ROWS, COLUMNS), (1, group))


def float4(group: int) -> ScaledMatrix:
    codes = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    scales = torch.rand(ROWS, COLUMNS // group) * 3 + 0.1
    dtype, factor = (torch.float8_e8m0fnu, None) if group == 32 else (torch.float8_e4m3fn, torch.tensor(0.013))
    return ScaledMatrix("e2m1", codes, scales.to(dtype), (ROWS, COLUMNS), (1, group), factor=factor)


def table(layout: Literal["nf4", "fp4"], group: int) -> ScaledMatrix:
    codes = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    return ScaledMatrix(layout, codes, torch.rand(ROWS, COLUMNS // group), (ROWS, COLUMNS), (1, group))


MATRICES = {
    "gptq 4": lambda: words(4, 128, zeros=True),
    "gptq 4, groups of 32": lambda: words(4, 32, zeros=True),
    "gptq 4, groups of 64": lambda: words(4, 64, zeros=False),
    "gptq 3": lambda: words(3, 128, zeros=True),
    "gptq 2": lambda: words(2, 64, zeros=False),
    "gptq 8": lambda: words(8, 128, zeros=False),
    "awq": awq,
    "fp8 per channel": lambda: fp8((1, COLUMNS)),
    "fp8 per tensor": lambda: fp8((ROWS, COLUMNS)),
    "fp8 blocks": lambda: fp8((32, 128)),
    "mxfp8": lambda: fp8((1, 32)),
    "int8 per channel": lambda: int8(COLUMNS),
    "int8 groups": lambda: int8(32),
    "mxfp4": lambda: float4(32),
    "nvfp4": lambda: float4(16),
    "nf4": lambda: table("nf4", 64),
    "fp4, groups of 128": lambda: table("fp4", 128),
}


@pytest.fixture
def native(library: Library) -> Operations:
    """Without a reference to fall back on."""
    return Operations(library, {})


@pytest.mark.parametrize("name", MATRICES)
def test_products(name: str, level: str, num_threads: int, native: Operations) -> None:
    matrix = MATRICES[name]()
    values = matrix.dequantize().double()
    for tokens in (1, 2, 21):
        x, bias = torch.randn(tokens, COLUMNS), torch.randn(ROWS)
        spread = (x.double().square() @ values.square().T).sqrt().clamp_min(1e-30)
        for is_exact, worst in ((False, 0.08), (True, 3e-5)):
            native.is_exact = is_exact
            error = (native.scaled_linear(x, matrix, bias) - bias - x.double() @ values.T) / spread
            assert error.abs().max() < worst


@pytest.mark.parametrize(
    "make", [lambda: fp8((1, COLUMNS)), lambda: table("nf4", 64), lambda: table("fp4", 64)], ids=["e4m3", "nf4", "fp4"]
)
def test_every_code_of_floats(make: Callable[[], ScaledMatrix], level: str, native: Operations) -> None:
    """A product with a unit vector is a column of the weight, bit by bit."""
    matrix = make()
    got = native.scaled_linear(torch.eye(COLUMNS), matrix, None)
    assert torch.equal(got.T, matrix.dequantize())


def test_factors_of_the_inputs(level: str, native: Operations) -> None:
    matrix = replace(words(4, 128, zeros=True), input_scale=torch.rand(COLUMNS))
    native.is_exact = True
    x = torch.randn(5, COLUMNS)
    torch.testing.assert_close(
        native.scaled_linear(x, matrix, None), OPS["scaled_linear"](x, matrix, None), atol=2e-4, rtol=1e-4
    )


def without(matrix: ScaledMatrix, name: str) -> ScaledMatrix:
    changes: dict[str, dict[str, object]] = {
        "an order of its own": {"group_index": torch.arange(COLUMNS).flip(0).int() // 128},
        "groups of 32 of a table": {"layout": "nf4", "block": (1, 32), "scales": torch.rand(ROWS, COLUMNS // 32)},
        "zeros of bytes": {"zeros": torch.zeros(ROWS, 2, dtype=torch.uint8)},
    }
    return replace(matrix, **changes[name])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["an order of its own", "zeros of bytes", "groups of 32 of a table"])
def test_what_has_no_packed_form(name: str, library: Library) -> None:
    """The reference takes it: the same as without native kernels."""
    plain = table("nf4", 64) if "table" in name else words(4 if "order" in name else 8, 128, zeros=False)
    matrix = without(plain, name)
    operations = Operations(library, dict(OPS))
    assert operations.scaled_weights.get(matrix) is None
    x = torch.randn(3, COLUMNS)
    assert torch.equal(operations.scaled_linear(x, matrix, None), OPS["scaled_linear"](x, matrix, None))


def test_exact_products_round_inputs_as_the_checkpoint_says(library: Library) -> None:
    matrix = replace(fp8((1, COLUMNS)), inputs=InputRounding("e4m3", "token"))
    operations = Operations(library, dict(OPS))
    x = torch.randn(3, COLUMNS)
    expected = OPS["scaled_linear"](x, matrix, None)
    operations.is_exact = True
    assert torch.equal(operations.scaled_linear(x, matrix, None), expected)
    operations.is_exact = False
    fast: Tensor = operations.scaled_linear(x, matrix, None)
    exact = x.double() @ matrix.dequantize().double().T
    assert (fast - exact).abs().max() < (expected - exact).abs().max()


def test_packed_memory_goes_with_the_weight(native: Operations) -> None:
    matrix = words(4, 128, zeros=True)
    native.scaled_linear(torch.randn(1, COLUMNS), matrix, None)
    assert len(native.scaled_weights._packed) == 1
    del matrix
    assert not native.scaled_weights._packed
