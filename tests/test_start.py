"""How the program starts: what ends it early, and what it must not run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vkit import LLM, InvalidRequest, SamplingParams

GOLDENS = Path(__file__).resolve().parents[2] / "shared" / "goldens" / "models"


@pytest.mark.parametrize("heavy", ["typer", "vkit.command", "logging"])
def test_an_interrupt_while_modules_load_is_one_line(heavy: str, tmp_path: Path) -> None:
    # The interpreter's own hook sends the interrupt exactly when the import begins.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {heavy!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "vkit", "--version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "vkit: interrupted\n")


def test_files_of_the_current_folder_are_not_run(tmp_path: Path) -> None:
    for name in ("tokenize", "torch", "typer", "signal", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file ran')\n")
    command = [sys.executable, "-m", "vkit", "complete", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--prompt" in done.stdout


NOT_FOR_A_COMPLETION = [
    *("pydantic", "jinja2", "psutil", "yaml", "httpx", "PIL", "av", "litestar", "uvicorn", "llguidance"),
    *("vkit.structured.compiler", "vkit.text.compiled_template", "vkit.server", "vkit.client", "vkit.benchmark"),
    *("vkit.parsers.tools.qwen3_coder", "vkit.video", "vkit.speech", "vkit.kernels.triton", "vkit.conversion"),
    *("torch._dynamo", "torch._inductor", "sympy"),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny Llama with a tokenizer beside it."""
    folder = tmp_path / "llama"
    folder.mkdir()
    for source in (GOLDENS / "llama", GOLDENS / "byte_tokenizer"):
        for file in source.iterdir():
            if file.name != "golden.safetensors":
                shutil.copyfile(file, folder / file.name)
    return folder


def test_a_completion_imports_only_what_it_needs(model: Path) -> None:
    program = (
        "import gc, sys\n"
        "from vkit.__main__ import start\n"
        f"sys.argv = ['vkit', 'complete', '--model', {str(model)!r}, '--prompt', 'hello', '--max-tokens', '2']\n"
        "status = start()\n"
        f"loaded = [name for name in {NOT_FOR_A_COMPLETION!r} if name in sys.modules]\n"
        "print(status, gc.isenabled(), loaded)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["0 True []"], done.stdout + done.stderr


def test_a_conversation_does_compile_the_template(model: Path) -> None:
    """Late, but not never: a template that is no Jinja is refused by the conversation that wants it."""
    (model / "chat_template.jinja").write_text("{% broken")
    with LLM.for_text(str(model), threads=1) as llm:
        assert llm.generate("hello", SamplingParams(max_tokens=1))
        with pytest.raises(InvalidRequest, match="chat template: line 1"):
            llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=1))
