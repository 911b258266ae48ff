"""The control connection: who is let in, and who cannot hold it up."""

from __future__ import annotations

import socket
import threading

import pytest

from vkit.parallel import channel
from vkit.parallel.channel import accept, call, listen

KEY = b"k" * 32
HOST = "127.0.0.1"


def test_a_caller_that_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_S", 1)
    with listen(HOST) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((HOST, port)):
            assert accept(listener, KEY, 10.0) is None  # in place of waiting for ever, in which case the test hangs
        calls: list[channel.Channel] = []
        caller = threading.Thread(target=lambda: calls.append(call(HOST, port, KEY, 3)))
        caller.start()
        met = accept(listener, KEY, 10.0)
        caller.join()
    assert met is not None
    rank, ours = met
    assert rank == 3
    late = threading.Timer(1.5, lambda: calls[0].send("later than a handshake may take"))
    late.start()
    assert ours.receive() == "later than a handshake may take"
    late.join()
    ours.close()
    calls[0].close()


def test_another_secret_is_refused() -> None:
    with listen(HOST) as listener:
        port = listener.getsockname()[1]
        refused: list[BaseException] = []

        def try_it() -> None:
            try:
                call(HOST, port, b"x" * 32, 1)
            except (OSError, EOFError) as error:
                refused.append(error)

        caller = threading.Thread(target=try_it)
        caller.start()
        assert accept(listener, KEY, 10.0) is None
        caller.join()
    assert len(refused) == 1
