"""Every CUDA kernel, its source run on the processor, against the reference of its op."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vkit.kernels import cases
from vkit.kernels.build import build_library
from vkit.kernels.cases import DTYPES, Case, judge
from vkit.kernels.compiler import find_compiler
from vkit.kernels.cuda import sources
from vkit.kernels.cuda.cases import OWN_CASES
from vkit.kernels.reference import OPS as REFERENCE

CPU = torch.device("cpu")
_NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


def verdict_of(case: Case, dtype: torch.dtype) -> cases.Verdict:
    from vkit.kernels.cuda import ops

    op = ops.find(case.op, dtype)
    if op is None:
        assert case.op == "paged_attention"
        assert dtype == torch.float32
        pytest.skip("tiles of attention are of 16-bit numbers; Triton's tests have this case")
    return judge(case, dtype, op, REFERENCE[case.op], CPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=_NAMES)
@pytest.mark.parametrize("case", OWN_CASES, ids=lambda case: f"{case.op}: {case.label}")
def test_parity(case: Case, dtype: torch.dtype) -> None:
    verdict = verdict_of(case, dtype)
    assert verdict.error <= verdict.tolerance


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=_NAMES)
@pytest.mark.parametrize(
    "case",
    [case for case in cases.CASES if case.op in ("add_rms_norm", "paged_attention", "quantized_linear", "rms_norm")],
    ids=lambda case: f"{case.op}: {case.label}",
)
def test_parity_of_the_common_cases(case: Case, dtype: torch.dtype) -> None:
    verdict = verdict_of(case, dtype)
    assert verdict.error <= verdict.tolerance


def test_every_op_has_cases_and_a_reference() -> None:
    from vkit.kernels.cuda.ops import OPS

    assert set(OPS) == {case.op for case in OWN_CASES}
    assert set(OPS) <= set(REFERENCE)


@pytest.mark.parametrize("order", ["1", "7"])
def test_results_do_not_depend_on_the_order_of_threads_and_blocks(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they do, a barrier is missing."""
    from vkit.kernels.cuda.ops import OPS

    for case in [case for case in OWN_CASES if case.op != "quantized_linear" or "(3, 35, 768)" in case.label]:
        given = [case.make(cases.Source(CPU, torch.bfloat16, torch.Generator().manual_seed(1))) for _ in range(2)]
        as_numbered = cases.outcome(case.op, OPS[case.op], given[0])
        monkeypatch.setenv("VK_HOST_ORDER", order)
        otherwise = cases.outcome(case.op, OPS[case.op], given[1])
        monkeypatch.delenv("VK_HOST_ORDER")
        assert all(map(torch.equal, as_numbered, otherwise)), case.label


BOUNDS = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
from pathlib import Path
import torch
from vkit.kernels.cuda import library
from vkit.kernels import cases
from vkit.kernels.cuda.cases import OWN_CASES
from vkit.kernels.cuda.ops import OPS
built, is_wrong = library.Library(Path(sys.argv[1])), sys.argv[2] == "wrong"
library.load_library = lambda: built
if is_wrong:
    start = built.start
    def careless(name, arguments, device):
        arguments.num_blocks += 1
        start(name, arguments, device)
    built.start = careless
for case in OWN_CASES:
    if is_wrong and case.op != "quantized_linear":
        continue
    arguments = case.make(cases.Source(torch.device("cpu"), torch.bfloat16, torch.Generator().manual_seed(2)))
    copied = [x.clone() if isinstance(x, torch.Tensor) and x.ndim < 4 else x for x in arguments]
    OPS[case.op](*copied)
print("all within bounds")
"""


@pytest.fixture(scope="module")
def guarded_library() -> Path:
    """The kernels with every access checked by the address sanitizer."""
    host = Path(__file__).parent / "host"
    flags = ("-std=c++17", "-O1", "-fPIC", "-DVK_HOST", "-xc++", f"-I{host}", "-Wno-unknown-pragmas")
    headers = [*sources.headers(), *host.glob("*.h")]
    guard = "-fsanitize=address"
    return build_library("cuda-host-bounds", sources.units(), headers, (*flags, guard), link_flags=(guard,))


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler to run the kernels on the processor with")
@pytest.mark.parametrize("manner", ["right", "wrong"])
def test_nothing_beyond_the_arrays_is_touched(manner: str, guarded_library: Path) -> None:
    """The kernels under the address sanitizer; with one block too many it must object."""
    preloaded = subprocess.run([str(find_compiler()), "-print-file-name=libasan.so"], capture_output=True, text=True)
    library = preloaded.stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("this compiler has no address sanitizer")
    environment = {**os.environ, "LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BOUNDS, str(guarded_library), manner]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    if manner == "right":
        assert done.stdout == "all within bounds\n", done.stderr[-3000:]
        assert done.returncode == 0
    else:
        assert done.returncode != 0
        assert "heap-buffer-overflow" in done.stderr
