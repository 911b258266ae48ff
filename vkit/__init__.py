"""vkit: run open language models from one command or as a library.

Public names are resolved on first use, so `import vkit` costs no torch import.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # as typing's, which takes longer to import than an interrupt at start-up may go unseen
if TYPE_CHECKING:
    from typing import Any

    from vkit.async_engine import AsyncLLM
    from vkit.beam_search import BeamSearchParams
    from vkit.cache.connector import (
        ConnectorContext,
        ConnectorStats,
        KVConnector,
        LoadFailed,
        SchedulerSide,
        WorkerSide,
    )
    from vkit.config import EngineArgs, EngineConfig
    from vkit.connectors import register_kv_connector
    from vkit.default_model import resolve_model
    from vkit.errors import (
        CheckpointError,
        EngineDeadError,
        ExitStatus,
        InvalidRequest,
        MissingExtra,
        ModelLoadError,
        OutOfMemoryPreflight,
        RequestFailed,
        UsageError,
        VkitError,
    )
    from vkit.inputs import PromptOptions
    from vkit.llm import LLM
    from vkit.media import AudioMedia, ImageMedia, VideoMedia
    from vkit.models import register_model
    from vkit.parsers.events import ContentDelta, ReasoningDelta, ToolCallDelta
    from vkit.parsers.json_calls import JsonCalls
    from vkit.parsers.python_calls import PythonCalls
    from vkit.parsers.reasoning_reader import ReasoningReader
    from vkit.parsers.registry import register_reasoning_parser, register_tool_parser
    from vkit.parsers.tool_reader import ToolReader
    from vkit.parsers.xml_calls import XmlCalls
    from vkit.scoring import LabelScores
    from vkit.structured.compiler import check_constraint
    from vkit.types import (
        CompletionOutput,
        FinishReason,
        Logprob,
        OutputKind,
        ReasoningMarks,
        RepetitionDetection,
        RequestMetrics,
        RequestOutput,
        SamplingParams,
        StructuredOutputs,
    )

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "AudioMedia",
    "BeamSearchParams",
    "CheckpointError",
    "CompletionOutput",
    "ConnectorContext",
    "ConnectorStats",
    "ContentDelta",
    "EngineArgs",
    "EngineConfig",
    "EngineDeadError",
    "ExitStatus",
    "FinishReason",
    "ImageMedia",
    "InvalidRequest",
    "JsonCalls",
    "KVConnector",
    "LabelScores",
    "LoadFailed",
    "Logprob",
    "MissingExtra",
    "ModelLoadError",
    "OutOfMemoryPreflight",
    "OutputKind",
    "PromptOptions",
    "PythonCalls",
    "ReasoningDelta",
    "ReasoningMarks",
    "ReasoningReader",
    "RepetitionDetection",
    "RequestFailed",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SchedulerSide",
    "StructuredOutputs",
    "ToolCallDelta",
    "ToolReader",
    "UsageError",
    "VideoMedia",
    "VkitError",
    "WorkerSide",
    "XmlCalls",
    "check_constraint",
    "register_kv_connector",
    "register_model",
    "register_reasoning_parser",
    "register_tool_parser",
    "resolve_model",
]

_HOMES = {
    "vkit.cache.connector": (
        "ConnectorContext",
        "ConnectorStats",
        "KVConnector",
        "LoadFailed",
        "SchedulerSide",
        "WorkerSide",
    ),
    "vkit.connectors": ("register_kv_connector",),
    "vkit.async_engine": ("AsyncLLM",),
    "vkit.beam_search": ("BeamSearchParams",),
    "vkit.inputs": ("PromptOptions",),
    "vkit.llm": ("LLM",),
    "vkit.media": ("AudioMedia", "ImageMedia", "VideoMedia"),
    "vkit.models": ("register_model",),
    "vkit.parsers.events": ("ContentDelta", "ReasoningDelta", "ToolCallDelta"),
    "vkit.parsers.json_calls": ("JsonCalls",),
    "vkit.parsers.python_calls": ("PythonCalls",),
    "vkit.parsers.reasoning_reader": ("ReasoningReader",),
    "vkit.parsers.registry": ("register_reasoning_parser", "register_tool_parser"),
    "vkit.parsers.tool_reader": ("ToolReader",),
    "vkit.parsers.xml_calls": ("XmlCalls",),
    "vkit.scoring": ("LabelScores",),
    "vkit.structured.compiler": ("check_constraint",),
    "vkit.config": ("EngineArgs", "EngineConfig"),
    "vkit.default_model": ("resolve_model",),
    "vkit.errors": (
        "CheckpointError",
        "EngineDeadError",
        "ExitStatus",
        "InvalidRequest",
        "MissingExtra",
        "ModelLoadError",
        "OutOfMemoryPreflight",
        "RequestFailed",
        "UsageError",
        "VkitError",
    ),
    "vkit.types": (
        "CompletionOutput",
        "FinishReason",
        "Logprob",
        "OutputKind",
        "ReasoningMarks",
        "RepetitionDetection",
        "RequestMetrics",
        "RequestOutput",
        "SamplingParams",
        "StructuredOutputs",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the module a public name lives in, on first use."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
