"""The video autoencoder against the reference: chunks, tiles, pixels, both spellings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vkit.errors import CheckpointError, InvalidRequest, ModelLoadError
from vkit.video.h3 import rows, video_vae
from vkit.video.h3.geometry import tiles
from vkit.video.h3.video_vae import (
    VideoVAE,
    count_decoded_frames,
    denormalise_pixels,
    normalise_pixels,
    pixels_to_bytes,
)
from vkit.video.h3.video_vae_config import VideoVAEConfig, merged_config, video_vae_config

TOLERANCE = 2e-5


def _json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def _config(folder: Path) -> VideoVAEConfig:
    given = _json(folder / "config.release_source.json") | _json(folder / "config.release.json")
    return merged_config(given, str(folder))


def _close(got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.shape == want.shape
    assert float((got - want).abs().max()) <= tolerance


def _decode(vae: VideoVAE, latent: Tensor) -> Tensor:
    return torch.cat(list(vae.decode(latent)), dim=1)


@pytest.fixture(scope="module")
def folder(goldens: Path) -> Path:
    return goldens / "video_vae" / "a"


@pytest.fixture(scope="module")
def vae(folder: Path) -> VideoVAE:
    return VideoVAE(folder / "weights.release.safetensors", _config(folder))


@pytest.mark.parametrize("name", ["a", "c"])
def test_both_spellings_of_the_configuration_agree(goldens: Path, name: str) -> None:
    folder = goldens / "video_vae" / name
    split = _json(folder / "config.split.json")
    tiling = {"vae_tile_size": split["_golden_tile_size"], "vae_tile_overlap_min": split["_golden_tile_overlap_min"]}
    assert merged_config(split | tiling, "split") == _config(folder)


def test_released_values_are_the_defaults() -> None:
    assert merged_config({}, "empty") == VideoVAEConfig()
    config = VideoVAEConfig()
    assert (config.ratio, config.time_ratio, config.decoder_width) == (16, 4, 2048)


def test_the_two_release_files_are_found_from_either(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "config.json").write_text((folder / "config.release.json").read_text())
    (tmp_path / "source" / "config.json").write_text((folder / "config.release_source.json").read_text())
    assert video_vae_config(tmp_path / "config.json") == _config(folder)
    assert video_vae_config(tmp_path / "source" / "config.json") == _config(folder)


def test_encoder(vae: VideoVAE, folder: Path) -> None:
    io = load_file(folder / "io.safetensors")
    for index in (0, 1):
        pixels = io[f"enc{index}.pixels_normalized"]
        moments = vae.encode(pixels)
        _close(moments, io[f"enc{index}.moments"])
        _close(vae.encode(pixels, tiled=False), io[f"enc{index}.moments_untiled"])
        sample = rows.sample_posterior(io[f"enc{index}.moments"])
        _close(sample, io[f"enc{index}.sample_seed42"], 2e-3)
        mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
        _close(rows.normalise(sample, mean, std, 0), io[f"enc{index}.condition_normalized"], 2e-3)


def test_narrow_convolutions_are_the_same(goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    stacked = video_vae._stacked_conv

    def counted(*arguments: Any) -> Tensor:
        calls.append(1)
        return stacked(*arguments)

    monkeypatch.setattr(video_vae, "NARROW", 1 << 20)
    monkeypatch.setattr(video_vae, "_stacked_conv", counted)
    for name, case in (("a", "enc1"), ("c", "encT20")):
        folder = goldens / "video_vae" / name
        io = load_file(folder / "io.safetensors")
        vae = VideoVAE(folder / "weights.release.safetensors", _config(folder))
        _close(vae.encode(io[f"{case}.pixels_normalized"]), io[f"{case}.moments"])
    assert len(calls) > 10


def test_decoder(vae: VideoVAE, folder: Path) -> None:
    io = load_file(folder / "io.safetensors")
    _close(_decode(vae, io["dec0.latent"]), io["dec0.frames_normalized"])
    _close(vae.post_quant(io["clip.latent"]), io["clip.post_quant"])
    _close(vae.decode_clip(io["clip.latent"]), io["clip.vit_out"])


@pytest.mark.parametrize("count", [3, 8, 9, 12, 17])
def test_chunks(vae: VideoVAE, folder: Path, count: int) -> None:
    io = load_file(folder / "io_chunks.safetensors")
    want = io[f"decT{count}.frames_normalized"]
    _close(_decode(vae, io[f"decT{count}.latent"]), want)
    assert count_decoded_frames(count) == want.shape[1]


def test_three_chunks_of_the_encoder(vae: VideoVAE, folder: Path) -> None:
    io = load_file(folder / "io_chunks.safetensors")
    _close(vae.encode(io["encT39.pixels_normalized"]), io["encT39.moments"])


def test_tiles(vae: VideoVAE, folder: Path) -> None:
    io = load_file(folder / "io_tiles.safetensors")
    for index in range(3):
        _close(vae.encode(io[f"encS{index}.pixels_normalized"]), io[f"encS{index}.moments"])
    _close(_decode(vae, io["decS0.latent"]), io["decS0.frames_normalized"])


@pytest.mark.parametrize("name", ["a", "c"])
def test_tile_plans(goldens: Path, name: str) -> None:
    plan = _json(goldens / "video_vae" / name / "tiles.json")
    for case in plan["plans"]:
        got = tiles(case["length"], plan["tile"], plan["min_overlap"], plan["ratio"])
        assert [tile.start for tile in got] == case["starts"]
        assert [tile.overlap for tile in got[:-1]] == case["overlaps"]


def test_from_pixels_to_conditions_and_back(vae: VideoVAE, folder: Path) -> None:
    io = load_file(folder / "io_pixels.safetensors")
    mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    for name, frames in (("image", io["image.u8"][None]), ("clip", io["clip.u8"])):
        pixels = normalise_pixels(frames)
        _close(pixels, io[f"{name}.pixels_normalized"])
        moments = vae.encode(pixels)
        _close(moments, io[f"{name}.moments"])
        latent = rows.normalise(rows.sample_posterior(moments), mean, std, 0)
        _close(latent, io[f"{name}.condition_normalized"], 2e-3)
    latent = rows.denormalise(io["out.latent_normalized"], mean, std, 0)
    _close(latent, io["out.latent"])
    frames = _decode(vae, latent)
    _close(frames, io["out.frames_normalized"])
    pixels = denormalise_pixels(frames)
    _close(pixels, io["out.frames"])
    assert int((pixels_to_bytes(pixels).int() - io["out.frames_u8"].int()).abs().max()) <= 1


def test_the_mask_token_is_never_read(folder: Path, tmp_path: Path) -> None:
    io = load_file(folder / "io_mask_token.safetensors")
    tensors = load_file(folder / "weights.release.safetensors")
    tensors["decoder.mask_token"] = io["decoder.mask_token"]
    save_file(tensors, tmp_path / "vae.safetensors")
    vae = VideoVAE(tmp_path / "vae.safetensors", _config(folder))
    _close(vae.decode_clip(io["latent"]), io["vit_out"])
    _close(_decode(vae, io["latent"]), io["frames_normalized"])


def test_strides_of_the_release(goldens: Path) -> None:
    folder = goldens / "video_vae" / "c"
    vae = VideoVAE(folder / "weights.release.safetensors", _config(folder))
    io = load_file(folder / "io.safetensors")
    for name in ("encS0", "encT20"):
        _close(vae.encode(io[f"{name}.pixels_normalized"]), io[f"{name}.moments"])
    for name in ("decS0", "decT9"):
        _close(_decode(vae, io[f"{name}.latent"]), io[f"{name}.frames_normalized"])


def test_the_split_spelling(goldens: Path, folder: Path, tmp_path: Path) -> None:
    io = load_file(folder / "io_chunks.safetensors")
    release = load_file(folder / "weights.release.safetensors")
    first = {name: tensor for name, tensor in release.items() if name.startswith("post_quant_conv.")}
    save_file(load_file(folder / "weights_decoder_only.split.safetensors") | first, tmp_path / "decoder.safetensors")
    decoder = VideoVAE(tmp_path / "decoder.safetensors", _config(folder))
    assert not decoder.has_encoder
    _close(_decode(decoder, io["decT12.latent"]), io["decT12.frames_normalized"])
    config = _config(folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in release.items():
        tensors |= _split(name, tensor, config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "vae.safetensors")
    vae = VideoVAE(tmp_path / "vae.safetensors", config)
    _close(_decode(vae, io["decT12.latent"]), io["decT12.frames_normalized"])
    _close(vae.encode(io["encT39.pixels_normalized"]), io["encT39.moments"])


def _split(name: str, tensor: Tensor, config: VideoVAEConfig) -> dict[str, Tensor]:
    """A release tensor in the split spelling, by the published table's rules."""
    if name == "decoder.mask_token":
        return {}
    if ".to_qkv." in name:
        parts = tensor.view(config.decoder_heads, 3, config.decoder_head_dim, -1).unbind(1)
        return {
            name.replace("to_qkv", f"to_{letter}"): part.reshape(config.decoder_width, *tensor.shape[1:])
            for letter, part in zip("qkv", parts, strict=True)
        }
    if ".ff.w1." in name:
        gate, up = tensor.chunk(2)
        return {name.replace(".ff.w1.", ".ff.net.0.proj."): torch.cat([up, gate])}
    for old, new in (
        (".ff.w2.", ".ff.net.2."),
        (".to_out.", ".to_out.0."),
        ("decoder.x_embedder.", "decoder.proj_in."),
        ("encoder.down.", "encoder.down_blocks."),
        (".block.", ".resnets."),
        (".downsample.conv.", ".downsamplers.0.conv."),
        (".nin_shortcut.", ".conv_shortcut."),
    ):
        name = name.replace(old, new)
    return {name: tensor}


