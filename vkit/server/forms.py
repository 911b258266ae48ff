"""multipart/form-data bodies: bytes to fields and files, within limits on everything but the files' own size.

Source: RFC 7578.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header  # comes with litestar

from vkit.server.problems import bad_request, clip

MAX_PARTS = 64
MAX_FIELD_BYTES = 1 << 20
MULTIPART = "multipart/form-data"


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """A file of a form."""

    name: str
    content: bytes


@dataclass(slots=True)
class Form:
    """What a form holds, in order; a name may come several times."""

    texts: list[tuple[str, str]] = field(default_factory=list)
    files: list[tuple[str, UploadedFile]] = field(default_factory=list)

    def names(self) -> Iterator[str]:
        """Every name, files' too."""
        yield from (name for name, _ in self.texts)
        yield from (name for name, _ in self.files)

    def all(self, name: str) -> list[str]:
        """Every text of that name; `name[]` is the same name."""
        return [text for given, text in self.texts if given.removesuffix("[]") == name]

    def text(self, name: str) -> str | None:
        """The one text of that name, None if it is absent or empty.

        Raises:
            Problem: 400 when there are several.
        """
        found = self.all(name)
        if len(found) > 1:
            raise bad_request(f"{name}: given {len(found)} times", name)
        return found[0] if found and found[0] else None

    def file(self, name: str) -> UploadedFile:
        """The one file of that name.

        Raises:
            Problem: 400 when there is none, or several.
        """
        found = [file for given, file in self.files if given == name]
        if len(found) != 1:
            what = "a file is required" if not found else f"{len(found)} files, expected one"
            raise bad_request(f"{name}: {what}", name)
        return found[0]


def decode_form(content_type: str | None, raw: bytes) -> Form:
    """The form in a request body.

    Raises:
        Problem: 400 for another content type or a malformed body.
    """
    media_type, options = parse_options_header(content_type or "")
    if media_type.lower() != MULTIPART:
        raise bad_request(f"Unsupported Media Type: Only '{MULTIPART}' is allowed")
    boundary = options.get("boundary")
    if not boundary:
        raise bad_request("Invalid multipart body: the Content-Type header names no boundary")
    form = Form()
    try:
        with PushMultipartParser(boundary, content_length=len(raw), max_segment_count=MAX_PARTS) as parser:
            segment: MultipartSegment | None = None
            parts = bytearray()
            for item in parser.parse(raw):
                if segment is None:
                    segment = item
                elif item is None:
                    _add(form, segment.name or "", segment.filename, parts)
                    segment, parts = None, bytearray()
                else:
                    parts += item
                    if segment.filename is None and len(parts) > MAX_FIELD_BYTES:
                        raise bad_request(f"{clip(segment.name)}: above {MAX_FIELD_BYTES} bytes", segment.name)
    except (MultipartError, UnicodeError) as exc:
        raise bad_request(f"Invalid multipart body: {clip(str(exc))}") from None
    return form


def _add(form: Form, name: str, filename: str | None, content: bytearray) -> None:
    if filename is not None:
        form.files.append((name, UploadedFile(filename, bytes(content))))
        return
    try:
        form.texts.append((name, content.decode("utf-8")))
    except UnicodeDecodeError:
        raise bad_request(f"{clip(name)}: not UTF-8 text", name) from None
