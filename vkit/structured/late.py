"""The grammar compiler, imported with the first constraint: most programs never see one."""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING

from vkit.sequence import Grammar
from vkit.types import StructuredOutputs

if TYPE_CHECKING:
    from vkit.structured.compiler import GrammarCompiler
    from vkit.structured.vocabulary import TokenSource


class LateCompiler:
    """A `GrammarCompiler` that is made when it is needed. May be used from any thread."""

    def __init__(self, tokenizer: TokenSource, end_ids: Collection[int]) -> None:
        """As for `GrammarCompiler`."""
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._making = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    def compile(self, constraint: StructuredOutputs) -> Future[Grammar]:
        """A grammar of its own for one sequence; the future fails with InvalidRequest when it cannot be enforced."""
        with self._making:
            if self._compiler is None:
                from vkit.structured.compiler import GrammarCompiler

                self._compiler = GrammarCompiler(self._tokenizer, self._end_ids)
        return self._compiler.compile(constraint)

    def close(self) -> None:
        """Stop the compiler, if there is one."""
        with self._making:
            if self._compiler is not None:
                self._compiler.close()
