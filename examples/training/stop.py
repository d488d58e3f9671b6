"""Signals that end a run after its micro-batch."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable


class Stop:
    """A context that turns SIGINT and SIGTERM into a request to stop, in ``signal``. A second signal ends the process.

    A thread receives the signals while the main thread computes. Launchers and terminals send the same request several
    times, so signals within ``SAME`` seconds count as one.
    """

    SAME = 1.0
    signal: int | None = None

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._since = say, 0.0

    def __enter__(self) -> Stop:
        self._heard, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._descriptor = signal.set_wakeup_fd(self._sender.fileno())
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        # a handler that does nothing: the thread is told only of signals with a handler
        self._before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _listen(self) -> None:
        while number := self._heard.recv(1):
            if number[0] in (signal.SIGINT, signal.SIGTERM):
                self._note(number[0])

    def _note(self, number: int) -> None:
        if self.signal is None:
            self.signal, self._since = number, time.monotonic()
            self._say(f"{signal.Signals(number).name}: stopping after this micro-batch; one more stops at once")
        elif time.monotonic() - self._since > self.SAME:
            self._say(f"{signal.Signals(number).name}: stopped at once; steps since the last checkpoint are lost")
            os._exit(128 + number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._descriptor)
        self._sender.close()
        self._thread.join()
        self._heard.close()
