"""NIM management routes."""

from __future__ import annotations

from vkit.server.nim.management import license_, live, manifest, metadata, ready, versions
from vkit.server.nim.schemas import HealthReply, LicenseReply, ManifestReply, MetadataReply, VersionsReply
from vkit.server.routes import Route
from vkit.server.settings import ServerSettings


def nim_routes(settings: ServerSettings) -> list[Route]:
    """The routes of this family."""
    get, tag = ("GET",), "management"
    return [
        Route(get, "/v1/health/live", live, "Liveness", tag, needs_key=False, reply=HealthReply, is_probe=True),
        Route(get, "/v1/health/ready", ready, "Readiness", tag, needs_key=False, reply=HealthReply, is_probe=True),
        Route(get, "/v1/version", versions, "Versions", tag, needs_key=False, reply=VersionsReply, is_probe=True),
        Route(get, "/v1/metadata", metadata, "What is running", tag, needs_key=False, reply=MetadataReply),
        Route(get, "/v1/license", license_, "The licence", tag, needs_key=False, reply=LicenseReply),
        Route(get, "/v1/manifest", manifest, "Profiles", tag, needs_key=False, reply=ManifestReply),
    ]
