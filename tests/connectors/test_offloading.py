"""The host tier, the disk tier and the shared folder: what they keep, forget, refuse and survive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vkit.connectors.folder import Folder
from vkit.connectors.moving import StoreUnavailable
from vkit.connectors.offloading import HostMemory
from vkit.errors import UsageError

IDENTITY = {"model": "m", "format_version": "1"}
PAYLOAD = bytes(range(256)) * 4
BOTH = pytest.mark.parametrize("connector", ["OffloadingConnector", "FileConnector"])


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def files_of(root: Path) -> list[Path]:
    return sorted(root.glob("*/??/*.kv"))


# The folder


def test_a_folder_gives_back_what_it_was_given(tmp_path: Path) -> None:
    folder = Folder(tmp_path, IDENTITY)
    assert folder.read(key(1), len(PAYLOAD)) is None
    folder.write(key(1), PAYLOAD)
    assert folder.contains(key(1))
    assert folder.read(key(1), len(PAYLOAD)) == PAYLOAD
    again = Folder(tmp_path, IDENTITY)
    assert (len(again), again.num_bytes) == (1, files_of(tmp_path)[0].stat().st_size)
    assert again.read(key(1), len(PAYLOAD)) == PAYLOAD
    assert again.clear()
    assert files_of(tmp_path) == []


@pytest.mark.parametrize("place", ["magic", "header", "payload", "checksum"])
def test_one_changed_byte_anywhere_is_a_miss(tmp_path: Path, place: str) -> None:
    folder = Folder(tmp_path, IDENTITY)
    folder.write(key(1), PAYLOAD)
    (file,) = files_of(tmp_path)
    data = bytearray(file.read_bytes())
    data[{"magic": 3, "header": 20, "payload": len(data) // 2, "checksum": -1}[place]] ^= 0x40
    file.write_bytes(data)
    assert folder.read(key(1), len(PAYLOAD)) is None
    assert not file.exists()
    assert not folder.contains(key(1))


@pytest.mark.parametrize("kept", [0, 1, 40, -33, -1])
def test_a_truncated_file_is_a_miss(tmp_path: Path, kept: int) -> None:
    folder = Folder(tmp_path, IDENTITY)
    folder.write(key(1), PAYLOAD)
    (file,) = files_of(tmp_path)
    data = file.read_bytes()
    file.write_bytes(data[: kept if kept >= 0 else len(data) + kept])
    assert folder.read(key(1), len(PAYLOAD)) is None


def test_files_of_another_identity_or_name_are_misses(tmp_path: Path) -> None:
    mine, other = Folder(tmp_path, IDENTITY), Folder(tmp_path, {**IDENTITY, "model": "another"})
    other.write(key(1), PAYLOAD)
    assert mine.read(key(1), len(PAYLOAD)) is None
    (foreign,) = files_of(tmp_path)
    mine.write(key(2), PAYLOAD)
    (own,) = (file for file in files_of(tmp_path) if file != foreign)
    own.write_bytes(foreign.read_bytes())  # another model's file under our name
    assert mine.read(key(2), len(PAYLOAD)) is None
    mine.write(key(3), PAYLOAD)
    (third,) = (file for file in files_of(tmp_path) if file != foreign)
    target = third.with_name(f"{key(4).hex()}.kv")
    third.rename(target)  # our own file under another block's name
    assert mine.read(key(4), len(PAYLOAD)) is None
    mine.write(key(5), PAYLOAD)
    assert mine.read(key(5), len(PAYLOAD) + 1) is None  # pages of another size


def test_the_least_recently_used_goes_first_also_after_a_restart(tmp_path: Path) -> None:
    folder = Folder(tmp_path, IDENTITY)
    folder.write(key(0), PAYLOAD)
    size = folder.num_bytes
    folder = Folder(tmp_path, IDENTITY, 3 * size)
    for number in (1, 2):
        time.sleep(0.01)
        folder.write(key(number), PAYLOAD)
    time.sleep(0.01)
    assert folder.read(key(0), len(PAYLOAD)) is not None
    folder = Folder(tmp_path, IDENTITY, 3 * size)
    folder.write(key(3), PAYLOAD)
    assert [folder.contains(key(number)) for number in range(4)] == [True, False, True, True]
    assert folder.num_bytes <= 3 * size
    assert len(Folder(tmp_path, IDENTITY, size)) == 1  # a smaller capacity holds from the start
    with pytest.raises(StoreUnavailable, match="larger than the capacity"):
        Folder(tmp_path, IDENTITY, size - 1).write(key(9), PAYLOAD)


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="root_dir"):
        Folder(tmp_path / "file", IDENTITY)


WRITER = """
import sys
from pathlib import Path
from vkit.connectors.folder import Folder
folder = Folder(Path(sys.argv[1]), {"model": "m", "format_version": "1"})
number = 0
while True:
    folder.write(number.to_bytes(32, "big"), bytes([number % 256]) * 4_000_000)
    if number == 2:
        print("writing", flush=True)
    number += 1
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.013])
def test_a_writer_killed_in_mid_write_leaves_a_usable_store(tmp_path: Path, delay_s: float) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    left = list(tmp_path.glob("*/??/*.tmp-*"))
    folder = Folder(tmp_path, IDENTITY)
    whole = len(folder)
    assert whole >= 3
    for number in range(whole):
        assert folder.read(key(number), 4_000_000) == bytes([number % 256]) * 4_000_000
    assert not list(tmp_path.glob("*/??/*.tmp-*"))
    assert len(left) <= 1
    folder.write(key(999), PAYLOAD)
    assert folder.read(key(999), len(PAYLOAD)) == PAYLOAD


