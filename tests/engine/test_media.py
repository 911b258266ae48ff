"""Requests with images and videos through the whole engine: however they are scheduled, their tokens stay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vkit import LLM, AudioMedia, ImageMedia, InvalidRequest, SamplingParams, UsageError, VideoMedia

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
PIXELS = {"size": {"shortest_edge": 256, "longest_edge": 1024}, "patch_size": 4}
"""An image becomes 4 to 16 tokens of 8 x 8 pixels."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A golden with the byte tokenizer and preprocessor configurations beside it."""

    def make(name: str) -> str:
        folder: Path = tmp_path_factory.mktemp(name)
        for file in [*(GOLDENS / "byte_tokenizer").iterdir(), *(GOLDENS / name).glob("*.json")]:
            shutil.copy(file, folder / file.name)
        (folder / "model.safetensors").symlink_to(GOLDENS / name / "model.safetensors")
        (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
        (folder / "video_preprocessor_config.json").write_text(
            json.dumps({**PIXELS, "size": {"shortest_edge": 256, "longest_edge": 4096}})
        )
        return str(folder)

    return make


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def image(height: int, width: int, seed: int = 0) -> ImageMedia:
    return ImageMedia(noise(height, width, seed=seed))


CLIP = VideoMedia(noise(7, 20, 28, seed=9), fps=3.0)
PROMPTS: list[dict[str, Any]] = [
    {"prompt": f"a{IMAGE}b, what", "multi_modal_data": {"image": image(31, 17)}},
    {"prompt": "only text here"},
    {"prompt": f"{IMAGE}{IMAGE} and", "multi_modal_data": {"image": [image(9, 40, 1), image(24, 24, 2)]}},
    {"prompt": f"x {VIDEO} y {IMAGE}", "multi_modal_data": {"video": [CLIP], "image": [image(31, 17)]}},
    {"prompt": f"a{IMAGE}b, what is it?", "multi_modal_data": {"image": image(31, 17)}},
    {"prompt": f"a{IMAGE}b, what is it?", "multi_modal_data": {"image": image(31, 17, 3)}},
]
"""The last two differ in nothing but what the picture shows."""


def open_llm(folder: str, **keywords: Any) -> LLM:
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_blocks": 200, "max_model_len": 120}
    return LLM(folder, **{**settings, "cpu_precision": "exact", "threads": 1, **keywords})


@pytest.fixture(scope="session", params=["qwen3_vl", "qwen3_5"])
def alone(request: pytest.FixtureRequest, model_folder: Callable[[str], str]) -> tuple[str, list[list[int]]]:
    """A model, and each prompt's tokens when it runs alone and uncut."""
    folder = model_folder(request.param)
    with open_llm(folder, enable_prefix_caching=False) as llm:
        return folder, [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


def tokens(llm: LLM, prompts: list[dict[str, Any]] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


def value(llm: LLM, name: str) -> float:
    (family,) = [family for family in llm.metrics() if family.name == name]
    return float(family.samples[0].value)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_num_seqs": 5, "max_num_batched_tokens": 7},
        {"max_num_seqs": 5, "max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 1024, "max_num_encoder_input_tokens": 1, "max_num_seqs": 5},
        {"max_num_batched_tokens": 24, "disable_chunked_mm_input": True, "max_num_seqs": 5},
        {"max_num_batched_tokens": 32, "max_num_encoder_input_tokens": 20, "max_num_seqs": 5, "async_scheduling": True},
        {"long_prefill_token_threshold": 5, "scheduling_policy": "priority"},
    ],
    ids=lambda settings: ",".join(f"{name}={value}" for name, value in settings.items()),
)
def test_tokens_do_not_depend_on_scheduling(alone: tuple[str, list[list[int]]], settings: dict[str, Any]) -> None:
    folder, expected = alone
    assert expected[4] != expected[5], "the picture matters"
    with open_llm(folder, **settings) as llm:
        assert tokens(llm) == expected
        assert value(llm, "vllm:mm_cache_queries") >= 6
        engine = llm._loaded.engine
        assert engine.pool.num_free == engine.pool.num_usable


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_drafts_change_nothing(alone: tuple[str, list[list[int]]], method: str) -> None:
    folder, expected = alone
    if method == "mtp" and "qwen3_5" not in folder:
        pytest.skip("this model has no head for it")
    drafts = {"method": method, "num_speculative_tokens": 2}
    drafts |= {"prompt_lookup_min": 1, "prompt_lookup_max": 2} if method == "ngram" else {}
    with open_llm(folder, speculative_config=drafts, enable_prefix_caching=False, max_num_seqs=5) as llm:
        assert tokens(llm) == expected
        assert value(llm, "vllm:spec_decode_num_draft_tokens") > 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preemption_changes_nothing(alone: tuple[str, list[list[int]]], async_scheduling: bool) -> None:
    folder, expected = alone
    with open_llm(
        folder,
        num_blocks=24,
        max_model_len=84,
        max_num_seqs=5,
        max_num_batched_tokens=16,
        async_scheduling=async_scheduling,
    ) as llm:
        assert tokens(llm, PROMPTS * 2) == expected * 2
        assert value(llm, "vllm:num_preemptions") > 0


def test_prefixes_are_reused_where_the_pictures_agree(alone: tuple[str, list[list[int]]]) -> None:
    folder, expected = alone
    with open_llm(folder, enable_prefix_caching=True) as llm:
        assert tokens(llm, PROMPTS[:1]) == expected[:1]
        (again,) = llm.generate(PROMPTS[4], GREEDY)
        assert again.outputs[0].token_ids == expected[4]
        assert again.num_cached_tokens == 16, "past the picture"
        (other,) = llm.generate(PROMPTS[5], GREEDY)
        assert other.outputs[0].token_ids == expected[5]
        assert other.num_cached_tokens == 0, "the first block holds a piece of the picture"
        assert tokens(llm) == expected
        assert llm.reset_prefix_cache()


def test_several_choices_share_a_picture(alone: tuple[str, list[list[int]]]) -> None:
    folder, expected = alone
    with open_llm(folder, enable_prefix_caching=False) as llm:
        (output,) = llm.generate(PROMPTS[0], GREEDY.with_(n=3))
        assert [choice.token_ids for choice in output.outputs] == [expected[0]] * 3
        assert value(llm, "vllm:mm_cache_hits") == 2


def test_sleep_forgets_encoded_media(alone: tuple[str, list[list[int]]]) -> None:
    folder, expected = alone
    with open_llm(folder) as llm:
        assert tokens(llm) == expected
        llm.sleep(2)
        llm.wake_up()
        assert tokens(llm) == expected


GEMMA_IMAGE, GEMMA_SOUND = "<|image_pad|>", "<|im_end|>"
"""The golden's ids for images and sound, as the byte tokenizer spells them; a real vocabulary has marks around them."""

GEMMA_PROMPTS: list[dict[str, Any]] = [
    {"prompt": f"a picture far from the start {GEMMA_IMAGE} and more", "multi_modal_data": {"image": image(12, 17)}},
    {"prompt": "only text here, longer than a window"},
    {
        "prompt": f"{GEMMA_IMAGE}{GEMMA_IMAGE} {GEMMA_SOUND} x",
        "multi_modal_data": {
            "image": [image(9, 14, 1), image(40, 24, 2)],
            "audio": [AudioMedia(np.sin(np.arange(77, dtype=np.float32)), 16000)],
        },
    },
    {"prompt": f"a picture far from the start {GEMMA_IMAGE} and less", "multi_modal_data": {"image": image(12, 17)}},
]


@pytest.fixture(scope="module")
def hearing(model_folder: Callable[[str], str]) -> tuple[str, list[list[int]]]:
    """A model whose pictures see themselves, and each prompt's tokens when it runs alone and uncut."""
    folder = model_folder("gemma4_unified")
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps({"max_soft_tokens": 8}))
    with open_llm(folder, enable_prefix_caching=False) as llm:
        return folder, [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in GEMMA_PROMPTS]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 8},
        {"max_num_seqs": 4, "max_num_batched_tokens": 11, "enable_prefix_caching": True},
        {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_num_encoder_input_tokens": 3, "async_scheduling": True},
        {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "num_blocks": 35},
    ],
    ids=lambda settings: ",".join(f"{name}={value}" for name, value in settings.items()),
)
def test_pictures_that_see_themselves(hearing: tuple[str, list[list[int]]], settings: dict[str, Any]) -> None:
    folder, expected = hearing
    with open_llm(folder, **settings) as llm:
        assert tokens(llm, GEMMA_PROMPTS * 2) == expected * 2
        if "num_blocks" in settings:
            assert value(llm, "vllm:num_preemptions") > 0
        if settings.get("enable_prefix_caching"):
            assert value(llm, "vllm:prefix_cache_hits") > 0


