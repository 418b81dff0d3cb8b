"""The process group of a job's ranks, which no other program can join or send objects to.

Anyone who reaches the group's store can read and write it. Ranks on one host meet in a file that only their user can
open; ranks on several hosts meet at one address of rank 0's host, not at all of them. A tensor from a stranger is a
wrong number, but an object is a pickle, which runs code: ranks sign the objects that they send, and read no others.
"""

import io
import os
import pickle
import secrets
import socket
import tempfile
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed import distributed_c10d

_SIGNATURE_BYTES = 32
_opened: list[Store] = []
"""The store that rank 0 serves to ranks on several hosts."""


@dataclass(frozen=True)
class Meeting:
    """The store in which ranks find each other: a file, or a port at rank 0's address."""

    path: str = ""
    address: str = ""
    port: int = 0

    def open(self, world: int, timeout: timedelta) -> Store:
        """Return the store."""
        if self.path:
            store: Store = FileStore(self.path, world)
            store.set_timeout(timeout)
            return store
        return TCPStore(self.address, self.port, world, is_master=False, timeout=timeout, wait_for_workers=False)


@dataclass(frozen=True)
class Group:
    """Settings of a process group that all its ranks get from the controller."""

    meeting: Meeting
    secret: bytes = field(repr=False)
    backend: str
    world: int
    timeout: timedelta

    def join(self, rank: int) -> None:
        """Join the group as a rank. Returns after all ranks have joined."""
        sign_objects(self.secret)
        store = self.meeting.open(self.world, self.timeout)
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=self.world, timeout=self.timeout)


def new_secret() -> bytes:
    """Return a secret for one group."""
    return secrets.token_bytes(32)


def meet_in_file(folder: str) -> Meeting:
    """Return a store in a file for ranks on one host. Runs on rank 0. Only this user can open the file."""
    descriptor, path = tempfile.mkstemp(prefix="ranks-", dir=folder)
    os.close(descriptor)
    return Meeting(path=path)


def meet_at(address: str, port: int = 0) -> Meeting:
    """Return a store at this host's address for ranks on several hosts. Runs on rank 0, which serves it.

    If `port` is 0, the operating system chooses it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    # Without a listener, the store would listen at all addresses of the host.
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    _opened[:] = [store]
    return Meeting(address=address, port=port)


def sign_objects(secret: bytes) -> None:
    """Sign the objects that this process sends by collectives, also by those of torch, and check those it receives."""

    class Signer:
        def __init__(self, file: io.BytesIO) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            content = pickle.dumps(value)
            self._file.write(_sign(content, secret) + content)

    class Verifier:
        def __init__(self, file: io.BytesIO) -> None:
            self._file = file

        def load(self) -> Any:
            signature, content = self._file.read(_SIGNATURE_BYTES), self._file.read()
            if not secrets.compare_digest(signature, _sign(content, secret)):
                raise ConnectionError("a rank received an object that no rank of its group has sent")
            return pickle.loads(content)

    distributed_c10d._pickler, distributed_c10d._unpickler = Signer, Verifier  # type: ignore[assignment]


def _sign(content: bytes, secret: bytes) -> bytes:
    return blake2b(content, key=secret, digest_size=_SIGNATURE_BYTES).digest()