def test_files_that_a_living_writer_has_not_finished_stay(tmp_path: Path) -> None:
    folder = Folder(tmp_path, IDENTITY)
    folder.write(key(1), PAYLOAD)
    (file,) = files_of(tmp_path)
    unfinished = file.with_name(f"{file.name}.tmp-{os.getpid()}-77")
    unfinished.write_bytes(b"half")
    assert len(Folder(tmp_path, IDENTITY)) == 1
    assert unfinished.exists()


def test_memory_forgets_the_least_recently_used() -> None:
    memory = HostMemory(max_chunks=2)
    for name in (b"a", b"b"):
        memory.put(name, PAYLOAD)
    assert memory.get(b"a") == PAYLOAD
    memory.put(b"c", PAYLOAD)
    assert (memory.get(b"b"), len(memory), memory.num_bytes) == (None, 2, 2 * len(PAYLOAD))
    small = HostMemory(max_bytes=len(PAYLOAD))
    small.put(b"a", PAYLOAD)
    small.put(b"b", PAYLOAD)
    assert (small.get(b"a"), small.get(b"b")) == (None, PAYLOAD)
    small.put(b"big", PAYLOAD * 2)
    assert len(small) == 0


# Behind a model


@BOTH
def test_a_prefix_comes_back_and_changes_no_token(
    open_tiny: Callable[..., Any], tmp_path: Path, plain_tokens: list[int], connector: str
) -> None:
    model = open_tiny(connector, root_dir=str(tmp_path))
    assert model.tokens() == plain_tokens
    model.settle()
    output = model.answer()
    assert (output.outputs[0].token_ids, output.num_cached_tokens) == (plain_tokens, 64)
    counters = model.counters()
    tier = "host" if connector == "OffloadingConnector" else "disk"
    assert counters[f"prompt_tokens_cached_by_source/{tier}"] == 64
    assert counters["external_prefix_cache_hits"] == 64
    assert counters["kv_offload_load_bytes"] == counters["kv_offload_store_bytes"] > 0
    model.close()
    reopened = open_tiny(connector, root_dir=str(tmp_path))
    output = reopened.answer()
    assert (output.outputs[0].token_ids, output.num_cached_tokens) == (plain_tokens, 64)
    assert reopened.counters()["prompt_tokens_cached_by_source/disk"] == 64


@pytest.mark.parametrize("model", ["gemma2", "mistral", "deepseek_v2"])
def test_windows_and_latent_caches_move_too(open_tiny: Callable[..., Any], tmp_path: Path, model: str) -> None:
    plain = open_tiny(model=model).tokens()
    first = open_tiny("FileConnector", model=model, root_dir=str(tmp_path))
    assert first.tokens() == plain
    first.settle()
    second = open_tiny("FileConnector", model=model, root_dir=str(tmp_path))
    output = second.answer()
    assert (output.outputs[0].token_ids, output.num_cached_tokens) == (plain, 64)


def test_chunks_of_several_blocks(open_tiny: Callable[..., Any], tmp_path: Path, plain_tokens: list[int]) -> None:
    settings = {"root_dir": str(tmp_path), "offload_block_tokens": 32, "num_cpu_blocks": 2}
    model = open_tiny("OffloadingConnector", **settings)
    assert model.tokens() == plain_tokens
    model.settle()
    assert len(files_of(tmp_path)) == 2
    output = model.answer()
    assert (output.outputs[0].token_ids, output.num_cached_tokens) == (plain_tokens, 64)
    assert model.counters()["prompt_tokens_cached_by_source/disk"] == 64  # memory held the second chunk only


def test_outputs_are_kept_when_asked_for(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    for prompt_only, expected in ((True, 4), (False, 5)):
        root = tmp_path / str(prompt_only)
        model = open_tiny("OffloadingConnector", root_dir=str(root), offload_prompt_only=prompt_only)
        model.generate([{"prompt_token_ids": list(range(3, 73))}], _long())
        model.settle()
        assert len(files_of(root)) == expected


def _long() -> Any:
    from vkit import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)


