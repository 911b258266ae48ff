"""Products with codes and scales, interpreted: layouts as checkpoints have them, and what is left to plain torch."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from vkit.kernels.cases_scaled import FORMS
from vkit.kernels.planes import as_rows
from vkit.kernels.reference import OPS as REFERENCE
from vkit.kernels.scaled import InputRounding, ScaledMatrix

FEW = ("GPTQ 4, activation order", "AWQ", "FP8 blocks", "MXFP4", "NVFP4")


def matrix_of(name: str, rows: int, columns: int) -> ScaledMatrix:
    return FORMS[name](rows, columns, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", FORMS)
def test_bringing_into_rows_changes_no_value(name: str) -> None:
    matrix = matrix_of(name, 1032 if name == "AWQ" else 24, 160)
    rows = as_rows(matrix)
    assert rows.codes.is_contiguous()
    assert rows.scales.is_contiguous()
    assert rows.layout == ("words" if name == "AWQ" else matrix.layout)
    assert rows.nbytes == matrix.nbytes
    assert torch.equal(rows.dequantize(), matrix.dequantize())


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in FORMS if name not in FEW)]
)
def test_a_unit_vector_gives_a_column(name: str) -> None:
    from vkit.kernels.triton import scaled

    matrix = replace(as_rows(matrix_of(name, 16, 192)), input_scale=None, factor=None)
    values = matrix.dequantize()
    one = torch.zeros(1, 192)
    one[0, 37] = 1.0
    assert torch.equal(scaled.scaled_linear(one, matrix, None)[0], values[:, 37])
    assert torch.equal(scaled.scaled_linear(torch.eye(192)[[5, 100, 191]], matrix, None), values[:, [5, 100, 191]].T)


def test_every_e4m3_code_and_what_is_not_a_number() -> None:
    from vkit.kernels.triton import scaled

    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).view(torch.float8_e4m3fn)
    matrix = ScaledMatrix("bytes", codes, torch.ones(1, 1), (1, 256), (1, 256))
    found = torch.cat([scaled.scaled_linear(torch.eye(256)[i : i + 1], matrix, None)[0] for i in (0, 1, 9, 126, 255)])
    assert found.isnan().all(), "a NaN in the row is in every sum"
    numbers = codes.view(torch.uint8)[:, torch.arange(256) % 128 != 127]
    matrix = ScaledMatrix("bytes", numbers.view(torch.float8_e4m3fn), torch.ones(1, 1), (1, 254), (1, 254))
    assert torch.equal(scaled.scaled_linear(torch.eye(254), matrix, None)[:, 0], matrix.dequantize()[0])


def test_scales_that_are_powers_of_two() -> None:
    from vkit.kernels.triton import scaled

    codes = torch.full((1, 64), 0x22, dtype=torch.uint8)
    scales = torch.tensor([[0, 1, 254, 255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    matrix = ScaledMatrix("e2m1", codes, scales, (1, 128), (1, 32))
    for group, expected in enumerate((2.0**-127, 2.0**-126, 2.0**127)):
        one = torch.zeros(1, 128)
        one[0, 32 * group] = 1.0
        part = replace(matrix, codes=codes[:, :48], scales=scales[:, :3], shape=(1, 96))
        assert scaled.scaled_linear(one[:, :96], part, None).item() == expected
    assert scaled.scaled_linear(torch.ones(1, 128), matrix, None).isnan().all()


def test_activations_stay_as_they_are_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    from vkit.kernels.triton import fallback, scaled

    fallback.forget()
    plain = as_rows(matrix_of("FP8 per channel", 16, 64))
    rounded = replace(plain, inputs=InputRounding("e4m3", "token"))
    x = torch.randn(2, 64)
    with caplog.at_level(logging.WARNING, logger="vkit.kernels"):
        for _ in range(2):
            out = scaled.scaled_linear(x, rounded, None)
    torch.testing.assert_close(out, REFERENCE["scaled_linear"](x, plain, None))
    assert caplog.messages == ["scaled_linear: activations are not rounded to e4m3; only the weights are packed"]


@pytest.mark.parametrize("case", ["three bits", "not in rows", "awq"])
def test_what_it_does_not_read_is_left_to_the_reference_and_said_once(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    from vkit.kernels.triton import fallback, scaled

    fallback.forget()
    if case == "three bits":
        codes = torch.randint(-(1 << 31), 1 << 31, (4, 6)).int()
        matrix = ScaledMatrix("words", codes, torch.rand(4, 1), (4, 64), (1, 64), bits=3)
        reason = "codes of 3 bits as words of int32, scales of torch.float32"
    elif case == "awq":
        matrix = matrix_of("AWQ", 8, 64)
        reason = "codes of 4 bits as awq of int32, scales of torch.float16"
    else:
        matrix, reason = matrix_of("GPTQ 4", 4, 64), "codes that do not lie row by row"
    x = torch.randn(2, 64)
    with caplog.at_level(logging.WARNING, logger="vkit.kernels"):
        for _ in range(2):
            out = scaled.scaled_linear(x, matrix, None)
    assert torch.equal(out, REFERENCE["scaled_linear"](x, matrix, None))
    assert caplog.messages == [f"scaled_linear: no triton kernel for {reason}; plain torch runs it"]
