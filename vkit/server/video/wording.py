"""Errors of the library in words for clients: fields instead of files, no folders of the server, no flags to give."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from vkit.errors import InvalidRequest, VkitError
from vkit.server.problems import Problem
from vkit.video.h3.request import VideoRequest

EMBEDS = "the server's embeddings"
FIELDS = {"steps": "num_inference_steps", "first_frame": "input_reference", "references": "metadata"}
"""What the library calls otherwise than the routes."""
_FOLDERS = re.compile(r"(?<![\w./:-])/(?:[^\s/:'\"]+/)+")
"""The folders of an absolute path; its last name is left."""
_FOR_OPERATORS = re.compile(r"--\w|\bresume|\bdirectory\b")


def named_files(request: VideoRequest) -> dict[str, Path]:
    """The files of a request by the field that brought them."""
    files: dict[str, Path | None] = {"input_reference": request.first_frame}
    for item in request.references:
        kind = "audio" if item.kind == "audio" else "video"
        files[f"metadata.input_reference_{kind}"] = item.path
        if item.sound is not None:
            files["metadata.input_reference_audio"] = item.sound
    return {name: path for name, path in files.items() if path is not None}


def words_for_client(error: Exception, request: VideoRequest, folder: Path) -> str:
    """The message of an error, without paths of the server. `folder`: the job's, whose files keep their names."""
    text = error.message if isinstance(error, VkitError) else str(error)
    remedy = error.remedy if isinstance(error, VkitError) else None
    if remedy is not None and not _FOR_OPERATORS.search(remedy):
        text = f"{text} ({remedy})"
    return _without_paths(text, request, folder)


def problem_for_client(error: InvalidRequest, request: VideoRequest, folder: Path) -> Problem:
    """A 400 in words for the client, naming the field whose file is at fault, or that the library names."""
    at_fault = next((name for name, path in named_files(request).items() if str(path) in error.message), None)
    param = at_fault if at_fault is not None else FIELDS.get(error.param or "", error.param)
    if param == "prompt_embeds":  # the operator's, no field of a request
        param = None
    return Problem(400, words_for_client(error, request, folder), param)


def _without_paths(text: str, request: VideoRequest, folder: Path) -> str:
    known: Mapping[str, Path] = named_files(request)
    if request.prompt_embeds is not None:
        known = {**known, EMBEDS: request.prompt_embeds}
    for name, path in sorted(known.items(), key=lambda item: -len(str(item[1]))):
        text = text.replace(str(path), name)
    text = text.replace(f"{folder}/", "").replace(f"{folder}: ", "").replace(str(folder), "the job's folder")
    return _FOLDERS.sub("", text)
