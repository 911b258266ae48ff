"""A model that several ranks share, as the engine sees it: rank 0's share, and the others told to do the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from vkit.errors import EngineDeadError
from vkit.parallel.messages import Sleep, Step, WakeUp
from vkit.parallel.team import Team
from vkit.parallel.wire import PlanWriter, SentPlan
from vkit.sampled import SampledTokens
from vkit.sequence import Plan


class OwnShare(Protocol):
    """What rank 0 itself computes."""

    def prepare(self, plan: Plan) -> Any:
        """Host work of a step."""

    def execute(self, step: Any) -> Tensor:
        """Logits of a prepared step."""

    def sleep(self, level: int) -> None:
        """Give memory back."""

    def wake_up(self, tags: frozenset[str]) -> None:
        """Take memory again."""

    def close(self) -> None:
        """Free everything."""


@dataclass(frozen=True, slots=True)
class _SharedStep:
    own: Any
    sent: SentPlan


class SharedModel:
    """Runs steps on all ranks. An error of any ends the engine: the others would wait in the middle of a step."""

    copies_states = True

    def __init__(self, own: OwnShare, team: Team) -> None:
        self._own = own
        self._team = team
        self._writer = PlanWriter()

    def watch_with(self, on_failure: Callable[[EngineDeadError], None]) -> None:
        """Call `on_failure`, from another thread, if a rank is lost."""
        self._team.watch_with(on_failure)

    def prepare(self, plan: Plan, sampled: SampledTokens | None = None, /) -> _SharedStep:
        """Host work of a step, the message to the others included. Its tokens are known: nothing is launched ahead.

        Raises:
            EngineDeadError: it failed.
        """
        assert sampled is None, "the others are told tokens, which must be known"
        try:
            return _SharedStep(self._own.prepare(plan), self._writer.write(plan))
        except Exception as error:  # whatever it was, the others wait for a step that will not come
            raise self._team.blame(error) from error

    def execute(self, step: _SharedStep) -> Tensor:
        """Logits (R, V) float32 of a prepared step.

        Raises:
            EngineDeadError: a rank was lost, or failed.
        """
        self._team.send(Step(step.sent))
        try:
            return self._own.execute(step.own)
        except Exception as error:  # torch tells a lost rank by several types
            raise self._team.blame(error) from error

    def sleep(self, level: int) -> None:
        """Give up caches, and at level 2 the weights, on all ranks."""
        self._team.send(Sleep(level))
        self._own.sleep(level)

    def wake_up(self, tags: frozenset[str]) -> None:
        """Bring back "weights", "kv_cache" or both, on all ranks."""
        self._own.wake_up(tags)  # refuses what cannot be before anybody hears of it
        self._team.send(WakeUp(tags))
        self._writer = PlanWriter()

    def close(self) -> None:
        """Free everything and end the other ranks."""
        self._team.close()
        self._own.close()
