"""A model's text as the parts of a reply: thoughts, content, tool calls. Knows no tokens, no engine and no HTTP."""

from __future__ import annotations
