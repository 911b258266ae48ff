"""The diffusion transformer against the reference, in every spelling of its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vkit.errors import CheckpointError, ModelLoadError, UsageError
from vkit.video.h3.dit import DiT
from vkit.video.h3.dit_weights import DiTWeights
from vkit.video.h3.layout import Layout, RowKind
from vkit.video.h3.partition import resolve_partition
from vkit.video.h3.request import Offload, QkvLayout
from vkit.video.h3.weights import Residency

CPU = torch.device("cpu")
CONTIGUOUS = "weights.release_names_contiguous_qkv.safetensors"


def _layout(io: dict[str, Tensor]) -> Layout:
    """The layout of a stored case; kinds are told by index lists, which stand in the sequence's order."""
    tags = io["token_tags"].numpy()
    kinds = np.full(len(tags), RowKind.NOISY_VIDEO, np.int64)
    num_video, num_audio = int(io["num_condition_video_rows"]), int(io["num_condition_audio_rows"])
    kinds[io["audio_indices"].numpy()] = RowKind.NOISY_AUDIO
    kinds[io["video_indices"][:num_video].numpy()] = RowKind.CONDITION_VIDEO
    kinds[io["audio_indices"][:num_audio].numpy()] = RowKind.CONDITION_AUDIO
    indices = (io[name].numpy() for name in ("video_indices", "audio_indices", "text_indices"))
    return Layout(io["position_ids"].numpy(), tags, kinds, *indices, num_video, num_audio)


def _run(
    path: Path,
    io: dict[str, Tensor],
    dtype: torch.dtype,
    taps: dict[str, Tensor],
    *,
    offload: Offload = "none",
    **how: object,
) -> tuple[Tensor, Tensor]:
    weights = DiTWeights(path, **how)  # type: ignore[arg-type]
    dit = DiT(weights, Residency(CPU, offload), dtype)
    layout = _layout(io)
    of_kind = {
        RowKind(int(kind)): float(io["timestep_values"][io["timestep_indices"][row]])
        for row, kind in enumerate(layout.kinds)
    }
    modulations = dit.modulations(list(of_kind.values()))
    text = dit.refine_text(io["text_embeds"])
    rope = dit.rope(layout)
    taps |= {"out.text_refined": text, "out.rope_cos": rope[0], "out.rope_sin": rope[1]}
    taps["out.temb"] = dit.timestep_embedding(io["timestep_values"])
    taps["out.packed_in"] = dit.pack(layout, text, io["video_rows"], io["audio_rows"])

    def keep(index: int, x: Tensor) -> None:
        taps[f"out.block_{index}_out"] = x.clone()

    return dit.forward(layout, text, io["video_rows"], io["audio_rows"], rope, modulations, of_kind, keep)


def _check(path: Path, case: Path, tolerance: float = 2e-5, **how: object) -> None:
    io = load_file(case)
    taps: dict[str, Tensor] = {}
    taps["out.video_velocity"], taps["out.audio_velocity"] = _run(path, io, torch.float32, taps, **how)  # type: ignore[arg-type]
    compared = 0
    for name, value in taps.items():
        if name in io:
            assert float((value - io[name]).abs().max()) <= tolerance, name
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize("task", ["t2va", "fl2va", "ref2va"])
def test_release_names(goldens: Path, task: str) -> None:
    folder = goldens / "dit" / "a"
    _check(folder / CONTIGUOUS, folder / f"io_{task}.safetensors", config=folder / "config.release.json")


@pytest.mark.parametrize(
    ("name", "layout", "config"),
    [
        (CONTIGUOUS, None, "config.release.json"),
        ("weights.release_grouped_qkv.safetensors", "grouped", "config.release.json"),
        ("weights.split.safetensors", None, "config.split.json"),
    ],
)
def test_every_spelling(goldens: Path, name: str, layout: QkvLayout | None, config: str) -> None:
    folder = goldens / "dit" / "b"
    _check(folder / name, folder / "io_fl2va.safetensors", qkv_layout=layout, config=folder / config)


