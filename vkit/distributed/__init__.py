"""What ranks that share a model need of each other: layers know `Ranks`, and only `groups` knows torch's groups."""

from __future__ import annotations

from vkit.distributed.ranks import ALONE, CannotShare, Communicator, Ranks

__all__ = ["ALONE", "CannotShare", "Communicator", "Ranks"]
