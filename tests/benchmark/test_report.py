"""Result files survive a round trip, damage is one line, comparisons are arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vkit.benchmark.report import Difference, ResultFile, Run, Setting, compare, encode, figures, read_result
from vkit.benchmark.session import MeasuredRun, result_file
from vkit.benchmark.statistics import Arrival, Distribution, Goodput, RequestRecord, Slo, Summary, summarize
from vkit.errors import UsageError


def records(step_s: float = 0.1) -> list[RequestRecord]:
    made = []
    for i in range(4):
        one = RequestRecord(i, 0.0, 0.01 * i, end_s=1.0 + step_s * i, input_tokens=10, output_tokens=3)
        one.arrivals = [Arrival(0.2 + step_s * (i + k), 1) for k in range(3)]
        made.append(one)
    return [*made, RequestRecord(4, 0.0, 0.0, end_s=0.5, error="HTTP 500: no")]


def result(settings: dict[str, Setting] | None = None, step_s: float = 0.1) -> ResultFile:
    found = records(step_s)
    return result_file([MeasuredRun(found, summarize(found, Slo.parse("ttft:300")))], settings or {"model": "m"})


def saved(folder: Path, content: Any) -> Path:
    path = folder / "result.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_a_result_survives_the_round_trip(tmp_path: Path) -> None:
    written = result()
    assert read_result(saved(tmp_path, encode(written))) == written


def test_the_file_holds_the_figures_under_plain_names() -> None:
    content = json.loads(encode(result()))
    assert (content["format"], content["version"], content["settings"]) == ("vkit-bench", 1, {"model": "m"})
    (run,) = content["runs"]
    assert (run["summary"]["completed"], run["summary"]["failed"]) == (4, 1)
    assert set(run["summary"]["ttft_ms"]) == {"mean", "median", "p90", "p99"}
    assert run["summary"]["goodput"]["share"] == pytest.approx(2 / 5)
    assert [row["error"] for row in run["requests"]] == [None] * 4 + ["HTTP 500: no"]
    first, last = run["requests"][0], run["requests"][4]
    assert (first["ttft_ms"], first["tpot_ms"], first["e2e_ms"]) == pytest.approx((200, 100, 400))
    assert run["requests"][2]["send_delay_ms"] == pytest.approx(20)
    assert (last["ttft_ms"], last["tpot_ms"], last["e2e_ms"]) == (None, None, None)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        {},
        {"format": "other", "version": 1, "settings": {}, "runs": []},
        {"format": "vkit-bench", "version": 2, "settings": {}, "runs": []},
        {"format": "vkit-bench", "version": 1, "settings": {}, "runs": []},
        {"format": "vkit-bench", "version": 1, "settings": {}, "runs": [{"summary": {}}]},
        {"format": "vkit-bench", "version": 1, "settings": {"a": []}, "runs": []},
    ],
)
def test_a_damaged_result_file_is_one_line(tmp_path: Path, content: Any) -> None:
    path = saved(tmp_path, content)
    with pytest.raises(UsageError) as caught:
        read_result(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_result_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json: No such file"):
        read_result(tmp_path / "none.json")


def summary(**changes: Any) -> Summary:
    return replace(summarize(records()), goodput=None, **changes)


def single(made: Summary, batch_size: int | None = None, **settings: Setting) -> ResultFile:
    return ResultFile(settings=settings, runs=[Run(made, [], batch_size)])


def test_every_figure_has_a_flat_name() -> None:
    flat = dict(figures(replace(summary(), goodput=Goodput(2.0, 0.5))))
    assert flat["completed"] == 4
    assert (flat["goodput.requests_per_s"], flat["goodput.share"]) == (2.0, 0.5)
    assert {
        f"{name}_ms.{part}" for name in ("ttft", "tpot", "itl", "e2e") for part in ("mean", "median", "p90", "p99")
    } < {*flat}
    assert dict(figures(summary(ttft_ms=None)))["ttft_ms.p99"] is None


def test_differences_and_ratios() -> None:
    a = single(summary(output_tokens_per_s=100.0, ttft_ms=Distribution(10, 20, 30, 40), failed=0), model="x", seed=0)
    b = single(
        summary(output_tokens_per_s=150.0, ttft_ms=Distribution(5, 20, 60, 10), failed=2), model="y", seed=0, n=1
    )
    found = compare(a, b, names=("a.json", "b.json"))
    by_name = {row.figure: row for row in found.runs[0].figures}
    assert by_name["output_tokens_per_s"] == Difference("output_tokens_per_s", 100.0, 150.0, 50.0, 1.5)
    assert by_name["ttft_ms.mean"] == Difference("ttft_ms.mean", 10, 5, -5, 0.5)
    assert by_name["ttft_ms.p99"] == Difference("ttft_ms.p99", 40, 10, -30, 0.25)
    assert by_name["failed"] == Difference("failed", 0, 2, 2, None), "nothing to divide by"
    assert found.settings == {"model": ("x", "y"), "n": (None, 1)}
    assert not any(name.startswith("goodput") for name in by_name), "neither has it"


def test_a_figure_that_one_lacks_has_no_difference() -> None:
    a, b = single(summary(tpot_ms=None)), single(summary())
    rows = {row.figure: row for row in compare(a, b, names=("a", "b")).runs[0].figures}
    assert (rows["tpot_ms.mean"].a, rows["tpot_ms.mean"].difference, rows["tpot_ms.mean"].ratio) == (None, None, None)
    assert rows["tpot_ms.mean"].b is not None


def test_a_sweep_and_a_run_cannot_be_compared() -> None:
    with pytest.raises(UsageError, match="a holds a single run, b batch sizes 4"):
        compare(single(summary()), single(summary(), 4), names=("a", "b"))


def test_a_comparison_encodes_to_json() -> None:
    found = compare(single(summary()), single(summary()), names=("a", "b"))
    assert json.loads(encode(found))["runs"][0]["figures"][0] == {
        "figure": "completed",
        "a": 4,
        "b": 4,
        "difference": 0,
        "ratio": 1.0,
    }
