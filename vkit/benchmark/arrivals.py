"""When requests are sent: a closed loop keeps a number in flight, an open loop sends at a rate, come what may."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` requests in flight; one that ends makes room for the next."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """`request_rate` requests a second on average.

    `burstiness` is the shape of the gamma distribution of the gaps: 1 is a Poisson process, below 1 comes in bursts,
    above 1 is more even.
    """

    request_rate: float
    burstiness: float = 1.0


Arrivals = ClosedLoop | OpenLoop


def send_times(loop: OpenLoop, num_requests: int, seed: int) -> list[float]:
    """Seconds after the start at which each request is sent, rising from 0. Equal seeds give equal times.

    Gaps are gamma distributed with shape `burstiness` and mean `1 / request_rate`.
    """
    rng = random.Random(seed)
    times = [0.0]
    for _ in range(num_requests - 1):
        times.append(times[-1] + rng.gammavariate(loop.burstiness, 1.0 / (loop.request_rate * loop.burstiness)))
    return times[:num_requests]
