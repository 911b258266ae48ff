"""Everything there is to know about a card, in one run: is it right, and how fast is it.

    python benchmarks/gpu/run.py [--output gpu.json] [--markdown docs/performance.md] [--work DIR] [--only STAGE,...]

Stages: `kernels`, each op against plain torch, then its share of what the card reaches; `equality`, greedy tokens of a
small model: CPU, op by op, captured, launched ahead; `engine`, a synthetic 8B model in bfloat16 and Q4_K: decoding at
batch 1 and 64 as a share of the copy rate of the same run, a prompt of 8192 tokens as a share of its matmul rate;
`against`, the same weights under `transformers`, in turns. Models of random weights are written to the work folder, 16
and 5 GB. What is done is in the output file, and a second run goes on where the first stopped.

`--tiny` does the same with models of a few layers on the CPU, in seconds: it shows that the script works, and no speed.
It has not been run on a card yet: see docs/performance.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import section, written
from synthetic import LLAMA_8B, SMALL, TINY, Shape, Stored, described, write_plain, write_q4_k

from vkit import LLM, SamplingParams, __version__
from vkit.errors import VkitError
from vkit.kernels import check, speeds

STAGES = ("kernels", "equality", "engine", "against")
NEAR_TIE = 1e-3
"""Nats between the two likeliest tokens below which either may win."""
Row = dict[str, Any]

ON_A_CARD: dict[str, dict[str, Any]] = {
    "captured, launched ahead": {},
    "op by op": {"enforce_eager": True},
    "not launched ahead": {"async_scheduling": False},
}
ON_A_CPU: dict[str, dict[str, Any]] = {
    "recorded": {},
    "op by op": {"enforce_eager": True},
    "planned ahead": {"async_scheduling": True},
}
"""The first is what the engine does by itself."""


@dataclass(frozen=True)
class Plan:
    """How large everything is."""

    device: str
    shape: Shape
    sizes: speeds.Sizes
    timer: speeds.Timer
    batches: tuple[int, ...]
    context: int
    short: int
    long: int
    """Tokens of two runs whose difference is decoding alone."""
    prompt: int
    rounds: int
    variants: Mapping[str, Mapping[str, Any]]
    """The ways to run a model, by name, and their settings."""

    @property
    def max_model_len(self) -> int:
        """The longest sequence."""
        return max(self.context + self.long, self.prompt + 1) + 1

    @property
    def num_blocks(self) -> int:
        """Blocks of 32 that hold the largest batch, or the prompt."""
        batch = max(self.batches) * -(-(self.context + self.long + 1) // 32)
        return 2 + max(batch, -(-(self.prompt + 33) // 32))


def card_plan() -> Plan:
    """What is measured on a card."""
    return Plan("cuda", LLAMA_8B, speeds.CARD, speeds.time_on_card, (1, 64), 512, 16, 144, 8192, 3, ON_A_CARD)


def tiny_plan() -> Plan:
    """What shows that the script works."""
    sizes = dataclasses.replace(speeds.SMALL, copy_bytes=1 << 22, matrix=128)
    return Plan("cpu", TINY, sizes, speeds.time_on_host, (1, 4), 16, 2, 6, 64, 1, ON_A_CPU)


def open_engine(stored: Stored, plan: Plan, **settings: Any) -> LLM:
    """The model in an engine that holds the largest batch."""
    chosen: dict[str, Any] = {
        "tokenizer": str(stored.tokenizer), "device": plan.device, "max_model_len": plan.max_model_len,
        "num_blocks": plan.num_blocks, "max_num_seqs": max(plan.batches), "enable_prefix_caching": False,
        "max_num_batched_tokens": max(plan.prompt, max(plan.batches)),
    }  # fmt: skip
    return LLM(str(stored.path), **{**chosen, **settings})


def prompts(shape: Shape, batch: int, length: int) -> list[list[int]]:
    """Random tokens, the same in every run."""
    found: list[list[int]] = np.random.default_rng(batch).integers(3, shape.vocab, (batch, length)).tolist()
    return found


Generate = Callable[[list[list[int]], int], object]
"""(prompts, tokens of each): runs them all."""


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def decode_seconds(generate: Generate, plan: Plan, batch: int) -> float:
    """Seconds of one decoding step: what a longer run takes more than a shorter one, per token."""
    given = prompts(plan.shape, batch, plan.context)
    long, short = timed(lambda: generate(given, plan.long)), timed(lambda: generate(given, plan.short))
    return max(1e-9, (long - short) / (plan.long - plan.short))


def prefill_seconds(generate: Generate, plan: Plan) -> float:
    """Seconds from a prompt to its first token."""
    given = prompts(plan.shape, 1, plan.prompt)
    return timed(lambda: generate(given, 1))


def engine_generate(llm: LLM) -> Generate:
    """The engine, greedily."""

    def generate(given: list[list[int]], num_tokens: int) -> object:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        return llm.generate([{"prompt_token_ids": prompt} for prompt in given], params)

    return generate


def decode_row(stored: Stored, plan: Plan, batch: int, seconds: float, ceilings: speeds.Ceilings) -> Row:
    """A step's rate, and the bytes that it must move as a share of what the copy of this run moves."""
    cached = batch * (plan.context + (plan.short + plan.long) // 2) * stored.shape.kv_bytes_per_token
    share = (stored.weight_bytes + cached) / seconds / ceilings.copy_bytes_per_s
    return {"what": f"decode, batch {batch}", "seconds": seconds, "tokens_per_s": batch / seconds, "share": share}


def prefill_row(stored: Stored, plan: Plan, seconds: float, ceilings: speeds.Ceilings) -> Row:
    """A prompt's rate, and its operations as a share of what the matrix product of this run does."""
    share = stored.shape.prefill_flop(plan.prompt) / seconds / ceilings.matmul_flop_per_s
    rate = plan.prompt / seconds
    return {"what": f"prefill, {plan.prompt} tokens", "seconds": seconds, "tokens_per_s": rate, "share": share}


def run_kernels(plan: Plan, say: check.Say) -> Row:
    """Parity and speed of every op on the card; on a CPU what there is to say about why not."""
    try:
        return {"report": check.check_card(say)}
    except RuntimeError as reason:
        return {"skipped": str(reason)}


def run_equality(plan: Plan, work: Path, say: check.Say) -> Row:
    """Greedy tokens of a small float32 model by the CPU, and by the device in every way there is to run it."""
    stored = write_plain(work / "small", SMALL, torch.device("cpu"), torch.float32)
    small = dataclasses.replace(plan, batches=(8,), context=24, long=40, prompt=64)
    given = [prompt[: 8 + 2 * i] for i, prompt in enumerate(prompts(SMALL, 8, 24))]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in given]
    plain = params.with_(logprobs=None)
    with open_engine(stored, dataclasses.replace(small, device="cpu"), cpu_precision="exact") as llm:
        expected = [output.outputs[0] for output in llm.generate(asked, params)]
    rows = []
    for name, settings in plan.variants.items():
        exact = {"cpu_precision": "exact"} if plan.device == "cpu" else {}
        with open_engine(stored, small, dtype="float32", **exact, **settings) as llm:
            found = [output.outputs[0].token_ids for output in llm.generate(asked, plain)]
        rows.append({"what": name, **compared(found, expected)})
        say(f"equality, {name}: {rows[-1]['num_equal']} of {rows[-1]['num_compared']} tokens")
    return {"rows": rows, "passed": all(row["passed"] for row in rows)}


