"""Native products and look-ups against float64 products of the golden values of every block format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vkit.kernels.cpu.library import Library
from vkit.kernels.cpu.ops import Operations
from vkit.kernels.cpu.weights import PACKED_FORMATS

FORMATS = sorted(PACKED_FORMATS)
SHAPES = [(37, 3, 1), (16, 2, 2), (50, 1, 7), (1, 1, 16), (33, 2, 83)]
"""(rows, blocks of at least 32 inputs, tokens): part of a group of rows, every height of tile, two chunks of tokens."""


def random_weight(golden: dict[str, Tensor], qtype: str, rows: int, num_units: int) -> tuple[Tensor, Tensor]:
    """A packed weight of golden blocks and its values in float64."""
    raw, values = golden[f"{qtype}.raw"], golden[f"{qtype}.values"].double()
    finite = values.isfinite().all(1) & (values.abs().amax(1) < 1e6)
    raw, values = raw[finite], values[finite]
    index = torch.randint(0, len(raw), (rows, num_units * max(1, 32 // values.shape[1])))
    return raw[index].flatten(1), values[index].flatten(1)


def spread(x: Tensor, weight: Tensor) -> Tensor:
    """Standard deviation of each output if inputs were random: what errors are measured in."""
    return (x.double().square() @ weight.square().T).sqrt().clamp_min(1e-30)


@pytest.mark.parametrize("qtype", FORMATS)
def test_fast_product(
    qtype: str, level: str, num_threads: int, operations: Operations, golden_blocks: dict[str, Tensor]
) -> None:
    torch.manual_seed(0)
    for rows, units, tokens in SHAPES:
        data, weight = random_weight(golden_blocks, qtype, rows, units)
        x, bias = torch.randn(tokens, weight.shape[1]), torch.randn(rows)
        y = operations.quantized_linear(x, data, qtype, bias)
        error = (y - bias - x.double() @ weight.T) / spread(x, weight)
        # Rounding to 8 bits: a step is max/127, about 1/45 of the deviation, and an error is uniform within it.
        assert error.square().mean().sqrt() < 0.012
        assert error.abs().max() < 0.08


@pytest.mark.parametrize("qtype", FORMATS)
def test_exact_product(
    qtype: str, level: str, num_threads: int, library: Library, golden_blocks: dict[str, Tensor]
) -> None:
    operations = Operations(library, {})
    operations.is_exact = True
    torch.manual_seed(0)
    for rows, units, tokens in SHAPES:
        data, weight = random_weight(golden_blocks, qtype, rows, units)
        x, bias = torch.randn(tokens, weight.shape[1]), torch.randn(rows)
        y = operations.quantized_linear(x, data, qtype, bias)
        error = (y - bias - x.double() @ weight.T) / spread(x, weight)
        assert error.abs().max() < 3e-5


@pytest.mark.parametrize("qtype", FORMATS)
def test_look_up_is_bit_equal(qtype: str, level: str, operations: Operations, golden_blocks: dict[str, Tensor]) -> None:
    data, values = golden_blocks[f"{qtype}.raw"], golden_blocks[f"{qtype}.values"]
    if values.shape[1] < 32:
        data, values = data.view(len(data) // 2, -1), values.view(len(values) // 2, -1)
    ids = torch.tensor([0, len(data) - 1, 3 % len(data), 3 % len(data)])
    got = operations.quantized_embedding(ids, data, qtype)
    assert torch.equal(got.view(torch.int32), values[ids].contiguous().view(torch.int32))


def test_tokens_do_not_see_each_other(level: str, operations: Operations, golden_blocks: dict[str, Tensor]) -> None:
    """A row's result is the same bits whatever the height of the tile it falls into."""
    torch.manual_seed(0)
    for qtype in ("Q4_0", "Q4_K", "Q6_K", "Q2_K"):
        data, weight = random_weight(golden_blocks, qtype, 40, 2)
        x = torch.randn(90, weight.shape[1])
        together = operations.quantized_linear(x, data, qtype)
        for first, count in ((0, 1), (5, 2), (17, 7), (3, 31)):
            assert torch.equal(
                operations.quantized_linear(x[first : first + count], data, qtype), together[first : first + count]
            )