def test_shards_of_the_release_are_grouped(goldens: Path, tmp_path: Path) -> None:
    folder = goldens / "dit" / "b"
    tensors = load_file(folder / "weights.release_grouped_qkv.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(folder / "config.release.json", tmp_path / "config.json")
    assert DiTWeights(tmp_path).qkv_layout == "grouped"
    _check(tmp_path, folder / "io_fl2va.safetensors")


def test_the_wrong_row_order_is_seen(goldens: Path) -> None:
    folder = goldens / "dit" / "b"
    with pytest.raises(AssertionError, match=r"out\."):
        _check(folder / "weights.release_grouped_qkv.safetensors", folder / "io_fl2va.safetensors")


def test_curve_form(goldens: Path) -> None:
    folder = goldens / "dit" / "curve"
    config = folder / "config.release.json"
    assert DiTWeights(folder / CONTIGUOUS, config=config).config.adaln_curve_grid == 17
    _check(folder / CONTIGUOUS, folder / "io_fl2va.safetensors", 5e-5, config=config)


@pytest.mark.parametrize("offload", ["none", "disk"])
def test_gguf(goldens: Path, offload: Offload) -> None:
    folder = goldens / "dit" / "a"
    assert DiTWeights(folder / "tiny.gguf").is_packed
    _check(folder / "tiny.gguf", folder / "io_gguf_t2va.safetensors", offload=offload)


def test_reading_layers_from_disk_changes_no_bit(goldens: Path) -> None:
    folder = goldens / "dit" / "a"
    io = load_file(folder / "io_t2va.safetensors")
    resident = _run(folder / CONTIGUOUS, io, torch.bfloat16, {})
    streamed = _run(folder / CONTIGUOUS, io, torch.bfloat16, {}, offload="disk")
    assert all(torch.equal(one, two) for one, two in zip(resident, streamed, strict=True))


@pytest.mark.parametrize("task", ["t2va", "fl2va", "ref2va"])
def test_bfloat16_rounds_where_the_reference_does(goldens: Path, task: str) -> None:
    folder = goldens / "dit" / "a"
    io = load_file(folder / f"io_{task}.safetensors")
    video, audio = _run(folder / CONTIGUOUS, io, torch.bfloat16, {})
    for got, name in ((video, "out_bf16.video_velocity"), (audio, "out_bf16.audio_velocity")):
        difference = (got - io[name]).abs()
        assert float(difference.max()) <= 0.06
        assert float(difference.mean()) < 0.01


def test_chunks_of_rows_change_nothing_that_matters(goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vkit.video.h3.dit.ROW_CHUNK", 7)
    folder = goldens / "dit" / "a"
    _check(folder / CONTIGUOUS, folder / "io_ref2va.safetensors", config=folder / "config.release.json")


def test_every_tensor_of_gguf_has_the_manifest_s_shape(goldens: Path) -> None:
    folder = goldens / "dit" / "a"
    weights = DiTWeights(folder / "tiny.gguf")
    manifest = json.loads((folder / "tiny_gguf_manifest.json").read_text())
    assert set(manifest) == weights.files.names()
    for name, entry in manifest.items():
        assert list(weights.files.info(name).shape) == entry["logical_shape"], name


# what is refused


@pytest.fixture
def tensors(goldens: Path) -> dict[str, Tensor]:
    return load_file(goldens / "dit" / "b" / CONTIGUOUS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("blocks.0.mlp.fc1.weight"), "blocks.0.mlp.fc1.weight"),
        (lambda t: t.pop("final_layer.video_out.weight"), "final_layer.video_out.weight"),
        (lambda t: t.pop("time_embedder.proj_in.weight"), "neither"),
        (lambda t: t.update(adaln_t_table=torch.zeros(4, 10)), "both"),
        (lambda t: t.update({"blocks.0.norm1.weight": torch.zeros(3)}), r"norm1.*\[3\]"),
        (lambda t: t.update({"blocks.0.attn.out_proj.comfy_quant": torch.zeros(3)}), "comfy_quant"),
        (lambda t: t.update({"blocks.0.attn.out_proj.weight_scale": torch.zeros(3)}), "NVFP4"),
        (lambda t: t.update({"blocks.0.extra.weight": torch.zeros(3)}), "does not have"),
        (lambda t: t.update({"blocks.0.attn.qkv_proj.lora_A.weight": torch.zeros(3)}), "LoRA"),
    ],
)
def test_damaged_weights(tensors: dict[str, Tensor], tmp_path: Path, change: object, words: str) -> None:
    change(tensors)  # type: ignore[operator]
    save_file(tensors, tmp_path / "dit.safetensors")
    with pytest.raises((CheckpointError, ModelLoadError), match=words):
        DiTWeights(tmp_path / "dit.safetensors")


def test_a_configuration_that_contradicts(goldens: Path, tmp_path: Path) -> None:
    folder = goldens / "dit" / "b"
    config = json.loads((folder / "config.release.json").read_text()) | {"num_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="num_layers = 3"):
        DiTWeights(folder / CONTIGUOUS, config=tmp_path / "config.json")


def test_a_row_order_where_there_is_none(goldens: Path) -> None:
    with pytest.raises(UsageError, match="--qkv-layout"):
        DiTWeights(goldens / "dit" / "b" / "weights.split.safetensors", qkv_layout="grouped")


def test_the_partition_is_told_or_asked_for(tmp_path: Path) -> None:
    named = tmp_path / "MiniMax-H3-Ref2VA-Q4_K_M.gguf"
    assert resolve_partition(named, None) == "ref2va"
    assert resolve_partition(tmp_path / "dit.gguf", None) is None
    assert resolve_partition(tmp_path / "dit.gguf", "fl2va") == "fl2va"
    assert resolve_partition(tmp_path / "transformer", None) is None
    with pytest.raises(UsageError, match="says ref2va"):
        resolve_partition(named, "fl2va")
    (tmp_path / "model_index.json").write_text('{"_minimax_h3": {"partition": "fl2va"}}')
    assert resolve_partition(named, None) == "fl2va"
    with pytest.raises(UsageError, match="model_index"):
        resolve_partition(tmp_path / "dit.gguf", "ref2va")
