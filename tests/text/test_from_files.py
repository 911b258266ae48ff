from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from vkit.errors import CheckpointError, InvalidRequest
from vkit.text.from_files import tokenizer_from_directory, tokenizer_from_file
from vkit.text.tokenizer import Tokenizer, load_tokenizer

IM_START, IM_END = 248, 249


def configured(directory: Path, config: dict[str, Any], name: str = "tokenizer_config.json") -> Tokenizer:
    (directory / name).write_text(json.dumps(config), encoding="utf-8")
    return tokenizer_from_directory(directory)


def with_json(directory: Path, **changes: Any) -> None:
    content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    content.update(changes)
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


class TestGoldenByteTokenizer:
    def test_ids_are_bytes(self, golden_tokenizer: Tokenizer) -> None:
        text = "Hello é😀\n"
        assert golden_tokenizer.encode(text) == list(text.encode())
        assert golden_tokenizer.decode(list(text.encode())) == text

    def test_special_tokens(self, golden_tokenizer: Tokenizer) -> None:
        assert golden_tokenizer.special_ids == frozenset(range(248, 256))
        assert golden_tokenizer.encode("<|im_start|>", parse_special=True) == [IM_START]
        assert golden_tokenizer.encode("<|im_start|>") == list(b"<|im_start|>")
        assert golden_tokenizer.decode([IM_START, 65]) == "A"
        assert golden_tokenizer.decode([IM_START, 65], skip_special_tokens=False) == "<|im_start|>A"
        assert golden_tokenizer.token_id("</think>") == 255

    def test_facts(self, golden_tokenizer: Tokenizer) -> None:
        assert golden_tokenizer.vocab_size == 256
        assert (golden_tokenizer.bos_token, golden_tokenizer.eos_token) == (None, "<|im_end|>")
        assert golden_tokenizer.eos_token_ids == {IM_END}
        assert not golden_tokenizer.adds_bos
        assert "im_start" in golden_tokenizer.chat_templates["default"]

    def test_one_token(self, golden_tokenizer: Tokenizer) -> None:
        assert golden_tokenizer.token_piece(0x20) == "Ġ"
        assert golden_tokenizer.token_text(0x20) == " "
        assert golden_tokenizer.token_bytes(0xC3) == b"\xc3"
        assert golden_tokenizer.token_text(0xC3) == "\ufffd"
        assert golden_tokenizer.token_bytes(IM_END) == b"<|im_end|>"
        assert (golden_tokenizer.token_bytes(5000), golden_tokenizer.token_piece(5000)) == (b"", "")

    def test_a_lone_surrogate_is_refused(self, golden_tokenizer: Tokenizer) -> None:
        with pytest.raises(InvalidRequest, match=r"U\+D800 at 1"):
            golden_tokenizer.encode("a\ud800")

    def test_a_bare_file_does(self, golden_tokenizer_dir: Path) -> None:
        tokenizer = load_tokenizer(golden_tokenizer_dir / "tokenizer.json")
        assert tokenizer.encode("abc") == [97, 98, 99]
        assert (tokenizer.eos_token_id, tokenizer.chat_templates) == (None, {})

    def test_threads_do_not_disturb_each_other(self, golden_tokenizer: Tokenizer) -> None:
        text = "<|im_start|>a" * 50
        wrong = []

        def encode(parse_special: bool, length: int) -> None:
            for _ in range(200):
                if len(golden_tokenizer.encode(text, parse_special=parse_special)) != length:
                    wrong.append(parse_special)

        threads = [threading.Thread(target=encode, args=a) for a in ((True, 100), (False, 650))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


class TestSettings:
    def test_bos_as_text_or_object(self, model_directory: Path) -> None:
        for bos in ("<|im_start|>", {"content": "<|im_start|>", "lstrip": False}):
            tokenizer = configured(model_directory, {"bos_token": bos, "add_bos_token": True})
            assert tokenizer.encode("a") == [IM_START, 97]
            assert tokenizer.encode("a", add_special_tokens=False) == [97]
            assert tokenizer.adds_bos

    def test_pitfall_12_one_bos(self, model_directory: Path) -> None:
        tokenizer = configured(model_directory, {"bos_token": "<|im_start|>", "add_bos_token": True})
        assert tokenizer.encode("<|im_start|>a", parse_special=True) == [IM_START, 97]
        tokenizer = configured(model_directory, {"bos_token": "<|im_start|>", "add_bos_token": False})
        assert tokenizer.encode("<|im_start|>a", parse_special=True) == [IM_START, 97]
        assert tokenizer.encode("a") == [97]

    def test_eos_after_the_text(self, model_directory: Path) -> None:
        tokenizer = configured(model_directory, {"eos_token": "<|im_end|>", "add_eos_token": True})
        assert tokenizer.encode("a") == [97, IM_END]

    def test_the_post_processors_tokens(self, model_directory: Path) -> None:
        piece = {"Sequence": {"id": "A", "type_id": 0}}
        start = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
        special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [IM_START], "tokens": ["<|im_start|>"]}}
        processor = {"type": "TemplateProcessing", "single": [start, piece], "pair": [piece, piece]}
        with_json(model_directory, post_processor={**processor, "special_tokens": special})
        tokenizer = configured(model_directory, {})
        assert tokenizer.encode("a") == [IM_START, 97]
        assert tokenizer.bos_token == "<|im_start|>"
        assert tokenizer.encode("<|im_start|>a", parse_special=True) == [IM_START, 97]
        off = configured(model_directory, {"bos_token": "<|im_start|>", "add_bos_token": False})
        assert off.encode("a") == [97]

    def test_older_file_of_special_tokens(self, model_directory: Path) -> None:
        tokenizer = configured(model_directory, {"eos_token": {"content": "<|im_end|>"}}, "special_tokens_map.json")
        assert tokenizer.eos_token_id == IM_END

    def test_the_models_config_where_the_tokenizers_is_silent(self, model_directory: Path) -> None:
        tokenizer = configured(model_directory, {"eos_token_id": [IM_END, 10], "bos_token_id": IM_START}, "config.json")
        assert tokenizer.eos_token_id == IM_END
        assert tokenizer.eos_token_ids == {IM_END, 10}
        assert tokenizer.bos_token_id == IM_START

    def test_tokens_declared_beyond_the_file(self, model_directory: Path) -> None:
        declared = {"256": {"content": "<extra>", "special": True}, "249": {"content": "<|im_end|>", "special": True}}
        tokenizer = configured(model_directory, {"added_tokens_decoder": declared})
        assert tokenizer.encode("<extra>", parse_special=True) == [256]
        assert 256 in tokenizer.special_ids
        assert tokenizer.vocab_size == 257
        with pytest.raises(CheckpointError, match="leaves a gap"):
            configured(model_directory, {"added_tokens_decoder": {"300": {"content": "<far>"}}})
        with pytest.raises(CheckpointError, match="has id 249"):
            configured(model_directory, {"added_tokens_decoder": {"256": {"content": "<|im_end|>", "special": True}}})

    def test_truncation_and_padding_of_the_file_are_off(self, model_directory: Path) -> None:
        with_json(
            model_directory,
            truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
            padding={"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
            | {"pad_type_id": 0, "pad_token": "x"},
        )
        assert tokenizer_from_directory(model_directory).encode("abcdef") == list(b"abcdef")

    def test_a_file_given_replaces_the_directorys(self, model_directory: Path, tmp_path: Path) -> None:
        configured(model_directory, {"eos_token": "<|im_end|>", "chat_template": "A"})
        other = tmp_path / "other.json"
        other.write_text(json.dumps({"bos_token": "<|im_start|>", "add_bos_token": True, "chat_template": "B"}))
        tokenizer = load_tokenizer(model_directory, tokenizer_config=other)
        assert (tokenizer.eos_token, tokenizer.encode("a"), tokenizer.chat_templates) == (
            None,
            [IM_START, 97],
            {"default": "B"},
        )


class TestChatTemplateFiles:
    def test_text_or_named_list(self, model_directory: Path) -> None:
        assert configured(model_directory, {"chat_template": "T"}).chat_templates == {"default": "T"}
        named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
        tokenizer = configured(model_directory, {"chat_template": named})
        assert tokenizer.chat_templates == {"default": "A", "tool_use": "B"}

    def test_files_of_their_own(self, model_directory: Path) -> None:
        (model_directory / "chat_template.json").write_text(json.dumps({"chat_template": "P"}))
        assert configured(model_directory, {}).chat_templates == {"default": "P"}
        assert configured(model_directory, {"chat_template": "C"}).chat_templates == {"default": "C"}
        (model_directory / "chat_template.jinja").write_text("J")
        (model_directory / "additional_chat_templates").mkdir()
        (model_directory / "additional_chat_templates" / "rag.jinja").write_text("R")
        tokenizer = configured(model_directory, {"chat_template": "C"})
        assert tokenizer.chat_templates == {"default": "J", "rag": "R"}


class TestRefusals:
    def test_no_such_path(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="no such file"):
            load_tokenizer(tmp_path / "nowhere")

    def test_no_tokenizer_json(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no tokenizer\.json here"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"model": {"type": "Nonsense"}}'])
    def test_damaged_tokenizer_json(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "tokenizer.json"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
            tokenizer_from_file(path)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"eos_token": "<nope>"}, "'<nope>'"),
            ({"eos_token": 5}, "eos_token"),
            ({"add_bos_token": "yes"}, "add_bos_token"),
            ({"chat_template": [{"name": "x"}]}, "chat_template"),
            ({"chat_template": 5}, "chat_template"),
            ({"added_tokens_decoder": []}, "added_tokens_decoder"),
            ({"added_tokens_decoder": {"a": {}}}, "'a'"),
        ],
    )
    def test_damaged_settings(self, model_directory: Path, config: dict[str, Any], words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            configured(model_directory, config)

    @pytest.mark.parametrize("content", ["{", "[1]", "\x00"])
    def test_settings_that_are_no_object(self, model_directory: Path, content: str) -> None:
        (model_directory / "tokenizer_config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            tokenizer_from_directory(model_directory)


def test_a_special_token_that_ordinary_text_would_reach_is_spelled_out(tmp_path: Path) -> None:
    """A unigram model has its control tokens among the pieces, and would take them for text."""
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as LibraryTokenizer

    pieces = [("<unk>", 0.0), ("</s>", -1.0), *((c, -5.0) for c in "</s>ab")]
    library = LibraryTokenizer(models.Unigram(pieces, unk_id=0))
    library.decoder = decoders.Metaspace()
    library.add_special_tokens([AddedToken("</s>", normalized=False)])
    (tmp_path / "tokenizer.json").write_text(library.to_str(), encoding="utf-8")
    tokenizer = tokenizer_from_directory(tmp_path)
    assert tokenizer.encode("a</s>b", parse_special=True)[1] == 1
    ids = tokenizer.encode("a</s>b")
    assert 1 not in ids
    assert tokenizer.decode(ids) == "a</s>b"