def test_a_picture_that_sees_itself_needs_room_in_one_step(hearing: tuple[str, list[list[int]]]) -> None:
    with open_llm(hearing[0], max_num_seqs=1, max_num_batched_tokens=4) as llm:
        with pytest.raises(InvalidRequest, match=r"image: its 6 tokens side by side .* at most 4"):
            llm.generate(GEMMA_PROMPTS[0], GREEDY)
        sound = {"image": [], "audio": GEMMA_PROMPTS[2]["multi_modal_data"]["audio"]}
        assert tokens(llm, [{"prompt": f"hear {GEMMA_SOUND}", "multi_modal_data": sound}])


@pytest.fixture(scope="module")
def llm(model_folder: Callable[[str], str]) -> Iterator[LLM]:
    with open_llm(model_folder("qwen3_vl"), limit_mm_per_prompt='{"image": 2, "video": 0}', max_model_len=40) as llm:
        yield llm


PICTURE = image(31, 17)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            {"prompt": f"{IMAGE}{IMAGE}{IMAGE}", "multi_modal_data": {"image": [PICTURE] * 3}},
            "image: 3 given, at most 2",
        ),
        ({"prompt": VIDEO, "multi_modal_data": {"video": [CLIP]}}, "video: 1 given, at most 0"),
        ({"prompt": IMAGE, "multi_modal_data": {"audio": []}, "x": 1}, "expected exactly one of the keys"),
        ({"prompt": "no place for it", "multi_modal_data": {"image": PICTURE}}, "0 placeholders of kind image"),
        ({"prompt": f"{IMAGE}{IMAGE}", "multi_modal_data": {"image": PICTURE}}, "2 placeholders of kind image"),
        ({"prompt": IMAGE, "multi_modal_data": {"image": image(1, 201)}}, "at most 200 times"),
        (
            {"prompt": f"{IMAGE}{IMAGE} " + "x" * 20, "multi_modal_data": {"image": [image(32, 32)] * 2}},
            r"prompt: 57 tokens \(32 of them for 2 media items\).*send smaller media",
        ),
        ({"prompt_token_ids": [300], "multi_modal_data": {"image": PICTURE}}, "token id 300 is outside"),
    ],
)
def test_what_cannot_be_served_is_refused(llm: LLM, prompt: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompt, GREEDY)


