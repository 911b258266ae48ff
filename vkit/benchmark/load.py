"""Puts a load on a target and notes when tokens came. Times are those of the running event loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vkit.benchmark.arrivals import Arrivals, ClosedLoop, OpenLoop, send_times
from vkit.benchmark.statistics import Arrival, RequestRecord, apportion
from vkit.benchmark.targets import Request, Target, TargetEvent
from vkit.errors import VkitError

NO_USAGE = "the answer has no usage: its tokens cannot be counted"
Measure = Callable[[Request, float], Coroutine[Any, Any, RequestRecord]]
Now = Callable[[], float]


class Observer(Protocol):
    """Someone watching a run."""

    def sent(self) -> None:
        """A request went out."""

    def ended(self, record: RequestRecord) -> None:
        """A request completed or failed."""


class Silent:
    """An observer that does nothing."""

    def sent(self) -> None:
        """Nothing."""

    def ended(self, record: RequestRecord) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class _Timed:
    time_s: float
    event: TargetEvent


async def run_load(
    target: Target,
    requests: Sequence[Request],
    arrivals: Arrivals,
    *,
    seed: int = 0,
    observer: Observer | None = None,
    start_s: float | None = None,
) -> list[RequestRecord]:
    """One record for each request, in the order of `requests`. A request that fails ends alone; its record says why.

    Times in records count from `start_s` on the loop's clock, from now if None; `seed` draws the gaps of an open loop.
    """
    clock = asyncio.get_running_loop().time
    start = clock() if start_s is None else start_s
    watch = observer or Silent()

    async def measure(request: Request, scheduled_s: float) -> RequestRecord:
        record = RequestRecord(request.index, scheduled_s, clock() - start)
        watch.sent()
        await _fill(record, target, request, lambda: clock() - start)
        watch.ended(record)
        return record

    if isinstance(arrivals, ClosedLoop):
        return await _closed(requests, arrivals, measure, lambda: clock() - start)
    return await _open(requests, arrivals, seed, measure, lambda: clock() - start)


async def _closed(requests: Sequence[Request], loop: ClosedLoop, measure: Measure, now: Now) -> list[RequestRecord]:
    records: dict[int, RequestRecord] = {}
    queue = iter(enumerate(requests))

    async def serve() -> None:
        for position, request in queue:
            records[position] = await measure(request, now())

    async with asyncio.TaskGroup() as group:
        for _ in range(min(loop.concurrency, len(requests))):
            group.create_task(serve())
    return [records[position] for position in range(len(requests))]


async def _open(
    requests: Sequence[Request], loop: OpenLoop, seed: int, measure: Measure, now: Now
) -> list[RequestRecord]:
    tasks: list[asyncio.Task[RequestRecord]] = []
    async with asyncio.TaskGroup() as group:
        for request, time_s in zip(requests, send_times(loop, len(requests), seed), strict=True):
            await asyncio.sleep(max(0.0, time_s - now()))
            tasks.append(group.create_task(measure(request, time_s)))
    return [task.result() for task in tasks]


async def _fill(record: RequestRecord, target: Target, request: Request, now: Now) -> None:
    timed: list[_Timed] = []
    try:
        async for event in target.stream(request):
            timed.append(_Timed(now(), event))
    except VkitError as error:
        record.error = str(error)
    record.end_s = now()
    if record.error is None:
        _count(record, timed)


def _count(record: RequestRecord, timed: Sequence[_Timed]) -> None:
    """Write the token counts and arrivals of a completed request into `record`."""
    usage = next((item.event.usage for item in reversed(timed) if item.event.usage is not None), None)
    if usage is None:
        record.error = NO_USAGE
        return
    record.num_preemptions = max(item.event.num_preemptions for item in timed)
    record.drafts = timed[-1].event.drafts
    record.input_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
    split = _stated_split(timed, usage.completion_tokens)
    record.is_split_exact = split is not None
    record.arrivals = split if split is not None else _estimated_split(timed, usage.completion_tokens)
    ids = [item.event.token_ids for item in timed if item.event.token_ids is not None]
    record.token_ids = [token_id for part in ids for token_id in part] if ids else None


def _stated_split(timed: Sequence[_Timed], total: int) -> list[Arrival] | None:
    """The tokens of each event where nothing is left to guess, else None.

    Either the target stated them for every text and they sum to `total`, or there are as many texts as tokens.
    """
    texts = [item for item in timed if item.event.text_len]
    stated = [Arrival(item.time_s, item.event.num_tokens) for item in timed if item.event.num_tokens]
    if all(item.event.num_tokens is not None for item in texts) and sum(item.num_tokens for item in stated) == total:
        return stated
    return [Arrival(item.time_s, 1) for item in texts] if len(texts) == total else None


def _estimated_split(timed: Sequence[_Timed], total: int) -> list[Arrival]:
    """`total` tokens over the events with text, by its length; over the others only if none has any."""
    carrying = [item for item in timed if item.event.text_len] or [item for item in timed if item.event.num_tokens]
    counts = apportion(total, [item.event.text_len for item in carrying])
    return [Arrival(item.time_s, count) for item, count in zip(carrying, counts, strict=True) if count]
