"""What a step costs beside the model: microseconds per sequence and step, in pieces, at several batch sizes.

    python benchmarks/host_overhead.py [--json out.json] [--random] [--vocab 49152] [--context 64]

Everything is real but the forward pass, which returns ready logits: scheduler, batch building, sampler, output side
with detokenising, and the request's own accounting. `--random` samples with temperature, top_k and top_p instead of
taking the likeliest. `--context` is the prompt length: the figures must not depend on it. Processor time of the
engine's thread, so that a busy machine changes the figures little; with `--threads` rows are drawn by several, as in
use.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from vkit import kernels
from vkit.batch import BatchBuilder
from vkit.cache.groups import CacheKind, LayerCacheSpec, TensorSpec, group_layers
from vkit.cache.store import TensorStore
from vkit.engine import Engine, EngineSettings
from vkit.inputs import InputProcessor
from vkit.scheduler import SchedulerLimits
from vkit.sequence import Plan
from vkit.text.tokenizer import Tokenizer
from vkit.text.vocabulary import Vocabulary
from vkit.types import OutputKind, SamplingParams

BLOCK_SIZE = 32
WARM_UP_STEPS = 8


class ReadyLogits:
    """Builds real batches and answers with logits made beforehand."""

    def __init__(self, num_seqs: int, num_blocks: int, max_model_len: int, vocab_size: int) -> None:
        tensors = tuple(TensorSpec(name, (1, 8), "float32", 4) for name in ("k", "v"))
        specs: list[LayerCacheSpec | None] = [LayerCacheSpec(CacheKind.FULL, tensors)]
        device = torch.device("cpu")
        self.groups = group_layers(specs)
        store = TensorStore(specs, num_blocks=num_blocks, block_size=BLOCK_SIZE, device=device)
        self._builder = BatchBuilder(
            self.groups,
            store,
            block_size=BLOCK_SIZE,
            max_num_seqs=num_seqs,
            max_model_len=max_model_len,
            device=device,
        )
        # A model's logits are peaked: a few tokens stand out of a broad floor.
        torch.manual_seed(0)
        self._logits = torch.randn(num_seqs, vocab_size) * 2.5
        self._scratch = self._logits.clone()

    def prepare(self, plan: Plan) -> int:
        """The real batch; all that is kept of it is how many logits rows it wants."""
        batch = self._builder.build(plan)
        return int(batch.logits_rows.shape[0])

    def execute(self, num_rows: int) -> torch.Tensor:
        """Fresh logits, as a forward pass would leave them."""
        rows = self._scratch[:num_rows]
        rows.copy_(self._logits[:num_rows])
        return rows


class _Letters:
    def encode(self, text: str, parse_special: bool) -> list[int]:
        return list(text.encode())


def letters_tokenizer(vocab_size: int) -> Tokenizer:
    """Every token is a short word."""
    vocabulary = Vocabulary(
        size=vocab_size,
        piece=lambda token_id: f" w{token_id}",
        added_ids=frozenset(),
        special_ids=frozenset(),
        spell=str.encode,
    )
    return Tokenizer(_Letters(), vocabulary)


class Stopwatch:
    """Seconds spent in each named piece."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Count the time of `owner.method` under `name`."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **keywords: Any) -> Any:
            begin = time.thread_time()
            try:
                return inner(*args, **keywords)
            finally:
                self.seconds[name] += time.thread_time() - begin

        setattr(owner, method, timed)


def measure(
    num_seqs: int, *, num_steps: int, vocab_size: int, context: int, params: SamplingParams
) -> dict[str, float]:
    """Microseconds per sequence and step, by piece; "total" leaves the stand-in's forward pass out."""
    max_model_len = context + num_steps + WARM_UP_STEPS + 2
    num_blocks = num_seqs * (-(-max_model_len // BLOCK_SIZE)) + 1
    runner = ReadyLogits(num_seqs, num_blocks, max_model_len, vocab_size)
    limits = SchedulerLimits(
        max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * context, max_model_len=max_model_len
    )
    settings = EngineSettings(limits=limits, num_blocks=num_blocks, block_size=BLOCK_SIZE, vocab_size=vocab_size)
    tokenizer = letters_tokenizer(vocab_size)
    engine = Engine(settings, runner, runner.groups, tokenizer)
    inputs = InputProcessor(max_model_len, vocab_size, tokenizer)
    for index in range(num_seqs):
        prompt = [(index * 7919 + position) % vocab_size for position in range(context)]
        engine.add_request(inputs.process(prompt, params, request_id=f"{index}"))
    for _ in range(WARM_UP_STEPS):
        engine.step()
    watch = Stopwatch()
    watch.wrap(engine.scheduler, "schedule", "schedule")
    watch.wrap(runner, "prepare", "build batch")
    watch.wrap(runner, "execute", "forward")
    watch.wrap(engine.sampler, "sample", "sample")
    watch.wrap(engine.scheduler, "commit", "commit")
    watch.wrap(engine.outputs, "process", "outputs")
    begin = time.thread_time()
    for _ in range(num_steps):
        engine.step()
    total = time.thread_time() - begin - watch.seconds.pop("forward")
    engine.close()
    per_piece = {name: seconds * 1e6 / num_steps / num_seqs for name, seconds in watch.seconds.items()}
    return {**per_piece, "total": total * 1e6 / num_steps / num_seqs}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--random", action="store_true", help="temperature 0.8, top_k 50, top_p 0.95")
    parser.add_argument("--plain-random", action="store_true", help="temperature 1 and nothing else")
    parser.add_argument("--top-p", action="store_true", help="temperature 0.8, top_p 0.95 and nothing else")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads that draw rows; vkit itself takes all there are"
    )
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels.configure("cpu", num_threads=args.threads, is_exact=False)
    chosen: dict[str, Any] = {"temperature": 0.0}
    if args.random:
        chosen = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 1}
    if args.plain_random:
        chosen = {"temperature": 1.0, "seed": 1}
    if args.top_p:
        chosen = {"temperature": 0.8, "top_p": 0.95, "seed": 1}
    params = SamplingParams(max_tokens=None, ignore_eos=True, output_kind=OutputKind.DELTA, **chosen)
    rows = {
        size: measure(size, num_steps=args.steps, vocab_size=args.vocab, context=args.context, params=params)
        for size in args.batch_sizes
    }
    names = list(next(iter(rows.values())))
    print("us per sequence and step".ljust(28) + "".join(name.rjust(13) for name in names))
    for size, row in rows.items():
        print(f"{size} running".ljust(28) + "".join(f"{row[name]:13.2f}" for name in names))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({str(size): row for size, row in rows.items()}, file, indent=2)


if __name__ == "__main__":
    main()