def test_options_that_media_rule_out(llm: LLM) -> None:
    from vkit import BeamSearchParams, PromptOptions

    prompt = {"prompt": IMAGE, "multi_modal_data": {"image": PICTURE}}
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens: a prompt with media cannot be cut"):
        llm.generate(prompt, GREEDY, options=PromptOptions(truncate_prompt_tokens=3))
    with pytest.raises(InvalidRequest, match="beam search takes text only"):
        llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2))


def test_an_item_longer_than_a_whole_step(model_folder: Callable[[str], str]) -> None:
    folder = model_folder("qwen3_vl")
    with open_llm(folder, max_num_batched_tokens=8, max_num_seqs=4, disable_chunked_mm_input=True) as llm:
        with pytest.raises(InvalidRequest, match=r"its 16 tokens side by side .* at most 8"):
            llm.generate({"prompt": IMAGE, "multi_modal_data": {"image": image(32, 32)}}, GREEDY)
        assert tokens(llm, [{"prompt": IMAGE, "multi_modal_data": {"image": image(16, 16)}}])


def test_prompts_that_may_not_be_cut(alone: tuple[str, list[list[int]]]) -> None:
    folder, expected = alone
    settings: dict[str, Any] = {"enable_chunked_prefill": False, "max_num_batched_tokens": 120, "max_num_seqs": 4}
    with open_llm(folder, **settings) as llm:
        assert tokens(llm) == expected
    with open_llm(folder, **settings, max_num_encoder_input_tokens=4) as llm:
        assert tokens(llm, PROMPTS[:2]) == expected[:2], "one item has the step to itself"
        with pytest.raises(InvalidRequest, match=r"tokens of media in a prompt .* encodes at most 4"):
            llm.generate(PROMPTS[2], GREEDY)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit_mm_per_prompt": '{"image": 1}'}, "--limit-mm-per-prompt: .* takes text only"),
        ({"max_num_encoder_input_tokens": 5}, "--max-num-encoder-input-tokens: .* takes text only"),
        ({"disable_chunked_mm_input": True}, "--disable-chunked-mm-input: .* takes text only"),
        ({"limit_mm_per_prompt": {"picture": 1}}, "--limit-mm-per-prompt: expected one of image, video, audio"),
        ({"limit_mm_per_prompt": {"image": -1}}, "--limit-mm-per-prompt: must be at least 0"),
        ({"limit_mm_per_prompt": "{"}, "--limit-mm-per-prompt: not JSON"),
    ],
)
def test_settings_that_cannot_be(model_folder: Callable[[str], str], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_llm(model_folder("qwen3"), **settings)


def test_limits_name_kinds_the_model_takes(model_folder: Callable[[str], str]) -> None:
    with pytest.raises(UsageError, match="takes image, video, not audio"):
        open_llm(model_folder("qwen3_vl"), limit_mm_per_prompt={"audio": 1})


def test_media_for_a_text_model(model_folder: Callable[[str], str]) -> None:
    with (
        open_llm(model_folder("qwen3")) as llm,
        pytest.raises(InvalidRequest, match="image: this model takes text only"),
    ):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": PICTURE}}, GREEDY)


def test_placeholder_ids_are_ordinary_tokens_without_media(alone: tuple[str, list[list[int]]]) -> None:
    folder, _ = alone
    with open_llm(folder) as llm:
        (output,) = llm.generate({"prompt_token_ids": [7, 250, 251, 8]}, GREEDY)
        assert output.prompt_token_ids == [7, 250, 251, 8]
        assert len(output.outputs[0].token_ids) == 12
