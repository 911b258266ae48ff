"""The built-in pages: one reply each, made of the files in web/, that load nothing from anywhere.

A page's style sheets and scripts are put into it, so that it works under any path a proxy puts the server at, and its
content security policy allows exactly those, by digest: text that ends up in the page by mistake cannot run.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from litestar.response.base import Response

from vkit.server.call import Call

HTML = "text/html"
JSON = "application/json"

_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.-]+)">')
_SCRIPT = re.compile(r'<script src="([\w.-]+)" defer></script>')


@dataclass(frozen=True, slots=True)
class Page:
    """A page as it is sent."""

    body: bytes
    etag: str
    policy: str
    """Value of Content-Security-Policy."""


@cache
def load_page(name: str) -> Page:
    """The page web/`name`, complete."""
    html = _asset(name)
    styles = [_asset(file) for file in _STYLE.findall(html)]
    scripts = [_asset(file) for file in _SCRIPT.findall(html)]
    # One script element at the end of the body does what `defer` does for files: the page is there when it runs.
    html = _STYLE.sub("", _SCRIPT.sub("", html))
    style, script = "".join(styles), "".join(scripts)
    html = html.replace("</head>", f"<style>{style}</style></head>").replace(
        "</body>", f"<script>{script}</script></body>"
    )
    body = html.encode()
    return Page(body, f'"{hashlib.sha256(body).hexdigest()[:32]}"', _policy(style, script))


def page_reply(call: Call, page: Page) -> Response[bytes]:
    """The page, or 304 for a browser that has it."""
    headers = {
        "cache-control": "no-cache",
        "etag": page.etag,
        "content-security-policy": page.policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "vary": "Accept",
    }
    if _has_current(call.header("if-none-match"), page.etag):
        return Response(b"", status_code=304, media_type=HTML, headers=headers)
    return Response(page.body, status_code=200, media_type=HTML, headers=headers)


def prefers_html(accept: str | None) -> bool:
    """Whether an Accept header ranks text/html above application/json, as browsers do and API clients do not."""
    if accept is None:
        return False
    ranges = [_media_range(item) for item in accept.split(",")]
    return _quality(ranges, HTML) > _quality(ranges, JSON)


def _media_range(item: str) -> tuple[str, float]:
    """Media type and quality; a quality that is none counts as 0, so that it can ask for nothing."""
    kind, *parameters = (part.strip().lower() for part in item.split(";"))
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            return kind, float(value) if re.fullmatch(r"\s*[01](\.\d{0,3})?\s*", value) else 0.0
    return kind, 1.0


def _quality(ranges: list[tuple[str, float]], kind: str) -> float:
    """The quality of the most specific range that takes this type.

    Source: RFC 9110, section 12.5.1.
    """
    for pattern in (kind, kind.partition("/")[0] + "/*", "*/*"):
        found = [quality for name, quality in ranges if name == pattern]
        if found:
            return max(found)
    return 0.0


def _has_current(if_none_match: str | None, etag: str) -> bool:
    given = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    return etag in given or "*" in given


def _asset(name: str) -> str:
    return resources.files("vkit.server").joinpath("web", name).read_text("utf-8")


def _policy(style: str, script: str) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_digest(script)}",
            f"style-src {_digest(style)}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
