"""Prompts: generated ones have the asked length, files are read exactly, damage is one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vkit.benchmark.datasets import (
    WORDS,
    DatasetKind,
    Prompt,
    kind_of_file,
    load_prompts,
    pick,
    random_sequences,
    shared_prefix_sequences,
    word_calibration,
)
from vkit.errors import UsageError


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_random_sequences_have_their_lengths_and_repeat_by_seed() -> None:
    alphabet = range(100)
    found = random_sequences(alphabet, [3, 50, 1], 4)
    assert [len(item) for item in found] == [3, 50, 1]
    assert all(member in alphabet for item in found for member in item)
    assert found == random_sequences(alphabet, [3, 50, 1], 4)
    assert found != random_sequences(alphabet, [3, 50, 1], 5)


def test_shared_prefixes_are_shared_and_the_rest_is_not() -> None:
    found = shared_prefix_sequences(range(1000), 6, 40, 30, 2, seed=1)
    assert all(len(item) == 40 for item in found)
    beginnings = [tuple(item[:30]) for item in found]
    assert beginnings[0::2] == [beginnings[0]] * 3
    assert beginnings[1::2] == [beginnings[1]] * 3
    assert beginnings[0] != beginnings[1]
    assert len({tuple(item[30:]) for item in found}) == 6


def test_words_are_many_and_different() -> None:
    assert len(set(WORDS)) == len(WORDS) > 150


def test_sharegpt_takes_the_first_turn_in_order(tmp_path: Path) -> None:
    entries = [
        {"id": "a", "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "no"}]},
        {"conversations": []},
        {"conversation": [{"role": "user", "content": "two é"}]},
        {"conversations": [{"from": "human", "value": "  "}]},
    ]
    path = written(tmp_path, "a.json", json.dumps(entries))
    found = load_prompts(DatasetKind.SHAREGPT, path)
    assert found.prompts == [Prompt("one"), Prompt("two é")]
    assert found.notes == [f"{path}: 2 entries without a first turn are left out"]


def test_jsonl_takes_texts_ids_and_lengths(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "one"}',
        "",
        '{"prompt": [1, 2], "output_len": 5}',
        '{"text": "t", "max_tokens": 7, "topic": "x"}',
    ]
    path = written(tmp_path, "a.jsonl", "\r\n".join(lines))
    found = load_prompts(DatasetKind.JSONL, path)
    assert found.prompts == [Prompt("one"), Prompt((1, 2), 5), Prompt("t", 7)]
    assert found.notes == [f"{path}: not used: topic"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', "--dataset jsonl"),
        ("{}", "JSON list of entries, got an object"),
        ("[]", "no prompt in this sharegpt file"),
        ("[3]", "entry 0: expected an object"),
        ('[{"conversations": [{"value": "a"}]}, {}]', "entry 1: expected an object with a list"),
        ('[{"conversations": "x"}]', "entry 0"),
        ('[{"conversations": ["x"]}]', "entry 0: its first turn has no text"),
        ('[{"conversations": [{"value": 3}]}]', "entry 0: its first turn has no text"),
        ('[{"conversations": [{"value": ""}]}]', "no prompt"),
    ],
)
def test_a_damaged_sharegpt_file_is_one_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = written(tmp_path, "a.json", content)
    with pytest.raises(UsageError) as caught:
        load_prompts(DatasetKind.SHAREGPT, path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no prompt in this jsonl file"),
        ('{"prompt": "a"}\n{"prompt"', ":2: not JSON"),
        ("[]", ":1: expected an object"),
        ("{}", ':1: expected "prompt"'),
        ('{"prompt": ""}', ':1: expected "prompt"'),
        ('{"prompt": []}', ':1: expected "prompt"'),
        ('{"prompt": [1, -2]}', ':1: expected "prompt"'),
        ('{"prompt": [true]}', ':1: expected "prompt"'),
        ('{"prompt": [1.5]}', ':1: expected "prompt"'),
        ('{"prompt": "a", "text": "b"}', ":1: prompt and text say the same"),
        ('{"prompt": "a", "output_len": 0}', ":1: output_len"),
        ('{"prompt": "a", "max_tokens": "9"}', ":1: output_len"),
    ],
)
def test_a_damaged_jsonl_file_is_one_line_with_its_line_number(tmp_path: Path, content: str, message: str) -> None:
    path = written(tmp_path, "a.jsonl", content)
    with pytest.raises(UsageError) as caught:
        load_prompts(DatasetKind.JSONL, path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused_by_flag(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError, match="--dataset-path"):
            load_prompts(DatasetKind.SHAREGPT, path)


def test_the_name_of_a_file_tells_its_kind() -> None:
    assert kind_of_file(Path("a/b.JSONL")) is DatasetKind.JSONL
    assert kind_of_file(Path("b.json")) is DatasetKind.SHAREGPT


def test_pick_never_repeats_a_prompt() -> None:
    prompts = [Prompt(text) for text in "abc"]
    assert pick(prompts, 2, 8, where="f") == prompts[:2]
    assert pick(prompts, None, 8, where="f") == prompts
    assert pick(prompts, None, 2, where="f") == prompts[:2]
    with pytest.raises(UsageError, match="f: holds 3 prompts, 4 are asked for"):
        pick(prompts, 4, 8, where="f")


def test_words_are_calibrated_by_two_measurements() -> None:
    num_words = word_calibration([(8, 8 * 2 + 5), (16, 16 * 2 + 5)])
    assert [num_words(tokens) for tokens in (25, 105, 6, 1)] == [10, 50, 1, 1]


def test_measurements_that_tell_nothing_mean_a_token_a_word() -> None:
    assert word_calibration([(1, 6), (1, 6)])(9) == 9
    assert word_calibration([(4, 6), (8, 6)])(9) == 9
