"""Tokenizers to follow grammars with, vectors, and feeding text as tokens or bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vkit.sequence import Grammar
from vkit.text.tokenizer import Tokenizer
from vkit.text.vocabulary import Vocabulary
from vkit.types import StructuredOutputs

SHARED = Path(__file__).parents[2] / ".." / "shared"
ANY_WHITESPACE = r"[ \n\t\r]*"
BOS_ID, EOS_ID = 256, 257


class _GreedyEncoder:
    """Longest merged text first, else bytes: merges may cut characters anywhere."""

    def __init__(self, merges: Sequence[bytes]) -> None:
        self._merges = sorted(((text, 258 + i) for i, text in enumerate(merges)), key=lambda item: -len(item[0]))

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids, rest = [], text.encode()
        while rest:
            piece, token_id = next((item for item in self._merges if rest.startswith(item[0])), (rest[:1], rest[0]))
            ids.append(token_id)
            rest = rest[len(piece) :]
        return ids


def bytes_tokenizer(merges: Sequence[bytes] = ()) -> Tokenizer:
    """One token per byte, BOS, EOS, and merged tokens of any bytes."""
    pieces = [*(f"<{value}>" for value in range(256)), "<bos>", "<eos>", *(f"<m{i}>" for i in range(len(merges)))]
    spelt = {f"<m{i}>": data for i, data in enumerate(merges)}
    special = frozenset({BOS_ID, EOS_ID})
    vocabulary = Vocabulary(
        size=len(pieces),
        piece=lambda token_id: pieces[token_id] if token_id < len(pieces) else None,
        added_ids=special,
        special_ids=special,
        spell=lambda piece: spelt[piece],
        byte_values={value: value for value in range(256)},
    )
    return Tokenizer(_GreedyEncoder(merges), vocabulary, bos_token_id=BOS_ID, eos_token_id=EOS_ID)


MERGES = [
    *('{"', '":', '", "', '"}', ' "', "\\/", "\\\\", '\\"', "a\\", "//", "/", "id", "title", "12", "ab", "abc"),
]
CUTTING_MERGES = [text.encode() for text in MERGES] + [
    # Halves of characters glued to what stands beside them: é, 日本, 🌊.
    *(b'"\xc3', b'\xa9"', b"\xe6\x97", b"\xa5\xe6\x9c", b"\xac", b"\xf0\x9f", b"\x8c\x8a", b"\xe3\x81", b"\xaf\xe3"),
]


def vectors(name: str) -> list[Any]:
    """The cases of one file of vectors."""
    cases: list[Any] = json.loads((SHARED / "vectors" / name).read_text(encoding="utf-8"))
    return cases


def constraint_of(case: dict[str, Any]) -> StructuredOutputs:
    """The constraint a case of vectors/structured asks for."""
    kind, spec = case["kind"], case["spec"]
    match kind:
        case "json_schema":
            return StructuredOutputs(json=spec, whitespace_pattern=ANY_WHITESPACE)
        case "json_object":
            return StructuredOutputs(json_object=True, whitespace_pattern=ANY_WHITESPACE)
        case "gbnf" | "lark":
            return StructuredOutputs(grammar=spec)
        case _:
            return StructuredOutputs(**{kind: spec})


def allowed(grammar: Grammar, vocab_size: int) -> set[int]:
    """The ids a grammar allows next."""
    row = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    grammar.fill_bitmask(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def follows(grammar: Grammar, tokenizer: Tokenizer, token_ids: Sequence[int]) -> bool:
    """Whether the tokens are accepted one by one and the output may end after the last."""
    return all(grammar.accept_tokens([token_id]) for token_id in token_ids) and may_end(grammar, tokenizer)


def may_end(grammar: Grammar, tokenizer: Tokenizer) -> bool:
    """Whether the end is allowed now, by the mask and by acceptance alike."""
    assert tokenizer.eos_token_id is not None
    by_mask = tokenizer.eos_token_id in allowed(grammar, tokenizer.vocab_size)
    assert (grammar.validate_tokens([tokenizer.eos_token_id]) != []) == by_mask
    return by_mask
