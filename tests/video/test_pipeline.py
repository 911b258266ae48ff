"""The pipeline as its callers see it, on a whole model of random weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vkit.errors import InvalidRequest, UsageError, VkitError
from vkit.video.errors import DiskSpaceError, MediaError, MuxError, ResumeError, VideoCancelled, VideoFailed
from vkit.video.frames import frame_path, read_picture
from vkit.video.h3 import geometry
from vkit.video.h3.geometry import Size
from vkit.video.h3.pipeline import Progress, VideoPipeline, VideoResult
from vkit.video.h3.request import Reference, VideoModelPaths, VideoOptions, VideoRequest, attach_sound
from vkit.video.h3.tiny import main
from vkit.video.mux import MuxJob, in_process_muxer
from vkit.video.sound import read_sound

pytestmark = pytest.mark.slow

SHORT = VideoRequest(prompt="a lighthouse", num_frames=22, width=64, height=64, steps=4)


def _run(paths: VideoModelPaths, request: VideoRequest, workdir: Path, **how: Any) -> VideoResult:
    options = how.pop("options", VideoOptions())
    with VideoPipeline.open(paths, options) as pipeline:
        return pipeline.generate(request, workdir, **how)


def _frames(workdir: Path) -> list[str]:
    return sorted(file.name for file in workdir.glob("frame_*.ppm"))


# the three tasks


def test_text_to_video(tiny: VideoModelPaths, tmp_path: Path) -> None:
    pytest.importorskip("av")
    reports: list[Progress] = []
    result = _run(
        tiny,
        SHORT,
        tmp_path / "work",
        output=tmp_path / "out.mp4",
        muxer=in_process_muxer(),
        progress=reports.append,
        preview_every=1,
    )
    assert (result.num_frames, result.num_forwards_run, result.plan.rows.text) == (22, 3, 12)
    assert _frames(tmp_path / "work") == [f"frame_{index:06d}.ppm" for index in range(22)]
    frame = read_picture(frame_path(tmp_path / "work", 0))
    assert frame.shape == (64, 64, 3)
    assert frame.std() > 5
    wave = read_sound(tmp_path / "work" / "audio.wav", 10.0)
    assert wave.shape == (2, 37 * 800)
    assert wave.std() > 1e-3
    assert (tmp_path / "out.mp4").stat().st_size > 1000
    job = json.loads((tmp_path / "work" / "job.json").read_text())
    assert (job["status"], job["seed"], job["latent_checksum"]) == ("succeeded", 42, result.latent_checksum)
    stages = [stage.name for stage in result.plan.stages]
    assert stages == ["encode", "denoise", "decode_video", "decode_audio"]
    for name in (*stages, "mux"):
        mine = [report for report in reports if report.stage == name]
        assert [report.done for report in mine] == sorted(report.done for report in mine)
        assert mine[-1].done == mine[-1].total
    previews = [report.preview for report in reports if report.preview is not None]
    assert [path.name for path in previews] == ["preview_000001.ppm", "preview_000002.ppm"]
    assert read_picture(previews[0]).shape == (64, 64, 3)


def test_equal_requests_make_equal_videos_and_seeds_make_others(tiny: VideoModelPaths, tmp_path: Path) -> None:
    first = _run(tiny, SHORT, tmp_path / "a")
    again = _run(tiny, SHORT, tmp_path / "b", checkpoint_every=2)
    other = _run(tiny, replace(SHORT, seed=7), tmp_path / "c")
    assert first.latent_checksum == again.latent_checksum != other.latent_checksum
    assert frame_path(tmp_path / "a", 21).read_bytes() == frame_path(tmp_path / "b", 21).read_bytes()


def test_keyframes(tiny: VideoModelPaths, media: Path, tmp_path: Path) -> None:
    request = replace(SHORT, first_frame=media / "first.ppm", last_frame=media / "other.ppm")
    with VideoPipeline.open(tiny) as pipeline:
        plan = pipeline.plan(request)
        assert plan.task == "fl2va"
        # label, start, 8x8 merged cells (64x64 is enlarged to 256x256), end, twice; then the prompt
        assert plan.rows.text == 2 * (len("<Picture 1>: ") + 2 + 64) + 12
        assert plan.rows.condition_video == 2 * 4
        assert any("last frame of 96x48 is scaled and cropped to 64x64" in line for line in plan.warnings)
        result = pipeline.generate(request, tmp_path / "work")
    assert result.num_frames == 22
    assert result.latent_checksum != _run(tiny, SHORT, tmp_path / "plain").latent_checksum
    loose = _run(tiny, replace(request, noise_aug=0.5), tmp_path / "loose")
    assert loose.latent_checksum != result.latent_checksum
    blind = _run(tiny, request, tmp_path / "blind", options=VideoOptions(vision_conditioning=False))
    assert blind.plan.rows.text == 12
    assert any("vision conditioning is off" in line for line in blind.warnings)


def test_references(tiny_ref: VideoModelPaths, media: Path, tmp_path: Path) -> None:
    references = (
        Reference("video", media / "clip"),
        Reference("audio", media / "tone.wav"),
    )
    joined = attach_sound(references)
    assert joined == (Reference("video", media / "clip", media / "tone.wav"),)
    request = replace(SHORT, references=joined, num_frames=39)
    with VideoPipeline.open(tiny_ref) as pipeline:
        plan = pipeline.plan(request)
        assert plan.task == "ref2va"
        # a clip of 26 frames is shown at 1024x768 and trimmed to 22: 7 latent frames of 24x32 rows
        assert plan.rows.condition_video == 7 * 24 * 32
        assert plan.rows.condition_audio == 2 * 20


def test_a_sound_alone_and_a_chain_of_runs(tiny_ref: VideoModelPaths, media: Path, tmp_path: Path) -> None:
    request = replace(SHORT, references=(Reference("audio", media / "tone.wav"),), steps=3)
    result = _run(tiny_ref, request, tmp_path / "one")
    assert result.plan.rows.condition_audio == 40
    assert any("sound alone" in line for line in result.warnings)
    with VideoPipeline.open(tiny_ref) as pipeline:
        chained = replace(SHORT, references=(Reference("video", tmp_path / "one", tmp_path / "one" / "audio.wav"),))
        rows = pipeline.plan(chained).rows
    assert (rows.condition_video, rows.condition_audio) == (7 * 24 * 24, 2 * 37)


def test_every_kind_of_reference_at_once(
    tiny_ref: VideoModelPaths, media: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At the released sizes the encoder alone takes minutes on a small machine; test_references plans those.
    whole = geometry.canvas
    monkeypatch.setattr(geometry, "canvas", lambda size: whole(size, short=64, max_pixels=64 * 128))
    monkeypatch.setattr(geometry, "reference_image_size", lambda size: Size(128, 96))
    references = (
        Reference("image", media / "small.ppm"),
        Reference("video", media / "clip", media / "tone.wav"),
        Reference("audio", media / "tone.wav"),
    )
    request = replace(SHORT, references=references, num_frames=39)
    result = _run(tiny_ref, request, tmp_path / "work")
    assert result.num_frames == 39
    assert result.plan.rows.condition_video == 3 * 4 + 7 * 2 * 3
    assert result.plan.rows.condition_audio == 80
    others = [replace(request, references=references[:2]), replace(request, references=references[::-1])]
    checksums = {_run(tiny_ref, other, tmp_path / str(index)).latent_checksum for index, other in enumerate(others)}
    assert len(checksums | {result.latent_checksum}) == 3


# replay, streaming, forms of the weights


def test_embeddings_can_be_replayed(tiny: VideoModelPaths, media: Path, tmp_path: Path) -> None:
    request = replace(SHORT, first_frame=media / "first.ppm")
    made = _run(tiny, request, tmp_path / "a", save_embeds=tmp_path / "e.f32")
    assert (tmp_path / "e.f32").stat().st_size == made.plan.rows.text * 32 * 4
    replay = replace(request, prompt=None, prompt_embeds=tmp_path / "e.f32")
    again = _run(replace(tiny, encoder=None, tokenizer=None), replay, tmp_path / "b")
    assert again.latent_checksum == made.latent_checksum
    (tmp_path / "e.f32.tags.json").unlink()
    untagged = _run(tiny, replay, tmp_path / "c")
    assert untagged.latent_checksum != made.latent_checksum


def test_embeddings_of_other_pictures_are_warned_of(tiny: VideoModelPaths, media: Path, tmp_path: Path) -> None:
    stored, tags = tmp_path / "e.f32", tmp_path / "e.f32.tags.json"
    np.ones(2 * 32, "<f4").tofile(stored)
    text = replace(SHORT, prompt=None, prompt_embeds=stored)
    shown = replace(text, first_frame=media / "first.ppm")

    def warned(request: VideoRequest) -> list[str]:
        with VideoPipeline.open(tiny) as pipeline:
            return [line for line in pipeline.plan(request).warnings if line.startswith("e.f32: ")]

    assert warned(text) == []
    assert "no row tags beside it" in warned(shown)[0]
    tags.write_text("[1, 1]")
    assert warned(text) == []
    assert "encoded without pictures" in warned(shown)[0]
    tags.write_text("[0, 1]")
    assert "encoded with pictures" in warned(text)[0]
    assert warned(shown) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_from_disk_make_the_same_bits(tiny: VideoModelPaths, tmp_path: Path, dtype: Any) -> None:
    resident = _run(tiny, SHORT, tmp_path / "a", options=VideoOptions(dtype=dtype))
    streamed = _run(tiny, SHORT, tmp_path / "b", options=VideoOptions(dtype=dtype, offload="disk"))
    assert resident.latent_checksum == streamed.latent_checksum
    assert frame_path(tmp_path / "a", 3).read_bytes() == frame_path(tmp_path / "b", 3).read_bytes()


def test_the_loop_alone(without: VideoModelPaths, tmp_path: Path) -> None:
    embeds = np.random.default_rng(0).normal(size=(5, 32)).astype("<f4")
    (tmp_path / "e.f32").write_bytes(embeds.tobytes())
    request = replace(SHORT, prompt=None, prompt_embeds=tmp_path / "e.f32")
    result = _run(without, request, tmp_path / "work", denoise_only=True)
    assert (result.num_frames, result.audio, result.output) == (0, None, None)
    assert result.seconds_per_forward > 0
    with pytest.raises(UsageError, match="--video-vae"):
        _run(without, request, tmp_path / "full")


def test_more_latents_than_seventeen(tiny: VideoModelPaths, tmp_path: Path) -> None:
    result = _run(tiny, replace(SHORT, num_frames=107, width=32, height=32, steps=2), tmp_path / "work")
    assert (result.plan.latent_t, result.num_frames) == (32, 107)
    levels = [read_picture(frame_path(tmp_path / "work", index)).std() for index in range(0, 107, 15)]
    assert min(levels) > 0.5 * max(levels)


# cancelled, killed, continued


def test_cancelling_leaves_a_state_that_continues(tiny: VideoModelPaths, tmp_path: Path) -> None:
    whole = _run(tiny, SHORT, tmp_path / "whole")
    seen: list[Progress] = []

    def after_two_steps() -> bool:
        return any(report.stage == "denoise" and report.done >= 7 for report in seen)

    how: dict[str, Any] = {"progress": seen.append, "cancelled": after_two_steps, "checkpoint_every": 100}
    with pytest.raises(VideoCancelled) as caught:
        _run(tiny, SHORT, tmp_path / "work", **how)
    assert caught.value.exit_status == 130
    assert json.loads((tmp_path / "work" / "job.json").read_text())["status"] == "cancelled"
    rest = _run(tiny, SHORT, tmp_path / "work", resume=True)
    assert rest.num_forwards_run == 1
    assert rest.latent_checksum == whole.latent_checksum
    for index in (0, 21):
        assert frame_path(tmp_path / "work", index).read_bytes() == frame_path(tmp_path / "whole", index).read_bytes()


def test_cancelling_before_the_first_step(tiny: VideoModelPaths, tmp_path: Path) -> None:
    with pytest.raises(VideoCancelled):
        _run(tiny, SHORT, tmp_path / "work", cancelled=lambda: True)
    assert _run(tiny, SHORT, tmp_path / "work", resume=True).num_forwards_run == 3


KILLED_RUN = """
import sys
from pathlib import Path
from vkit.video.h3.pipeline import VideoPipeline
from vkit.video.h3.request import VideoModelPaths, VideoRequest
folder, work = Path(sys.argv[1]), Path(sys.argv[2])
paths = VideoModelPaths(dit=folder / "dit", encoder=folder / "encoder", video_vae=folder / "video_vae",
                        audio_vae=folder / "audio_vae")
