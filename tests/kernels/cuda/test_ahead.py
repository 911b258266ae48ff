"""What every CUDA kernel takes on real cards, compiled without one, against the table in tests/data.

After a change: `python -m vkit.kernels.cuda.ahead --write tests/data/cuda_resources.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vkit.kernels.compiler import BuildError
from vkit.kernels.cuda import ahead, sources

TABLE = Path(__file__).parents[2] / "data" / "cuda_resources.json"
THREADS = {"decode": 128, "packed_product": 256, "rms_norm_held": 1024, "rms_norm_twice": 1024}
SHARED_LIMIT = 48 << 10
"""Bytes a block may have without asking for more."""


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def rows(recorded: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, int]]]:
    for name, targets in recorded["kernels"].items():
        for target, row in targets.items():
            yield name, target, row


def test_the_table_is_of_the_sources_as_they_are_now(recorded: dict[str, Any]) -> None:
    assert recorded["source"] == ahead.fingerprint()
    assert all(set(targets) == set(ahead.TARGETS) for targets in recorded["kernels"].values())
    assert {name.partition("<")[0] for name in recorded["kernels"]} == set(THREADS)


def test_every_format_width_and_type_is_compiled(recorded: dict[str, Any]) -> None:
    from vkit.kernels.cuda.packed import FORMATS

    names = set(recorded["kernels"])
    floats = ("bf16", "f16", "float")
    assert {f"packed_product<{f}, {p}, {t}>" for f in FORMATS for p in ("true", "false") for t in floats} <= names
    widths = ((64, 1), (64, 2), (128, 1), (128, 2), (256, 1))
    assert {f"decode<{t}, {w}, {n}>" for t in floats[:2] for w, n in widths} <= names


def test_nothing_spills_and_everything_fits(recorded: dict[str, Any]) -> None:
    for name, target, row in rows(recorded):
        assert row["stack"] + row["spill_stores"] + row["spill_loads"] == 0, f"{name} spills on {target}"
        threads = THREADS[name.partition("<")[0]]
        assert row["registers"] * threads <= 65536, f"{name} does not fit on {target}"
        assert row["shared"] <= SHARED_LIMIT, f"{name} does not fit on {target}"


def test_rows_are_loaded_wide_and_multiplied_by_tensor_cores(recorded: dict[str, Any]) -> None:
    for name, target, row in rows(recorded):
        if name.startswith(("decode", "rms_norm_held")):
            assert row["wide_loads"] > 0, f"{name} on {target}"
        if name.startswith("decode"):
            width, columns = map(int, re.findall(r"\d+", name)[-2:])
            assert row["products"] == width // 8 * columns, f"{name} on {target}"  # 1/16 for scores, 1/16 for values
        assert (row["products"] > 0) == name.startswith(("decode", "packed")), f"{name} on {target}"


@pytest.mark.slow
@pytest.mark.skipif(sources.find_nvcc() is None, reason="nvcc is not here")
@pytest.mark.parametrize("target", ahead.TARGETS)
def test_compiling_gives_the_table(recorded: dict[str, Any], target: str) -> None:
    found = ahead.table([target])
    assert set(found["kernels"]) == set(recorded["kernels"])
    for name, targets in found["kernels"].items():
        row = targets[target]
        assert row["stack"] + row["spill_stores"] + row["spill_loads"] == 0, f"{name} spills on {target}"
        if found["nvcc"] == recorded["nvcc"]:
            before = recorded["kernels"][name][target]
            assert row == {key: before[key] for key in row}, f"{name} on {target}"


def test_the_fingerprint_ignores_comments_and_sees_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    for name in sources.UNITS:
        (tmp_path / name).write_text("int a = 1;  // one\n")
    (tmp_path / "all.cuh").write_text("int b;\n")
    before = ahead.fingerprint()
    (tmp_path / "all.cuh").write_text("// two\nint   b;\n")
    assert ahead.fingerprint() == before
    (tmp_path / "all.cuh").write_text("int c;\n")
    assert ahead.fingerprint() != before


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sources, "find_nvcc", lambda: None)
    assert ahead.main([]) == 1
    assert capsys.readouterr().err == "nothing is compiled: nvcc is not found\n"


@pytest.mark.skipif(sources.find_nvcc() is None, reason="nvcc is not here")
def test_a_source_that_does_not_compile_is_one_line(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text("int a = ;\n")
    with pytest.raises(BuildError, match=r"^nvcc failed: .*wrong\.cu\(1\): error"):
        ahead.compile_ahead(source, "sm_90")


def test_names_are_as_the_source_writes_them() -> None:
    assert ahead.kernel_name("_Z6decodeI4bf16Li128ELi1EEv8VkDecode") == "decode<bf16, 128, 1>"
    assert ahead.kernel_name("plain") == "plain"
