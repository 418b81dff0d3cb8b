"""The process group: where its store listens, who may open it, and which objects a rank reads."""

import os
import pickle
import stat
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from train_loop.doctor import all_reduce
from train_loop.parallel.process_group import Group, Meeting, meet_at, meet_in_file, new_secret, sign_objects

SECONDS = timedelta(seconds=10)


@pytest.fixture(autouse=True)
def _unsigned_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_pickler", "_unpickler"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Join a group of one rank."""
    Group(meet_in_file(str(tmp_path)), new_secret(), "gloo", 1, SECONDS).join(0)
    yield
    dist.destroy_process_group()


def listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections(kind="tcp")
    return {(one.laddr[0], one.laddr[1]) for one in found if one.status == psutil.CONN_LISTEN}


def test_store_listens_at_one_address_only() -> None:
    before = listening()
    meeting = meet_at("127.0.0.1")
    assert listening() - before == {("127.0.0.1", meeting.port)}
    meeting.open(2, SECONDS).set("name", "value")
    assert meeting.open(2, SECONDS).get("name") == b"value"


def test_store_of_one_host_is_a_file_that_only_its_user_can_open(tmp_path: Path) -> None:
    before = listening()
    # The folder of a Ray session has mode 0777.
    tmp_path.chmod(0o777)
    meeting = meet_in_file(str(tmp_path))
    stores = [meeting.open(2, SECONDS) for _ in range(2)]
    stores[0].set("name", "value")
    assert stores[1].get("name") == b"value"
    mode = Path(meeting.path).stat().st_mode
    assert (stat.S_IMODE(mode), listening() - before) == (0o600, set())


def test_objects_of_ranks_arrive(alone: None) -> None:
    values: list[Any] = [None]
    dist.all_gather_object(values, {"rank": 0, "error": ValueError("x")})
    assert values[0]["rank"] == 0
    dist.broadcast_object_list(values, src=0)
    gathered: list[Any] = [None]
    dist.gather_object([1, 2], gathered)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, gathered)
    assert (repr(values[0]["error"]), scattered) == ("ValueError('x')", [[1, 2]])


# torch has no types for the functions by which all its collectives send objects.
to_tensor: Any = distributed_c10d._object_to_tensor
to_object: Any = distributed_c10d._tensor_to_object


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("hostile",)


@pytest.mark.parametrize("signature", [b"", bytes(32), b"x" * 31])
def test_objects_of_strangers_are_not_unpickled(
    signature: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sign_objects(new_secret())
    received = torch.frombuffer(bytearray(signature + pickle.dumps(Hostile())), dtype=torch.uint8)
    with pytest.raises(ConnectionError, match="no rank of its group has sent"):
        to_object(received, len(received), None)
    assert list(tmp_path.iterdir()) == []


def test_objects_of_another_group_are_not_unpickled(tmp_path: Path) -> None:
    sign_objects(new_secret())
    tensor, size = to_tensor({"rank": 0}, torch.device("cpu"), None)
    assert to_object(tensor, size, None) == {"rank": 0}
    sign_objects(new_secret())
    with pytest.raises(ConnectionError, match="no rank of its group has sent"):
        to_object(tensor, size, None)


def test_secret_is_not_shown() -> None:
    group = Group(Meeting(), b"the-secret", "gloo", 1, SECONDS)
    assert "the-secret" not in repr(group)


def test_doctors_store_listens_at_one_address_only() -> None:
    before = listening()
    served = all_reduce.meeting("127.0.0.1:0", serve=True)
    assert listening() - before == {("127.0.0.1", served.port)}
    assert all_reduce.meeting("[fd00::1]:99", serve=False) == Meeting(address="fd00::1", port=99)
