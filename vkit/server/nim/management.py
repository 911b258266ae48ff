"""GET /v1/health/live, ready, version, metadata, license, manifest, as NIM clients expect them."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata as distributions
from pathlib import Path
from typing import Any

import yaml
from litestar.response.base import Response

from vkit import __version__
from vkit.server.call import Call
from vkit.server.nim.schemas import (
    HealthReply,
    LicenseReply,
    ManifestReply,
    MetadataReply,
    ModelInfo,
    VersionsReply,
)
from vkit.server.openapi import API_VERSION
from vkit.server.problems import Problem, unavailable
from vkit.server.state import Phase

LICENSE_URL = "https://www.apache.org/licenses/LICENSE-2.0"


async def live(call: Call) -> Response[Any]:
    """200 as soon as the socket is open."""
    return call.json(HealthReply(message="Service is live.", status="live"))


async def ready(call: Call) -> Response[Any]:
    """200 when inference requests are served, else 503."""
    phase = call.state.phase
    if phase is not Phase.READY:
        raise unavailable(f"Service is not ready: {phase}.")
    return call.json(HealthReply(message="Service is ready.", status="ready"))


async def versions(call: Call) -> Response[Any]:
    """Versions of the server and of its API document."""
    return call.json(VersionsReply(__version__, API_VERSION))


async def license_(call: Call) -> Response[Any]:
    """The licence text."""
    return call.json(license_reply())


async def metadata(call: Call) -> Response[Any]:
    """What is running."""
    settings = call.settings
    profile_id, tags = _profile(call)
    return call.json(
        MetadataReply(
            version=__version__,
            modelInfo=[ModelInfo(name, settings.model_argument) for name in settings.served_model_names],
            licenseInfo=license_reply(),
            assetInfo=[],
            repository_override=settings.repository_override,
            selectedModelProfileId=profile_id,
            selectedModelProfileName=f"vkit-{tags['precision']}-tp{tags['tp']}",
        )
    )


async def manifest(call: Call) -> Response[Any]:
    """Profiles of this server; the active one only."""
    settings = call.settings
    profile_id, tags = _profile(call)
    document = {
        "schema_version": "1.0",
        "product_name": "vkit",
        "version": __version__,
        "profiles": {
            profile_id: {
                "model": settings.served_model_names[0],
                "release": __version__,
                "tags": tags,
                "container_id": "",
                "workspace": {"files": _model_files(settings.model_argument)},
            }
        },
    }
    return call.json(ManifestReply(yaml.safe_dump(document, sort_keys=False), settings.repository_override))


@cache
def license_reply() -> LicenseReply:
    """The licence file of the installed distribution, or of the source tree.

    Raises:
        Problem: 500 when the file is missing from the installation.
    """
    path = _license_path()
    if path is None:
        raise Problem(500, "The license file is missing from this installation.")
    text = path.read_text(encoding="utf-8")
    return LicenseReply(
        path=str(path), sha=hashlib.sha1(text.encode()).hexdigest(), size=len(text), url=LICENSE_URL, content=text
    )


def _license_path() -> Path | None:
    beside = Path(__file__).resolve().parents[3] / "LICENSE"
    if beside.is_file():
        return beside
    try:
        files = distributions.files("vkit") or []
    except distributions.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())).resolve() for file in files if file.name == "LICENSE"]
    return found[0] if found else None


def _profile(call: Call) -> tuple[str, dict[str, Any]]:
    """The id of what runs here, the same for the same model on the same kind of machine, and its tags."""
    engine = call.state.loaded_engine
    config = dict(engine.settings) if engine is not None else {}
    parts = [
        str(config.get(key, ""))
        for key in ("architecture", "dtype", "quantization", "device", "tensor_parallel_size", "pipeline_parallel_size")
    ]
    tags = {
        "llm_engine": "vkit",
        "precision": str(config.get("dtype", "unknown")),
        "tp": int(config.get("tensor_parallel_size", 1)),
        "pp": 1,
        "gpu": str(config.get("device", "cpu")),
        "feat_lora": call.settings.enable_lora,
    }
    return hashlib.sha256("\0".join(parts).encode()).hexdigest(), tags


def _model_files(argument: str) -> list[dict[str, Any]]:
    path = Path(argument)
    if path.is_file():
        return [{"name": path.name, "size": path.stat().st_size}]
    if path.is_dir():
        return [{"name": file.name, "size": file.stat().st_size} for file in sorted(path.iterdir()) if file.is_file()]
    return []
