"""Bytes of media that a request names by URL, within what the operator allows: data, http(s) and file."""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit

from vkit.errors import InvalidRequest
from vkit.media.items import MediaKind
from vkit.media.unusable import ForbiddenMedia, UnusableMedia

if TYPE_CHECKING:
    import httpx

MAX_REDIRECTS = 5
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class MediaAccess:
    """Where media may come from, and how much of it."""

    allowed_domains: tuple[str, ...] = ()
    """Hosts of http(s) URLs, subdomains included; empty: any."""
    allowed_local_paths: tuple[Path, ...] = ()
    """Folders whose files may be named; empty: none."""
    max_bytes: int = 1 << 28
    timeout_s: float = 10.0
    """For the whole download."""

    async def read(self, url: str, kind: MediaKind) -> bytes:
        """What is at `url`.

        Raises:
            InvalidRequest: no URL, or a scheme other than data, http, https and file.
            ForbiddenMedia: a host or path that is not allowed.
            UnusableMedia: it cannot be read, or is too large.
        """
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return decode_data_url(url, kind, self.max_bytes)
        if scheme in ("http", "https"):
            return await self._download(url, kind)
        if scheme == "file":
            return await asyncio.to_thread(self._read_file, url, kind)
        shown = url if len(url) <= 80 else url[:80] + "…"
        raise InvalidRequest(f"{kind}: expected a data:, http(s): or file: URL, got {shown!r}", param=kind)

    def _read_file(self, url: str, kind: MediaKind) -> bytes:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise InvalidRequest(f"{kind}: a file: URL names a path on this machine, got host {parts.netloc!r}")
        path = Path(unquote(parts.path))
        try:
            real = path.resolve(strict=False)
            allowed = [folder.resolve() for folder in self.allowed_local_paths]
        except (OSError, RuntimeError, ValueError):
            raise ForbiddenMedia(kind, "its path cannot be followed") from None
        if not any(real.is_relative_to(folder) for folder in allowed):
            raise ForbiddenMedia(
                kind, f"{path}: not under an allowed folder", remedy="start the server with --allowed-local-media-path"
            )
        try:
            if not real.is_file():
                raise UnusableMedia(kind, f"{path}: no such file")
            if (size := real.stat().st_size) > self.max_bytes:
                raise UnusableMedia(kind, f"{path}: {size} bytes, at most {self.max_bytes} are taken")
            return real.read_bytes()
        except OSError as error:
            raise UnusableMedia(kind, f"{path}: {error.strerror or error}") from None

    async def _download(self, url: str, kind: MediaKind) -> bytes:
        import httpx

        try:
            async with asyncio.timeout(self.timeout_s), httpx.AsyncClient(timeout=self.timeout_s) as client:
                for hop in range(MAX_REDIRECTS + 1):
                    await self._check_host(url, kind, is_redirect=hop > 0)
                    async with client.stream("GET", url, follow_redirects=False) as reply:
                        if reply.has_redirect_location:
                            url = urljoin(url, reply.headers["location"])
                            continue
                        return await self._body(reply, kind)
                raise UnusableMedia(kind, f"more than {MAX_REDIRECTS} redirects")
        except TimeoutError:
            raise UnusableMedia(kind, f"the download took longer than {self.timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, ValueError) as error:
            raise UnusableMedia(kind, f"the download failed ({error or type(error).__name__})") from None

    async def _body(self, reply: httpx.Response, kind: MediaKind) -> bytes:
        if reply.status_code != 200:
            raise UnusableMedia(kind, f"the download failed with status {reply.status_code}")
        data = bytearray()
        async for chunk in reply.aiter_bytes(CHUNK_BYTES):
            data += chunk
            if len(data) > self.max_bytes:
                raise UnusableMedia(kind, f"the download is larger than {self.max_bytes} bytes")
        return bytes(data)

    async def _check_host(self, url: str, kind: MediaKind, *, is_redirect: bool) -> None:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".").lower()
        if parts.scheme not in ("http", "https") or not host:
            raise UnusableMedia(kind, "no usable http(s) URL")
        if self.allowed_domains and not any(
            host == domain or host.endswith("." + domain) for domain in (d.lower() for d in self.allowed_domains)
        ):
            raise ForbiddenMedia(kind, f"host {host!r} is not allowed", remedy="see --allowed-media-domains")
        if is_redirect and await _is_private(host, parts.port or 0):
            raise ForbiddenMedia(kind, f"redirected to the private address of {host!r}")


async def _is_private(host: str, port: int) -> bool:
    """Whether any address of a host is not a public one."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port)
    except OSError:
        return False  # the download will say so
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    return any(not address.is_global for address in addresses)


def decode_data_url(url: str, kind: MediaKind, max_bytes: int) -> bytes:
    """The bytes of `data:<type>;base64,<data>`. The type is not believed: the decoder looks for itself.

    Raises:
        UnusableMedia: another encoding, characters that are not base64, or too much.
    """
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise UnusableMedia(kind, "a data: URL must read data:<type>;base64,<data>")
    return decode_base64(payload, kind, max_bytes)


def decode_base64(payload: str, kind: MediaKind, max_bytes: int) -> bytes:
    """Bytes of base64 text, line breaks allowed.

    Raises:
        UnusableMedia: characters that are not base64, or too much.
    """
    if len(payload) // 4 * 3 > max_bytes + 3:
        raise UnusableMedia(kind, f"more than {max_bytes} bytes")
    try:
        return base64.b64decode("".join(payload.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnusableMedia(kind, f"not base64 ({error})") from None
