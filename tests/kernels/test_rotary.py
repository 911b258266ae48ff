"""Rope against complex multiplication."""

from __future__ import annotations

import pytest
import torch

from vkit import kernels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def table(width: int, positions: int = 64) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions).float(), 10000 ** -(torch.arange(0, width, 2).float() / width))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def expected(x: torch.Tensor, positions: torch.Tensor, width: int, interleaved: bool) -> torch.Tensor:
    """Each pair as a complex number, turned by its angle."""
    out = x.double().clone()
    half = width // 2
    first, second = (slice(0, width, 2), slice(1, width, 2)) if interleaved else (slice(0, half), slice(half, width))
    angles = torch.outer(positions.double(), 10000 ** -(torch.arange(0, width, 2).double() / width)).unsqueeze(1)
    turned = torch.complex(out[..., first], out[..., second]) * torch.polar(torch.ones_like(angles), angles)
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "width"), [(16, 16), (20, 12), (2, 2)])
@pytest.mark.usefixtures("backend")
def test_rope_in_views(head_dim: int, width: int, interleaved: bool, dtype: torch.dtype) -> None:
    fused = torch.randn(7, 6 * head_dim).to(dtype)
    before = fused.clone()
    q, k = fused[:, : 4 * head_dim].view(7, 4, head_dim), fused[:, 4 * head_dim : 5 * head_dim].view(7, 1, head_dim)
    positions = torch.tensor([0, 1, 2, 63, 5, 5, 9])
    wanted_q, wanted_k = (expected(x, positions, width, interleaved) for x in (q, k))
    kernels.rope(q, k, positions, table(width), interleaved)
    torch.testing.assert_close(q.double(), wanted_q, atol=TOLERANCE[dtype], rtol=1e-2)
    torch.testing.assert_close(k.double(), wanted_k, atol=TOLERANCE[dtype], rtol=1e-2)
    assert torch.equal(fused[:, 5 * head_dim :], before[:, 5 * head_dim :])
    assert torch.equal(q[..., width:], before[:, : 4 * head_dim].view(7, 4, head_dim)[..., width:])


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.usefixtures("backend")
def test_qk_norm_rope_equals_its_parts(offset: float) -> None:
    fused = torch.randn(3, 5 * 8)
    q, k = fused[:, :24].view(3, 3, 8), fused[:, 24:32].view(3, 1, 8)
    q_weight, k_weight, positions = torch.randn(8), torch.randn(8), torch.tensor([4, 0, 7], dtype=torch.int32)
    wanted_q, wanted_k = kernels.rms_norm(q, q_weight, 1e-6, offset), kernels.rms_norm(k, k_weight, 1e-6, offset)
    kernels.rope(wanted_q, wanted_k, positions, table(8))
    kernels.qk_norm_rope(q, k, q_weight, k_weight, 1e-6, offset, positions, table(8))
    torch.testing.assert_close(q, wanted_q)
    torch.testing.assert_close(k, wanted_k)


@pytest.mark.usefixtures("backend")
def test_no_tokens_and_no_keys() -> None:
    kernels.rope(torch.empty(0, 2, 8), torch.empty(0, 1, 8), torch.empty(0, dtype=torch.int64), table(8))
    q = torch.randn(1, 2, 8)
    wanted = expected(q, torch.tensor([3]), 8, False)
    kernels.rope(q, None, torch.tensor([3]), table(8))
    torch.testing.assert_close(q.double(), wanted, atol=1e-5, rtol=1e-5)


def test_errors_name_op_argument_got_and_wanted() -> None:
    q, k, positions = torch.randn(2, 2, 8), torch.randn(2, 1, 8), torch.tensor([0, 1])
    with pytest.raises(TypeError, match=r"rope: cos_sin of torch.float64, expected torch.float32"):
        kernels.rope(q, k, positions, table(8).double())
    with pytest.raises(TypeError, match=r"rope: positions of torch.float32"):
        kernels.rope(q, k, positions.float(), table(8))
    with pytest.raises(ValueError, match=r"rope: positions \(1,\), expected \(2,\)"):
        kernels.rope(q, k, positions[:1], table(8))
    with pytest.raises(ValueError, match=r"rope: cos_sin \(64, 16\), expected \(positions, even width <= 8\)"):
        kernels.rope(q, k, positions, table(16))
    with pytest.raises(ValueError, match=r"rope: k \(2, 1, 4\), expected \(2, kv heads, 8\)"):
        kernels.rope(q, k[..., :4], positions, table(4))
    with pytest.raises(ValueError, match=r"qk_norm_rope: k_weight \(4,\), expected \(8,\)"):
        kernels.qk_norm_rope(q, k, torch.ones(8), torch.ones(4), 1e-6, 0.0, positions, table(8))
