"""`vkit chat`: a conversation over the model's chat template, at a terminal or from piped lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkit.commands import _options, _render
from vkit.commands._session import open_model
from vkit.errors import RequestFailed, UsageError, VkitError
from vkit.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from vkit import LLM

PROMPT = "> "
HELP = """\
/system TEXT  set the system message; without TEXT, remove it
/reset        forget the conversation, keep the system message
/save FILE    write the conversation as JSON
/help         this list
/exit         leave (so does Ctrl-D)
Ctrl-C stops an answer. A line that begins with // is sent with one / less."""


@_options.expands_flags
def chat(
    *,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="The system message to begin with.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            min=1,
            help="Most tokens of one answer.",
            show_default="the rest of the context",
            rich_help_panel=_options.SAMPLING_PANEL,
        ),
    ] = None,
    temperature: _options.Temperature = 0.0,
    top_p: _options.TopP = 1.0,
    top_k: _options.TopK = 0,
    seed: _options.Seed = None,
    stop: _options.Stop = None,
    sources: _options.ModelFlags,
    engine: _options.EngineFlags,
    adapter: _options.AdapterFlags,
) -> None:
    """Talk with a model.

    Each line is one message; /help lists what else can be typed. Lines may also be piped in.
    """
    params = _options.sampling_params(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
    )
    with open_model(sources, engine, adapter, max_num_seqs=1) as (llm, _):
        llm.apply_chat_template([{"role": "user", "content": "hello"}])  # a model without a template ends here
        Conversation(llm, params, system, adapter.lora).run()


@dataclass
class Conversation:
    """What was said so far, and the loop that goes on with it."""

    llm: LLM
    params: SamplingParams
    system: str | None = None
    lora: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as the template gets it."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def run(self) -> None:
        """Answer line after line until the input ends.

        Raises:
            UsageError: standard input is closed, or a line of it is not UTF-8 text.
        """
        if sys.stdin is None:
            raise UsageError("standard input is closed")
        is_interactive = sys.stdin.isatty()
        num_lines = 0
        if is_interactive:
            _render.note("type /help for what can be typed, Ctrl-D to leave")
        is_interrupted = False
        while True:
            try:
                if is_interrupted:
                    is_interrupted = False
                    _render.note("type /exit or press Ctrl-D to leave")
                num_lines += 1
                line = _read_line(is_interactive, num_lines)
                if line is None or line.strip() in ("/exit", "/quit"):
                    return
                self.take(line)
            except KeyboardInterrupt:
                if not is_interactive:
                    raise
                is_interrupted = True  # told above, where the next impatient Ctrl-C is caught too
            except VkitError as error:
                if not is_interactive:
                    raise
                _render.note(f"error: {error}")

    def take(self, line: str) -> None:
        """Obey a line that begins with one slash, send any other."""
        if line.startswith("/") and not line.startswith("//"):
            self.obey(line)
        elif line.strip():
            self.say(line.removeprefix("/"))

    def obey(self, line: str) -> None:
        """Do what a slash line says.

        Raises:
            UsageError: it is none of the known ones, or its file cannot be written.
        """
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if word == "/system":
            self.system = rest or None
        elif word == "/reset" and not rest:
            self.turns.clear()
        elif word == "/save" and rest:
            self.save(Path(rest))
        elif word == "/help" and not rest:
            print(HELP, file=sys.stderr, flush=True)
        else:
            raise UsageError(f"{line.strip()}: not understood", remedy="/help lists what can be typed")

    def save(self, path: Path) -> None:
        """Write the conversation as a JSON list of messages."""
        try:
            path.write_text(json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"/save: {path}: {error.strerror or error}") from None
        _render.note(f"{len(self.messages)} messages saved to {path}")

    def say(self, text: str) -> None:
        """Send a message and write the answer as it comes. Ctrl-C stops the answer; what came of it stays said."""
        self.turns.append({"role": "user", "content": text})
        pieces: list[str] = []
        is_stopped = False
        try:
            for piece in self._answer():
                pieces.append(piece)
                _render.write_text(piece)
        except KeyboardInterrupt:
            is_stopped = True
        except VkitError:
            self.turns.pop()
            raise
        self.turns.append({"role": "assistant", "content": "".join(pieces)})
        _render.write_text("\n")
        if is_stopped:
            _render.note("stopped")

    def _answer(self) -> Iterator[str]:
        deltas = self.llm.chat_stream(self.messages, self.params, lora=self.lora)
        try:
            for delta in deltas:
                completion = delta.outputs[0]
                if completion.finish_reason is FinishReason.ERROR:
                    raise RequestFailed(f"the request failed: {completion.error or 'no reason was given'}")
                yield completion.text
        finally:
            if isinstance(deltas, Generator):
                deltas.close()  # ends the request where the answer was stopped


def _read_line(is_interactive: bool, number: int) -> str | None:
    """The next line, the `number`th, without its end; None when there are no more."""
    if is_interactive and sys.stdout.isatty():
        import readline  # noqa: F401  line editing and history for input()

        try:
            return input(PROMPT)
        except EOFError:
            _render.write_text("\n")
            return None
    if is_interactive:
        print(PROMPT, end="", file=sys.stderr, flush=True)
    line = _options.utf8_text(sys.stdin.buffer.readline(), f"standard input, line {number}")
    return line.rstrip("\r\n") if line else None
