"""Every Triton kernel, interpreted, against the reference of its op."""

from __future__ import annotations

import pytest
import torch

from vkit.kernels.cases import CASES, Case, judge
from vkit.kernels.reference import OPS as REFERENCE

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
_PAIRS = [(case, dtype) for case in CASES for dtype in case.dtypes]


def _named(value: Case | torch.dtype) -> str:
    return f"{value.op}: {value.label}" if isinstance(value, Case) else str(value).removeprefix("torch.")


@pytest.mark.parametrize(("case", "dtype"), _PAIRS, ids=_named)
def test_parity(case: Case, dtype: torch.dtype) -> None:
    from vkit.kernels.triton.ops import OPS

    verdict = judge(case, dtype, OPS[case.op], REFERENCE[case.op], CPU)
    assert verdict.error <= verdict.tolerance


def test_every_op_has_cases_and_a_reference() -> None:
    from vkit.kernels.triton.ops import OPS

    assert set(OPS) == {case.op for case in CASES}
    assert set(OPS) <= set(REFERENCE)


def test_the_judge_sees_what_is_wrong() -> None:
    case = next(case for case in CASES if case.op == "silu_and_mul" and case.label == "(3, 154)")
    right = REFERENCE["silu_and_mul"]
    assert judge(case, torch.float32, right, right, CPU).is_good
    assert not judge(case, torch.float32, lambda x: right(x) + 1e-3, right, CPU).is_good
    assert not judge(case, torch.float32, lambda x: right(x) * float("nan"), right, CPU).is_good
    with pytest.raises(ValueError, match=r"silu_and_mul: gave \(3, 77\) of torch.float64, expected"):
        judge(case, torch.float32, lambda x: right(x).double(), right, CPU)


def test_the_judge_sees_what_is_written_beside_the_result() -> None:
    case = next(case for case in CASES if case.op == "write_kv")
    right = REFERENCE["write_kv"]

    def careless(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, *rest: torch.Tensor) -> None:
        right(k, v, k_cache, *rest)
        k_cache.as_strided((1,), (1,), k_cache.shape[-1])[0] = 0.0  # the first entry between two rows

    assert judge(case, torch.float32, right, right, CPU).is_good
    assert not judge(case, torch.float32, careless, right, CPU).is_good
