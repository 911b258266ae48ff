"""/v1/videos: jobs, their states and files, what is refused, and the official client."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from vkit.video.errors import ResumeError

FILE = bytes(range(256)) * 40
BROKEN = b"broken"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


async def test_a_job_goes_from_queued_to_succeeded(studio):
    made = studio()
    made.pipeline.gate.clear()
    job = await made.create(size="1280x720", seconds="5", model="MiniMax-H3-FL2VA", metadata={"a": "b"})
    assert job["id"] == "vid_1"
    assert job["object"] == "video"
    assert job["size"] == "1280x704"
    assert job["seconds"] == f"{124 / 24:.6g}"
    assert "1280x704" in job["warning"]
    assert job["metadata"] == {"a": "b"}
    refused = await made.client.get("/v1/videos/vid_1/content")
    assert refused.status_code == 409
    assert refused.json()["error"]["message"].endswith(("queued.", "running."))
    made.pipeline.gate.set()
    done = await made.over("vid_1")
    assert (done["status"], done["progress"]) == ("succeeded", 100)
    assert Path(done["output_path"]).read_bytes() == FILE
    assert done["completed_at"] >= done["created_at"]
    assert done["seed"] == 42
    assert "rendered" in done["warning"]
    assert "error" not in done
    content = await made.client.get("/v1/videos/vid_1/content")
    assert content.headers["content-type"] == "video/mp4"
    assert content.headers["content-length"] == str(len(FILE))
    assert content.content == FILE


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-3", FILE[:4]),
        ("bytes=100-", FILE[100:]),
        ("bytes=-7", FILE[-7:]),
        ("bytes=5-999999", FILE[5:]),
        ("bytes=-999999", FILE),
    ],
)
async def test_parts_of_the_file(studio, header, expected):
    made = studio()
    await made.create()
    await made.over("vid_1")
    reply = await made.client.get("/v1/videos/vid_1/content", headers={"range": header})
    assert reply.status_code == 206
    assert reply.content == expected
    first = len(FILE) - len(expected) if header.startswith("bytes=-") or header.endswith(("-", "9")) else 0
    assert reply.headers["content-range"] == f"bytes {first}-{first + len(expected) - 1}/{len(FILE)}"


@pytest.mark.parametrize("header", ["bytes=99999-", "bytes=-0"])
async def test_a_part_outside_the_file(studio, header):
    made = studio()
    await made.create()
    await made.over("vid_1")
    reply = await made.client.get("/v1/videos/vid_1/content", headers={"range": header})
    assert reply.status_code == 416
    assert reply.headers["content-range"] == f"bytes */{len(FILE)}"


@pytest.mark.parametrize("header", ["bytes=3-1", "lines=1-2", "bytes=a-b", "bytes=0-1,4-5"])
async def test_other_ranges_give_the_whole_file(studio, header):
    made = studio()
    await made.create()
    await made.over("vid_1")
    reply = await made.client.get("/v1/videos/vid_1/content", headers={"range": header})
    assert (reply.status_code, reply.content) == (200, FILE)


async def test_a_failure_is_told_and_the_next_job_runs(studio, failure):
    made = studio()
    made.pipeline.failure = failure
    await made.create()
    done = await made.over("vid_1")
    assert (done["status"], done["error"]) == ("failed", "the latents are not finite")
    content = await made.client.get("/v1/videos/vid_1/content")
    assert content.status_code == 500
    assert "the latents are not finite" in content.json()["error"]["message"]
    made.pipeline.failure = RuntimeError("")
    await made.create()
    assert (await made.over("vid_2"))["error"] == "unspecified error"
    made.pipeline.failure = None
    await made.create()
    assert (await made.over("vid_3"))["status"] == "succeeded"


async def test_failures_name_fields_and_no_folders(studio, tmp_path):
    made = studio()
    folder = made.root / "vid_1"
    texts = {
        f"{folder}: holds no run to resume": "holds no run to resume",
        f"{folder}/state/latents.safetensors: is damaged": "state/latents.safetensors: is damaged",
        "/some/where/dit/model-1.safetensors: ends too soon": "model-1.safetensors: ends too soon",
        "ratio 16/9 of t2va/fl2va, see https://host/page": "ratio 16/9 of t2va/fl2va, see https://host/page",
    }
    image = "data:image/png;base64," + base64.b64encode(PNG).decode()
    for number, (text, shown) in enumerate(texts.items(), 1):
        made.pipeline.failure = ResumeError(
            text.replace("vid_1", f"vid_{number}"), remedy="start anew in another directory"
        )
        await made.create()
        assert (await made.over(f"vid_{number}"))["error"] == shown
    inputs = made.root / "vid_5" / "inputs"
    made.pipeline.failure = RuntimeError(f"{inputs}/input_reference.png: cannot be read")
    await made.create(input_reference=image)
    assert (await made.over("vid_5"))["error"] == "RuntimeError: input_reference: cannot be read"


async def test_how_firmly_pictures_are_held_to(studio):
    made = studio()
    image = "data:image/png;base64," + base64.b64encode(PNG).decode()
    await made.create(input_reference=image, extra_params={"noise_aug": 0.5})
    await made.create(input_reference=image)
    await made.over("vid_2")
    assert [request.noise_aug for request, _ in made.pipeline.seen] == [0.5, 0.999]


async def test_a_damaged_upload_names_its_field(studio):
    made = studio()
    image = "data:image/png;base64," + base64.b64encode(BROKEN).decode()
    reply = await made.client.post("/v1/videos", json={"prompt": "x", "input_reference": image})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["message"], error["param"]) == ("input_reference: is damaged", "input_reference")


async def test_what_the_disk_cannot_hold_is_refused(studio):
    made = studio()
    made.pipeline.disk_bytes = 1 << 60
    reply = await made.client.post("/v1/videos", json={"prompt": "x", "size": "1280x704", "num_frames": 345})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "size"
    assert error["message"].startswith("size: 1280x704 of 345 frames: about 1152921504.61 GB will be written")
    assert str(made.root) not in reply.text
    assert list(made.root.glob("vid_*")) == []


async def test_the_disk_is_promised_once(studio, monkeypatch):
    """What waits and what the running job still has to write count; what it wrote is no longer free anyway."""
    made, mega = studio(), 1_000_000
    monkeypatch.setattr("vkit.video.space.shutil.disk_usage", lambda place: SimpleNamespace(free=1000 * mega))
    made.pipeline.disk_bytes = 400 * mega
    made.pipeline.gate.clear()
    await made.create()
    while made.jobs.get("vid_1").status != "running":
        await asyncio.sleep(0.01)
    await made.create()
    refused = await made.client.post("/v1/videos", json={"prompt": "x"})
    assert refused.status_code == 503
    assert "The videos before this one will fill the disk: with it about 1.20 GB will be written" in refused.text
    assert "Retry-After" in refused.headers
    assert sorted(path.name for path in made.root.glob("vid_*")) == ["vid_1", "vid_2"]
    frames = made.root / "vid_1" / "frames"
    frames.mkdir()
    with (frames / "0").open("wb") as file:
        file.truncate(200 * mega)  # a hole: it takes nothing here
    await made.create()
    assert (await made.client.post("/v1/videos", json={"prompt": "x"})).status_code == 503
    await made.client.delete("/v1/videos/vid_2")  # gives back what it was promised
    await made.create()
    made.pipeline.disk_bytes = 1001 * mega  # too much for the disk alone: the client's fault
    assert (await made.client.post("/v1/videos", json={"prompt": "x"})).status_code == 400
    made.pipeline.gate.set()


async def test_only_the_video_itself_can_be_had(studio):
    made = studio()
    await made.create()
    await made.over("vid_1")
    assert (await made.client.get("/v1/videos/vid_1/content?variant=video")).content == FILE
    for variant in ("thumbnail", "spritesheet"):
        reply = await made.client.get(f"/v1/videos/vid_1/content?variant={variant}")
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["param"] == "variant"
        assert variant in error["message"]


async def test_a_file_that_vanished(studio):
    made = studio()
    await made.create()
    Path((await made.over("vid_1"))["output_path"]).unlink()
    assert (await made.client.get("/v1/videos/vid_1/content")).status_code == 500


async def test_unknown_jobs(studio):
    made = studio()
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", ""), ("POST", "/remix")):
        reply = await made.client.request(method, f"/v1/videos/vid_9{path}")
        assert reply.status_code == 404
        assert reply.json()["error"]["type"] == "NotFoundError"


async def test_without_a_video_model_the_routes_do_not_exist(serve):
    served = serve()
    for method, path in (("POST", "/v1/videos"), ("GET", "/v1/videos"), ("GET", "/v1/videos/vid_1")):
        assert (await served.client.request(method, path)).status_code == 404


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"model": ""}, "model"),
    ({"model": 4}, "model"),
    ({"size": "1280"}, "size"),
    ({"size": "1280x720x3"}, "size"),
    ({"size": "0x720"}, "size"),
    ({"size": " 1280x720"}, "size"),
    ({"size": "-1x720"}, "size"),
    ({"size": 720}, "size"),
    ({"seconds": "long"}, "seconds"),
    ({"seconds": 0}, "seconds"),
    ({"seconds": "nan"}, "seconds"),
    ({"seconds": "inf"}, "seconds"),
    ({"seconds": -1, "duration": 5}, "seconds"),
    ({"size": "a", "width": 64, "height": 64}, "size"),
    ({"duration": 0}, "duration"),
    ({"duration": "5"}, "duration"),
    ({"width": 64}, "height"),
    ({"height": 64}, "width"),
    ({"width": 0, "height": 64}, "width"),
    ({"num_frames": 0}, "num_frames"),
    ({"num_inference_steps": 1}, "num_inference_steps"),
    ({"num_inference_steps": 1_000_000_000}, "num_inference_steps"),
    ({"extra_params": {"num_inference_steps": 1001}}, "num_inference_steps"),
    ({"num_inference_steps": 2.5}, "num_inference_steps"),
    ({"flow_shift": 0}, "flow_shift"),
    ({"audio_flow_shift": -3}, "audio_flow_shift"),
    ({"seed": -1}, "seed"),
    ({"noise_aug": 0.5}, "noise_aug"),
    ({"noise_aug": 1.5, "input_reference": "data:image/png;base64,AA=="}, "noise_aug"),
    ({"noise_aug": "x"}, "noise_aug"),
    ({"seed": "x"}, "seed"),
    ({"fps": 30}, "fps"),
    ({"fit": "squash"}, "fit"),
    ({"task": "v2v"}, "task"),
    ({"task": "fl2va"}, "task"),
    ({"extra_params": {"width": 3}}, "extra_params"),
    ({"extra_params": {"seed": "x"}}, "extra_params.seed"),
    ({"extra_params": []}, "extra_params"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"input_reference": ""}, "input_reference"),
    ({"input_reference": "https://host/a.png"}, "input_reference"),
    ({"input_reference": {"file_id": "x"}}, "input_reference"),
    ({"input_reference": "data:image/png,xx"}, "input_reference"),
    ({"input_reference": "data:image/png;base64,"}, "input_reference"),
    ({"metadata": {"input_reference_video": ""}}, "metadata.input_reference_video"),
    ({"metadata": {"input_reference_video": "data:video/mp4;base64,AA=="}}, "metadata.input_reference_video"),
    ({"metadata": {"input_reference_audio": "http://host/a.wav"}}, "metadata.input_reference_audio"),
    (
        {"input_reference": "data:;base64,AA==", "metadata": {"input_reference_audio": "data:;base64,AA=="}},
        "input_reference",
    ),
]


@pytest.mark.parametrize(("body", "param"), BAD)
async def test_bad_requests_name_the_field(studio, body, param):
    made = studio()
    reply = await made.client.post("/v1/videos", json={"prompt": "waves", **body})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"] or "").startswith(param)
    assert param.rpartition(".")[2] in error["message"]
    assert made.pipeline.seen == []
    assert list(made.root.glob("vid_*")) == []


async def test_what_beats_what(studio):
    made = studio()
    job = await made.create(
        size="640x320",
        seconds=4,
        width=960,
        height=None,
        duration=2,
        num_frames=22,
        seed=7,
        num_inference_steps=9,
        flow_shift=5,
        extra_params={"seed": 8, "audio_flow_shift": 2.5, "fit": "crop", "fps": 24},
        model="other",
    )
    done = await made.over(job["id"])
    ((request, _),) = made.pipeline.seen
    assert (request.width, request.height, request.duration, request.num_frames) == (960, 320, 2.0, None)
    assert (request.seed, request.steps, request.flow_shift, request.audio_flow_shift) == (7, 9, 5.0, 2.5)
    assert request.fit == "crop"
    for words in ("extra_params.seed: 8 is not used", "num_frames: 22 is not used", "model: other is not known"):
        assert words in done["warning"]
    assert done["model"] == "other"


async def test_conditioning_follows_from_the_inputs(studio, tmp_path):
    clips = tmp_path / "clips"
    clips.mkdir()
    (clips / "a.mp4").write_bytes(b"clip")
    made = studio(readable=(clips,), max_queued=9)
    data = "data:audio/wav;base64," + base64.b64encode(b"RIFF....WAVE").decode()
    image = "data:image/png;base64," + base64.b64encode(PNG).decode()
    await made.create(input_reference=image)
    await made.create(input_reference={"image_url": {"url": image}})
    await made.create(metadata={"input_reference_video": str(clips / "a.mp4")})
    await made.create(metadata={"input_reference_audio": data})
    await made.create(metadata={"input_reference_audio": data, "input_reference_video": str(clips / "a.mp4")})
    await made.over("vid_5")
    requests = [request for request, _ in made.pipeline.seen]
    assert [request.resolved_task for request in requests] == ["fl2va", "fl2va", "ref2va", "ref2va", "ref2va"]
    assert requests[0].first_frame.read_bytes() == PNG
    assert requests[0].first_frame.suffix == ".png"
    assert [(r.kind, r.sound is not None) for r in requests[4].references] == [("video", True)]
    assert requests[3].references[0].path.suffix == ".wav"


async def test_a_job_folder_can_be_the_next_clip(studio):
    made = studio()
    await made.create()
    folder = Path((await made.over("vid_1"))["output_path"]).parent
    await made.create(metadata={"input_reference_video": str(folder)})
    assert (await made.over("vid_2"))["status"] == "succeeded"


async def test_other_folders_are_forbidden(studio, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    made = studio()
    (made.root / "link").symlink_to(secret)
    for path in (secret, made.root / "link", made.root / ".." / "secret", Path("/etc/passwd")):
        reply = await made.client.post(
            "/v1/videos", json={"prompt": "x", "metadata": {"input_reference_video": str(path)}}
        )
        assert reply.status_code == 403
        assert "--allowed-local-media-path" in reply.json()["error"]["message"]
    reply = await made.client.post("/v1/videos", json={"prompt": "x", "input_reference": str(made.root / "none.png")})
    assert reply.status_code == 400


async def test_sound_needs_its_autoencoder(studio):
    made = studio(has_sound=False)
    reply = await made.client.post(
        "/v1/videos", json={"prompt": "x", "metadata": {"input_reference_audio": "data:;base64,AAAA"}}
    )
    assert reply.status_code == 400
    assert "--audio-vae" in reply.json()["error"]["message"]
    assert "silent" in (await made.create())["warning"]


async def test_fixed_embeddings_say_that_the_prompt_was_not_read(studio, tmp_path):
    made = studio(prompt_embeds=tmp_path / "embeds.bin")
    assert "not read" in (await made.create())["warning"]
    await made.over("vid_1")
    assert made.pipeline.seen[0][0].prompt is None


async def test_a_full_queue(studio):
    made = studio(max_queued=2)
    made.pipeline.gate.clear()
    await made.create()
    while not made.pipeline.seen:
        await asyncio.sleep(0.005)
    await made.create()
    await made.create()
    reply = await made.client.post("/v1/videos", json={"prompt": "x"})
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) > 0
    assert len((await made.client.get("/v1/videos")).json()["data"]) == 3


async def test_cancelling_and_deleting(studio):
    made = studio()
    made.pipeline.gate.clear()
    await made.create()
    await made.create()
    while not made.pipeline.seen:
        await asyncio.sleep(0.005)
    for job_id in ("vid_2", "vid_1"):
        reply = await made.client.delete(f"/v1/videos/{job_id}")
        assert reply.json() == {"id": job_id, "object": "video.deleted", "deleted": True}
        done = await made.over(job_id)
        assert (done["status"], done["error"]) == ("failed", "cancelled")
    assert len(made.pipeline.seen) == 1
    made.pipeline.gate.set()
    await made.create()
    folder = Path((await made.over("vid_3"))["output_path"]).parent
    await made.client.delete("/v1/videos/vid_3")
    assert not folder.exists()
    assert (await made.client.get("/v1/videos/vid_3")).status_code == 404


async def test_a_job_cancelled_at_its_last_moment_stays_cancelled(studio):
    made = studio()
    made.pipeline.at_end = lambda: made.jobs.delete("vid_1")
    await made.create()
    done = await made.over("vid_1")
    assert (done["status"], done["error"]) == ("failed", "cancelled")


async def test_lists_are_paged(studio):
    made = studio(max_queued=9)
    for _ in range(5):
        await made.create()
    page = (await made.client.get("/v1/videos?limit=2")).json()
    assert [job["id"] for job in page["data"]] == ["vid_5", "vid_4"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (True, "vid_5", "vid_4")
    page = (await made.client.get("/v1/videos?order=asc&after=vid_3&limit=5")).json()
    assert [job["id"] for job in page["data"]] == ["vid_4", "vid_5"]
    assert page["has_more"] is False
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=vid_77"):
        reply = await made.client.get(f"/v1/videos?{query}")
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == query.partition("=")[0]


async def test_sync_waits(studio, failure):
    made = studio()
    reply = await made.client.post("/v1/videos/sync", json={"prompt": "x"})
    assert (reply.status_code, reply.json()["status"]) == (200, "succeeded")
    made.pipeline.failure = failure
    reply = await made.client.post("/v1/videos/sync", json={"prompt": "x"})
    assert reply.status_code == 500
    assert "not finite" in reply.json()["error"]["message"]


async def test_jobs_survive_a_restart(studio, tmp_path):
    first = studio(root=tmp_path / "kept")
    await first.create(prompt="one", metadata={"a": "b"}, model="m")
    await first.over("vid_1")
    first.pipeline.gate.clear()
    image = "data:image/png;base64," + base64.b64encode(PNG).decode()
    await first.create(prompt="two", input_reference=image, seed=9)
    await first.create(prompt="three")
    while len(first.pipeline.seen) < 2:
        await asyncio.sleep(0.005)
    before = (await first.client.get("/v1/videos/vid_1")).json()
    await asyncio.to_thread(first.jobs.close)
    (tmp_path / "kept" / "vid_7").mkdir()
    (tmp_path / "kept" / "vid_7" / "record.json").write_bytes(b"{broken")
    second = studio(root=tmp_path / "kept")
    assert (await second.client.get("/v1/videos/vid_1")).json() == before
    assert (await second.over("vid_2"))["status"] == "succeeded"
    assert (await second.over("vid_3"))["status"] == "succeeded"
    ((request, resumes), (_, fresh)) = second.pipeline.seen
    assert (request.prompt, request.seed, resumes, fresh) == ("two", 9, True, False)
    assert request.first_frame.read_bytes() == PNG
    assert (await second.create())["id"] == "vid_8"


async def test_a_number_is_given_once(studio, tmp_path):
    root = tmp_path / "kept"
    first = studio(root=root)
    for _ in range(2):
        await first.over((await first.create())["id"])
    await first.client.delete("/v1/videos/vid_2")
    await asyncio.to_thread(first.jobs.close)
    second = studio(root=root)
    refused = await second.client.post("/v1/videos", json={"prompt": "x", "task": "fl2va"})
    assert refused.status_code == 400
    await asyncio.to_thread(second.jobs.close)
    third = studio(root=root)
    assert (await third.create())["id"] == "vid_4"
    await third.over("vid_4")
    await asyncio.to_thread(third.jobs.close)
    (root / "last_number").write_text("damaged")
    assert (await studio(root=root).create())["id"] == "vid_5"


async def test_a_server_that_cannot_keep_numbers_takes_nothing(studio):
    made = studio()
    (made.root / "last_number").mkdir()
    reply = await made.client.post("/v1/videos", json={"prompt": "x"})
    assert reply.status_code == 503
    assert str(made.root) not in reply.text
    assert list(made.root.glob("vid_*")) == []


async def test_what_a_cut_off_request_left_is_removed(studio, tmp_path):
    root = tmp_path / "kept"
    for name in ("vid_3/inputs", "vid_4", "vid_5/state", "vid_clips", "vid_06x"):
        (root / name).mkdir(parents=True)
    (root / "vid_3" / "inputs" / "input_reference.png").write_bytes(PNG)
    (root / "vid_4" / "record.tmp").write_bytes(b"{")
    made = studio(root=root)
    assert sorted(path.name for path in root.glob("vid_*")) == ["vid_06x", "vid_5", "vid_clips"]
    assert (await made.create())["id"] == "vid_6"


async def test_what_cannot_go_on_after_a_restart_says_so(studio, tmp_path):
    first = studio(root=tmp_path / "kept")
    first.pipeline.gate.clear()
    await first.create()
    while not first.pipeline.seen:
        await asyncio.sleep(0.005)
    await asyncio.to_thread(first.jobs.close)
    pipeline = type(first.pipeline)()
    pipeline.can_resume = False
    second = studio(root=tmp_path / "kept", pipeline=pipeline)
    done = await second.over("vid_1")
    assert done["status"] == "failed"
    assert "the server stopped" in done["error"]


@pytest.fixture
def sdk(start_videos):
    """The official client, polling."""
    made = start_videos()
    with openai.OpenAI(base_url=f"{made.url}/v1", api_key="-", max_retries=0) as client:
        yield client, made


def test_the_official_client_makes_a_video(sdk):
    client, made = sdk
    made.pipeline.gate.clear()
    job = client.videos.create(prompt="waves", model="sora-2", size="1280x720", seconds="4", input_reference=PNG)
    assert job.status in ("queued", "in_progress")
    made.pipeline.gate.set()
    done = client.videos.poll(job.id, poll_interval_ms=10)
    assert (done.status, done.progress, done.size) == ("completed", 100, "1280x704")
    assert client.videos.download_content(job.id).read() == FILE
    assert [video.id for video in client.videos.list(limit=1, order="asc")] == [job.id]
    (request, _), *_ = made.pipeline.seen
    assert request.first_frame.read_bytes() == PNG
    assert client.videos.delete(job.id).deleted is True
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(job.id)


def test_the_official_client_polls_a_failure(sdk, failure):
    client, made = sdk
    made.pipeline.failure = failure
    done = client.videos.create_and_poll(prompt="waves", poll_interval_ms=10)
    assert done.status == "failed"
    assert done.error.message == "the latents are not finite"


async def test_forms(studio):
    made = studio()
    fields = {"prompt": "x", "num_inference_steps": "5", "metadata": '{"a": "b"}', "extra_params": '{"seed": 3}'}
    reply = await made.client.post("/v1/videos", data=fields, files={"input_reference": ("a.png", PNG, "image/png")})
    assert reply.status_code == 200, reply.text
    await made.over("vid_1")
    request = made.pipeline.seen[0][0]
    assert (request.steps, request.seed, request.first_frame.read_bytes()) == (5, 3, PNG)
    for bad, param in (
        ({"num_inference_steps": "many"}, "num_inference_steps"),
        ({"metadata": "{"}, "metadata"),
        ({"width": "1.5", "height": "2"}, "width"),
        ({"input_reference": "data:;base64,AA=="}, "input_reference"),
    ):
        reply = await made.client.post(
            "/v1/videos", data={"prompt": "x", **bad}, files={"input_reference": ("a.png", PNG, "image/png")}
        )
        assert reply.status_code == 400, reply.text
        assert param in reply.json()["error"]["message"]
    reply = await made.client.post("/v1/videos", files={"input_reference": ("a.png", PNG, "image/png")})
    assert reply.json()["error"]["param"] == "prompt"
