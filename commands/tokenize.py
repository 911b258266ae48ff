"""`vkit tokenize`: token ids of a corpus, one line per entry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vkit.commands import _render
from vkit.errors import UsageError

ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}


def tokenize(
    tokenizer: Annotated[Path, typer.Argument(metavar="TOKENIZER", help="A tokenizer.json or a .gguf file.")],
    corpus: Annotated[
        Path,
        typer.Argument(
            metavar="CORPUS",
            help="Text file: one entry per line with escapes \\n \\r \\t \\\\; lines that begin with # are skipped.",
        ),
    ],
) -> None:
    """Print the token ids of each line of a corpus.

    EMPTY stands for none. No special tokens are added.
    """
    entries = read_corpus(corpus)
    if not tokenizer.is_file():
        raise UsageError(f"TOKENIZER: {tokenizer}: no such file")
    from vkit.text import open_tokenizer

    encode = open_tokenizer(tokenizer).encode
    for entry in entries:
        ids = encode(entry, add_special_tokens=False)
        _render.write_text((" ".join(map(str, ids)) or "EMPTY") + "\n")


def read_corpus(path: Path) -> list[str]:
    """The corpus entries, unescaped.

    Raises:
        UsageError: unreadable, not UTF-8, no newline at the end, or an unknown escape; names the line.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"CORPUS: {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"CORPUS: {path}: not UTF-8 text at byte {error.start}") from None
    if text and not text.endswith("\n"):
        raise UsageError(f"CORPUS: {path}: the last line does not end with a newline")
    lines = text.split("\n")[:-1]
    return [unescape(line, f"{path}:{i}") for i, line in enumerate(lines, 1) if not line.startswith("#")]


def unescape(line: str, place: str) -> str:
    r"""`line` with \n \r \t \\ replaced by what they stand for.

    Raises:
        UsageError: any other escape.
    """
    parts: list[str] = []
    rest = iter(line)
    for character in rest:
        if character != "\\":
            parts.append(character)
            continue
        escape = next(rest, "")
        if escape not in ESCAPES:
            raise UsageError(f"CORPUS: {place}: unknown escape \\{escape}", remedy=r"known: \n \r \t \\")
        parts.append(ESCAPES[escape])
    return "".join(parts)
