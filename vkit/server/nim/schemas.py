"""Reply shapes of the NIM management routes."""

from __future__ import annotations

from msgspec import Struct

from vkit.server.schema import Json


class HealthReply(Struct, kw_only=True):
    """Liveness or readiness."""

    object: str = "health.response"
    message: str
    status: str


class VersionsReply(Struct):
    """Versions of the server and of its API document."""

    release: str
    api: str


class LicenseReply(Struct, kw_only=True):
    """The licence of the server."""

    name: str = "LICENSE"
    path: str
    sha: str
    size: int
    url: str
    type: str = "file"
    content: str


class ModelInfo(Struct):
    """One served name."""

    shortName: str
    modelUrl: str


class MetadataReply(Struct, kw_only=True):
    """What is running."""

    version: str
    modelInfo: list[ModelInfo]
    licenseInfo: LicenseReply
    assetInfo: list[Json]
    repository_override: str
    selectedModelProfileId: str
    selectedModelProfileName: str


class ManifestReply(Struct):
    """Profiles of this server as YAML text."""

    manifest_file: str
    repository_override: str
