"""Tokenizers rebuilt from the metadata of a GGUF file. Takes a plain mapping of keys; reads no file itself.

Source: the GGUF specification (tokenizer.ggml.*) and the behaviour of llama.cpp, to whose token ids these are equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from vkit.errors import CheckpointError, ModelLoadError
from vkit.text.merging_core import Merging, MergingCore
from vkit.text.merging_core import Vocabulary as MergedVocabulary
from vkit.text.pretokenizers import LINES, WHOLE_WORDS_FIRST, patterns_for
from vkit.text.score_merging import ScoreMerger
from vkit.text.settings import DEFAULT_TEMPLATE, TokenizerSettings
from vkit.text.table_cache import MIN_TOKENS, keep_tables, kept_tables, table_key
from vkit.text.tables import MergeTables
from vkit.text.tokenizer import Tokenizer
from vkit.text.vocabulary import WORD_START, Vocabulary, byte_level_bytes, sentencepiece_bytes

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of tokenizer.ggml.token_type."""

_SENTENCEPIECE_KINDS = (NORMAL, USER_DEFINED, UNUSED, BYTE)
"""The tokens that text becomes by merging, where user-defined ones do too."""

_Core = Callable[[str], list[int]]
"""Encodes a text without added tokens."""

_MODELS = ("gpt2", "llama", "gemma4")
_PREFIX = "tokenizer.ggml."
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>"),
        *("<|end_of_text|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>"),
        *("<｜end▁of▁sentence｜>", "<end_of_utterance>", "<|return|>", "<|call|>"),
    }
)
"""Texts of control and user-defined tokens that end a generation."""

_CHANNEL_END_TEXTS = frozenset({"<|return|>", "<|call|>"})
"""In a vocabulary with one of these, <|end|> only ends a part of the answer."""

# White space as the tokenizer library sees it; str.strip() would also take U+001C to U+001F.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


@dataclass(frozen=True)
class GGUFVocabulary:
    """The tokenizer part of a file's metadata, checked."""

    values: Mapping[str, Any]
    architecture: str
    origin: str

    @cached_property
    def model(self) -> str:
        model = self.values.get(_PREFIX + "model")
        if model is None:
            raise CheckpointError(f"{self.origin}: the file holds no tokenizer (no {_PREFIX}model)")
        if model not in _MODELS:
            raise ModelLoadError(
                f"{self.origin}: tokenizer model {model!r} is not supported (supported: {', '.join(_MODELS)})"
            )
        return str(model)

    @cached_property
    def pre(self) -> str | None:
        pre = self.values.get(_PREFIX + "pre")
        return None if pre is None else str(pre)

    @cached_property
    def table_key(self) -> str | None:
        """The name under which tables of this vocabulary are kept; None: they are not."""
        return table_key(self.values)

    @cached_property
    def tables(self) -> MergeTables | None:
        """The tables kept at an earlier start, if any."""
        return None if self.table_key is None else kept_tables(self.table_key)

    @cached_property
    def tokens(self) -> Sequence[str]:
        return self._array("tokens") if self.tables is None else self.tables.tokens

    @cached_property
    def types(self) -> npt.NDArray[Any]:
        if self.values.get(_PREFIX + "token_type") is None and self.model == "gpt2":
            return np.full(len(self.tokens), NORMAL)
        return np.asarray(self._array("token_type", len(self.tokens)))

    @cached_property
    def scores(self) -> list[float]:
        found = self._array("scores", len(self.tokens))
        return found if isinstance(found, list) else list(found.tolist())

    @cached_property
    def merges(self) -> Sequence[str]:
        if _PREFIX + "merges" not in self.values and all(len(self.tokens[i]) <= 1 for i in self.ids_of(NORMAL)):
            return []  # single characters only: nothing to merge, and writers leave empty lists out
        merges: list[str] = self._array("merges")
        return merges

    def ids_of(self, *types: int) -> list[int]:
        """Ids of the tokens of these types, rising."""
        ids: list[int] = np.flatnonzero(np.isin(self.types, types)).tolist()
        return ids

    def texts_of(self, *types: int) -> dict[str, int]:
        """Id by text of the tokens of these types; of equal texts the last one counts, as in llama.cpp.

        Texts that were not UTF-8 are left out: no text can hold them.
        """
        tokens = self.tokens
        return {tokens[i]: i for i in self.ids_of(*types) if tokens[i] and _is_unicode(tokens[i])}

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(_PREFIX + key)
        return default if value is None else bool(value)

    def token_id(self, role: str) -> int | None:
        value = self.values.get(f"{_PREFIX}{role}_token_id")
        if value is None:
            return None
        if not 0 <= int(value) < len(self.tokens):
            raise CheckpointError(
                f"{self.origin}: {_PREFIX}{role}_token_id is {value}, the vocabulary has {len(self.tokens)} tokens"
            )
        return int(value)

    def _array(self, key: str, length: int | None = None) -> Any:
        value = self.values.get(_PREFIX + key)
        if value is None:
            raise CheckpointError(f"{self.origin}: {_PREFIX}{key} is missing, tokenizer model {self.model!r} needs it")
        items: Any = value
        if length is not None and len(items) != length:
            raise CheckpointError(f"{self.origin}: {_PREFIX}{key} has {len(items)} entries for {length} tokens")
        return items


