"""Tokenizers and templates carried both ways: the same ids for the same texts, by the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from vkit.conversion import ConversionError, convert
from vkit.conversion.tokenizer_to_gguf import SAMPLES
from vkit.loaders import open_checkpoint
from vkit.text.pretokenizers import PATTERNS
from vkit.text.tokenizer import load_tokenizer

WORDS = [
    "the quick brown fox jumps over the lazy dog and the other dogs",
    "def function(argument): return argument + 12345",
    "naïve café größe  zwei  Leerzeichen\n\n\tTab",
] * 4
SPECIAL = ["<|im_start|>", "<|im_end|>"]


def byte_level(pre: str) -> Tokenizer:
    library = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[pre]]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    library.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    library.add_tokens([AddedToken("<tool>", normalized=False)])
    return library


def sentencepiece(has_prefix: bool) -> Tokenizer:
    library = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])
    names = ["<unk>", *(f"<0x{value:02X}>" for value in range(256))]
    library.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=380, special_tokens=names, show_progress=False, limit_alphabet=60)
    )
    content = json.loads(library.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] == "<unk>"]
    library = Tokenizer.from_str(json.dumps(content))
    library.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return library


LIBRARIES: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: byte_level("gpt-2"),
    "llama-bpe": lambda: byte_level("llama-bpe"),
    "qwen2": lambda: byte_level("qwen2"),
    "smollm": lambda: byte_level("smollm"),
    "sentencepiece": lambda: sentencepiece(True),
    "sentencepiece without prefix": lambda: sentencepiece(False),
}


@pytest.fixture
def folder_with(with_tokenizer: Callable[[str], Path]) -> Callable[[Tokenizer], Path]:
    """A golden whose embedding has as many rows as the tokenizer has tokens, and a few more."""

    def make(library: Tokenizer) -> Path:
        import torch
        from safetensors.torch import load_file, save_file

        folder = with_tokenizer("llama")
        rows = library.get_vocab_size() + 5
        tensors = load_file(folder / "model.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in tensors:
                tensors[name] = torch.randn(rows, tensors[name].shape[1])
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
        library.save(str(folder / "tokenizer.json"))
        return folder

    return make


@pytest.mark.parametrize("kind", LIBRARIES)
def test_there_and_back(kind: str, folder_with: Callable[[Tokenizer], Path], tmp_path: Path) -> None:
    library = LIBRARIES[kind]()
    folder = folder_with(library)
    convert(folder, tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "back")
    again = Tokenizer.from_file(str(tmp_path / "back" / "tokenizer.json"))
    packed = load_tokenizer(open_checkpoint(tmp_path / "m.gguf"))
    for text in (*SAMPLES, *WORDS, "<|im_start|>user\nhi<|im_end|>", "a<tool>b"):
        expected = library.encode(text, add_special_tokens=False).ids
        assert again.encode(text, add_special_tokens=False).ids == expected, text
        assert packed.encode(text, add_special_tokens=False, parse_special=True) == expected, text
        assert again.decode(expected, skip_special_tokens=False) == library.decode(expected, skip_special_tokens=False)


def test_roles_and_template(with_tokenizer: Callable[[str], Path], tmp_path: Path) -> None:
    folder = with_tokenizer("llama")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"bos_token": "<think>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [249, 255]}))
    convert(folder, tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "back")
    for path in (folder, tmp_path / "m.gguf", tmp_path / "back"):
        tokenizer = load_tokenizer(open_checkpoint(path))
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.adds_bos) == ("<think>", "<|im_end|>", True)
        assert tokenizer.encode("hi") == [254, ord("h"), ord("i")]
        assert tokenizer.chat_templates == {"default": settings["chat_template"]}
    assert load_tokenizer(open_checkpoint(tmp_path / "m.gguf")).eos_token_ids >= {249, 255}


def test_unknown_cutting_is_refused(with_tokenizer: Callable[[str], Path], tmp_path: Path) -> None:
    folder = with_tokenizer("llama")
    content = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "[aeiou]"}, "behavior": "Isolated", "invert": False}
    byte_step = content["pre_tokenizer"] | {"use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_step]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConversionError, match="which no GGUF pre-tokenizer does"):
        convert(folder, tmp_path / "m.gguf")
    content["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConversionError, match="of type WordLevel"):
        convert(folder, tmp_path / "m.gguf")
