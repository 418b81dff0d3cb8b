"""The receiver of heartbeats on a port that anyone may send to."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.waiting import wait_for
from train_loop.liveness.heartbeat import Beat, Phase, Target, encode
from train_loop.ray_train.heartbeat_listener import HeartbeatListener

BEAT = Beat(0, 1, 2, Phase.DATA, 0.5)
HOSTILE = [b"[" * 1000, b'{"token":' + b"[" * 900, b"{}", b"", b"x" * 60_000, b"\xff" * 200]


class Counter:
    """A listener, and the number of its ticks and heartbeats."""

    def __init__(self) -> None:
        self.ticks, self.beats, self.fails = 0, 0, False
        self.listener = HeartbeatListener("127.0.0.1", on_beat=self._beat, tick=self._tick, clock=time.monotonic)

    def _beat(self, beat: Beat) -> None:
        assert beat == BEAT
        self.beats += 1
        if self.fails:
            raise RecursionError("a handler that fails")

    def _tick(self) -> None:
        self.ticks += 1


@contextmanager
def flood(target: Target, datagrams: list[bytes]) -> Iterator[None]:
    """Send the datagrams about 1,000 times a second."""
    stop = threading.Event()

    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            while not stop.wait(0.001 * len(datagrams)):
                for data in datagrams:
                    sender.sendto(data, target[:2])

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def counter() -> Iterator[Counter]:
    made = Counter()
    made.listener.start()
    yield made
    made.listener.close()


def test_datagrams_of_strangers_delay_neither_ticks_nor_heartbeats(counter: Counter) -> None:
    target = counter.listener.target
    with flood(target, [*HOSTILE, encode(BEAT, target.token), encode(BEAT, "guess")]):
        wait_for(lambda: counter.ticks >= 4 and counter.beats >= 10, "ticks and heartbeats", seconds=20)


def test_error_in_a_handler_does_not_stop_the_ticks(counter: Counter) -> None:
    counter.fails = True
    target = counter.listener.target
    with flood(target, [encode(BEAT, target.token)]):
        wait_for(lambda: counter.ticks >= 3, "ticks", seconds=20)
