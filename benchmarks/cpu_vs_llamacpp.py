"""vkit against llama.cpp on the same GGUF files and the same CPU, in turns, round by round.

    python benchmarks/cpu_vs_llamacpp.py MODEL.gguf... --llama-python PATH --llama-bench llamacpp_bench.py
        [--threads 2] [--rounds 5] [--clock wall|cpu] [--transformers]
        [--pp 128,512,2048] [--depth 0,2048] [--batch 1,8,32] [--json out.json]

`--llama-python` is an interpreter with llama-cpp-python built natively; `--llama-bench` the program that times one side
(../shared/bench/llamacpp_bench.py). For vkit a whole engine step is timed, scheduling and sampling included; for
llama.cpp the decode call alone. Both keep their model loaded; each round runs one side, then the other. Printed are the
medians over rounds in tokens per second and the ratio vkit / llama.cpp. Wall time needs a machine that is idle
otherwise; `--clock cpu` counts processor time instead, for `--threads 1` on a busy one.

Beside decoding at batch 1 stands what share of the plain read rate (measured by our own threads just before) the
weights alone were read at. `--transformers` adds transformers in bfloat16 on the same file, which it opens as a whole.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WARM_UP_STEPS = 3
DECODE_STEPS = 32
BATCH_PROMPT = 16


class VkitSide:
    """One loaded engine and its timed scenarios."""

    def __init__(self, model: str, threads: int, clock: Callable[[], float], limit: int, batch: int) -> None:
        from vkit.config import EngineArgs
        from vkit.loading import load_model

        blocks = -(-(limit + 64) // 32) + batch * (-(-(BATCH_PROMPT + DECODE_STEPS + 16) // 32)) + 8
        loaded = load_model(
            EngineArgs(
                model=model,
                threads=threads,
                max_model_len=limit + 64,
                max_num_batched_tokens=max(limit, 2048),
                num_blocks=blocks,
                enable_prefix_caching=False,
            )
        )
        self._engine, self._inputs, self._clock = loaded.engine, loaded.inputs, clock
        self._vocab_size = loaded.inputs.vocab_size
        self._random = random.Random(1)
        self._count = 0

    def _add(self, num_tokens: int, max_tokens: int) -> None:
        from vkit.types import SamplingParams

        prompt = [self._random.randrange(3, self._vocab_size) for _ in range(num_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._count += 1
        self._engine.add_request(self._inputs.process(prompt, params, request_id=f"{self._count}"))

    def _step(self) -> float:
        started = self._clock()
        self._engine.step()
        return self._clock() - started

    def _drain(self) -> None:
        while self._engine.scheduler.has_unfinished:
            self._engine.step()

    def prefill(self, num_tokens: int) -> float:
        """Tokens per second of one prompt in one step."""
        self._add(num_tokens, 1)
        seconds = self._step()
        self._drain()
        return num_tokens / seconds

    def decode(self, depth: int, num_seqs: int) -> float:
        """Tokens per second of `num_seqs` sequences, each with `depth` tokens before the first timed one."""
        for _ in range(num_seqs):
            self._add(max(depth, 1), DECODE_STEPS + WARM_UP_STEPS + 1)
        for _ in range(WARM_UP_STEPS):
            self._step()
        seconds = sum(self._step() for _ in range(DECODE_STEPS))
        self._drain()
        return num_seqs * DECODE_STEPS / seconds


class TransformersSide:
    """The same scenarios for transformers: one call of the model per step, the largest logit as the next token."""

    def __init__(self, model: str, threads: int, clock: Callable[[], float]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        path = Path(model)
        self._model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.bfloat16
        ).eval()
        self._clock = clock

    def _call(self, ids: Any, past: Any) -> tuple[float, Any]:
        import torch

        started = self._clock()
        with torch.inference_mode():
            out = self._model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            next_ids = out.logits[:, -1].argmax(-1, keepdim=True)
        return self._clock() - started, (next_ids, out.past_key_values)

    def _prompts(self, count: int, num_tokens: int) -> Any:
        import torch

        return torch.randint(3, self._model.config.vocab_size, (count, num_tokens))

    def prefill(self, num_tokens: int) -> float:
        """Tokens per second of one prompt in one call."""
        return num_tokens / self._call(self._prompts(1, num_tokens), None)[0]

    def decode(self, depth: int, num_seqs: int) -> float:
        """Tokens per second of `num_seqs` sequences in one batch."""
        _, state = self._call(self._prompts(num_seqs, max(depth, 1)), None)
        seconds = 0.0
        for step in range(WARM_UP_STEPS + DECODE_STEPS):
            taken, state = self._call(*state)
            seconds += taken if step >= WARM_UP_STEPS else 0.0
        return num_seqs * DECODE_STEPS / seconds


def run_side(options: argparse.Namespace) -> None:
    """Answer each line on stdin with one round's figures, as JSON."""
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    side: VkitSide | TransformersSide
    if options.side == "transformers":
        side = TransformersSide(options.models[0], options.threads, clock)
    else:
        limit = max([*options.pp, *options.depth, BATCH_PROMPT]) + DECODE_STEPS
        side = VkitSide(options.models[0], options.threads, clock, limit, max(options.batch))

    def measure() -> dict[str, float]:
        found = {f"prefill {count}": side.prefill(count) for count in options.pp}
        found.update({f"decode at {depth}": side.decode(depth, 1) for depth in options.depth})
        found.update({f"batch {count}": side.decode(BATCH_PROMPT, count) for count in options.batch if count > 1})
        return found

    measure()
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)


