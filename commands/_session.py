"""Opening the model a command runs: which one, how far along, what it became."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vkit.commands import _options, _render
from vkit.starting import starting

if TYPE_CHECKING:
    from vkit import LLM


@contextmanager
def open_model(
    sources: _options.ModelFlags,
    engine: _options.EngineFlags,
    adapter: _options.AdapterFlags,
    *,
    max_num_seqs: int,
) -> Iterator[tuple[LLM, float]]:
    """The loaded model and the seconds that took; closed at the end. Torch comes in after every cheap check."""
    from vkit import EngineArgs, resolve_model

    path = resolve_model(sources.model, revision=sources.revision, download_dir=sources.download_dir, say=_render.note)
    keywords = {
        "model": str(path),
        "max_num_seqs": max_num_seqs,
        "max_logprobs": -1,
        **sources.engine_keywords(),
        **engine.engine_keywords(),
        **adapter.engine_keywords(),
    }
    EngineArgs(**keywords)  # contradictions end here, before torch is imported

    with starting():
        from vkit import LLM

        begin = time.perf_counter()
        with _render.load_progress(path.name) as progress:
            llm = LLM.for_text(**keywords, on_load_progress=progress)
    load_s = time.perf_counter() - begin
    with llm:
        _render.note(f"{path.name} loaded in {load_s:.1f} s")
        yield llm, load_s
