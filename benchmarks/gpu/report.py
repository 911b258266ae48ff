"""A run's report as a section of a Markdown document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"
"""Between these a document has the section."""
WORST_KERNELS = 8


def section(report: dict[str, Any]) -> str:
    """The section, without the marks around it."""
    return "\n".join(_lines(report)) + "\n"


def written(path: Path, text: str) -> None:
    """Replace the document's section.

    Raises:
        ValueError: the document has no place for it.
    """
    document = path.read_text(encoding="utf-8")
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"{path}: expected {BEGIN} and {END} once each")
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


def _lines(report: dict[str, Any]) -> Iterator[str]:
    found, stages = report["identity"], report["stages"]
    versions = ", ".join(f"{name} {found[name]}" for name in ("vkit", "torch", "cuda") if name in found)
    yield f"Measured {report['date']} on {found['device']} ({versions})."
    if found["tiny"]:
        yield "A tiny run on the CPU: it shows that the script works, and says nothing about speed."
    for name, stage in stages.items():
        yield ""
        if "failure" in stage:
            yield f"**{name}: failed.** {stage['failure']}"
        elif "skipped" in stage:
            yield f"{name}: not run: {stage['skipped']}."
        else:
            yield from _STAGES[name](stage)


def _kernels(stage: dict[str, Any]) -> Iterator[str]:
    report = stage["report"]
    parity = report["parity"]
    failed = [row for row in parity if not row["passed"]]
    yield f"Kernels: {len(parity) - len(failed)} of {len(parity)} comparisons with plain torch passed."
    for row in failed:
        yield f"- FAILED: {row['op']} {row['dtype']} {row['shape']}"
    timed = [row for row in report["speeds"] if "share" in row]
    yield ""
    yield from _table(
        ("op", "shape", "µs", "share of its ceiling"),
        [
            (row["op"], row["shape"], f"{row['seconds'] * 1e6:.1f}", f"{row['share']:.0%}")
            for row in sorted(timed, key=lambda row: row["share"])[:WORST_KERNELS]
        ],
    )
    yield f"\nThe {min(WORST_KERNELS, len(timed))} lowest shares of {len(timed)}; all are in the JSON."


def _equality(stage: dict[str, Any]) -> Iterator[str]:
    yield "Greedy tokens of a small float32 model, against the CPU:"
    yield ""
    yield from _table(
        ("run", "equal", "compared", "widest gap at a difference", ""),
        [
            (
                row["what"],
                str(row["num_equal"]),
                str(row["num_compared"]),
                f"{row['worst_gap']:.1e}",
                "passed" if row["passed"] else "**failed**",
            )
            for row in stage["rows"]
        ],
    )


def _engine(stage: dict[str, Any]) -> Iterator[str]:
    ceilings = stage["ceilings"]
    yield (
        f"Decoding as a share of the copy rate of this run, {ceilings['copy_bytes_per_s'] / 1e9:.1f} GB/s; prefill as a"
        f" share of its bfloat16 products, {ceilings['matmul_flop_per_s'] / 1e12:.2f} TFLOP/s:"
    )
    yield ""
    yield from _table(
        ("model", "run", "", "ms", "tokens/s", "share"),
        [
            (
                row["model"],
                row["variant"],
                row["what"],
                f"{row['seconds'] * 1e3:.2f}",
                f"{row['tokens_per_s']:.0f}",
                f"{row['share']:.1%}",
            )
            for row in stage["rows"]
        ],
    )


def _against(stage: dict[str, Any]) -> Iterator[str]:
    yield f"Against transformers {stage['transformers']} on the same weights, in turns:"
    yield ""
    yield from _table(
        ("", "vkit, ms", "transformers, ms", "times as fast"),
        [
            (row["what"], f"{row['vkit_s'] * 1e3:.2f}", f"{row['transformers_s'] * 1e3:.2f}", f"{row['ratio']:.2f}")
            for row in stage["rows"]
        ],
    )


_STAGES = {"kernels": _kernels, "equality": _equality, "engine": _engine, "against": _against}


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
