"""Which experts the grouped kernel takes, and that what it remembers of them goes with them."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from vkit.kernels.cases_packed import expert_matrix, packed_rows
from vkit.kernels.experts import ExpertMatrix
from vkit.kernels.reference import OPS as REFERENCE

CPU = torch.device("cpu")
WEIGHTS, IDS = torch.tensor([[0.25, 0.75], [0.5, 0.5]]), torch.tensor([[0, 2], [1, 0]])


def matrices(offset: int = 0) -> tuple[ExpertMatrix, ExpertMatrix]:
    """Three experts of 8 x 4, whose weights begin `offset` entries into their memory."""
    gate_up, down = torch.randn(3, 9, 8), torch.randn(3, 9, 4)
    return (
        ExpertMatrix(tuple(x.view(-1)[offset : offset + 64].view(8, 8) for x in gate_up)),
        ExpertMatrix(tuple(x.view(-1)[offset : offset + 32].view(8, 4) for x in down)),
    )


@pytest.mark.parametrize(
    ("activation", "offset", "reason"),
    [
        ("relu2", 0, "the activation relu2"),
        ("silu", 1, "experts that do not begin at a multiple of 16 bytes"),
    ],
)
def test_what_it_does_not_take_is_left_to_the_reference_and_said_once(
    activation: str, offset: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    from vkit.kernels.triton import experts, fallback

    fallback.forget()
    gate_up, down = matrices(offset)
    if activation == "relu2":
        gate_up = ExpertMatrix(tuple(weight[:4] for weight in gate_up.weights if isinstance(weight, torch.Tensor)))
    x = torch.randn(2, 8)
    with caplog.at_level(logging.WARNING, logger="vkit.kernels"):
        for _ in range(2):
            out = experts.run_experts(x, WEIGHTS, IDS, [gate_up], down, activation)
    assert torch.equal(out, REFERENCE["run_experts"](x, WEIGHTS, IDS, [gate_up], down, activation))
    assert [record.message for record in caplog.records] == [
        f"run_experts: no triton kernel for {reason}; plain torch runs it"
    ]


def test_addresses_are_kept_as_long_as_the_matrix() -> None:
    from vkit.kernels.triton import experts

    gate_up, down = matrices()
    x = torch.randn(2, 8)
    first = experts.run_experts(x, WEIGHTS, IDS, [gate_up], down, "silu")
    assert experts._table(down) is experts._table(down)
    assert torch.equal(first, experts.run_experts(x, WEIGHTS, IDS, [gate_up], down, "silu"))
    torch.testing.assert_close(first, REFERENCE["run_experts"](x, WEIGHTS, IDS, [gate_up], down, "silu"))
    before = len(experts._known)
    del gate_up, down
    gc.collect()
    assert len(experts._known) == before - 2


@pytest.mark.parametrize("name", ["Q8_0", "NVFP4", "GPTQ 4"])
def test_packed_experts_have_a_kernel(name: str, caplog: pytest.LogCaptureFixture) -> None:
    from vkit.kernels.triton import experts, fallback

    fallback.forget()
    generator = torch.Generator().manual_seed(5)
    gate_up = expert_matrix(name, 3, 64, 32, CPU, generator)
    down = expert_matrix(name, 3, 32, 32, CPU, generator)
    x = torch.randn(2, 32)
    with caplog.at_level(logging.WARNING, logger="vkit.kernels"):
        out = experts.run_experts(x, WEIGHTS, IDS, [gate_up], down, "silu")
    assert not caplog.messages
    torch.testing.assert_close(out, REFERENCE["run_experts"](x, WEIGHTS, IDS, [gate_up], down, "silu"))


def test_packed_experts_that_it_does_not_read_are_left_to_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    from vkit.kernels.triton import experts, fallback

    fallback.forget()
    square = packed_rows("Q4_0", 32, 32, torch.Generator().manual_seed(1))  # blocks, not laid out in planes
    fused = ExpertMatrix((torch.cat([square, square]),) * 3, "Q4_0")
    ordered = "GPTQ 4, activation order"
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 32)
    with caplog.at_level(logging.WARNING, logger="vkit.kernels"):
        for gate_up, down in (
            (fused, ExpertMatrix((square,) * 3, "Q4_0")),
            (expert_matrix(ordered, 3, 64, 32, CPU, generator), expert_matrix(ordered, 3, 32, 32, CPU, generator)),
        ):
            for _ in range(2):
                out = experts.run_experts(x, WEIGHTS, IDS, [gate_up], down, "silu")
            assert torch.equal(out, REFERENCE["run_experts"](x, WEIGHTS, IDS, [gate_up], down, "silu"))
    assert caplog.messages == [
        "run_experts: no triton kernel for experts of type Q4_0; plain torch runs it",
        "run_experts: no triton kernel for experts with an activation order or factors of their inputs; "
        "plain torch runs it",
    ]
