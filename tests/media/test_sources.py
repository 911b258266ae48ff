"""Media by URL: what is allowed is read, and nothing else."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from vkit.errors import InvalidRequest
from vkit.media.sources import MediaAccess
from vkit.media.unusable import ForbiddenMedia, UnusableMedia


class Pages(BaseHTTPRequestHandler):
    """/ok, /large, /missing, /away?<location>, /slow."""

    release: ClassVar[threading.Event]

    def do_GET(self) -> None:
        """One page."""
        path, _, location = self.path.partition("?")
        status = {"/away": 302, "/missing": 404}.get(path, 200)
        body = b"x" * 100_000 if path == "/large" else b"picture"
        self.send_response(status)
        if path == "/away":
            self.send_header("location", location)
        if path == "/slow":
            self.release.wait(10)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Address of the pages."""
    Pages.release = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    Pages.release.set()
    server.shutdown()
    server.server_close()
    thread.join()


def read(url: str, access: MediaAccess = MediaAccess()) -> bytes:
    """What is at a URL."""
    return asyncio.run(access.read(url, "image"))


def test_data_urls_are_read_whatever_type_they_claim() -> None:
    assert read("data:image/png;base64," + base64.b64encode(b"\0abc").decode()) == b"\0abc"
    assert read("DATA:;BASE64,YW\nJj") == b"abc"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:text/plain,hello", "must read data:<type>;base64"),
        ("data:image/png;base64", "must read data:<type>;base64"),
        ("data:image/png;base64,a!b=", "not base64"),
        ("data:image/png;base64,abc", "not base64"),
    ],
)
def test_other_data_urls_are_unusable(url: str, words: str) -> None:
    with pytest.raises(UnusableMedia, match=words):
        read(url)


def test_data_urls_have_a_limit() -> None:
    with pytest.raises(UnusableMedia, match="more than 10 bytes"):
        read("data:;base64," + "A" * 400, MediaAccess(max_bytes=10))


@pytest.mark.parametrize("url", ["", "picture.png", "ftp://host/a.png", "/etc/passwd", "javascript:1"])
def test_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="expected a data:, http") as caught:
        read(url)
    assert not isinstance(caught.value, UnusableMedia | ForbiddenMedia)


def test_files_need_an_allowed_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a b.png").write_bytes(b"here")
    (inside / "link.png").symlink_to(outside / "a b.png")
    access = MediaAccess(allowed_local_paths=(inside,), max_bytes=100)
    assert read((inside / "a b.png").as_uri(), access) == b"here"
    for path in (outside / "a b.png", inside / "link.png", inside / ".." / "out" / "a b.png"):
        with pytest.raises(ForbiddenMedia, match="--allowed-local-media-path"):
            read(f"file://{path}".replace(" ", "%20"), access)
    with pytest.raises(ForbiddenMedia):
        read((inside / "a b.png").as_uri())
    with pytest.raises(UnusableMedia, match="no such file"):
        read((inside / "none.png").as_uri(), access)
    (inside / "large").write_bytes(bytes(101))
    with pytest.raises(UnusableMedia, match="at most 100"):
        read((inside / "large").as_uri(), access)
    with pytest.raises(InvalidRequest, match="on this machine"):
        read("file://elsewhere/a.png", access)


def test_pages_are_downloaded_within_the_limits(site: str) -> None:
    assert read(f"{site}/ok") == b"picture"
    with pytest.raises(UnusableMedia, match="status 404"):
        read(f"{site}/missing")
    with pytest.raises(UnusableMedia, match="larger than 5000 bytes"):
        read(f"{site}/large", MediaAccess(max_bytes=5000))
    with pytest.raises(UnusableMedia, match="took longer than"):
        read(f"{site}/slow", MediaAccess(timeout_s=0.2))
    with pytest.raises(UnusableMedia, match="download failed"):
        read("http://127.0.0.1:1/none")


def test_only_allowed_hosts_are_asked(site: str) -> None:
    assert read(f"{site}/ok", MediaAccess(allowed_domains=("127.0.0.1",))) == b"picture"
    with pytest.raises(ForbiddenMedia, match=r"host '127\.0\.0\.1' is not allowed"):
        read(f"{site}/ok", MediaAccess(allowed_domains=("example.org",)))


def test_redirects_never_lead_to_a_private_address(site: str) -> None:
    with pytest.raises(ForbiddenMedia, match="private address"):
        read(f"{site}/away?{site}/ok")
    with pytest.raises(UnusableMedia, match="no usable http"):
        read(f"{site}/away?file:///etc/passwd")
