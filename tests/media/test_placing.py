"""Placeholders grow, and positions follow the grids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vkit.errors import InvalidRequest
from vkit.media import ImageMedia, MediaInput, VideoMedia
from vkit.media.qwen import PixelRules, QwenMarks, QwenMedia

IMAGE, VIDEO, START, END = 250, 251, 252, 253
RULES = PixelRules(64, 1 << 20)
QWEN = QwenMedia(
    QwenMarks(IMAGE, VIDEO, START, END),
    lambda token_id: f"<{token_id}>",
    lambda text: list(text.encode()),
    patch_size=4,
    image_rules=RULES,
    video_rules=RULES,
)


def image(rows: int, columns: int) -> MediaInput:
    """One that becomes rows x columns tokens."""
    return QWEN.prepare(ImageMedia(np.zeros((8 * rows, 8 * columns, 3), np.uint8)))


def video(frames: int, rows: int, columns: int) -> MediaInput:
    return QWEN.prepare(VideoMedia(np.zeros((2 * frames, 8 * rows, 8 * columns, 3), np.uint8), fps=2.0))


def test_one_placeholder_grows() -> None:
    item = image(3, 2)
    placed = QWEN.place([1, START, IMAGE, END, 2], [item])
    assert placed.token_ids == [1, START, *[IMAGE] * 6, END, 2]
    assert [(entry.item, entry.spans) for entry in placed.media] == [(item, ((2, 8),))]


def test_a_grown_prompt_stays() -> None:
    ids = [1, START, *[IMAGE] * 6, END, IMAGE, IMAGE, 2]
    placed = QWEN.place(ids, [image(3, 2), image(1, 2)])
    assert placed.token_ids == ids
    assert [entry.spans for entry in placed.media] == [((2, 8),), ((9, 11),)]


def test_items_belong_to_placeholders_in_order() -> None:
    first, second, clip = image(1, 2), image(2, 2), video(2, 1, 2)
    placed = QWEN.place([IMAGE, 5, START, VIDEO, END, IMAGE], [first, second, clip])
    assert [entry.item for entry in placed.media] == [first, clip, second]
    text = b"<0.2 seconds>", b"<1.2 seconds>"
    frames = [token for time in text for token in (*time, START, VIDEO, VIDEO, END)]
    assert placed.token_ids == [IMAGE, IMAGE, 5, *frames, *[IMAGE] * 4]
    assert [stop - start for start, stop in placed.media[1].spans] == [2, 2]


def test_a_video_without_marks_around_it_grows_too() -> None:
    placed = QWEN.place([7, VIDEO, 8], [video(1, 1, 1)])
    assert placed.token_ids == [7, *b"<0.2 seconds>", START, VIDEO, END, 8]


def test_positions_of_the_golden_prompt(load_golden: Any) -> None:
    golden = load_golden("qwen3_vl")
    placed = QWEN.place(golden["mm_input_ids"].tolist(), [image(3, 2), video(2, 2, 2)])
    assert placed.token_ids == golden["mm_input_ids"].tolist()
    np.testing.assert_array_equal(placed.rope_positions, golden["mm_positions"])
    assert placed.position_delta == golden["mm_rope_delta"].item()


def test_placeholders_without_items_are_ordinary_tokens() -> None:
    placed = QWEN.place([IMAGE, VIDEO, IMAGE], [])
    assert placed.token_ids == [IMAGE, VIDEO, IMAGE]
    assert placed.rope_positions is None
    assert QWEN.place([IMAGE, VIDEO], [image(1, 1)]).media[0].spans == ((0, 1),)


@pytest.mark.parametrize(
    ("ids", "items", "message"),
    [
        ([1, 2], [image(1, 2)], "0 placeholders of kind image .* for 1 given"),
        ([IMAGE] * 3, [image(1, 2)], "3 placeholders of kind image .* for 1 given"),
        ([IMAGE], [image(1, 2), image(1, 2)], "1 placeholders of kind image .* for 2 given"),
        ([VIDEO, VIDEO, VIDEO, 5, VIDEO], [video(2, 1, 2)], "3 video placeholders side by side"),
        ([IMAGE, VIDEO, IMAGE, VIDEO], [image(1, 2), video(1, 1, 2)], "mixed up"),
    ],
)
def test_numbers_that_do_not_match_are_refused(ids: list[int], items: list[MediaInput], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        QWEN.place(ids, items)


def test_placeholder_text() -> None:
    assert QWEN.placeholder("image") == "<252><250><253>"
    with pytest.raises(InvalidRequest, match="audio: this model takes text and image, video"):
        QWEN.placeholder("audio")
