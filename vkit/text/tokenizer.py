"""Text to token ids and back, whatever the model's files look like.

A Tokenizer joins an encoder (built from tokenizer.json or from GGUF metadata) with a vocabulary that knows the bytes of
every token. Decoding is ours: the bytes of the tokens are joined and read as UTF-8, so text can be produced token by
token without ever looking back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from vkit.errors import CheckpointError, InvalidRequest
from vkit.text.settings import TokenizerSettings, read_settings_file
from vkit.text.vocabulary import Vocabulary


class Encoder(Protocol):
    """Turns text into token ids and adds nothing."""

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Token ids of `text`; special tokens written in it count as such only with `parse_special`."""


class SequenceDecoder(Protocol):
    """Decodes whole sequences, for vocabularies whose tokens have no bytes of their own."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of `token_ids`."""


class CheckpointFiles(Protocol):
    """What a tokenizer needs of a checkpoint."""

    @property
    def path(self) -> Path:
        """The directory, or the GGUF file."""

    @property
    def gguf_metadata(self) -> Mapping[str, Any] | None:
        """Raw metadata of a GGUF file."""


class _TokenBytes(dict[int, bytes]):
    """Bytes of each token, worked out when first asked for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._vocabulary = vocabulary

    def __missing__(self, token_id: int) -> bytes:
        value = self[token_id] = self._vocabulary.token_bytes(token_id)
        return value


class _TokenTexts(dict[int, "str | bytes"]):
    """Text of each token that is whole by itself, else its bytes."""

    def __init__(self, bytes_of: _TokenBytes) -> None:
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> str | bytes:
        data = self._bytes_of[token_id]
        try:
            value: str | bytes = data.decode("utf-8")
        except UnicodeDecodeError:
            value = data
        self[token_id] = value
        return value


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads."""

    def __init__(
        self,
        encoder: Encoder,
        vocabulary: Vocabulary,
        *,
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        sequence_decoder: SequenceDecoder | None = None,
    ) -> None:
        """`prefix` and `suffix` are what `add_special_tokens` puts around a text.

        `sequence_decoder` is needed when, and only when, the vocabulary cannot spell its tokens.
        """
        self._encoder = encoder
        self.vocabulary = vocabulary
        self._prefix = list(prefix)
        self._suffix = list(suffix)
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        own_eos = frozenset() if eos_token_id is None else frozenset({eos_token_id})
        self.eos_token_ids: frozenset[int] = own_eos | frozenset(eos_token_ids)
        self.chat_templates: dict[str, str] = dict(chat_templates or {})
        self.settings: Mapping[str, Any] = settings or {}
        self.sequence_decoder = sequence_decoder
        self._bytes_of = _TokenBytes(vocabulary)
        self.texts: Mapping[int, str | bytes] = _TokenTexts(self._bytes_of)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return self.vocabulary.size

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that `skip_special_tokens` leaves out."""
        return self.vocabulary.special_ids

    @property
    def adds_bos(self) -> bool:
        """Whether a text without anything in it still gets a first token."""
        return bool(self._prefix)

    @property
    def bos_token(self) -> str | None:
        """The text of the BOS token."""
        return None if self.bos_token_id is None else self.vocabulary.piece(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """The text of the primary EOS token."""
        return None if self.eos_token_id is None else self.vocabulary.piece(self.eos_token_id)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        With `parse_special` the texts of special tokens become those tokens; without, text never does, so a user cannot
        write them. `add_special_tokens` puts BOS and EOS around it where the model wants them; a text that
        already starts with BOS gets no second one.

        Raises:
            InvalidRequest: `text` holds lone surrogates, so it is no Unicode text.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at {error.start}"
            ) from error
        token_ids = self._encoder.encode(text, parse_special)
        if not add_special_tokens:
            return token_ids
        if token_ids[: len(self._prefix)] == self._prefix:
            return token_ids + self._suffix
        return self._prefix + token_ids + self._suffix

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 come out as U+FFFD.

        Without `spaces_between_special_tokens`, the space that some vocabularies put after a special token is left out
        (it matters only where special tokens are kept).
        """
        if self.sequence_decoder is not None:
            return self.sequence_decoder.decode(token_ids, skip_special_tokens)
        if skip_special_tokens:
            special = self.special_ids
            token_ids = [token_id for token_id in token_ids if token_id not in special]
        pieces = [self._bytes_of[token_id] for token_id in token_ids]
        if self.vocabulary.has_space_prefix:
            after_added = not (skip_special_tokens or spaces_between_special_tokens)
            self._drop_space_prefixes(pieces, token_ids, after_added=after_added)
        data = b"".join(pieces)
        return data.decode("utf-8", "replace")

    def _drop_space_prefixes(self, pieces: list[bytes], token_ids: Sequence[int], *, after_added: bool) -> None:
        """Takes the encoder's own space from the first of `pieces` in place, and also after added tokens."""
        is_due = True
        for i, token_id in enumerate(token_ids):
            is_visible = bool(pieces[i])
            if is_due and is_visible:
                pieces[i] = pieces[i].removeprefix(b" ")
                if not after_added:
                    return
            is_due = token_id in self.vocabulary.added_ids or (is_due and not is_visible)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes `token_id` adds to a text that has already begun; nothing for an id without token."""
        return self._bytes_of[token_id]

    def token_text(self, token_id: int) -> str:
        """The text of one token; a part of a character comes out as U+FFFD."""
        return self._bytes_of[token_id].decode("utf-8", "replace")

    def token_piece(self, token_id: int) -> str:
        """The token as its vocabulary file spells it; the empty string for an id without token."""
        return self.vocabulary.piece(token_id) or ""

    def token_id(self, text: str) -> int | None:
        """The special or added token whose text is `text`, or None."""
        for token_id in self.vocabulary.added_ids:
            if self.vocabulary.piece(token_id) == text:
                return token_id
        return None


def load_tokenizer(source: Path | str | CheckpointFiles, *, tokenizer_config: Path | None = None) -> Tokenizer:
    """The tokenizer of a model directory, a .gguf file, a bare tokenizer.json, or an open checkpoint.

    `tokenizer_config` is read in place of tokenizer_config.json; for a GGUF, what it says wins over the metadata.

    Raises:
        CheckpointError: a file is missing or damaged.
        ModelLoadError: the kind of tokenizer is not supported; the message names it.
    """
    from vkit.text.from_files import tokenizer_from_directory, tokenizer_from_file
    from vkit.text.from_gguf import tokenizer_from_gguf

    settings = None if tokenizer_config is None else read_settings_file(tokenizer_config)
    path = Path(source) if isinstance(source, str | Path) else source.path
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if path.is_dir():
        return tokenizer_from_directory(path, settings=settings)
    if path.suffix == ".json":
        return tokenizer_from_file(path, settings=settings or TokenizerSettings())
    metadata = _gguf_metadata(path if isinstance(source, str | Path) else source)
    architecture = metadata.get("general.architecture", "")
    return tokenizer_from_gguf(metadata, architecture=str(architecture), settings=settings, origin=str(path))


def _gguf_metadata(source: Path | CheckpointFiles) -> Mapping[str, Any]:
    if not isinstance(source, Path):
        assert source.gguf_metadata is not None, "only a checkpoint from a GGUF file is a file"
        return source.gguf_metadata
    from vkit.loaders import open_checkpoint
    from vkit.loaders.gguf_header import read_header
    from vkit.loaders.storage import open_storage

    storage = open_storage(source)
    try:
        metadata: Mapping[str, Any] = read_header(storage).metadata
    finally:
        storage.close()
    if metadata.get("split.no"):  # a later part of a split file says nothing about the model
        checkpoint = open_checkpoint(source)
        try:
            metadata = dict(checkpoint.gguf_metadata or {})
        finally:
            checkpoint.close()
    return metadata