def test_names_of_both_spellings(goldens: Path) -> None:
    from vkit.video.h3.video_vae import _release_name

    table = _json(goldens / "video_vae" / "names.release_to_split.json")["names"]
    assert len(table) == 560
    for release, entry in table.items():
        for split in entry["split"] if entry["transform"] == "none" else []:
            assert _release_name(split) == release
        assert _release_name(release) == release


def test_what_cannot_be(vae: VideoVAE, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="22"):
        list(vae.decode(torch.zeros(6, 2, 4, 4)))
    tensors = load_file(folder / "weights.release.safetensors")
    tensors.pop("post_quant_conv.weight")
    save_file(tensors, tmp_path / "vae.safetensors")
    with pytest.raises(CheckpointError, match="post_quant_conv"):
        VideoVAE(tmp_path / "vae.safetensors", _config(folder))
    with pytest.raises(CheckpointError, match="by the configuration"):
        VideoVAE(folder / "weights.release.safetensors", VideoVAEConfig(latent_channels=6, decoder_layers=1))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"causal_decoder": True}, "causal_decoder"),
        ({"padding_mode": "zeros"}, "padding_mode"),
        ({"pixel_norm_type": "none"}, "pixel_norm_type"),
        ({"vit_decoder_kwargs": {"qk_norm_affine": True}}, "qk_norm_affine"),
        ({"ch": -1}, "ch is -1"),
        ({"ch_mult": "12"}, "ch_mult"),
        ({"latents_mean": [0.0]}, "latents_mean"),
        ({"latents_std": [float("nan")] * 24}, "latents_std"),
        ({"space_down": [2, 2]}, "levels"),
        ({"vae_ratio": 8}, "vae_ratio"),
        ({"vae_tile_overlap_min": 256}, "tiles of 256"),
        ({"time_down": [2, 2, 2, 1, 1, 1]}, "frames per latent"),
    ],
)
def test_configurations_that_cannot_be(keys: dict[str, Any], words: str) -> None:
    with pytest.raises((CheckpointError, ModelLoadError), match=words):
        merged_config(keys, "config.json")