def tokenizer_from_gguf(
    metadata: Mapping[str, Any],
    *,
    architecture: str,
    settings: TokenizerSettings | None = None,
    origin: str = "GGUF metadata",
) -> Tokenizer:
    """The tokenizer described by `metadata` (raw keys such as tokenizer.ggml.tokens).

    `settings`, if given, wins over the metadata in what it says; `origin` names the file in messages.

    Raises:
        CheckpointError: a needed key is missing or contradicts another.
        ModelLoadError: a tokenizer model that is not supported; the message names it.
    """
    data = GGUFVocabulary(metadata, architecture, origin)
    build = {"gpt2": _byte_level_core, "llama": _sentencepiece_core, "gemma4": _character_core}[data.model]
    user_texts, all_texts = data.texts_of(USER_DEFINED), data.texts_of(UNKNOWN, CONTROL, USER_DEFINED)
    encoder = _CutEncoder(build(data), user_texts, all_texts, _swallowing_ids(data))
    settings = settings or TokenizerSettings()
    bos = _role_id(data, "bos", settings.bos_token)
    eos = _role_id(data, "eos", settings.eos_token)
    default_bos = data.model == "llama" or data.pre in WHOLE_WORDS_FIRST
    adds_bos = _first(settings.add_bos, data.flag("add_bos_token", default_bos))
    adds_eos = _first(settings.add_eos, data.flag("add_eos_token", False))
    return Tokenizer(
        encoder,
        _vocabulary(data),
        prefix=[bos] if adds_bos and bos is not None else [],
        suffix=[eos] if adds_eos and eos is not None else [],
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=_end_ids(data),
        chat_templates={**_chat_templates(metadata), **settings.chat_templates},
        settings=settings.raw,
    )


class _CutEncoder:
    """Cuts text at added tokens and hands what lies between to `core`, which knows none of them."""

    def __init__(
        self,
        core: _Core,
        always: Mapping[str, int],
        with_special: Mapping[str, int],
        swallows_space: frozenset[int],
    ) -> None:
        self._core = core
        self._always = always
        self._with_special = with_special
        self._swallows_space = swallows_space

    @cached_property
    def _plain_cutter(self) -> _Cutter:
        return _Cutter(self._always)

    @cached_property
    def _special_cutter(self) -> _Cutter:
        return _Cutter(self._with_special)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        cutter = self._special_cutter if parse_special else self._plain_cutter
        token_ids: list[int] = []
        swallow = False
        for part in cutter.cut(text):
            if isinstance(part, int):
                token_ids.append(part)
                swallow = part in self._swallows_space
                continue
            if swallow:
                part = part.lstrip(_WHITE_SPACE)
            token_ids += self._core(part)
        return token_ids