def compared(found: Sequence[list[int]], expected: Sequence[Any]) -> Row:
    """Tokens up to the first difference of each output; one that is a near tie may differ, and ends the comparison."""
    num_equal = num_compared = 0
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        pairs = zip(ours, theirs.token_ids, strict=True)
        place = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        num_equal += len(ours) if place is None else place
        num_compared += len(ours) if place is None else place + 1
        if place is not None:
            likeliest = sorted((entry.logprob for entry in theirs.logprobs[place][1:]), reverse=True)
            worst = max(worst, likeliest[0] - likeliest[1])
    return {"num_equal": num_equal, "num_compared": num_compared, "worst_gap": worst, "passed": worst <= NEAR_TIE}


def run_engine(plan: Plan, work: Path, say: check.Say) -> Row:
    """Both models, every batch, every way to run them."""
    ceilings = speeds.measure_ceilings(torch.device(plan.device), plan.sizes, plan.timer)
    plain = write_plain(work / "plain", plan.shape, torch.device(plan.device))
    packed = write_q4_k(work / "packed-q4_k.gguf", plan.shape, plain.path)
    rows: list[Row] = []
    for model, stored in (("bf16", plain), ("Q4_K", packed)):
        for variant, settings in plan.variants.items():
            with open_engine(stored, plan, **settings) as llm:
                generate = engine_generate(llm)
                generate(prompts(plan.shape, max(plan.batches), plan.context), plan.short)  # what is compiled, is now
                found = [
                    decode_row(stored, plan, batch, median(decode_seconds, generate, plan, batch), ceilings)
                    for batch in plan.batches
                ]
                if not settings:
                    found.append(prefill_row(stored, plan, median(prefill_seconds, generate, plan), ceilings))
            for row in found:
                rows.append({"model": model, "variant": variant, **row})
                say(f"{model}, {variant}: {row['what']}: {row['tokens_per_s']:.1f} tokens/s, {row['share']:.1%}")
    models = {"bf16": described(plain), "Q4_K": described(packed)}
    return {"models": models, "ceilings": dataclasses.asdict(ceilings), "rows": rows}


def median(measure: Callable[..., float], generate: Generate, plan: Plan, *arguments: Any) -> float:
    """The median of as many rounds as planned."""
    return statistics.median(measure(generate, plan, *arguments) for _ in range(plan.rounds))


