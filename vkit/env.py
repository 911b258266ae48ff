"""The VKIT_* environment: every variable that is not a flag, declared, parsed and documented once.

Every command-line flag can also be set as `VKIT_<FLAG>`; `flag_variable` gives that name and `vkit.command` reads it.
The variables declared here have no flag. A malformed value stops the program.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vkit.errors import UsageError

PREFIX = "VKIT_"
TRUE_WORDS = ("1", "true")
FALSE_WORDS = ("0", "false")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Variable(Generic[T]):
    """One environment variable. `parse` raises ValueError saying what was expected."""

    name: str
    parse: Callable[[str], T]
    default: T
    summary: str

    def read(self, environ: Mapping[str, str] = os.environ) -> T:
        """The parsed value, or the default when the variable is not set.

        Raises:
            UsageError: a value that cannot be parsed; the message names the variable.
        """
        text = environ.get(self.name)
        if text is None:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise UsageError(f"{self.name}: {error}, got {text!r}") from None


def parse_bool(text: str) -> bool:
    """True for 1 or true, False for 0 or false, in any case.

    Raises:
        ValueError: anything else.
    """
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError("expected 1, 0, true or false")


def parse_distributions(text: str) -> tuple[str, ...]:
    """Distribution names from a comma-separated list, normalised; empty text gives none.

    Raises:
        ValueError: an entry that no distribution can be called.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", name):
            raise ValueError("expected distribution names separated by commas")
    return tuple(normalised(name) for name in names)


def parse_names(text: str) -> tuple[str, ...]:
    """Names from a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_port(text: str) -> int:
    """A TCP port.

    Raises:
        ValueError: anything else.
    """
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ValueError("expected a port, 1..65535")
    return int(text)


def normalised(distribution: str) -> str:
    """A distribution's name as comparisons need it. Source: PEP 503."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def flag_variable(flag: str) -> str:
    """The environment variable that sets a flag: `--max-tokens` gives `VKIT_MAX_TOKENS`."""
    return PREFIX + flag.lstrip("-").replace("-", "_").upper()


PLUGINS: Variable[tuple[str, ...] | None] = Variable(
    "VKIT_PLUGINS",
    parse_distributions,
    None,
    "Distributions whose plug-ins load, separated by commas; empty: none but the built-in ones. Not set: all.",
)
TRACEBACK: Variable[bool] = Variable(
    "VKIT_TRACEBACK",
    parse_bool,
    False,
    "1 prints the whole traceback of an error, for bug reports.",
)
TOKENIZER_CACHE: Variable[bool] = Variable(
    "VKIT_TOKENIZER_CACHE",
    parse_bool,
    True,
    "0 keeps no tables of a GGUF file's vocabulary in the cache folder, and reads none: every start builds them.",
)
CPU_LEVEL: Variable[str | None] = Variable(
    "VKIT_CPU_LEVEL",
    str,
    None,
    "A lower level of the CPU kernels than the best this processor has: scalar, avx2, avx512vnni or amx.",
)

NIM_SERVED_MODEL_NAME: Variable[tuple[str, ...]] = Variable(
    "NIM_SERVED_MODEL_NAME",
    parse_names,
    (),
    "Names of a served model, separated by commas, where neither --served-model-name nor its variable is given.",
)

LMCACHE_HOST: Variable[str] = Variable(
    "VKIT_LMCACHE_HOST", str, "127.0.0.1", "Host of LMCacheConnector's server, where --kv-transfer-config names none."
)
LMCACHE_PORT: Variable[int] = Variable(
    "VKIT_LMCACHE_PORT", parse_port, 65432, "Port of LMCacheConnector's server, where --kv-transfer-config names none."
)
LMCACHE_HASH_ALGO: Variable[str] = Variable(
    "VKIT_LMCACHE_HASH_ALGO",
    str,
    "blake3",
    "How LMCacheConnector names chunks, where --kv-transfer-config does not say: blake3, or vllm (sha256_cbor).",
)

VARIABLES: tuple[Variable[Any], ...] = (
    PLUGINS,
    TRACEBACK,
    TOKENIZER_CACHE,
    CPU_LEVEL,
    NIM_SERVED_MODEL_NAME,
    LMCACHE_HOST,
    LMCACHE_PORT,
    LMCACHE_HASH_ALGO,
)
"""Every variable without a flag, in the order the manual lists them."""