class _Cutter:
    """Finds the texts of tokens inside a text: leftmost first, the longest at a position."""

    _GAP = "gap"

    def __init__(self, tokens: Mapping[str, int]) -> None:
        # A word-level tokenizer whose only word is "anything else": the library's own automaton does the search.
        self._ids = [-1, *tokens.values()]
        self._finder = LibraryTokenizer(models.WordLevel({self._GAP: 0}, unk_token=self._GAP))
        if self._GAP in tokens:
            raise CheckpointError(f"a special token has the text {self._GAP!r}, which this program keeps for itself")
        self._finder.add_tokens([AddedToken(text, normalized=False) for text in tokens])

    def cut(self, text: str) -> Iterator[str | int]:
        """The text between tokens, and the ids of the tokens, in order."""
        if len(self._ids) == 1:
            if text:
                yield text
            return
        found = self._finder.encode(text, add_special_tokens=False)
        for index, (start, end) in zip(found.ids, found.offsets, strict=True):
            yield self._ids[index] if index else text[start:end]


def _byte_level_core(data: GGUFVocabulary) -> _Core:
    """Byte-level BPE: cut by regular expressions, write bytes in the byte alphabet, merge by rank."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns_for(data.pre)]
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merging = Merging(
        None, pre_tokenizers.Sequence([*splits, alphabet]), takes_whole_words=data.pre in WHOLE_WORDS_FIRST
    )
    return _merging_core(data, merging, lambda: _file_merges(data))


def _character_core(data: GGUFVocabulary) -> _Core:
    """BPE on characters with bytes as the last resort (gemma4): lines are cut apart, spaces are U+2581."""
    lines = pre_tokenizers.Split(Regex(LINES[0]), "isolated")
    merging = Merging(normalizers.Replace(" ", WORD_START), lines, falls_back_to_bytes=True, unknown=_unknown(data))
    return _merging_core(data, merging, lambda: _file_merges(data))


def _sentencepiece_core(data: GGUFVocabulary) -> _Core:
    """SentencePiece BPE: the pair whose union has the highest score merges first, with bytes as the last resort."""
    has_prefix = has_space_prefix(data)
    spaces = normalizers.Replace(" ", WORD_START)
    normalizer = normalizers.Sequence([normalizers.Prepend(WORD_START), spaces]) if has_prefix else spaces
    merging = Merging(normalizer, None, falls_back_to_bytes=True, unknown=_unknown(data))
    ranked = None if data.tables is not None else merges_by_score(data)
    if data.tables is None and ranked is None:
        return _score_merger(data, data.texts_of(*_SENTENCEPIECE_KINDS), has_prefix).encode
    return _merging_core(data, merging, lambda: (data.texts_of(*_SENTENCEPIECE_KINDS), ranked or []))


def _merging_core(data: GGUFVocabulary, merging: Merging, work_out: Callable[[], MergedVocabulary]) -> _Core:
    """Encodes from the tables kept at an earlier start, or else by what `work_out` makes of the file."""
    if data.tables is not None:
        return MergingCore(merging, data.tables)
    ids, merges = work_out()
    if data.table_key is not None and len(data.tokens) >= MIN_TOKENS:
        keep_tables(data.table_key, MergeTables.build(data.tokens, ids, merges))
    return MergingCore(merging, (ids, merges))


def _score_merger(data: GGUFVocabulary, vocab: Mapping[str, int], has_prefix: bool) -> ScoreMerger:
    return ScoreMerger(
        scores={data.tokens[i]: data.scores[i] for i in data.ids_of(NORMAL)},
        ids={text: i for text, i in vocab.items() if data.types[i] != BYTE},
        byte_ids={value: token_id for token_id, value in _byte_values(data).items()},
        unknown_id=data.token_id("unknown"),
        has_prefix=has_prefix,
    )


def _unknown(data: GGUFVocabulary) -> tuple[str, int] | None:
    """Spelling and id of the token for what no other stands for."""
    unknown = data.token_id("unknown")
    return None if unknown is None or not _is_unicode(data.tokens[unknown]) else (data.tokens[unknown], unknown)


def _file_merges(data: GGUFVocabulary) -> MergedVocabulary:
    """Ids by spelling, and the file's merges as pairs.

    Merges that name control tokens or broken texts can never apply and are left out.
    """
    vocab = data.texts_of(NORMAL, UNUSED, BYTE)
    pairs = [tuple(merge.split(" ")) for merge in data.merges]
    for rank, pair in enumerate(pairs):
        if len(pair) != 2:
            raise CheckpointError(
                f"{data.origin}: {_PREFIX}merges: entry {rank} is {' '.join(pair)!r:.80}, not two tokens"
            )
    return vocab, [(left, right) for left, right in pairs if left in vocab and right in vocab and left + right in vocab]


def merges_by_score(data: GGUFVocabulary) -> list[tuple[str, str]] | None:
    """Merges that make BPE choose as SentencePiece does: by falling score of the result, then by ids of the parts.

    None when two results have the same score: then the place in the text decides, and no order of merges can say so.
    """
    types, tokens, scores = data.types, data.tokens, data.scores
    vocab = data.texts_of(*_SENTENCEPIECE_KINDS)
    parts = {text: i for text, i in vocab.items() if types[i] != BYTE}
    merges: list[tuple[str, str]] = []
    last_score = None
    for i in sorted(data.ids_of(NORMAL), key=lambda i: -scores[i]):
        token = tokens[i]
        cuts = [
            (parts[token[:at]], parts[token[at:]], at)
            for at in range(1, len(token))
            if token[:at] in parts and token[at:] in parts
        ]
        if not cuts:
            continue
        if scores[i] == last_score:
            return None
        last_score = scores[i]
        cuts.sort()
        merges += [(token[:at], token[at:]) for _, _, at in cuts]
    return merges


def _vocabulary(data: GGUFVocabulary) -> Vocabulary:
    tokens = data.tokens
    num_tokens = len(tokens)
    return Vocabulary(
        size=num_tokens,
        piece=lambda token_id: tokens[token_id] if 0 <= token_id < num_tokens else None,
        added_ids=frozenset(data.ids_of(UNKNOWN, CONTROL, USER_DEFINED)),
        special_ids=frozenset(data.ids_of(UNKNOWN, CONTROL)),
        spell=byte_level_bytes if data.model == "gpt2" else sentencepiece_bytes,
        byte_values=_byte_values(data),
        has_space_prefix=data.model == "llama" and has_space_prefix(data),
    )


def _byte_values(data: GGUFVocabulary) -> dict[int, int]:
    return {i: int(m[1], 16) for i in data.ids_of(BYTE) if (m := _BYTE_PIECE.fullmatch(data.tokens[i]))}


def has_space_prefix(data: GGUFVocabulary) -> bool:
    """Whether a space is put before a text."""
    return data.flag("add_space_prefix", default=not data.architecture.startswith("gemma"))


def _swallowing_ids(data: GGUFVocabulary) -> frozenset[int]:
    """Tokens that take the white space after them along. The file cannot say so; phi-3's own tokenizer does."""
    if data.architecture != "phi3" or data.model != "llama":
        return frozenset()
    texts = data.texts_of(UNKNOWN, CONTROL, USER_DEFINED)
    return frozenset(
        token_id
        for text, token_id in texts.items()
        if text == "</s>" or (text.startswith("<|") and text.endswith("|>") and text != "<|endoftext|>")
    )