def run_against(plan: Plan, work: Path, say: check.Say) -> Row:
    """vkit and transformers with the same weights in memory at once, in turns: the largest batch, and the prompt."""
    if importlib.util.find_spec("transformers") is None:
        return {"skipped": "transformers is not installed"}
    import transformers

    stored = write_plain(work / "plain", plan.shape, torch.device(plan.device))
    dtype = torch.bfloat16 if plan.device == "cuda" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(stored.path, dtype=dtype).to(plan.device).eval()

    def theirs(given: list[list[int]], num_tokens: int) -> object:
        ids = torch.tensor(given, device=plan.device)
        lengths = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
        with torch.inference_mode():
            return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)

    batch = max(plan.batches)
    measures = {
        f"decode, batch {batch}": lambda generate: decode_seconds(generate, plan, batch),
        f"prefill, {plan.prompt} tokens": lambda generate: prefill_seconds(generate, plan),
    }
    rows = []
    with open_engine(stored, plan) as llm:
        ours = engine_generate(llm)
        for generate in (ours, theirs):  # warm up
            generate(prompts(plan.shape, batch, plan.context), plan.short)
        for what, measure in measures.items():
            pairs = [(measure(ours), measure(theirs)) for _ in range(plan.rounds)]
            ratio = statistics.median(other / own for own, other in pairs)
            own, other = (statistics.median(side) for side in zip(*pairs, strict=True))
            rows.append({"what": what, "vkit_s": own, "transformers_s": other, "ratio": ratio})
            say(f"against transformers: {what}: {ratio:.2f} times as fast")
    return {"transformers": transformers.__version__, "rows": rows}


def identity(plan: Plan, is_tiny: bool) -> Row:
    """What ran where and when; a run with another identity does not go on where this one stopped."""
    found: Row = {"device": plan.device, "tiny": is_tiny, "torch": torch.__version__, "vkit": __version__}
    if plan.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "capability": f"{properties.major}.{properties.minor}"}
        found |= {"cuda": torch.version.cuda, "total_bytes": properties.total_memory}
    return found


def run_all(plan: Plan, work: Path, path: Path, only: Sequence[str], report: Row, say: check.Say) -> None:
    """Run the stages that are asked for and not done, writing the report after each."""
    stages: dict[str, Callable[[], Row]] = {
        "kernels": lambda: run_kernels(plan, say),
        "equality": lambda: run_equality(plan, work, say),
        "engine": lambda: run_engine(plan, work, say),
        "against": lambda: run_against(plan, work, say),
    }
    for name in STAGES:
        if name not in only or "failure" not in report["stages"].get(name, {"failure": ""}):
            continue
        say(f"stage {name}")
        started = time.monotonic()
        try:
            found = stages[name]()
        except (VkitError, RuntimeError, ValueError, OSError) as error:  # the other stages are worth having
            found = {"failure": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
            say(f"stage {name} failed: {found['failure']}")
        report["stages"][name] = {**found, "took_s": round(time.monotonic() - started, 1)}
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def has_failed(report: Row) -> bool:
    """Whether anything came out wrong or did not run to its end."""
    stages = report["stages"]
    kernels = stages.get("kernels", {}).get("report", {})
    is_unequal = not stages.get("equality", {}).get("passed", True)
    return bool(kernels.get("num_failed")) or is_unequal or any("failure" in stage for stage in stages.values())


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0; 1 without a card, or with something that failed; 2 for an argument that cannot be."""
    parser = argparse.ArgumentParser(description="Check and measure vkit on a card.")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="the report; a run goes on from it")
    parser.add_argument("--markdown", type=Path, help="a document whose GPU section is replaced by the report's")
    parser.add_argument("--work", type=Path, help="folder for the models, kept; without it one that is removed")
    parser.add_argument("--only", default=",".join(STAGES), help="stages, with commas between them")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU: whether the script works")
    options = parser.parse_args(arguments)
    only = options.only.split(",")
    if unknown := [name for name in only if name not in STAGES]:
        parser.error(f"--only: no stage {unknown[0]!r}, expected some of {', '.join(STAGES)}")
    if not options.tiny and (reason := check.unavailable()):
        print(f"no GPU to measure: {reason}; --tiny tries the script on the CPU", file=sys.stderr)
        return 1
    if options.tiny and options.markdown is not None and options.markdown.name == "performance.md":
        parser.error("--markdown: a tiny run says nothing about speed, so it has no place in performance.md")
    plan = tiny_plan() if options.tiny else card_plan()
    found = identity(plan, options.tiny)
    report: Row = {"identity": found, "date": datetime.date.today().isoformat(), "stages": {}}
    if options.output.exists():
        before = json.loads(options.output.read_text(encoding="utf-8"))
        if before.get("identity") == found:
            report["stages"] = before["stages"]
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        run_all(plan, work, options.output, only, report, lambda line: print(line, file=sys.stderr, flush=True))
    text = section(report)
    print(text)
    if options.markdown is not None:
        written(options.markdown, text)
    return int(has_failed(report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