class Child:
    """A side in a process of its own that answers a line with a line."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def round(self) -> dict[str, Any]:
        """The figures of one round."""
        assert self._process.stdin is not None
        self._process.stdin.write("round\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the side."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args!r} ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer


def llama_children(options: argparse.Namespace, model: str) -> list[tuple[dict[str, str], Child]]:
    """Processes that together time what the options ask for, and how their figures are called here."""
    common = [options.llama_python, options.llama_bench, model, "--interactive", "--reps", "1"]
    common += ["--threads", str(options.threads), "--clock", options.clock, "--tg", str(DECODE_STEPS)]
    common += ["--batch-prompt", str(BATCH_PROMPT), "--batch-steps", str(DECODE_STEPS)]
    several = [count for count in options.batch if count > 1]
    children = []
    left = sorted(options.pp)
    runs: list[tuple[int, int | None]] = []
    for depth in sorted(options.depth):
        # Its context must take the whole depth in one call, which --pp makes room for.
        prompt = next((count for count in left if count >= depth), None)
        if prompt is not None:
            left.remove(prompt)
        runs.append((prompt or depth, depth))
    runs += [(prompt, None) for prompt in left]
    for index, (prompt, decode_at) in enumerate(runs):
        batches = several if not index else []
        names = {f"batch{count}": f"batch {count}" for count in batches}
        extra = ["--pp", str(prompt), "--batch", ",".join(map(str, batches))]
        if prompt in options.pp:
            names["pp"] = f"prefill {prompt}"
        if decode_at is None:
            extra += ["--tg", "0"]
        else:
            names["tg"] = f"decode at {decode_at}"
            extra += ["--depth", str(decode_at)]
        children.append((names, Child([*common, *extra])))
    return children


def compare(options: argparse.Namespace, model: str) -> dict[str, dict[str, float]]:
    """Medians over interleaved rounds: figure -> {side: tokens per second, "ratio" to llama.cpp, ...}."""
    arguments = ["--threads", str(options.threads), "--clock", options.clock]
    for name in ("pp", "depth", "batch"):
        arguments += [f"--{name}", ",".join(map(str, getattr(options, name)))]
    sides = ["vkit", *(["transformers"] if options.transformers else [])]
    ours = {side: Child([sys.executable, __file__, model, "--side", side, *arguments]) for side in sides}
    theirs = llama_children(options, model)
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for side, child in ours.items():
            for name, rate in child.round().items():
                found.setdefault(name, {}).setdefault(side, []).append(rate)
        for names, child in theirs:
            answer = child.round()
            for key, name in names.items():
                found[name].setdefault("llama.cpp", []).append(answer[key]["tok_per_s"])
    for child in [*ours.values(), *(child for _, child in theirs)]:
        child.close()
    results = {}
    for name, figures in found.items():
        row = {side: statistics.median(rates) for side, rates in figures.items()}
        row["ratio"] = row["vkit"] / row["llama.cpp"]
        if "transformers" in row:
            row["ratio to transformers"] = row["vkit"] / row["transformers"]
        results[name] = row
    return results


def read_rate(threads: int) -> float:
    """Bytes per second that the native threads read at."""
    from vkit.kernels.cpu.library import load_library
    from vkit.kernels.cpu.probe import read_rate as measure

    library = load_library()
    library.set_num_threads(threads)
    return measure(library)


def weights_read(model: str) -> float:
    """Bytes of weights that a token reads: all but the embedding, of which it reads a row, if the head is apart."""
    from vkit.loaders import open_checkpoint

    checkpoint = open_checkpoint(Path(model))
    table = "model.embed_tokens.weight"
    is_apart = "lm_head.weight" in checkpoint.tensor_names()
    spared = checkpoint.tensor_info(table).nbytes if is_apart else 0
    total: int = checkpoint.num_weight_bytes
    checkpoint.close()
    return total - spared


def line(name: str, row: dict[str, float]) -> str:
    """One row of the table."""
    text = f"  {name:16s} vkit {row['vkit']:8.1f}   llama.cpp {row['llama.cpp']:8.1f}   ratio {row['ratio']:5.2f}"
    if "transformers" in row:
        text += f"   transformers {row['transformers']:8.1f}   ratio {row['ratio to transformers']:5.2f}"
    if "share of the read rate" in row:
        text += f"   {100 * row['share of the read rate']:.0f} % of the read rate"
    return text


def main() -> None:
    """Compare and print a table."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument(
        "--llama-bench", default=str(Path(__file__).resolve().parents[2] / "shared/bench/llamacpp_bench.py")
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--pp", type=numbers, default=[128, 512, 2048])
    parser.add_argument("--depth", type=numbers, default=[0, 2048])
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--side", choices=("vkit", "transformers"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu needs --threads 1: threads that wait burn processor time")
    if options.side:
        run_side(options)
        return
    results = {}
    for model in options.models:
        rate = read_rate(options.threads)
        results[Path(model).name] = found = compare(options, model)
        if "decode at 0" in found and options.clock == "wall":
            found["decode at 0"]["share of the read rate"] = found["decode at 0"]["vkit"] * weights_read(model) / rate
        print(f"{Path(model).name}: tokens per second, {options.threads} threads, {options.clock} time", end="")
        print(f", memory read at {rate / 1e9:.1f} GB/s")
        for name, row in found.items():
            print(line(name, row))
        sys.stdout.flush()
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
