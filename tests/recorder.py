"""What stands in for CUDA graphs on a host: the work is called again, over the same memory, as it was first given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from vkit.graphs import NoHostReads

Run = Callable[[], None]


@dataclass
class CallRecorder:
    """Keeps the calls. As with a graph, nothing but what lies in memory may differ from one replay to the next."""

    warm_ups: int = 2
    is_strict: bool = False
    """Refuse host reads as for CUDA. The native kernels of the CPU do read: they check that ids are in range."""
    before_replay: Run | None = None
    error: Exception | None = None
    """Raised in place of capturing."""
    num_recorded: int = 0
    num_replayed: int = 0

    def watch(self) -> AbstractContextManager[object]:
        return NoHostReads() if self.is_strict else nullcontext()

    def record(self, run: Run) -> Run:
        for _ in range(self.warm_ups + 1):  # a capture runs the host's side once more
            run()
        if self.error is not None:
            raise self.error
        self.num_recorded += 1

        def replay() -> None:
            if self.before_replay is not None:
                self.before_replay()
            self.num_replayed += 1
            run()

        return replay
