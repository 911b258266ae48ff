"""The prompts of a run: made up from a seed, or read from a file.

Knows files and random numbers. It does not know who answers the prompts: generated ones are drawn from an alphabet that
the target names (token ids of an engine in this process, words for a server elsewhere).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vkit.errors import UsageError

T = TypeVar("T")

PROMPT_KEYS = ("prompt", "text")
OUTPUT_LEN_KEYS = ("output_len", "max_tokens")


class DatasetKind(StrEnum):
    """Where prompts come from."""

    RANDOM = "random"
    SHAREGPT = "sharegpt"
    JSONL = "jsonl"
    SHARED_PREFIX = "shared-prefix"

    @property
    def is_file(self) -> bool:
        """Whether prompts are read from a file instead of made up."""
        return self in (DatasetKind.SHAREGPT, DatasetKind.JSONL)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as text or as token ids. `output_len` is the entry's own wish, None when it has none."""

    content: str | tuple[int, ...]
    output_len: int | None = None


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """Prompts of a file in its order, and one line for each thing in the file that is not used."""

    prompts: list[Prompt]
    notes: list[str]


def kind_of_file(path: Path) -> DatasetKind:
    """The data set kind that a file's name tells: `.jsonl` is JSONL, anything else ShareGPT."""
    return DatasetKind.JSONL if path.suffix.lower() == ".jsonl" else DatasetKind.SHAREGPT


def random_sequences(alphabet: Sequence[T], lengths: Sequence[int], seed: int) -> list[list[T]]:
    """One sequence of random members of `alphabet` for each length. Equal seeds give equal sequences."""
    rng = random.Random(seed)
    return [rng.choices(alphabet, k=length) for length in lengths]


def shared_prefix_sequences(
    alphabet: Sequence[T], num_prompts: int, length: int, prefix_len: int, num_prefixes: int, seed: int
) -> list[list[T]]:
    """`num_prompts` sequences of `length`; the first `prefix_len` of each are one of `num_prefixes` beginnings."""
    rng = random.Random(seed)
    prefixes = [rng.choices(alphabet, k=prefix_len) for _ in range(num_prefixes)]
    return [prefixes[i % num_prefixes] + rng.choices(alphabet, k=length - prefix_len) for i in range(num_prompts)]


