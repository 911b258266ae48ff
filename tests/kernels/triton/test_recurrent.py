"""Layers with states on the GPU's kernels, beyond the cases of the slow sweep: cuts, repeated keys, rows that rest."""

from __future__ import annotations

import pytest
import torch

from vkit.kernels.cases import CASES, Case, judge
from vkit.kernels.recurrent import ScanConstants, StateBatch
from vkit.kernels.reference import OPS as REFERENCE

OPS = ("causal_conv1d", "log_decay", "gated_delta_net", "mamba2_scan")
QUICK = [case for case in CASES if case.op in OPS and "(1, 70, 5)" not in case.label and "(1, 21, 3)" not in case.label]


def batch_of(counts: list[int], rows: list[int], fresh: bool = False) -> StateBatch:
    cu = [sum(counts[:index]) for index in range(len(counts) + 1)]
    is_fresh = torch.tensor([fresh] * len(counts))
    return StateBatch(torch.tensor(rows), is_fresh, torch.tensor(cu, dtype=torch.int32), cu)


@pytest.mark.parametrize("case", QUICK, ids=lambda case: f"{case.op}: {case.label}")
def test_parity(case: Case) -> None:
    from vkit.kernels.triton.ops import OPS as TRITON

    assert judge(case, torch.bfloat16, TRITON[case.op], REFERENCE[case.op], torch.device("cpu")).is_good


def test_equal_keys_that_overwrite_each_other() -> None:
    """Every token writes to the same place at full strength: powers of the system would reach 10^18 and cancel."""
    from vkit.kernels.triton.states import gated_delta_net

    k = torch.ones(64, 1, 4)
    v = torch.randn(64, 1, 3)
    state = torch.zeros(1, 1, 4, 3)
    decay, write = torch.zeros(64, 1), torch.full((64, 1), 20.0)
    out = gated_delta_net(k, k, v, decay, write, state, batch_of([64], [0]))
    torch.testing.assert_close(out, v * 4**-0.5, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state[0, 0].sum(0), v[-1, 0] * 2, atol=1e-4, rtol=1e-4)


def test_a_prompt_may_be_cut_anywhere() -> None:
    from vkit.kernels.triton.states import mamba2_scan

    x, step, (b, c) = torch.randn(70, 1, 3), torch.randn(70, 1), torch.randn(2, 70, 1, 5)
    constants = ScanConstants(torch.tensor([0.3]), torch.tensor([0.5]), torch.tensor([-1.0]), 0.01)
    states = torch.zeros(2, 2, 1, 5, 3)
    whole = mamba2_scan(x, step, b, c, constants, states[0], batch_of([70], [1], fresh=True))
    parts = [
        mamba2_scan(
            x[cut], step[cut], b[cut], c[cut], constants, states[1], batch_of([count], [1], fresh=cut.start == 0)
        )
        for count, cut in ((33, slice(0, 33)), (1, slice(33, 34)), (36, slice(34, 70)))
    ]
    torch.testing.assert_close(whole, torch.cat(parts), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[0], states[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_a_row_below_zero_touches_no_state(count: int) -> None:
    """What a captured graph has in its unused rows."""
    from vkit.kernels.triton.convolution import causal_conv1d
    from vkit.kernels.triton.states import gated_delta_net

    batch = batch_of([count, count], [1, -1])
    q, k = torch.randn(2, 2 * count, 1, 4)
    v, decay, write = torch.randn(2 * count, 1, 3), -torch.rand(2 * count, 1), torch.randn(2 * count, 1)
    state, past = torch.randn(3, 1, 4, 3), torch.randn(3, 5, 3)
    before, past_before = state.clone(), past.clone()
    gated_delta_net(q, k, v, decay, write, state, batch)
    causal_conv1d(torch.randn(2 * count, 5), torch.randn(5, 4), None, past, batch)
    assert torch.equal(state[[0, 2]], before[[0, 2]])
    assert torch.equal(past[[0, 2]], past_before[[0, 2]])
    assert not torch.equal(state[1], before[1])
    assert not torch.equal(past[1], past_before[1])
