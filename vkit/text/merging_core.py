"""Byte-pair encoding of text without added tokens: a little of it from tables, much of it by the tokenizer library."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models

from vkit.text.tables import MergeTables, TableMerger

SHORT_TEXT = 4096
"""Characters up to which a text is encoded from tables: some 10 microseconds for each, the library's model is built in
0.1 s."""
MANY_CHARACTERS = 4 * SHORT_TEXT
"""Characters after which the library's model is worth building for short texts too."""

Vocabulary = tuple[dict[str, int], Sequence[tuple[str, str]]]
"""Ids by spelling, and merges by falling priority."""


@dataclass(frozen=True, slots=True)
class Merging:
    """How a text becomes words, and words become tokens."""

    normalizer: Any
    pre_tokenizer: Any
    """The library's, or None."""
    takes_whole_words: bool = False
    """A word that is a token needs no merges."""
    falls_back_to_bytes: bool = False
    """Characters that are no token become the tokens of their bytes; with `unknown` those without such tokens too."""
    unknown: tuple[str, int] | None = None
    """Spelling and id of what stands for anything else."""

    def library(self, vocabulary: Vocabulary) -> LibraryTokenizer:
        """The library's tokenizer."""
        ids, merges = vocabulary
        model = models.BPE(
            vocab=ids if self.unknown is None else {**ids, self.unknown[0]: self.unknown[1]},
            merges=merges,
            ignore_merges=self.takes_whole_words,
            byte_fallback=self.falls_back_to_bytes,
            unk_token=None if self.unknown is None else self.unknown[0],
            fuse_unk=self.unknown is not None,
        )
        library = LibraryTokenizer(model)
        if self.normalizer is not None:
            library.normalizer = self.normalizer
        if self.pre_tokenizer is not None:
            library.pre_tokenizer = self.pre_tokenizer
        return library


class MergingCore:
    """Encodes texts. Safe to use from several threads."""

    def __init__(self, merging: Merging, source: Vocabulary | MergeTables) -> None:
        """With tables the library's model is built when it is worth it; without, at once."""
        self._merging = merging
        self._source = source
        self._making = threading.Lock()
        self._num_characters = 0
        self._merger: TableMerger | None = None
        self._library: LibraryTokenizer | None = None
        if isinstance(source, MergeTables):
            self._merger = TableMerger(
                source, takes_whole_words=merging.takes_whole_words, falls_back_to_bytes=merging.falls_back_to_bytes
            )
        else:
            self._library = merging.library(source)

    def __call__(self, text: str) -> list[int]:
        """The token ids of `text`."""
        library, merger = self._library, self._merger
        if library is None and merger is not None and len(text) <= SHORT_TEXT:
            self._num_characters += len(text)
            found = self._from_tables(text, merger) if self._num_characters <= MANY_CHARACTERS else None
            if found is not None:
                return found
        token_ids: list[int] = (library or self._built()).encode(text, add_special_tokens=False).ids
        return token_ids

    @property
    def uses_tables(self) -> bool:
        """Whether the library's model has not been needed yet."""
        return self._library is None

    def _from_tables(self, text: str, merger: TableMerger) -> list[int] | None:
        """The token ids of a text; None where only the library knows them."""
        if self._merging.normalizer is not None:
            text = self._merging.normalizer.normalize_str(text)
        words = [text]
        if self._merging.pre_tokenizer is not None:
            words = [word for word, _ in self._merging.pre_tokenizer.pre_tokenize_str(text)]
        token_ids: list[int] = []
        for word in words:
            found = merger.encode(word)
            if found is None:
                return None
            token_ids += found
        return token_ids

    def _built(self) -> LibraryTokenizer:
        with self._making:
            if self._library is None:
                assert isinstance(self._source, MergeTables)
                self._library = self._merging.library(self._source.vocabulary())
                self._merger = None
            return self._library