def test_tokens_do_not_see_each_other_in_bfloat16(level: str, operations: Operations) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(50, 66).bfloat16(), torch.randn(90, 66)
    together = operations.linear(x, weight)
    for first, count in ((0, 1), (5, 2), (17, 7), (3, 31)):
        rows = slice(first, first + count)
        assert torch.equal(operations.linear(x[rows], weight), together[rows])


def test_threads_do_not_change_results(
    level: str, library: Library, operations: Operations, golden_blocks: dict[str, Tensor]
) -> None:
    torch.manual_seed(0)
    data, weight = random_weight(golden_blocks, "Q5_K", 200, 3)
    x, dense = torch.randn(70, weight.shape[1]), torch.randn(90, weight.shape[1]).half()
    before = library.num_threads
    results = []
    for count in (1, 2, 5):
        library.set_num_threads(count)
        results.append((operations.quantized_linear(x, data, "Q5_K"), operations.linear(x, dense)))
    library.set_num_threads(before)
    for packed, plain in results[1:]:
        assert torch.equal(packed, results[0][0])
        assert torch.equal(plain, results[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_activation_types_and_strides(
    dtype: torch.dtype, operations: Operations, golden_blocks: dict[str, Tensor]
) -> None:
    data, weight = random_weight(golden_blocks, "Q8_0", 20, 4)
    wide = torch.randn(2, 3, weight.shape[1] + 8).to(dtype)
    x = wide[..., :-8]
    y = operations.quantized_linear(x, data, "Q8_0")
    assert y.dtype is dtype
    assert y.shape == (2, 3, 20)
    error = (y.double() - x.double() @ weight.T).flatten(0, 1) / spread(x.flatten(0, 1), weight)
    assert error.abs().max() < 0.08
    assert operations.quantized_linear(x[:0], data, "Q8_0").shape == (0, 3, 20)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(1, 1, 1), (5, 7, 3), (17, 100, 4), (64, 96, 70)])
@pytest.mark.parametrize("is_exact", [False, True])
def test_plain_product(
    weight_dtype: torch.dtype, rows: int, columns: int, tokens: int, is_exact: bool, level: str, library: Library
) -> None:
    operations = Operations(library, {})
    operations.is_exact = is_exact
    torch.manual_seed(0)
    x, weight, bias = torch.randn(tokens, columns), torch.randn(rows, columns).to(weight_dtype), torch.randn(rows)
    y = operations.linear(x, weight, bias)
    error = (y - bias - x.double() @ weight.double().T) / spread(x, weight.double())
    # The fast product with bfloat16 weights may round activations to the weight's type, by half of 2^-8.
    is_rounding = weight_dtype is torch.bfloat16 and not is_exact
    assert error.abs().max() < (2**-9 * 6 if is_rounding else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_look_up(dtype: torch.dtype, level: str, operations: Operations) -> None:
    table = torch.randn(9, 37)[:, :33].to(dtype)
    ids = torch.tensor([8, 0, 0, 5], dtype=torch.int32)
    assert torch.equal(operations.embedding(ids, table, torch.float32), table[ids.long()].float())
    with pytest.raises(IndexError, match=r"expected 0\.\.8"):
        operations.embedding(torch.tensor([9]), table, torch.float32)


def test_packing_follows_the_life_of_the_original(library: Library, golden_blocks: dict[str, Tensor]) -> None:
    operations = Operations(library, {})
    data, weight = random_weight(golden_blocks, "Q4_0", 32, 4)
    x = torch.randn(1, weight.shape[1])
    first = operations.quantized_linear(x, data, "Q4_0")
    assert len(operations.weights._packed) == 1
    assert torch.equal(first, operations.quantized_linear(x, data, "Q4_0"))
    assert len(operations.weights._packed) == 1
    del data
    assert not operations.weights._packed