request = VideoRequest(prompt="a lighthouse", num_frames=22, width=64, height=64, steps=int(sys.argv[3]))
with VideoPipeline.open(paths) as pipeline:
    result = pipeline.generate(request, work, resume=(work / "state").exists(), denoise_only=False,
                               progress=lambda report: print(report.stage, report.done, flush=True))
print("checksum", result.latent_checksum, result.num_forwards_run, flush=True)
"""


@pytest.mark.parametrize(
    "kill_after",
    [["denoise 16"], pytest.param(["encode 1", "denoise 0", "denoise 5", "decode_video 0"], marks=pytest.mark.slow)],
)
def test_killed_at_any_step_it_ends_with_the_same_bits(
    tiny: VideoModelPaths, tmp_path: Path, kill_after: list[str]
) -> None:
    folder, steps = tiny.dit.parent, 9
    command = [sys.executable, "-c", KILLED_RUN, str(folder), str(tmp_path / "work"), str(steps)]
    threads = str(torch.get_num_threads())
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    whole = _run(tiny, replace(SHORT, steps=steps), tmp_path / "whole")
    for moment in kill_after:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == moment:
                process.send_signal(signal.SIGKILL)
                break
        process.stdout.close()
        assert process.wait(timeout=120) == -signal.SIGKILL
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    checksum, forwards = done.stdout.splitlines()[-1].split()[1:]
    assert checksum == whole.latent_checksum
    assert int(forwards) < steps - 1
    assert _frames(tmp_path / "work") == _frames(tmp_path / "whole")
    for index in range(22):
        assert frame_path(tmp_path / "work", index).read_bytes() == frame_path(tmp_path / "whole", index).read_bytes()


def test_only_the_same_run_is_continued(tiny: VideoModelPaths, tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="no run to resume"):
        _run(tiny, SHORT, tmp_path / "work", resume=True)
    with pytest.raises(VideoCancelled):
        _run(tiny, SHORT, tmp_path / "work", cancelled=lambda: True)
    for other, words in (
        (replace(SHORT, seed=1), "seed"),
        (replace(SHORT, prompt="a boat"), "prompt"),
        (replace(SHORT, steps=5, flow_shift=9.0), "flow_shift, steps"),
    ):
        with pytest.raises(ResumeError, match=f"{words} differ"):
            _run(tiny, other, tmp_path / "work", resume=True)
    with pytest.raises(ResumeError, match="dtype"):
        _run(tiny, SHORT, tmp_path / "work", resume=True, options=VideoOptions(dtype="bfloat16"))
    with pytest.raises(InvalidRequest, match="holds a run already"):
        _run(tiny, SHORT, tmp_path / "work")
    assert _run(tiny, SHORT, tmp_path / "work", resume=True, options=VideoOptions(offload="disk")).num_frames == 22


def test_a_damaged_state_is_told(tiny: VideoModelPaths, tmp_path: Path) -> None:
    with pytest.raises(VideoCancelled):
        _run(tiny, SHORT, tmp_path / "work", cancelled=_after(12))
    state = tmp_path / "work" / "state" / "latents.safetensors"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(ResumeError, match="damaged"):
        _run(tiny, SHORT, tmp_path / "work", resume=True)


@pytest.mark.parametrize("name", ["latents", "text", "conditions"])
def test_one_flipped_bit_of_a_state_is_told(tiny: VideoModelPaths, media: Path, tmp_path: Path, name: str) -> None:
    request = replace(SHORT, first_frame=media / "first.ppm")
    folder = tmp_path / "work" / "state"
    with pytest.raises(VideoCancelled):
        _run(tiny, request, tmp_path / "work", cancelled=(folder / "latents.safetensors").exists)
    state = folder / f"{name}.safetensors"
    whole = state.read_bytes()
    state.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    with pytest.raises(ResumeError, match=f"{name}.safetensors: is damaged: its checksum differs"):
        _run(tiny, request, tmp_path / "work", resume=True)
    state.write_bytes(whole)
    assert _run(tiny, request, tmp_path / "work", resume=True).num_frames == 22


def _after(count: int) -> Any:
    asked = iter(range(count))
    return lambda: next(asked, None) is None


# failures on the way


def test_a_full_disk_is_told_before_anything_is_read(
    tiny: VideoModelPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(DiskSpaceError, match="GB are free"):
        _run(tiny, SHORT, tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_numbers_that_are_not_finite_end_the_run(
    tiny: VideoModelPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vkit.video.h3.dit import DiT

    def broken(self: DiT, *arguments: Any, **others: Any) -> Any:
        video, audio = forward(self, *arguments, **others)
        return video.index_fill(0, torch.tensor([0]), float("nan")), audio

    forward = DiT.forward
    monkeypatch.setattr(DiT, "forward", broken)
    with pytest.raises(VideoFailed, match="step 1 made numbers that are not finite"):
        _run(tiny, SHORT, tmp_path / "work")
    job = json.loads((tmp_path / "work" / "job.json").read_text())
    assert (job["status"], "step 1" in job["error"]) == ("failed", True)


@pytest.mark.parametrize(("value", "words"), [(float("nan"), "not finite"), (0.25, "constant")])
def test_a_dead_sound_track_never_reaches_the_muxer(
    tiny: VideoModelPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, words: str
) -> None:
    from vkit.video.h3.audio_vae import AudioVAE

    monkeypatch.setattr(AudioVAE, "decode", lambda self, latent: torch.full((2, 1000), value))
    calls: list[MuxJob] = []
    with pytest.raises(VideoFailed, match=words):
        _run(tiny, SHORT, tmp_path / "work", output=tmp_path / "o.mp4", muxer=calls.append)
    assert not calls


def test_a_failing_muxer_leaves_everything_but_the_file(tiny: VideoModelPaths, tmp_path: Path) -> None:
    def fail(job: MuxJob) -> None:
        raise MuxError(f"{job.output}: the disk is made of cheese")

    with pytest.raises(MuxError, match="cheese"):
        _run(tiny, SHORT, tmp_path / "work", output=tmp_path / "o.mp4", muxer=fail)
    calls: list[MuxJob] = []
    _run(tiny, SHORT, tmp_path / "work", output=tmp_path / "o.mp4", muxer=calls.append, resume=True)
    assert [job.num_frames for job in calls] == [22]


# what is refused

BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"num_frames": 5}, "22"),
    ({"num_frames": 0}, "positive"),
    ({"duration": -1.0}, "above 0"),
    ({"duration": float("nan")}, "above 0"),
    ({"width": None}, "width: missing"),
    ({"height": None}, "height: missing"),
    ({"width": 16}, "at least 32"),
    ({"width": 640, "height": 64}, "aspect"),
    ({"steps": 1}, "at least 2"),
    ({"steps": 1001}, "at most 1000"),
    ({"flow_shift": 0.0}, "flow_shift"),
    ({"flow_shift": float("nan")}, "flow_shift"),
    ({"audio_flow_shift": -3.0}, "audio_flow_shift"),
    ({"noise_aug": 1.5}, "noise_aug"),
    ({"noise_aug": float("nan")}, "noise_aug"),
    ({"seed": 1 << 70}, "seed"),
    ({"fit": "squash"}, "fit"),
    ({"prompt": None}, "neither was given"),
    ({"prompt_embeds": Path("x.f32")}, "both were given"),
    ({"prompt": ""}, "at least one token"),
    ({"task": "i2v"}, "t2va, fl2va, ref2va"),
    ({"task": "fl2va"}, "neither keyframes nor references"),
    ({"task": "ref2va"}, "neither keyframes nor references"),
    ({"first_frame": Path("none.png")}, "none.png: cannot be read"),
    ({"first_frame": Path("none.png"), "references": (Reference("image", Path("b.png")),)}, "exclude each other"),
    ({"references": (Reference("image", Path("b.png")),)}, "partition fl2va, which serves t2va and fl2va"),
]


@pytest.mark.parametrize(("change", "words"), BAD_REQUESTS)
def test_bad_requests(tiny: VideoModelPaths, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with VideoPipeline.open(tiny) as pipeline:
        with pytest.raises(VkitError, match=words):
            pipeline.plan(replace(SHORT, **change))
        with pytest.raises(VkitError, match=words):
            pipeline.generate(replace(SHORT, **change), tmp_path / "work")
    assert not (tmp_path / "work").exists()


BAD_REFERENCES: list[tuple[tuple[Reference, ...], str]] = [
    (tuple(Reference("image", Path("first.ppm")) for _ in range(10)), "10 pictures"),
    (tuple(Reference("video", Path("clip")) for _ in range(4)), "4 clips"),
    (tuple(Reference("audio", Path("tone.wav")) for _ in range(4)), "4 sounds"),
    ((Reference("image", Path("first.ppm"), Path("tone.wav")),), "cannot carry a sound"),
    ((Reference("video", Path("first.ppm")),), "video format|no picture|frame rate"),
    ((Reference("video", Path("nothing")),), "no such file"),
    ((Reference("audio", Path("first.ppm")),), "no known"),
    ((Reference("image", Path("tone.wav")),), "picture"),
    ((Reference("image", Path("wide.ppm")),), "aspect"),
    ((Reference("video", Path("short")),), "at least 13"),
]


@pytest.mark.parametrize(("references", "words"), BAD_REFERENCES)
def test_bad_references(
    tiny_ref: VideoModelPaths, media: Path, tmp_path: Path, references: tuple[Reference, ...], words: str
) -> None:
    from vkit.video.frames import write_ppm

    write_ppm(tmp_path / "wide.ppm", np.zeros((10, 50, 3), np.uint8))
    (tmp_path / "short").mkdir()
    for index in range(5):
        shutil.copy(frame_path(media / "clip", index), tmp_path / "short")

    def place(path: Path) -> Path:
        return tmp_path / path if path.name in ("wide.ppm", "short") else media / path

    placed = tuple(
        replace(item, path=place(item.path), sound=None if item.sound is None else media / item.sound)
        for item in references
    )
    with VideoPipeline.open(tiny_ref) as pipeline, pytest.raises(VkitError, match=words):
        pipeline.plan(replace(SHORT, references=placed))


@pytest.mark.parametrize(
    ("size", "tags", "words"),
    [
        (100, None, "multiple of 128"),
        (0, None, "multiple of 128"),
        (256, "[1]", "2 tags"),
        (256, "[1, 7]", "2 tags"),
        (256, "{", "JSON"),
    ],
)
def test_bad_embeddings(tiny: VideoModelPaths, tmp_path: Path, size: int, tags: str | None, words: str) -> None:
    (tmp_path / "e.f32").write_bytes(bytes(size))
    if tags is not None:
        (tmp_path / "e.f32.tags.json").write_text(tags)
    with pytest.raises(MediaError, match=words):
        _run(tiny, replace(SHORT, prompt=None, prompt_embeds=tmp_path / "e.f32"), tmp_path / "work")


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"offload": "moon"}, "--offload moon"),
    ({"offload": "host", "device": "cpu"}, "--offload host"),
    ({"dequant_bf16": True}, "--dequant-bf16"),
    ({"device": "tpu"}, "--device"),
    ({"dtype": "float8"}, "float8"),
]


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS)
def test_bad_options(tiny: VideoModelPaths, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        VideoPipeline.open(tiny, VideoOptions(**options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_device_that_is_not_there(tiny: VideoModelPaths) -> None:
    with pytest.raises(UsageError, match="--device cuda"):
        VideoPipeline.open(tiny, VideoOptions(device="cuda"))


@pytest.mark.parametrize("part", ["dit", "encoder", "video_vae", "audio_vae"])
def test_missing_and_swapped_parts(tiny: VideoModelPaths, tmp_path: Path, part: str) -> None:
    with pytest.raises(VkitError, match="no such file"):
        VideoPipeline.open(replace(tiny, **{part: tmp_path / "none"}))
    with pytest.raises(VkitError, match=r"is this|missing|expected|the transformer has"):
        VideoPipeline.open(replace(tiny, **{part: tiny.audio_vae if part != "audio_vae" else tiny.encoder}))


def test_parts_a_request_needs(tiny: VideoModelPaths, tmp_path: Path) -> None:
    for part, words in (("encoder", "conditioner"), ("video_vae", "--video-vae"), ("audio_vae", "--audio-vae")):
        paths = replace(tiny, tokenizer=None, **{part: None})
        with VideoPipeline.open(paths) as pipeline, pytest.raises(VkitError, match=words):
            pipeline.plan(SHORT)


def test_a_partition_nobody_told(tiny: VideoModelPaths, tmp_path: Path) -> None:
    shutil.copytree(tiny.dit, tmp_path / "weights")
    (tmp_path / "weights" / "model_index.json").unlink()
    paths = replace(tiny, dit=tmp_path / "weights")
    with VideoPipeline.open(paths) as pipeline:
        with pytest.raises(UsageError, match="--partition"):
            pipeline.plan(SHORT)
        assert pipeline.plan(SHORT, denoise_only=True).partition is None
    with VideoPipeline.open(replace(paths, partition="fl2va")) as pipeline:
        assert pipeline.plan(SHORT).partition == "fl2va"
    with pytest.raises(UsageError, match="model_index"):
        VideoPipeline.open(replace(tiny, partition="ref2va"))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"preview_every": -1}, "preview_every"),
        ({"output": Path("o.mp4")}, "muxer"),
        ({"output": Path("none/o.mp4"), "muxer": print}, "no such folder"),
        ({"output": Path("/proc/o.mp4"), "muxer": print}, "cannot be written to"),
        ({"output": Path("o.mp4"), "muxer": print, "denoise_only": True}, "denoise_only"),
        ({"preview_every": 1, "denoise_only": True}, "denoise_only"),
    ],
)
def test_bad_runs(tiny: VideoModelPaths, tmp_path: Path, how: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        _run(tiny, SHORT, tmp_path / "work", **how)
    assert not (tmp_path / "work").exists()


# plans


def test_a_plan_of_the_released_sizes_reads_no_weights(tiny: VideoModelPaths) -> None:
    with VideoPipeline.open(tiny) as pipeline:
        plan = pipeline.plan(VideoRequest(prompt="x", width=1280, height=720, duration=5))
        assert pipeline.parameters()["video_row_width"] == 16
    assert (plan.width, plan.height, plan.num_frames, plan.latent_t, plan.audio_t) == (1280, 704, 124, 37, 207)
    assert (plan.steps, plan.num_forwards, plan.rows.video, plan.rows.audio) == (50, 49, 37 * 22 * 40, 414)
    assert plan.disk_bytes > 124 * 1280 * 704 * 3
    assert any("1280x720 becomes 1280x704" in line for line in plan.warnings)
    assert any("120 frames become 124" in line for line in plan.warnings)
    assert plan.seconds > 0
    assert plan.peak_bytes == max(stage.peak_bytes for stage in plan.stages)
    assert json.loads(json.dumps(plan.as_dict()))["rows"]["total"] == plan.rows.total


def test_the_tiny_model_is_made_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "m"), "ref2va"]) == 0
    assert str(tmp_path / "m" / "dit") in capsys.readouterr().out
    with VideoPipeline.open(VideoModelPaths(dit=tmp_path / "m" / "dit")) as pipeline:
        assert pipeline.parameters()["num_layers"] == 3
    assert main([]) == 2
    assert main([str(tmp_path), "t2va"]) == 2
