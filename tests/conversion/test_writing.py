"""What a conversion promises: types as planned, resumption, verification, room, no half file under the final name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vkit.conversion import ConversionError, convert, writing
from vkit.errors import UsageError

TYPES_OF = {
    # wanted -> (most matrices, the head)
    "F32": ("F32", "F32"), "F16": ("F16", "F16"), "BF16": ("BF16", "BF16"), "Q8_0": ("Q8_0", "Q8_0"),
    "Q4_0": ("Q4_0", "Q6_K"), "Q4_1": ("Q4_1", "Q6_K"), "Q5_0": ("Q5_0", "Q6_K"), "Q5_1": ("Q5_1", "Q6_K"),
    "Q4_K": ("Q4_K", "Q6_K"), "Q5_K": ("Q5_K", "Q6_K"), "Q6_K": ("Q6_K", "Q6_K"),
    "Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K"),
}  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers whose rows are whole blocks of every type."""
    folder = tmp_path_factory.mktemp("wide")
    rng = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (300, 256), "model.norm.weight": (256,), "lm_head.weight": (300, 256)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (256,),
            f"{prefix}post_attention_layernorm.weight": (256,),
            f"{prefix}self_attn.q_proj.weight": (256, 256),
            f"{prefix}self_attn.k_proj.weight": (128, 256),
            f"{prefix}self_attn.v_proj.weight": (128, 256),
            f"{prefix}self_attn.o_proj.weight": (256, 256),
            f"{prefix}mlp.gate_proj.weight": (512, 256),
            f"{prefix}mlp.up_proj.weight": (512, 256),
            f"{prefix}mlp.down_proj.weight": (256, 512),
        }
    save_file(
        {name: torch.randn(shape, generator=rng) / 16 for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 128, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("wanted", TYPES_OF)
def test_types(wanted: str, wide: Path, tmp_path: Path) -> None:
    """The package's reader finds the planned types, and its values are within the reported error of the source."""
    from gguf import GGUFReader, quants
    from safetensors.torch import load_file

    report = convert(wide, tmp_path / "m.gguf", type=wanted)
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "m.gguf").tensors}
    most, head = TYPES_OF[wanted]
    assert tensors["blk.0.ffn_up.weight"].tensor_type.name == most
    assert tensors["blk.1.attn_output.weight"].tensor_type.name == most
    assert tensors["output.weight"].tensor_type.name == head
    assert tensors["output_norm.weight"].tensor_type.name == "F32"
    source = load_file(wide / "model.safetensors")
    for name, original in (
        ("blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
    ):
        tensor, expected = tensors[name], source[original].numpy()
        values = quants.dequantize(tensor.data, tensor.tensor_type).reshape(expected.shape)
        error = np.sqrt(np.mean((values - expected) ** 2) / np.mean(expected**2))
        assert error <= report.types[tensor.tensor_type.name]["max_error"] + 1e-7
        assert error <= writing.ERROR_LIMITS[tensor.tensor_type.name]
    if wanted == "Q4_K_M":
        better = {name.split(".")[-2] for name, tensor in tensors.items() if tensor.tensor_type.name == "Q6_K"}
        assert better == {"output", "attn_v", "ffn_down"}


def test_rows_of_odd_width_get_the_next_better_type(models: Path, tmp_path: Path) -> None:
    report = convert(models / "llama", tmp_path / "m.gguf", type="Q4_K")
    assert set(report.types) == {"Q5_0", "Q8_0", "F32"}


class Stop(Exception):
    """What ends a run in the middle."""


def stop_after(share: float) -> writing.Progress:
    def progress(what: str, done_bytes: int, total_bytes: int) -> None:
        if what == "writing" and done_bytes > share * total_bytes:
            raise Stop

    return progress


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that are encoded."""
    names: list[str] = []
    original = writing.OutputTensor.encode

    def encode(tensor: writing.OutputTensor) -> torch.Tensor:
        names.append(tensor.name)
        return original(tensor)

    monkeypatch.setattr(writing.OutputTensor, "encode", encode)
    return names


@pytest.mark.parametrize("target", ["m.gguf", "folder"])
def test_a_stopped_run_goes_on(target: str, wide: Path, tmp_path: Path, encoded: list[str]) -> None:
    whole = tmp_path / f"whole-{target}"
    kind = "Q8_0" if target.endswith("gguf") else "BF16"
    convert(wide, whole, type=kind)
    count = len(encoded)
    encoded.clear()
    with pytest.raises(Stop):
        convert(wide, tmp_path / target, type=kind, progress=stop_after(0.5))
    assert not (tmp_path / target).exists()
    first = len(encoded)
    assert 0 < first < count
    unfinished = tmp_path / "m.gguf.part" if target == "m.gguf" else tmp_path / "folder.part" / "model.safetensors.part"
    with unfinished.with_name(unfinished.name + ".journal").open("a") as journal:
        journal.write('{"tensor": "outp')  # a line the kill cut short
    report = convert(wide, tmp_path / target, type=kind)
    assert report.num_resumed == first
    assert len(encoded) == count
    assert len(set(encoded)) == count, "no tensor was encoded twice"
    made = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if ".part" in str(path)]
    assert made == []
    file = (tmp_path / target) if target == "m.gguf" else tmp_path / target / "model.safetensors"
    other = whole if target == "m.gguf" else whole / "model.safetensors"
    left, right = file.read_bytes(), other.read_bytes()
    assert left == right


def test_what_another_run_left_is_not_taken(wide: Path, tmp_path: Path, encoded: list[str]) -> None:
    with pytest.raises(Stop):
        convert(wide, tmp_path / "m.gguf", type="Q8_0", progress=stop_after(0.5))
    report = convert(wide, tmp_path / "m.gguf", type="Q4_0")
    assert report.num_resumed == 0


def test_damaged_leftovers_are_written_again(wide: Path, tmp_path: Path, encoded: list[str]) -> None:
    with pytest.raises(Stop):
        convert(wide, tmp_path / "m.gguf", type="Q8_0", progress=stop_after(0.5))
    part = tmp_path / "m.gguf.part"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 0xFF
    part.write_bytes(content)
    first = len(encoded)
    report = convert(wide, tmp_path / "m.gguf", type="Q8_0")
    assert report.num_resumed == first - 1


def test_a_wrong_result_never_gets_the_name(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        writing, "quantize", lambda values, qtype: torch.zeros(values.numel() // 32 * 34, dtype=torch.uint8)
    )
    with pytest.raises(ConversionError, match=r"error 1 as Q8_0, more than 0\.02"):
        convert(wide, tmp_path / "m.gguf", type="Q8_0")
    assert not (tmp_path / "m.gguf").exists()


def test_a_disk_that_lies_is_noticed(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = writing._read

    def read(data: Any, offset: int, num_bytes: int) -> bytearray:
        payload = original(data, offset, num_bytes)
        payload[0] ^= 1
        return payload

    monkeypatch.setattr(writing, "_read", read)
    with pytest.raises(ConversionError, match="reads back otherwise"):
        convert(wide, tmp_path / "m.gguf", type="F16")


def test_no_room(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    few = os.statvfs_result((real.f_bsize, real.f_frsize, real.f_blocks, 1, 1, *tuple(real)[5:]))
    monkeypatch.setattr(writing.os, "statvfs", lambda path: few)
    with pytest.raises(ConversionError, match=r"bytes are needed, .* are free"):
        convert(wide, tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_values_that_do_not_fit(wide: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(wide / "model.safetensors")
    folder = tmp_path / "big"
    folder.mkdir()
    (folder / "config.json").write_bytes((wide / "config.json").read_bytes())
    tensors["lm_head.weight"][0, 0] = 1e6
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConversionError, match=r"'output\.weight': values do not fit in F16"):
        convert(folder, tmp_path / "m.gguf", type="F16")
    tensors["lm_head.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConversionError, match="not finite"):
        convert(folder, tmp_path / "m.gguf", type="BF16")


def test_one_at_a_time(wide: Path, tmp_path: Path) -> None:
    def second(what: str, done_bytes: int, total_bytes: int) -> None:
        convert(wide, tmp_path / "m.gguf", type="F16")

    with pytest.raises(ConversionError, match="another conversion is writing"):
        convert(wide, tmp_path / "m.gguf", type="F16", progress=second)


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        ("there.gguf", None, "exists already"),
        ("no/such/m.gguf", None, "no such directory"),
        ("m.gguf", "Q3_X", "--type: a GGUF file has F32, .*; got 'Q3_X'"),
        ("m", "Q8_0", "--type: a safetensors folder has F32, F16, BF16; got 'Q8_0'"),
    ],
)
def test_usage(target: str, kind: str | None, message: str, wide: Path, tmp_path: Path) -> None:
    (tmp_path / "there.gguf").touch()
    with pytest.raises(UsageError, match=message):
        convert(wide, tmp_path / target, type=kind)


def test_command(wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vkit.cli import main

    target = tmp_path / "m.gguf"
    assert main(["convert", str(wide), str(target), "--type", "q8_0", "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert (report["type"], report["target"]) == ("Q8_0", str(target))
    assert report["num_bytes"] == target.stat().st_size
    assert "no tokenizer.json" in captured.err
    assert main(["convert", str(wide), str(target)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["convert", str(target), str(tmp_path / "back")]) == 0
    assert "all read back and compared" in capsys.readouterr().out
