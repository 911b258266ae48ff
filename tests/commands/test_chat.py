"""`vkit chat`: history, slash lines, and Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def chat(vkit_run: Run, fake_llm: Any, model_file: Path) -> Run:
    fake_llm.answer = "ok"
    return lambda lines, *args: vkit_run("chat", "--model", str(model_file), *args, stdin=lines)


def test_piped_lines_are_answered_with_history(chat: Run, fake_llm: Any) -> None:
    result = chat("one\n\ntwo", "--system", "be brief")
    assert (result.status, result.stdout) == (0, "ok\nok\n")
    assert fake_llm.made[0].prompts == [
        "<system>be brief<user>one",
        "<system>be brief<user>one<assistant>ok<user>two",
    ]
    assert fake_llm.made[0].params[0].max_tokens is None


def test_a_line_that_is_not_utf8_is_named(chat: Run) -> None:
    result = chat(b"hi\n\xff\nhey\n")
    assert result.status == 2
    assert result.error.startswith("standard input, line 2: not UTF-8 text: ")


def test_slash_lines(chat: Run, fake_llm: Any, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    result = chat(f"a\n/reset\n/system be kind\nb\n/save {saved}\n/system\n//etc\n/help\n/exit\nnever")
    assert result.status == 0
    assert fake_llm.made[0].prompts == [
        "<user>a",
        "<system>be kind<user>b",
        "<user>b<assistant>ok<user>/etc",
    ]
    assert json.loads(saved.read_text()) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "ok"},
    ]
    assert "/reset" in result.stderr


@pytest.mark.parametrize("line", ["/sing", "/save", "/save /no/such/dir/x", "/reset now"])
def test_unknown_slash_line_ends_a_piped_run(chat: Run, line: str) -> None:
    result = chat(line + "\n")
    assert result.status == 2
    assert line.split()[0] in result.error


def test_model_without_template_is_refused_at_once(chat: Run, fake_llm: Any) -> None:
    fake_llm.has_template = False
    result = chat("hi\n")
    assert result.status == 2
    assert fake_llm.made[0].prompts == []


def test_a_failed_answer_ends_a_piped_run(chat: Run, fake_llm: Any) -> None:
    fake_llm.error = "broken"
    result = chat("hi\n")
    assert result.status == 1
    assert "broken" in result.error


class Terminal:
    """A chat at a pseudo-terminal."""

    def __init__(self, start: Callable[..., subprocess.Popen[bytes]], model: Path, answer: str) -> None:
        self.fd, child = pty.openpty()
        self.process = start(
            *("chat", "--model", str(model)),
            settings=f"delay_s=0.05;answer={answer}",
            env={"TERM": "xterm", "NO_COLOR": "1"},
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
        )
        os.close(child)
        self.seen = ""

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 200
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            self.read_for(1)
        self.seen = self.seen.partition(text)[2]

    def read_for(self, seconds: float) -> None:
        if select.select([self.fd], [], [], seconds)[0]:
            self.seen += os.read(self.fd, 4096).decode("utf-8", "replace")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_until(self, text: str) -> None:
        """Again every few seconds: Python loses one that comes between the prompt and the first wait for a key, or
        during a callback of a weak reference."""
        for _ in range(20):
            self.interrupt()
            patience = time.monotonic() + 4
            while text not in self.seen and time.monotonic() < patience:
                self.read_for(1)
            if text in self.seen:
                break
        self.wait_for(text)


def test_ctrl_c_stops_the_answer_and_not_the_program(
    start: Callable[..., subprocess.Popen[bytes]], model_file: Path, tmp_path: Path
) -> None:
    terminal = Terminal(start, model_file, "z" * 500)
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("zzz")
    terminal.interrupt_until("stopped")
    terminal.wait_for("> ")
    terminal.interrupt_until("Ctrl-D to leave")
    terminal.wait_for("> ")
    saved = tmp_path / "talk.json"
    terminal.type(f"/nonsense\n/save {saved}\n")
    terminal.wait_for("not understood")
    terminal.wait_for("saved to")
    terminal.wait_for("> ")  # only an editor that waits for keys takes Ctrl-D as the end
    terminal.type("\x04")
    assert terminal.process.wait(timeout=120) == 0
    user, assistant = json.loads(saved.read_text())
    assert user == {"role": "user", "content": "hello"}
    assert 3 <= len(assistant["content"]) < 500