def load_prompts(kind: DatasetKind, path: Path) -> LoadedPrompts:
    """All prompts of a file.

    Raises:
        UsageError: the file cannot be read, is damaged, or holds no prompt; the message names file, place and fault.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--dataset-path: {path}: {error.strerror or error}") from error
    loaded = _sharegpt(raw, path) if kind is DatasetKind.SHAREGPT else _jsonl(raw, path)
    if not loaded.prompts:
        raise UsageError(f"{path}: no prompt in this {kind} file")
    return loaded


def _sharegpt(raw: bytes, path: Path) -> LoadedPrompts:
    """The first turn of every entry. Entries without one, or with a blank one, are left out and counted in a note."""
    entries = _json(raw, str(path), remedy="a file of one JSON object a line is --dataset jsonl")
    if not isinstance(entries, list):
        raise UsageError(f"{path}: a ShareGPT file is a JSON list of entries, got {_kind(entries)}")
    turns = [_first_turn(entry, f"{path}: entry {index}") for index, entry in enumerate(entries)]
    prompts = [Prompt(turn) for turn in turns if turn.strip()]
    skipped = len(turns) - len(prompts)
    return LoadedPrompts(prompts, [f"{path}: {skipped} entries without a first turn are left out"] if skipped else [])


def _first_turn(entry: Any, where: str) -> str:
    turns = (
        next((entry[key] for key in ("conversations", "conversation") if key in entry), None)
        if isinstance(entry, dict)
        else None
    )
    if not isinstance(turns, list):
        raise UsageError(f'{where}: expected an object with a list "conversations", got {_kind(entry)}')
    if not turns:
        return ""
    turn = turns[0]
    text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
    if not isinstance(text, str):
        raise UsageError(f'{where}: its first turn has no text in "value" or "content"')
    return text


def _jsonl(raw: bytes, path: Path) -> LoadedPrompts:
    """One object a line: `prompt` or `text` (text or token ids), optionally `output_len` or `max_tokens`."""
    prompts: list[Prompt] = []
    unused: dict[str, None] = {}
    for number, line in enumerate(raw.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        entry = _json(line, where)
        if not isinstance(entry, dict):
            raise UsageError(f'{where}: expected an object with "prompt", got {_kind(entry)}')
        prompts.append(Prompt(_jsonl_content(entry, where), _jsonl_output_len(entry, where)))
        unused.update(dict.fromkeys(key for key in entry if key not in PROMPT_KEYS + OUTPUT_LEN_KEYS))
    return LoadedPrompts(prompts, [f"{path}: not used: {', '.join(sorted(unused))}"] if unused else [])


def _jsonl_content(entry: dict[str, Any], where: str) -> str | tuple[int, ...]:
    content = _one_of(entry, PROMPT_KEYS, where)
    if isinstance(content, str) and content:
        return content
    if isinstance(content, list) and content and all(type(item) is int and item >= 0 for item in content):
        return tuple(content)
    raise UsageError(f'{where}: expected "prompt" with a text or a list of token ids, not empty')


def _jsonl_output_len(entry: dict[str, Any], where: str) -> int | None:
    value = _one_of(entry, OUTPUT_LEN_KEYS, where)
    if value is not None and (type(value) is not int or value < 1):
        raise UsageError(f"{where}: output_len: expected a number of tokens of at least 1, got {value!r}")
    return value


def _one_of(entry: dict[str, Any], keys: Sequence[str], where: str) -> Any:
    given = [key for key in keys if key in entry]
    if len(given) > 1:
        raise UsageError(f"{where}: {' and '.join(given)} say the same thing; give one")
    return entry[given[0]] if given else None


def _json(raw: bytes, where: str, *, remedy: str | None = None) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{where}: not JSON: {error}", remedy=remedy) from error


def _kind(value: Any) -> str:
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    return names.get(type(value), f"{value!r}")


def pick(prompts: Sequence[Prompt], wanted: int | None, default: int, *, where: str) -> list[Prompt]:
    """The first `wanted` prompts; without a wish the first `default`, or all if there are fewer.

    Raises:
        UsageError: more are wanted than there are. Repeating them would measure the prefix cache.
    """
    if wanted is not None and wanted > len(prompts):
        raise UsageError(f"{where}: holds {len(prompts)} prompts, {wanted} are asked for")
    return list(prompts[: wanted or default])


Calibration = Callable[[int], int]
"""Number of tokens wanted -> number of words that make about as many."""


def word_calibration(samples: Sequence[tuple[int, int]]) -> Calibration:
    """How many words to write for a wanted number of tokens, from two (words, prompt tokens) measurements.

    A prompt costs a fixed part (special tokens, a chat template) and a part per word; two measurements give both. When
    they do not tell the parts apart, one token a word is assumed.
    """
    (words_a, tokens_a), (words_b, tokens_b) = samples
    if words_a == words_b or tokens_b <= tokens_a:
        return lambda num_tokens: num_tokens
    per_word = (tokens_b - tokens_a) / (words_b - words_a)
    fixed = tokens_a - per_word * words_a
    return lambda num_tokens: max(1, round((num_tokens - fixed) / per_word))


_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education foot boy age policy process music market sense nation plan "
    "college interest death experience effect use class control field development role effort rate heart drug show "
    "leader light voice wife police mind price report decision son view town road arm difference value building "
    "action season society tax director paper space ground form support event official matter center couple site "
    "project base activity star table court produce oil situation cost industry figure street image phone data "
    "picture practice piece land product doctor wall patient worker news test movie north love step"
)
WORDS: tuple[str, ...] = tuple(_WORDS.split())
"""Common words, most of them one token in most vocabularies: the alphabet of prompts for a server elsewhere."""
