"""The program as users start it: killed and resumed, its files probed from outside, and served over HTTP."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from vkit.video.frames import frame_path
from vkit.video.h3.request import VideoModelPaths

Run = Callable[..., Any]
Line = Callable[..., list[str]]


# pitfall 18: lengths


def _streams(path: Path) -> dict[str, dict[str, Any]]:
    """Rate, frames, start and length of both streams, by ffprobe where there is one, else by PyAV."""
    if shutil.which("ffprobe") is None:
        return _streams_by_pyav(path)
    command = ["ffprobe", "-v", "error", "-count_frames", "-show_streams", "-of", "json", str(path)]
    told = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=200).stdout)["streams"]
    video, audio = (next(item for item in told if item["codec_type"] == kind) for kind in ("video", "audio"))
    return {
        "video": {
            "codec": video["codec_name"],
            "rates": {video["r_frame_rate"], video["avg_frame_rate"]},
            "frames": int(video["nb_read_frames"]),
            "size": (video["width"], video["height"]),
            "start": float(video["start_time"]),
            "seconds": float(video["duration"]),
        },
        "audio": {
            "codec": audio["codec_name"],
            "rate": int(audio["sample_rate"]),
            "channels": audio["channels"],
            "start": float(audio["start_time"]),
            "seconds": float(audio["duration"]),
        },
    }


def _streams_by_pyav(path: Path) -> dict[str, dict[str, Any]]:
    av = pytest.importorskip("av")
    with av.open(str(path)) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        count = sum(1 for _ in container.decode(video))
        return {
            "video": {
                "codec": video.codec_context.name,
                "rates": {f"{Fraction(rate)}/1" for rate in (video.base_rate, video.average_rate)},
                "frames": count,
                "size": (video.width, video.height),
                "start": float(video.start_time * video.time_base),
                "seconds": float(video.duration * video.time_base),
            },
            "audio": {
                "codec": audio.codec_context.name,
                "rate": audio.rate,
                "channels": audio.channels,
                "start": float(audio.start_time * audio.time_base),
                "seconds": float(audio.duration * audio.time_base),
            },
        }


@pytest.mark.slow
@pytest.mark.parametrize("ffmpeg", [False, True])
def test_five_seconds_are_124_frames_at_24_with_sound_from_the_start(
    vkit_run: Run, line: Line, tmp_path: Path, ffmpeg: bool
) -> None:
    program = shutil.which("ffmpeg")
    if ffmpeg and program is None:
        pytest.skip("no ffmpeg program on this machine")
    pytest.importorskip("av")
    asked = line(frames=None, duration=5, size="64x96", steps=2, json=True, ffmpeg=program if ffmpeg else None)
    result = vkit_run(*asked)
    assert result.status == 0, result.stderr
    assert "120 frames become 124" in result.stderr
    assert json.loads(result.stdout)["num_frames"] == 124
    for streams in (_streams(tmp_path / "out.mp4"), _streams_by_pyav(tmp_path / "out.mp4")):
        video, audio = streams["video"], streams["audio"]
        assert (video["codec"], video["rates"], video["frames"], video["size"]) == ("h264", {"24/1"}, 124, (64, 96))
        assert (audio["codec"], audio["rate"], audio["channels"]) == ("aac", 32_000, 2)
        assert video["start"] == audio["start"] == 0
        assert video["seconds"] == pytest.approx(124 / 24, abs=1e-3)
        assert abs(video["seconds"] - audio["seconds"]) < 1 / 24


@pytest.mark.slow
def test_the_sound_of_the_file_is_that_of_the_working_directory(vkit_run: Run, line: Line, tmp_path: Path) -> None:
    """Lined up by correlation, the decoded sound is where it was within 10 ms."""
    np, av = pytest.importorskip("numpy"), pytest.importorskip("av")
    from vkit.video.sound import read_sound

    result = vkit_run(*line(frames=39, steps=2, workdir=tmp_path / "work"))
    assert result.status == 0, result.stderr
    wave = read_sound(tmp_path / "work" / "audio.wav", 10.0)[0]
    with av.open(str(tmp_path / "out.mp4")) as container:
        decoded = np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])
    count = min(len(wave), len(decoded)) - 2000
    shifts = range(-1000, 1001)
    scores = [float(np.dot(wave[1000 : 1000 + count], decoded[1000 + s : 1000 + s + count])) for s in shifts]
    assert abs(shifts[int(np.argmax(scores))]) <= 320


# killed, interrupted, terminated


@pytest.mark.slow
def test_a_run_that_dies_three_times_ends_as_one_that_never_did(
    begin: Callable[..., Any], line: Line, tmp_path: Path
) -> None:
    def args(name: str, **more: Any) -> list[str]:
        return line(workdir=tmp_path / name, out=tmp_path / f"{name}.mp4", steps=40, json=True, **more)

    whole = begin(*args("whole"))
    assert whole.ended() == 0, whole.stderr
    expected = json.loads(whole.stdout)
    state = tmp_path / "work" / "state" / "latents.safetensors"
    seen: bytes = b""

    def moved_on() -> bool:
        return state.is_file() and state.read_bytes() != seen

    for number, status in ((signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 130)):
        program = begin(*args("work", resume=True if seen else None))
        program.until(moved_on)
        assert program.ended(number) == status, program.stderr
        assert program.stdout == ""
        assert "Traceback" not in program.stderr
        assert status < 0 or "goes on from here" in program.stderr
        seen = state.read_bytes()
    last = begin(*args("work", resume=True))
    assert last.ended() == 0, last.stderr
    result = json.loads(last.stdout)
    assert result["latent_checksum"] == expected["latent_checksum"]
    assert 0 < result["num_forwards_run"] < expected["num_forwards_run"] == 39
    for index in range(22):
        assert frame_path(tmp_path / "work", index).read_bytes() == frame_path(tmp_path / "whole", index).read_bytes()
    assert (tmp_path / "work" / "audio.wav").read_bytes() == (tmp_path / "whole" / "audio.wav").read_bytes()


# served


def _server(begin: Callable[..., Any], paths: VideoModelPaths, *more: str) -> tuple[Any, str]:
    program = begin(
        "serve", "--video-only", "--host", "127.0.0.1", "--port", "0",
        "--video-dit", str(paths.dit), "--video-encoder", str(paths.encoder), "--video-tokenizer", str(paths.tokenizer),
        "--video-vae", str(paths.video_vae), *more,
    )  # fmt: skip
    found = program.until(lambda: re.search(r"listening on (http://\S+)", program.stdout + program.stderr))
    return program, found[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_a_server_makes_videos_and_goes_on_after_a_restart(
    begin: Callable[..., Any], tiny: VideoModelPaths, media: Path, tmp_path: Path
) -> None:
    openai = pytest.importorskip("openai")
    pytest.importorskip("av")
    flags = (
        "--audio-vae", str(tiny.audio_vae), "--video-workdir", str(tmp_path / "jobs"), "--video-openai-status",
        "--served-model-name", "h3",
    )  # fmt: skip
    server, url = _server(begin, tiny, *flags)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=200, max_retries=0)
    knobs = {"num_frames": 22, "num_inference_steps": 3}
    made = client.videos.create_and_poll(
        prompt="waves", model="h3", size="64x64", extra_body=knobs, poll_interval_ms=100
    )
    assert made.status == "completed", made
    (tmp_path / "text.mp4").write_bytes(client.videos.download_content(made.id).read())
    assert _streams(tmp_path / "text.mp4")["video"]["frames"] == 22
    with (media / "square.ppm").open("rb") as picture:
        shown = client.videos.create_and_poll(
            prompt="waves", model="h3", size="64x64", input_reference=picture, extra_body=knobs, poll_interval_ms=100
        )
    assert shown.status == "completed", shown
    with pytest.raises(openai.BadRequestError, match="22"):
        client.videos.create(prompt="waves", model="h3", size="64x64", extra_body={**knobs, "num_frames": 5})
    long = client.videos.create(
        prompt="gulls", model="h3", size="64x64", extra_body={"num_frames": 22, "num_inference_steps": 150}
    )
    state = tmp_path / "jobs" / long.id / "state" / "latents.safetensors"
    server.until(state.is_file)
    assert client.videos.retrieve(long.id).status == "in_progress"
    server.ended(signal.SIGKILL)
    again, url = _server(begin, tiny, *flags)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=200, max_retries=0)
    assert client.videos.retrieve(made.id).status == "completed"
    again.until(lambda: client.videos.retrieve(long.id).status == "completed", 240)
    (tmp_path / "long.mp4").write_bytes(client.videos.download_content(long.id).read())
    streams = _streams(tmp_path / "long.mp4")
    assert (streams["video"]["frames"], streams["audio"]["channels"]) == (22, 2)
    job = json.loads((tmp_path / "jobs" / long.id / "job.json").read_text())
    assert job["status"] == "succeeded"
    assert again.ended(signal.SIGTERM) in (0, 143), again.stderr
    assert "Traceback" not in again.stderr


@pytest.mark.slow
def test_a_server_without_sound_autoencoder_makes_silent_clips_and_says_so(
    begin: Callable[..., Any], tiny: VideoModelPaths, tmp_path: Path
) -> None:
    httpx, av = pytest.importorskip("httpx"), pytest.importorskip("av")
    _, url = _server(begin, tiny)
    body = {"prompt": "waves", "size": "64x64", "num_frames": 22, "num_inference_steps": 2}
    job = httpx.post(f"{url}/v1/videos/sync", json=body, timeout=120).json()
    assert job["status"] == "succeeded", job
    assert "silent" in job["warning"]
    (tmp_path / "silent.mp4").write_bytes(httpx.get(f"{url}/v1/videos/{job['id']}/content", timeout=200).content)
    with av.open(str(tmp_path / "silent.mp4")) as container:
        assert (len(container.streams.video), len(container.streams.audio)) == (1, 0)
        assert sum(1 for _ in container.decode(video=0)) == 22