@BOTH
def test_damaged_files_are_computed_again(
    open_tiny: Callable[..., Any], tmp_path: Path, plain_tokens: list[int], connector: str
) -> None:
    model = open_tiny(connector, root_dir=str(tmp_path))
    model.tokens()
    model.settle()
    model.close()
    files = files_of(tmp_path)
    assert len(files) == 4
    for file in files:
        file.write_bytes(file.read_bytes()[:-5])
    again = open_tiny(connector, root_dir=str(tmp_path))
    output = again.answer()
    assert (output.outputs[0].token_ids, output.num_cached_tokens) == (plain_tokens, 0)
    again.settle()
    assert again.answer().num_cached_tokens == 64  # written anew


def test_another_cache_dtype_finds_nothing(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = open_tiny("FileConnector", root_dir=str(tmp_path))
    model.tokens()
    model.settle()
    other = open_tiny("FileConnector", root_dir=str(tmp_path), kv_cache_dtype="bfloat16")
    assert other.answer().num_cached_tokens == 0
    other.settle()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("role", "finds", "keeps"), [("kv_producer", 0, 4), ("kv_consumer", 64, 0)])
def test_roles(open_tiny: Callable[..., Any], tmp_path: Path, role: str, finds: int, keeps: int) -> None:
    first = open_tiny("FileConnector", root_dir=str(tmp_path))
    first.tokens()
    first.settle()
    model = open_tiny("FileConnector", role=role, root_dir=str(tmp_path))
    assert model.answer().num_cached_tokens == finds
    model.answer(list(range(3, 73)))
    model.settle()
    assert len(files_of(tmp_path)) == 4 + keeps


def test_reset_external(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = open_tiny("OffloadingConnector", root_dir=str(tmp_path))
    model.tokens()
    assert model._thread.call(lambda engine: engine.reset_prefix_cache(reset_external=True)).result()
    assert files_of(tmp_path) == []
    assert model.answer().num_cached_tokens == 0


def test_sleep_and_wake(open_tiny: Callable[..., Any], tmp_path: Path, plain_tokens: list[int]) -> None:
    model = open_tiny("OffloadingConnector", root_dir=str(tmp_path))
    model.tokens()
    model.settle()
    model.sleep(2)
    model.wake_up()
    output = model.answer()
    assert (output.outputs[0].token_ids, output.num_cached_tokens) == (plain_tokens, 64)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "root_dir is required"),
        ({"root_dir": 3}, "root_dir: expected a non-empty string"),
        ({"num_cpu_block": 1}, "unknown key 'num_cpu_block', did you mean num_cpu_blocks"),
        ({"num_cpu_blocks": 0}, "num_cpu_blocks: must be at least 1"),
        ({"num_cpu_blocks": 1, "cpu_bytes_to_use": 1}, "give one of them"),
        ({"eviction_policy": "arc"}, "expected one of lru"),
        ({"group_idx": 1}, "no group of full attention"),
        ({"offload_block_tokens": 24}, "no multiple of the block size, 16"),
        ({"offload_prompt_only": 1}, "expected true or false"),
        ({"offload_block_tokens": 64, "num_cpu_blocks": 2}, "hold no chunk"),
    ],
)
def test_settings_that_cannot_be(
    open_tiny: Callable[..., Any], tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    if settings and "root_dir" not in settings:
        settings = {"root_dir": str(tmp_path), **settings}
    with pytest.raises(UsageError, match=message):
        open_tiny("OffloadingConnector", **settings)


def test_budgets_that_hold_no_chunk_are_warned_of(
    open_tiny: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, plain_tokens: list[int]
) -> None:
    model = open_tiny("OffloadingConnector", root_dir=str(tmp_path), cpu_bytes_to_use=10, fs_capacity_bytes=11)
    for name, limit in (("cpu_bytes_to_use", 10), ("fs_capacity_bytes", 11)):
        assert f"--kv-transfer-config: {name}: {limit} bytes hold no chunk, which takes " in caplog.text
    assert model.tokens() == plain_tokens
    caplog.clear()
    open_tiny("OffloadingConnector", root_dir=str(tmp_path), cpu_bytes_to_use=10**6, fs_capacity_bytes=10**6)
    assert "hold no chunk" not in caplog.text


def test_recurrent_models_are_refused(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="recurrent states are not moved"):
        open_tiny("FileConnector", model="kimi_linear", root_dir=str(tmp_path))


@pytest.mark.parametrize("drafts", [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "suffix"}])
def test_drafts_beside_a_connector(
    open_tiny: Callable[..., Any], tmp_path: Path, plain_tokens: list[int], drafts: dict[str, Any]
) -> None:
    drafts = {**drafts, "num_speculative_tokens": 3}
    first = open_tiny("FileConnector", root_dir=str(tmp_path), speculative_config=drafts)
    assert first.tokens() == plain_tokens
    first.settle()
    second = open_tiny("FileConnector", root_dir=str(tmp_path), speculative_config=drafts)
    output = second.answer()
    assert (output.outputs[0].token_ids, output.num_cached_tokens) == (plain_tokens, 64)
