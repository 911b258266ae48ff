"""Every error vkit shows to a person, with the exit status it ends the program with.

This module imports nothing of ours. Messages say what was given, what was expected and what to do.
"""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """Exit status of the `vkit` program."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    INTERRUPTED = 130


class VkitError(Exception):
    """Root of all errors a user can meet. `remedy`, if given, says in one clause what to do about it."""

    exit_status = ExitStatus.FAILURE

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class UsageError(VkitError):
    """A flag, an environment variable or a configuration value that cannot be used."""

    exit_status = ExitStatus.USAGE


class MissingExtra(UsageError):
    """An optional dependency is needed. The message names the extra that brings it."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the optional dependency set {extra!r}", remedy=f"pip install 'vkit[{extra}]'"
        )
        self.extra = extra


class InvalidRequest(VkitError):
    """A request that can never be served: 400 over HTTP, exit 2 on the command line.

    `param` is the name of the offending field, as the client spells it, or None when no single field is to blame.
    """

    exit_status = ExitStatus.USAGE

    def __init__(self, message: str, *, param: str | None = None, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.param = param


class RequestFailed(VkitError):
    """One request ended in an error of its own while the engine went on."""


class ModelLoadError(VkitError):
    """The model cannot be loaded: unsupported architecture, quantisation, or device."""


class CheckpointError(ModelLoadError):
    """A model file is missing, damaged or contradicts itself. The message names file and fault."""


class OutOfMemoryPreflight(ModelLoadError):
    """The model and one sequence of its context do not fit in memory; raised before weights are read."""


class EngineDeadError(VkitError):
    """The engine met a failure it cannot attribute to one request and has stopped."""
