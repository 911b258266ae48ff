"""What rank 0 and the others say to each other over a channel."""

from __future__ import annotations

from dataclasses import dataclass

from vkit.config import EngineConfig
from vkit.parallel.wire import SentPlan


@dataclass(frozen=True, slots=True)
class Start:
    """To a follower: load this model. Paths are rank 0's, unless the follower was given its own."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Step:
    """To a follower: run this plan."""

    plan: SentPlan


@dataclass(frozen=True, slots=True)
class Sleep:
    """To a follower: give memory back."""

    level: int


@dataclass(frozen=True, slots=True)
class WakeUp:
    """To a follower: take memory again."""

    tags: frozenset[str]


@dataclass(frozen=True, slots=True)
class Close:
    """To a follower: end."""


@dataclass(frozen=True, slots=True)
class Ready:
    """From a follower: the model is in memory."""


@dataclass(frozen=True, slots=True)
class Failed:
    """From a follower, its last words."""

    reason: str
    details: str | None = None
    """Where it happened, if that was not to be expected."""
    is_echo: bool = False
    """Whether it only noticed that another rank was lost, which has more to say."""


ToFollower = Start | Step | Sleep | WakeUp | Close
FromFollower = Ready | Failed
