"""`vkit h3-gen` over a model of random weights: what it prints, what it writes, how it stops and goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vkit.video.frames import frame_path, read_picture
from vkit.video.h3.request import VideoModelPaths

pytestmark = pytest.mark.slow

Run = Callable[..., Any]
Line = Callable[..., list[str]]


# a video


def test_a_video_from_text(vkit_run: Run, line: Line, tmp_path: Path, temporary: Path) -> None:
    result = vkit_run(*line(frames=20, size="70x90", seed=7))
    assert result.status == 0, result.stderr
    assert result.stdout == f"{tmp_path / 'out.mp4'}\n"
    for words in (
        "20 frames become 22: lengths are 17 n + 5",
        "70x90 becomes 64x64: sides are multiples of 32",
        "t2va, 64x64, 22 frames (0.92 s), 2 steps, seed 7",
        "denoising: done in",
        "file: done in",
    ):
        assert words in result.stderr
    assert "\x1b" not in result.stderr
    (workdir,) = temporary.iterdir()
    assert f"working directory {workdir}" in result.stderr
    assert len(list(workdir.glob("frame_*.ppm"))) == 22
    job = json.loads((workdir / "job.json").read_text())
    assert (job["status"], job["seed"], job["output"]) == ("succeeded", 7, str(tmp_path / "out.mp4"))
    assert (tmp_path / "out.mp4").stat().st_size > 1000


def test_json_is_one_object_on_stdout(vkit_run: Run, line: Line, tmp_path: Path) -> None:
    result = vkit_run(*line(json=True, workdir=tmp_path / "work"))
    assert result.status == 0, result.stderr
    assert result.stdout.count("\n") == 1
    value = json.loads(result.stdout)
    shown = {name: value[name] for name in ("status", "task", "partition", "width", "height", "fps", "num_frames")}
    assert shown == {
        "status": "succeeded",
        "task": "t2va",
        "partition": "fl2va",
        "width": 64,
        "height": 64,
        "fps": 24,
        "num_frames": 22,
    }
    assert (value["seed"], value["steps"], value["num_forwards"], value["num_forwards_run"]) == (42, 3, 2, 2)
    assert value["output"] == str(tmp_path / "out.mp4")
    assert Path(value["audio"]) == tmp_path / "work" / "audio.wav"
    assert set(value["stage_seconds"]) == {"encode", "denoise", "decode_video", "decode_audio", "mux"}
    assert value["latent_checksum"] == json.loads((tmp_path / "work" / "job.json").read_text())["latent_checksum"]
    assert any("trained on" in text for text in value["warnings"])


def test_keyframes_of_another_size_are_fitted_and_said(vkit_run: Run, line: Line, media: Path) -> None:
    given = {"first_frame": media / "square.ppm", "last_frame": media / "wide.ppm", "plan": True, "json": True}
    result = vkit_run(*line(**given))
    assert result.status == 0, result.stderr
    assert "last frame of 96x48 is scaled and cropped to 64x64" in result.stderr
    assert json.loads(result.stdout)["task"] == "fl2va"
    stretched = vkit_run(*line(**given, fit="stretch"))
    assert "last frame of 96x48 is stretched to 64x64" in stretched.stderr
    by_picture = vkit_run(*line(**{**given, "size": None, "last_frame": None}))
    assert (json.loads(by_picture.stdout)["width"], json.loads(by_picture.stdout)["height"]) == (768, 768)


def test_references_keep_the_order_of_the_command_line(
    vkit_run: Run, line: Line, tiny_ref: VideoModelPaths, media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vkit.video.h3.pipeline import VideoPipeline

    seen: list[Any] = []
    plan = VideoPipeline.plan

    def watched(self: VideoPipeline, request: Any, **options: Any) -> Any:
        seen.append([(item.kind, item.path.name, item.sound and item.sound.name) for item in request.references])
        return plan(self, request, **options)

    monkeypatch.setattr(VideoPipeline, "plan", watched)
    clip, square, wide, tone = (str(media / name) for name in ("clip", "square.ppm", "wide.ppm", "tone.wav"))
    base = line(tiny_ref, plan=True, out=None)
    orders = [
        (["--ref-image", wide, "--ref-video", clip, "--ref-image", square], 3),
        (["--ref-video", clip, "--ref-audio", tone, "--ref-image", square], 2),
        (["--ref-audio", tone, "--ref-image", square], 2),
    ]
    for given, count in orders:
        result = vkit_run(*base, *given)
        assert result.status == 0, result.stderr
        assert len(seen[-1]) == count
    assert [item[1] for item in seen[0]] == ["wide.ppm", "clip", "square.ppm"]
    assert seen[1] == [("video", "clip", "tone.wav"), ("image", "square.ppm", None)]
    assert [item[0] for item in seen[2]] == ["audio", "image"]
    monkeypatch.setenv("VKIT_REF_IMAGE", json.dumps([square]))
    assert vkit_run(*base, "--ref-video", clip).status == 0
    assert [item[0] for item in seen[3]] == ["video", "image"]


def test_a_working_directory_is_the_next_clip(
    vkit_run: Run, line: Line, tiny_ref: VideoModelPaths, media: Path, tmp_path: Path
) -> None:
    first = vkit_run(*line(tiny_ref, ref_audio=media / "tone.wav", workdir=tmp_path / "one"))
    assert first.status == 0, first.stderr
    assert "sound alone as reference" in first.stderr
    chained = line(
        tiny_ref, ref_video=tmp_path / "one", ref_audio=tmp_path / "one" / "audio.wav", steps=2, plan=True, json=True
    )
    result = vkit_run(*chained)
    assert result.status == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert (rows["condition_video"], rows["condition_audio"]) == (7 * 24 * 24, 2 * 37)


def test_the_sound_of_a_reference_file_is_not_used_and_said(
    vkit_run: Run, line: Line, tiny: VideoModelPaths, tiny_ref: VideoModelPaths, tmp_path: Path
) -> None:
    assert vkit_run(*line(tiny, steps=2)).status == 0
    result = vkit_run(*line(tiny_ref, ref_video=tmp_path / "out.mp4", plan=True))
    assert result.status == 0, result.stderr
    assert "its own sound is not used" in result.stderr


def test_previews_are_named_and_written(vkit_run: Run, line: Line, tmp_path: Path) -> None:
    result = vkit_run(*line(steps=4, preview_every=1, workdir=tmp_path / "work", checkpoint_every=2))
    assert result.status == 0, result.stderr
    for step in (1, 2):
        path = tmp_path / "work" / f"preview_{step:06d}.ppm"
        assert read_picture(path).shape == (64, 64, 3)
        assert f"denoising: step {step} of 3: {path}" in result.stderr


def test_a_program_writes_the_file(vkit_run: Run, line: Line, tmp_path: Path) -> None:
    program = tmp_path / "mux.sh"
    program.write_text('#!/bin/sh\nfor last; do :; done\necho "$@" > arguments\ncp frame_000000.ppm "$last"\n')
    program.chmod(0o755)
    result = vkit_run(*line(steps=2, ffmpeg=program, workdir=tmp_path / "work"))
    assert result.status == 0, result.stderr
    assert (tmp_path / "out.mp4").read_bytes() == frame_path(tmp_path / "work", 0).read_bytes()
    assert "24/1" in (tmp_path / "work" / "arguments").read_text()


def test_a_failed_program_ends_the_run_with_its_own_code(vkit_run: Run, line: Line, tmp_path: Path) -> None:
    program = tmp_path / "mux.sh"
    program.write_text("#!/bin/sh\necho no more tape >&2\nexit 7\n")
    program.chmod(0o755)
    result = vkit_run(*line(steps=2, ffmpeg=program, workdir=tmp_path / "work"))
    assert result.status == 1
    assert "ended with code 7: no more tape" in result.error
    again = vkit_run(*line(steps=2, workdir=tmp_path / "work", resume=True))
    assert again.status == 0, again.stderr
    assert (tmp_path / "out.mp4").is_file()


# instead of a video


def test_a_plan_reads_no_weights(
    vkit_run: Run, line: Line, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path
) -> None:
    from vkit.loaders.safetensors import SafetensorsTensors
    from vkit.video.h3.audio_vae import AudioVAE

    assert AudioVAE.statistics
    read: list[str] = []
    load = SafetensorsTensors.load
    monkeypatch.setattr(
        SafetensorsTensors, "load", lambda self, name, shape=None: (read.append(name), load(self, name, shape))[1]
    )
    result = vkit_run(*line(plan=True, out=None, size="1280x720", frames=None, duration=5))
    assert result.status == 0, result.stderr
    assert "1280x720 becomes 1280x704" in result.stderr
    head, rows, _, *table = result.stdout.splitlines()
    assert head.startswith("t2va, 1280x704, 124 frames (5.17 s), 2 steps, seed 42")
    assert f"{37 * 22 * 40} of pictures" in rows
    assert table[0].split() == ["stage", "work", "time", "weights", "memory"]
    assert [row.split("  ")[0] for row in table[1:6]] == ["prompt", "denoising", "pictures", "sound", "in all"]
    assert all(re.search(r"FLOP\s+.* s\s", row) for row in table[1:5])
    assert "on disk" in table[-1]
    assert not [name for name in read if "latents" not in name], read
    assert not list(temporary.iterdir())
    assert not (tmp_path / "out.mp4").exists()


def test_a_dry_run_reads_everything_once_and_makes_nothing(
    vkit_run: Run, line: Line, tiny: VideoModelPaths, tmp_path: Path, temporary: Path
) -> None:
    result = vkit_run(*line(dry_run=True))
    assert (result.status, result.stdout) == (0, ""), result.stderr
    assert "of weights read, nothing made" in result.stderr
    value = json.loads(vkit_run(*line(dry_run=True, json=True)).stdout)
    parts = [tiny.dit, tiny.encoder, tiny.video_vae, tiny.audio_vae]
    files = [file.stat().st_size for part in parts if part is not None for file in part.rglob("*.safetensors")]
    assert 0.9 * sum(files) < value["weight_bytes"] < sum(files)
    assert value["plan"]["num_frames"] == 22
    assert not list(temporary.iterdir())
    assert not (tmp_path / "out.mp4").exists()
    (tmp_path / "job.json").touch()
    taken = vkit_run(*line(dry_run=True, workdir=tmp_path))
    assert taken.status == 2
    assert taken.error.startswith(f"--workdir: {tmp_path}: holds a run already")
    assert "--resume it" in taken.error


def test_the_loop_alone_needs_no_autoencoders(vkit_run: Run, line: Line, temporary: Path) -> None:
    bare = {"video_vae": None, "audio_vae": None, "out": None, "denoise_only": True}
    result = vkit_run(*line(**bare))
    assert result.status == 0, result.stderr
    first, second = result.stdout.splitlines()
    found = re.fullmatch(
        r"denoise-only: seq=(\d+) steps=3 forwards=2 total=(\d+\.\d+) s  per_forward=(\d+\.\d+) s", first
    )
    assert found is not None, first
    assert int(found[1]) == 5 + 74 + 28
    assert float(found[2]) >= 2 * float(found[3]) > 0
    assert re.fullmatch(r"checksum: [0-9a-f]{64}", second)
    assert not list(temporary.iterdir())
    value = json.loads(vkit_run(*line(**bare, json=True)).stdout)
    assert f"checksum: {value['latent_checksum']}" == second
    assert (value["output"], value["num_frames"]) == (None, 0)
    other = vkit_run(*line(**bare, seed=43)).stdout.splitlines()[1]
    assert other != second


def test_the_sizes_of_the_transformer(vkit_run: Run, tiny: VideoModelPaths) -> None:
    result = vkit_run("h3-gen", "--dit", str(tiny.dit), "--dump-params")
    assert (result.status, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "num_layers=3",
        "token_refiner_num_layers=1",
        "hidden_size=64",
        "num_attention_heads=2",
        "attention_head_dim=32",
        "ffn_hidden_size=96",
        "latents_dim=4",
        "audio_latents_dim=8",
        "patch_size_t=1",
        "patch_size_h=2",
        "patch_size_w=2",
        "text_dim=32",
        "timestep_input_dim=32",
        "time_embed_hidden_size=48",
        "time_embed_dim=24",
        "adaln_out_features=1152",
        "final_adaln_out_features=128",
        "rope_inv_freq_len=4",
        "video_row_width=16",
        "rope_rot_dim=24",
    ]
    as_json = json.loads(vkit_run("h3-gen", "--dit", str(tiny.dit), "--dump-params", "--json").stdout)
    assert [f"{name}={value}" for name, value in as_json.items()] == result.stdout.splitlines()


def test_embeddings_are_stored_with_tags_and_replayed(vkit_run: Run, line: Line, media: Path, tmp_path: Path) -> None:
    shown = {"first_frame": media / "square.ppm", "denoise_only": True, "out": None}
    made = vkit_run(*line(**shown, save_embeds=tmp_path / "e.f32"))
    assert made.status == 0, made.stderr
    values = np.fromfile(tmp_path / "e.f32", "<f4")
    tags = json.loads((tmp_path / "e.f32.tags.json").read_text())
    assert len(tags) == len(values) // 32 > 64
    assert set(tags) == {0, 1}
    again = vkit_run(*line(**shown, prompt=None, encoder=None, prompt_embeds=tmp_path / "e.f32"))
    assert again.status == 0, again.stderr
    assert again.stdout.splitlines()[1] == made.stdout.splitlines()[1]
    blind = vkit_run(*line(**shown, no_vision_conditioning=True))
    assert "vision conditioning is off" in blind.stderr
    assert blind.stdout.splitlines()[1] != made.stdout.splitlines()[1]


# stopping and going on


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_the_next_layer_and_says_how_to_go_on(
    vkit_run: Run, line: Line, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path, number: int
) -> None:
    from vkit.commands import _h3_show

    whole = json.loads(vkit_run(*line(steps=5, json=True, workdir=tmp_path / "whole")).stdout)
    show = _h3_show._Lines.__call__

    def interrupt(self: Any, report: Any) -> None:
        show(self, report)
        if report.stage == "denoise" and report.done == 7:
            os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(_h3_show._Lines, "__call__", interrupt)
    stopped = vkit_run(*line(steps=5, json=True))
    assert (stopped.status, stopped.stdout) == (130, "")
    assert signal.getsignal(signal.SIGINT) is before
    (workdir,) = temporary.iterdir()
    assert "stopping at the next layer" in stopped.stderr
    assert f"the same command with --workdir {workdir} --resume goes on from here" in stopped.stderr
    assert stopped.stderr.splitlines()[-1] == "vkit: interrupted"
    assert json.loads((workdir / "job.json").read_text())["status"] == "cancelled"
    monkeypatch.setattr(_h3_show._Lines, "__call__", show)
    resumed = json.loads(vkit_run(*line(steps=5, json=True, workdir=workdir, resume=True)).stdout)
    assert resumed["latent_checksum"] == whole["latent_checksum"]
    assert resumed["num_forwards_run"] == 2
    for index in range(22):
        assert frame_path(workdir, index).read_bytes() == frame_path(tmp_path / "whole", index).read_bytes()


def test_only_the_same_run_goes_on(vkit_run: Run, line: Line, tmp_path: Path) -> None:
    nothing = vkit_run(*line(workdir=tmp_path / "none", resume=True))
    assert nothing.status == 1
    assert "holds no run to resume" in nothing.error
    loop = {"denoise_only": True, "out": None, "workdir": tmp_path / "work"}
    assert vkit_run(*line(**loop)).status == 0
    other = vkit_run(*line(**loop, seed=1, resume=True))
    assert other.status == 1
    assert "seed differ" in other.error
    taken = vkit_run(*line(**loop))
    assert taken.status == 2
    assert "holds a run already" in taken.error
    done = vkit_run(*line(**loop, resume=True, json=True))
    assert (done.status, json.loads(done.stdout)["num_forwards_run"]) == (0, 0)


# on a terminal


@pytest.mark.slow
def test_bars_previews_and_no_colour_where_none_is_wanted(line: Line, tmp_path: Path) -> None:
    """A terminal of 120 columns shows a bar for each stage, and previews as pictures unless colours are unwanted."""
    pty = pytest.importorskip("pty")
    shown = {}
    for name, more in (("colour", {"TERM": "xterm-256color", "COLORTERM": "truecolor"}), ("plain", {"NO_COLOR": "1"})):
        args = line(preview_every=1, workdir=tmp_path / name, out=tmp_path / f"{name}.mp4")
        shown[name] = _on_terminal(pty, args, {"COLUMNS": "120", "LINES": "40", "TERM": "xterm", **more})
    for text in shown.values():
        for stage in ("prompt", "denoising", "pictures", "sound", "file"):
            assert stage in text
        assert "100%" in text
        assert "preview_000001.ppm" in text
    assert re.search(r"\x1b\[[0-9;]*m", shown["colour"])
    assert "▀" in shown["colour"]
    assert not re.search(r"\x1b\[[0-9;]*m", shown["plain"])
    assert "▀" not in shown["plain"]


def _on_terminal(pty: Any, args: list[str], environment: dict[str, str]) -> str:
    """What the program writes to a terminal."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "vkit", *args], stdin=theirs, stdout=theirs, stderr=theirs, env=environ
    )
    os.close(theirs)
    pieces = []
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(ours)
    assert process.wait(timeout=120) == 0
    return b"".join(pieces).decode()


def test_help_costs_no_torch() -> None:
    code = (
        "import sys; from vkit.cli import main; status = main(['h3-gen', '--help']); "
        "sys.exit(status or ('torch' in sys.modules) * 9)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "--denoise-only" in done.stdout
