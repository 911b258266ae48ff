"""The control connection between rank 0 and another rank: messages in order, a beat while there is nothing to say.

Both ends prove a secret to each other before anything is read; messages are pickled, so whoever knows the secret is
trusted. A connection that ends, or stays silent, means that the other process is gone: nobody waits for it.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

BEAT_S = 5.0
SILENCE_S = 90.0
"""Silence after which the other end counts as gone."""
CONNECT_TIMEOUT_S = 300.0
HANDSHAKE_S = 10
"""How long a caller may keep others waiting before it has shown that it knows the secret."""
_BEAT = b""


class Channel:
    """One end. Any thread may send; one receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    @property
    def connection(self) -> Connection:
        """To wait for, beside others."""
        return self._connection

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            OSError: the other end is gone.
        """
        self.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def send_bytes(self, message: bytes) -> None:
        """Send a message that is pickled already."""
        with self._lock:
            self._connection.send_bytes(message)

    def beat(self) -> None:
        """Show that this end lives; not while a message is on its way, which shows it too."""
        if self._lock.acquire(blocking=False):
            try:
                self._connection.send_bytes(_BEAT)
            finally:
                self._lock.release()

    def receive(self) -> Any:
        """The next message, or None for a beat.

        Raises:
            EOFError, OSError: the other end is gone.
        """
        data = self._connection.recv_bytes()
        return pickle.loads(data) if data else None

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def listen(host: str) -> socket.socket:
    """A listening socket of rank 0, on a port of the system's choice."""
    return socket.create_server((host, 0), family=_family(host))


def accept(listener: socket.socket, key: bytes, timeout_s: float) -> tuple[int, Channel] | None:
    """The next rank that calls, and its channel; None if none does in time, or one that does not know the secret.

    Raises:
        OSError: the listener is closed.
    """
    listener.settimeout(timeout_s)
    try:
        made, _ = listener.accept()
    except TimeoutError:
        return None
    connection = _connection(made)
    try:
        _wait_at_most(connection, HANDSHAKE_S)
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        rank = int(connection.recv_bytes())
        _wait_at_most(connection, 0)
    except (AuthenticationError, EOFError, OSError, ValueError):
        connection.close()
        return None
    return rank, Channel(connection)


def call(host: str, port: int, key: bytes, rank: int) -> Channel:
    """A channel to rank 0.

    Raises:
        OSError, EOFError: it cannot be reached, or does not know the secret.
    """
    connection = _connection(socket.create_connection((host, port), CONNECT_TIMEOUT_S))
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except AuthenticationError as error:
        raise OSError(str(error)) from None
    connection.send_bytes(str(rank).encode())
    return Channel(connection)


def _connection(made: socket.socket) -> Connection:
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(made.detach())


def _wait_at_most(connection: Connection, seconds: int) -> None:
    """Have receiving fail with an OSError after so long; 0: never."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
