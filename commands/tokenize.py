"""`vkit tokenize`: token ids of a corpus, one line per entry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vkit.commands import _render
from vkit.errors import UsageError


def tokenize(
    tokenizer: Annotated[Path, typer.Argument(metavar="TOKENIZER", help="A tokenizer.json or a .gguf file.")],
    corpus: Annotated[
        Path,
        typer.Argument(
            metavar="CORPUS",
            help="Text, one entry per line, with the escapes \\n \\r \\t \\\\; lines that begin with # are skipped.",
        ),
    ],
) -> None:
    """Print the token ids of each line of a corpus.

    EMPTY stands for none. No special tokens are added.
    """
    content = _text_of(corpus)
    if not tokenizer.exists():
        raise UsageError(f"TOKENIZER: {tokenizer}: no such file")
    from vkit.text.corpus import encode_corpus, format_ids
    from vkit.text.tokenizer import load_tokenizer

    for token_ids in encode_corpus(load_tokenizer(tokenizer), content):
        _render.write_text(format_ids(token_ids) + "\n")


def _text_of(corpus: Path) -> str:
    try:
        return corpus.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"CORPUS: {corpus}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"CORPUS: {corpus}: not UTF-8 text at byte {error.start}") from None
