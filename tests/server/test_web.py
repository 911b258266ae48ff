"""The built-in pages as files and replies: self-contained, negotiated, cached, and locked down."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest

from vkit.server.pages import load_page, prefers_html

Serve = Callable[..., Any]

PAGES = ["index.html", "docs.html"]
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


class Elements(HTMLParser):
    """Every element with its attributes, and the text of scripts and style sheets."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, list[str]] = {"script": [], "style": []}
        self._open: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = tag if tag in self.inline else None

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open:
            self.inline[self._open].append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(params=PAGES)
def elements(request: pytest.FixtureRequest) -> Elements:
    return Elements(load_page(request.param).body.decode())


def assets() -> list[tuple[str, str]]:
    folder = resources.files("vkit.server").joinpath("web")
    return [(item.name, item.read_text("utf-8")) for item in folder.iterdir() if item.is_file()]


class TestAssets:
    def test_nothing_names_another_host(self) -> None:
        named = [
            (name, url)
            for name, text in assets()
            for url in re.findall(r"(?:https?:|wss?:)?//[\w.-]+\.\w+[^\s\"')]*", text)
            if not url.startswith("http://www.w3.org/2000/svg")
        ]
        assert len(assets()) >= 6
        assert named == []

    def test_a_page_is_one_file(self, elements: Elements) -> None:
        assert [script for script in elements.all("script") if script] == []
        assert [link["rel"] for link in elements.all("link")] == ["icon"]
        assert all((link["href"] or "").startswith("data:") for link in elements.all("link"))
        assert [len(parts) for parts in elements.inline.values()] == [1, 1]
        assert "@import" not in elements.inline["style"][0]
        assert "url(" not in elements.inline["style"][0]

    def test_every_asset_is_in_a_page(self) -> None:
        whole = b"".join(load_page(name).body for name in PAGES).decode()
        for name, text in assets():
            assert name in PAGES or text in whole, name

    def test_no_code_in_attributes(self, elements: Elements) -> None:
        for tag, attributes in elements.found:
            assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)

    def test_text_never_becomes_markup(self) -> None:
        for name, text in assets():
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
            ), name

    def test_everything_typed_into_has_a_label(self, elements: Elements) -> None:
        labelled = {label["for"] for label in elements.all("label") if "for" in label}
        for tag in ("input", "select", "textarea"):
            for attributes in elements.all(tag):
                assert attributes["id"] in labelled | {"live-window"}, attributes

    def test_ids_are_unique_and_references_resolve(self, elements: Elements) -> None:
        ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
        assert len(ids) == len(set(ids))
        for _, attributes in elements.found:
            for name in ("for", "aria-controls", "aria-labelledby", "aria-describedby"):
                assert set((attributes.get(name) or "").split()) <= set(ids), attributes

    def test_the_policy_allows_exactly_what_is_in_the_page(self) -> None:
        for name in PAGES:
            page = load_page(name)
            rules = dict(part.strip().partition(" ")[::2] for part in page.policy.split(";"))
            inline = Elements(page.body.decode()).inline
            for rule, tag in (("script-src", "script"), ("style-src", "style")):
                digest = base64.b64encode(hashlib.sha256(inline[tag][0].encode()).digest()).decode()
                assert rules[rule] == f"'sha256-{digest}'"
            assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
            assert rules["connect-src"] == "'self'"


class TestNegotiation:
    @pytest.mark.parametrize(
        ("accept", "is_html"),
        [
            (BROWSER, True),
            ("text/html", True),
            ("TEXT/HTML", True),
            ("application/json;q=0.5, text/html;q=0.6", True),
            ("application/json;q=0, text/html;q=0.1", True),
            ("text/*, application/json;q=0.9", True),
            (None, False),
            ("", False),
            ("*/*", False),
            ("application/json", False),
            ("text/html, application/json", False),
            ("text/html;q=0.9, application/json", False),
            ("text/html;q=0.5, */*", False),
            ("text/html;q=0", False),
            ("text/html;q=often", False),
            ("text/html;q=7", False),
            ("text/plain", False),
            (",;q=,;;", False),
        ],
    )
    def test_who_gets_the_page(self, accept: str | None, is_html: bool) -> None:
        assert prefers_html(accept) is is_html

    async def test_root(self, serve: Serve) -> None:
        served = serve()
        page = await served.get("/", accept=BROWSER)
        assert page.headers["content-type"].replace(" ", "") == "text/html;charset=utf-8"
        assert "<!doctype html>" in page.text[:20]
        for accept in ("*/*", "application/json"):
            probe = await served.get("/", accept=accept)
            assert probe.headers["content-type"] == "application/json"
            assert probe.json() == {"object": "vkit"}
            assert probe.headers["vary"] == page.headers["vary"] == "Accept"

    async def test_head(self, serve: Serve) -> None:
        served = serve()
        for accept, kind in ((BROWSER, "text/html"), ("*/*", "application/json")):
            whole = await served.get("/", accept=accept)
            head = await served.client.head("/", headers={"accept": accept})
            assert head.status_code == 200
            assert head.content == b""
            assert head.headers["content-type"].startswith(kind)
            assert head.headers["content-length"] == whole.headers["content-length"]

    async def test_without_a_key_and_before_the_model_is_there(self, serve: Serve) -> None:
        served = serve(is_loaded=False, api_keys=("secret",))
        assert (await served.get("/", accept=BROWSER)).status_code == 200
        assert (await served.get("/docs")).status_code == 200

    async def test_under_a_root_path(self, serve: Serve) -> None:
        served = serve(root_path="/models/a")
        for path in ("/models/a", "/models/a/"):
            assert "<!doctype html>" in (await served.get(path, accept=BROWSER)).text

    async def test_the_document_names_both_kinds(self, serve: Serve) -> None:
        document = (await serve().get("/openapi.json")).json()
        assert sorted(document["paths"]["/"]["get"]["responses"]["200"]["content"]) == ["application/json", "text/html"]


@pytest.mark.parametrize("path", ["/", "/docs"])
class TestHeaders:
    async def test_caching(self, serve: Serve, path: str) -> None:
        served = serve()
        first = await served.get(path, accept=BROWSER)
        assert first.headers["cache-control"] == "no-cache"
        tag = first.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            again = await served.get(path, accept=BROWSER, **{"if-none-match": known})
            assert again.status_code == 304
            assert again.content == b""
            assert again.headers["etag"] == tag
        changed = await served.get(path, accept=BROWSER, **{"if-none-match": '"other"'})
        assert changed.content == first.content

    async def test_protection(self, serve: Serve, path: str) -> None:
        reply = await serve().get(path, accept=BROWSER)
        assert reply.headers["content-security-policy"].startswith("default-src 'none'")
        assert "unsafe" not in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"


async def test_without_docs(serve: Serve) -> None:
    served = serve(disable_docs=True)
    assert (await served.get("/docs")).status_code == 404
    assert (await served.get("/", accept=BROWSER)).status_code == 200
