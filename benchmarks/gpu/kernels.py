"""The GPU kernels on the card at hand, as JSON: parity, the card's ceilings, each kernel's share of them.

    python benchmarks/gpu/kernels.py [--output gpu.json]

The same as `vkit doctor --gpu --json`. Progress goes to stderr, and to stdout the JSON alone. It has not been run on a
card yet: see docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from vkit.kernels.check import check_card


def main() -> int:
    """Exit status: 0, or 1 without a usable card or with a kernel that failed."""
    parser = argparse.ArgumentParser(description="Measure the GPU kernels.")
    parser.add_argument("--output", type=Path, help="file to write to; stdout without it")
    options = parser.parse_args()
    try:
        report = check_card(lambda line: print(line, file=sys.stderr))
    except RuntimeError as reason:
        print(f"no GPU to check: {reason}", file=sys.stderr)
        return 1
    text = json.dumps(report, indent=1)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 1 if report["num_failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
