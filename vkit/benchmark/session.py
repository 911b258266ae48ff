"""One benchmark from prompts to results: the part of `vkit bench` that is not options and output."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from vkit.benchmark.arrivals import Arrivals, ClosedLoop
from vkit.benchmark.datasets import Prompt
from vkit.benchmark.load import Observer, run_load
from vkit.benchmark.report import RequestRow, ResultFile, Run, Setting
from vkit.benchmark.statistics import RequestRecord, Slo, Summary, summarize
from vkit.benchmark.targets import GeneratedPrompts, Request, Target, requests_of

DEFAULT_NUM_PROMPTS = 8
DEFAULT_INPUT_LEN = 16
DEFAULT_OUTPUT_LEN = 16
DEFAULT_CONCURRENCY = 4
DEFAULT_NUM_BATCHES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is asked. `prompts` None makes up `num_prompts` of them."""

    prompts: Sequence[Prompt] | None = None
    num_prompts: int = DEFAULT_NUM_PROMPTS
    input_len: int = DEFAULT_INPUT_LEN
    output_len: int | None = None
    """None: what each entry of the file says, else 16."""
    prefix_len: int = 0
    num_prefixes: int = 1
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Sweep:
    """For each batch size, `num_batches` batches one after the other, all requests of a batch sent together."""

    batch_sizes: tuple[int, ...]
    num_batches: int = DEFAULT_NUM_BATCHES

    @property
    def num_requests(self) -> int:
        """Requests of the whole sweep."""
        return sum(self.batch_sizes) * self.num_batches


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """The records of one load, and their figures. `batch_size` is set in a sweep only."""

    records: list[RequestRecord]
    summary: Summary
    batch_size: int | None = None


async def make_requests(target: Target, workload: Workload) -> list[Request]:
    """The requests of a run, tokenised where the target can.

    Raises:
        UsageError: a prompt that the target cannot take.
    """
    prompts: Sequence[Prompt]
    if workload.prompts is None:
        spec = GeneratedPrompts(
            num_prompts=workload.num_prompts,
            input_len=workload.input_len,
            prefix_len=workload.prefix_len,
            num_prefixes=workload.num_prefixes,
            seed=workload.seed,
        )
        prompts = await target.generate(spec)
    else:
        prompts = [target.prepare(prompt) for prompt in workload.prompts]
    return requests_of(
        prompts,
        output_len=workload.output_len,
        default_output_len=DEFAULT_OUTPUT_LEN,
        temperature=workload.temperature,
        seed=workload.seed,
    )


async def measure(
    target: Target,
    requests: Sequence[Request],
    plan: Arrivals | Sweep,
    *,
    seed: int = 0,
    slo: Slo | None = None,
    observer: Observer | None = None,
) -> list[MeasuredRun]:
    """The run that `plan` describes, or one for each batch size of a sweep."""
    if not isinstance(plan, Sweep):
        records = await run_load(target, requests, plan, seed=seed, observer=observer)
        return [MeasuredRun(records, summarize(records, slo))]
    runs = []
    rest = iter(requests)
    for batch_size in plan.batch_sizes:
        batches = [[next(rest) for _ in range(batch_size)] for _ in range(plan.num_batches)]
        records = await _run_batches(target, batches, observer)
        runs.append(MeasuredRun(records, summarize(records, slo), batch_size))
    return runs


async def _run_batches(
    target: Target, batches: Sequence[Sequence[Request]], observer: Observer | None
) -> list[RequestRecord]:
    start_s = asyncio.get_running_loop().time()
    records: list[RequestRecord] = []
    for batch in batches:
        records += await run_load(target, batch, ClosedLoop(len(batch)), observer=observer, start_s=start_s)
    return records


def result_file(runs: Sequence[MeasuredRun], settings: dict[str, Setting]) -> ResultFile:
    """What `--json` writes about `runs`."""
    return ResultFile(
        settings=settings,
        runs=[Run(run.summary, [RequestRow.of(record) for record in run.records], run.batch_size) for run in runs],
    )


def submitted_ids(runs: Sequence[MeasuredRun]) -> list[list[int] | None]:
    """The generated ids of every request in the order of submission; None for one that failed or sent no ids."""
    records = sorted((record for run in runs for record in run.records), key=lambda record: record.index)
    return [None if record.error is not None else record.token_ids for record in records]