def _end_ids(data: GGUFVocabulary) -> frozenset[int]:
    """Every token that ends a generation."""
    texts = data.texts_of(CONTROL, USER_DEFINED)
    ends = {token_id for text, token_id in texts.items() if text in _END_TEXTS}
    ends |= {token_id for role in ("eos", "eot", "eom") if (token_id := data.token_id(role)) is not None}
    if not _CHANNEL_END_TEXTS.isdisjoint(texts):
        ends -= {texts.get("<|end|>", -1)}
    return frozenset(ends)


def _role_id(data: GGUFVocabulary, role: str, wanted: str | None) -> int | None:
    if wanted is None:
        return data.token_id(role)
    for token_id, token in enumerate(data.tokens):
        if token == wanted:
            return token_id
    raise CheckpointError(
        f"{data.origin}: the vocabulary has no token {wanted!r}, which the settings name as {role}_token"
    )


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    single = metadata.get("tokenizer.chat_template")
    templates = {DEFAULT_TEMPLATE: str(single)} if single else {}
    prefix = "tokenizer.chat_template."
    return templates | {key.removeprefix(prefix): str(metadata[key]) for key in metadata if key.startswith(prefix)}


def _first(*values: bool | None) -> bool:
    return next(bool(value) for value in values if value is not None)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
