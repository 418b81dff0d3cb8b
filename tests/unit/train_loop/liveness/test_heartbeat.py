"""Heartbeats of a real process, over a real socket."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.faults.memory import memory_group
from tests.support.waiting import wait_for
from train_loop.liveness import heartbeat
from train_loop.liveness.heartbeat import Beat, Phase, decode, encode

TOKEN = "secret"
_RANK = """
import sys, time
from train_loop.liveness.heartbeat import Heartbeat, Phase, Target
beat = Heartbeat(Target("127.0.0.1", int(sys.argv[1]), sys.argv[2]), rank=2, epoch=3)
beat.mark(5, Phase.TRAIN)
beat.mark_storage(time.monotonic())
line = sys.stdin.readline()
if line == "fill\\n":
    kept = bytearray(2**28)
beat.stop()
"""


class Listener:
    """A socket that collects heartbeats."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.settimeout(0.1)

    def next(self, wanted: Callable[[Beat], bool], *, seconds: float = 10) -> Beat:
        """Return the next heartbeat that matches."""

        def read() -> Beat | None:
            try:
                beat = decode(self.socket.recv(2048), TOKEN)
            except TimeoutError:
                return None
            return beat if beat is not None and wanted(beat) else None

        return wait_for(read, "a heartbeat", seconds=seconds)


@contextmanager
def rank() -> Iterator[tuple[Listener, "subprocess.Popen[bytes]"]]:
    listener = Listener()
    command = [sys.executable, "-c", _RANK, str(listener.socket.getsockname()[1]), TOKEN]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield listener, process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
        listener.socket.close()


def test_heartbeat_contains_rank_epoch_and_place() -> None:
    with rank() as (listener, _):
        beat = listener.next(lambda beat: beat.step == 5)
    assert (beat.rank, beat.epoch, beat.phase, beat.stopped, beat.ended) == (2, 3, Phase.TRAIN, False, False)


def test_heartbeat_of_a_stopped_process_reports_the_stop() -> None:
    with rank() as (listener, process):
        listener.next(lambda beat: beat.step == 5)
        process.send_signal(signal.SIGSTOP)
        assert listener.next(lambda beat: beat.stopped)
        process.send_signal(signal.SIGCONT)
        assert listener.next(lambda beat: not beat.stopped)


@pytest.mark.slow
def test_storage_is_not_reported_while_its_process_is_stopped() -> None:
    with rank() as (listener, process):
        listener.next(lambda beat: beat.storage_seconds > 0)
        process.send_signal(signal.SIGSTOP)
        first = listener.next(lambda beat: beat.stopped).storage_seconds
        with pytest.raises(TimeoutError):
            listener.next(lambda beat: beat.storage_seconds > first, seconds=3)
        process.send_signal(signal.SIGCONT)
        assert listener.next(lambda beat: not beat.stopped).storage_seconds <= first + 2
        assert listener.next(lambda beat: beat.storage_seconds > first + 2)


def test_heartbeat_of_a_killed_process_reports_its_end() -> None:
    with rank() as (listener, process):
        listener.next(lambda beat: beat.step == 5)
        process.kill()
        process.wait()
        beat = listener.next(lambda beat: beat.ended)
    # Only Linux 6.15 and newer report the cause.
    assert beat.status in (signal.SIGKILL, None)


@pytest.mark.parametrize("out_of_memory", [True, False])
def test_heartbeat_distinguishes_an_oom_kill_from_others(out_of_memory: bool) -> None:
    with memory_group() as group, rank() as (listener, process):
        listener.next(lambda beat: beat.step == 5)
        group.add(process.pid)
        # The heartbeat process checks once a second which group the rank is in.
        for _ in range(2):
            listener.next(lambda beat: True)
        if out_of_memory:
            group.allow(2**24)
            assert process.stdin is not None
            process.stdin.write(b"fill\n")
            process.stdin.flush()
        else:
            process.kill()
        assert process.wait() == -signal.SIGKILL
        assert listener.next(lambda beat: beat.ended).out_of_memory is out_of_memory


def test_stopped_heartbeat_reports_no_end() -> None:
    with rank() as (listener, process):
        listener.next(lambda beat: beat.step == 5)
        process.communicate(b"\n", timeout=20)
        with pytest.raises(TimeoutError):
            listener.next(lambda beat: beat.ended, seconds=1)


def test_heartbeats_continue_after_their_process_is_killed() -> None:
    with rank() as (listener, process):
        listener.next(lambda beat: beat.step == 5)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        subprocess.run(["kill", "-9", *children], check=True)
        wait_for(lambda: _drained(listener), "the last heartbeat of the killed process")
        assert listener.next(lambda beat: not beat.ended)


def _drained(listener: Listener) -> bool:
    try:
        listener.socket.recv(2048)
    except TimeoutError:
        return True
    return False


def test_datagram_without_a_valid_mac_is_ignored() -> None:
    beat = Beat(0, 1, 2, Phase.DATA, 0.5)
    whole = encode(beat, TOKEN)
    assert decode(whole, TOKEN) == beat
    for data in (encode(beat, "other"), b"", b"[" * 1000, b"x" * 5000, whole[:-3], whole[32:], whole[:40] + whole):
        assert decode(data, TOKEN) is None


def test_datagram_is_parsed_only_with_a_valid_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("parsed"))
    assert decode(encode(Beat(0, 1, 2, Phase.DATA, 0.5), "other"), TOKEN) is None


@pytest.mark.parametrize("fields", ['{"phase": 77}', '{"unknown": 1}', "[" * 900, "null", "{", '{"phase": "TRAIN"}'])
def test_authentic_datagram_with_wrong_fields_is_ignored(fields: str) -> None:
    if fields.endswith("}"):
        fields = '{"rank": 0, "epoch": 1, "step": 2, "seconds": 0.1, ' + fields[1:]
    assert decode(heartbeat._mac(fields.encode(), TOKEN) + fields.encode(), TOKEN) is None
