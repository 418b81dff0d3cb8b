"""Which connection makes room at a limit."""

import random
from collections import Counter

import pytest

from service.lifecycle.open_connections import OpenConnections


class Fake:
    """A connection, registered with its server."""

    def __init__(self, server: OpenConnections, address: str, *, known: bool = False, trusted: bool = False) -> None:
        self.server, self.address, self.is_known, self.closed = server, address, known, False
        self.accepted = server.add(self, address, trusted=trusted)
        self.mark(idle=True)

    def mark(self, *, idle: bool) -> "Fake":
        self.idle = idle
        self.server.mark(self, idle=idle)
        return self

    def abort(self, reason: str) -> None:
        self.closed = True
        # As asyncio does later.
        self.server.remove(self)


def test_largest_network_makes_room_first() -> None:
    server = OpenConnections(5, 5)
    attackers = [Fake(server, "10.0.0.1") for _ in range(4)]
    other = Fake(server, "10.0.0.2")
    assert Fake(server, "10.0.0.3").accepted
    assert [one.closed for one in (*attackers, other)] == [True, False, False, False, False]


def test_busy_strangers_make_room_for_a_newcomer() -> None:
    server = OpenConnections(4, 4)
    attackers = [Fake(server, f"10.0.0.{number}").mark(idle=False) for number in range(4)]
    assert Fake(server, "10.0.0.9").accepted
    assert sum(one.closed for one in attackers) == 1


@pytest.mark.parametrize("idle", [True, False])
def test_callers_with_a_key_are_closed_after_strangers_and_never_while_busy(idle: bool) -> None:
    server = OpenConnections(4, 4)
    callers = [Fake(server, "10.0.0.1", known=True).mark(idle=idle) for _ in range(3)]
    strangers = [Fake(server, "10.0.0.2") for _ in range(20)]
    assert not any(one.closed for one in callers)
    assert [one.closed for one in strangers] == [True] * 19 + [False]
    late = Fake(server, "10.0.0.2", known=True).mark(idle=False)
    assert late.accepted
    assert Fake(server, "10.0.0.3").accepted is idle


def test_caller_authenticated_since_it_was_marked_is_kept() -> None:
    server = OpenConnections(2, 2)
    caller, stranger = Fake(server, "10.0.0.1").mark(idle=False), Fake(server, "10.0.0.2").mark(idle=False)
    caller.is_known = True
    assert Fake(server, "10.0.0.3").accepted
    assert (caller.closed, stranger.closed) == (False, True)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("", "", True),
    ],
)
def test_addresses_of_one_network_share_a_limit(first: str, second: str, same: bool) -> None:
    server = OpenConnections(9, 1)
    one = Fake(server, first)
    assert Fake(server, second).accepted
    assert one.closed is same


def test_trusted_proxy_has_no_limit_of_its_own() -> None:
    server = OpenConnections(9, 2)
    made = [Fake(server, "10.0.0.1", trusted=True) for _ in range(9)]
    assert not any(one.closed for one in made)


def test_any_history_keeps_the_limits_and_busy_callers() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        server, made = OpenConnections(12, 5), list[Fake]()
        for _ in range(200):
            alive = [one for one in made if one.accepted and not one.closed]
            busy = [one for one in alive if one.is_known and not one.idle]
            match chance.randrange(4):
                case 0 | 1:
                    made.append(Fake(server, f"10.0.0.{chance.randrange(6)}", known=chance.random() < 0.3))
                    # A newcomer is refused only if no stranger and no idle caller is left in its way.
                    full = alive if len(alive) >= 12 else [one for one in alive if one.address == made[-1].address]
                    assert made[-1].accepted or all(one.is_known and not one.idle for one in full)
                case 2 if alive:
                    chance.choice(alive).mark(idle=chance.random() < 0.5)
                case 3 if alive:
                    chance.choice(alive).abort("left")
                    busy = []
            assert not any(one.closed for one in busy)
            alive = [one for one in made if one.accepted and not one.closed]
            assert len(alive) <= 12
            assert max(Counter(one.address for one in alive).values(), default=0) <= 5
