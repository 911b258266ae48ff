"""What stands in for a card: it computes what the hardware's operations are documented to, and sees misuse."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from vkit.kernels.build import build_library
from vkit.kernels.compiler import Unit, find_compiler
from vkit.kernels.cuda import sources

HOST = Path(__file__).parent / "host"
MISUSE = 719


@pytest.fixture(scope="module")
def wrong() -> ctypes.CDLL:
    if find_compiler() is None:
        pytest.skip("no C++ compiler to run the kernels on the processor with")
    flags = ("-std=c++17", "-O1", "-fPIC", "-DVK_HOST", "-xc++", f"-I{HOST}", f"-I{sources.FOLDER}")
    headers = [*sources.headers(), *HOST.glob("*.h")]
    return ctypes.CDLL(str(build_library("cuda-host-wrong", [Unit(HOST / "wrong.cu", ())], headers, flags)))


def run(wrong: ctypes.CDLL, mistake: int) -> tuple[int, torch.Tensor]:
    out = torch.zeros(64)
    return wrong.run_mistaken(ctypes.c_void_p(out.data_ptr()), mistake), out


def test_without_a_mistake(wrong: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    for order in "015":
        monkeypatch.setenv("VK_HOST_ORDER", order)
        code, out = run(wrong, 0)
        assert code == 0
        assert out.tolist() == [(i + 33) % 64 for i in range(64)]


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (1, "a barrier of the block after a thread has ended"),
        (2, "a barrier that not all threads reach"),
        (3, "shuffle_xor after a thread has ended"),
        (4, "one lane in transpose_tile, another in shuffle_xor"),
    ],
)
def test_threads_that_do_not_come_together(
    wrong: ctypes.CDLL, mistake: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(wrong, mistake)
    assert code == MISUSE
    assert said in capfd.readouterr().err


def test_a_missing_barrier_shows_in_the_order(wrong: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    _, as_numbered = run(wrong, 5)
    monkeypatch.setenv("VK_HOST_ORDER", "1")
    _, backwards = run(wrong, 5)
    assert not torch.equal(as_numbered, backwards)
    assert as_numbered.isnan().any()  # what no thread has written yet


def test_tiles_are_products_and_transposes(wrong: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    memory = torch.randn(576).bfloat16().float()
    a, b = memory[:256].view(16, 16).clone(), memory[256:384].view(16, 8).clone()
    assert wrong.run_tiles(ctypes.c_void_p(memory.data_ptr())) == 0
    torch.testing.assert_close(memory[384:512].view(16, 8), a @ b, atol=1e-5, rtol=1e-5)
    assert torch.equal(memory[512:].view(8, 8), b[:8].T)
