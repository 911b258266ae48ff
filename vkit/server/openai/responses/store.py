"""Responses kept for later requests: bounded by number and age, never evicting one that is under way."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vkit.server.openai.responses.job import ResponseJob
    from vkit.server.schema import Json


class ResponseStore:
    """Least recently used goes first."""

    def __init__(self, max_entries: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self._clock = clock
        self._jobs: OrderedDict[str, tuple[float, ResponseJob]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, response_id: str) -> bool:
        return self.get(response_id) is not None

    def put(self, job: ResponseJob) -> None:
        """Keep a response."""
        self._jobs[job.response.id] = (self._clock(), job)
        self._evict()

    def get(self, response_id: str) -> ResponseJob | None:
        """The response, if it is still kept."""
        self._drop_old()
        found = self._jobs.get(response_id)
        if found is None:
            return None
        self._jobs.move_to_end(response_id)
        return found[1]

    def delete(self, response_id: str) -> None:
        """Forget a response."""
        self._jobs.pop(response_id, None)

    def find_item(self, item_id: str) -> Json | None:
        """An input or output item of any kept response."""
        for _, job in reversed(self._jobs.values()):
            for item in (*job.response.output, *job.input_items):
                if item.get("id") == item_id:
                    return item
        return None

    def _drop_old(self) -> None:
        if not self._ttl_s:
            return
        limit = self._clock() - self._ttl_s
        for response_id, (since, job) in list(self._jobs.items()):
            if since < limit and job.is_done:
                del self._jobs[response_id]

    def _evict(self) -> None:
        self._drop_old()
        excess = len(self._jobs) - self._max_entries
        for response_id in [key for key, (_, job) in self._jobs.items() if job.is_done][: max(0, excess)]:
            del self._jobs[response_id]
