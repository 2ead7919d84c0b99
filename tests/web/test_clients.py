"""Clients by address, what they hold, and their turns."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from ecinn.web.clients import Shares, Turns, client_of


def test_addresses_of_one_ipv6_network_are_one_client() -> None:
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff:0:1")
    assert client_of("2001:db8::1") != client_of("2001:db8:0:1::1")
    assert client_of("192.0.2.1") != client_of("192.0.2.2")
    assert client_of("fe80::1%eth0") == client_of("fe80::2")
    assert client_of("somebody") == "somebody"


def test_a_client_holds_no_more_than_its_share_and_gives_it_back() -> None:
    shares, refusal = Shares(3), RuntimeError("too many")
    with shares.one("a", refusal), shares.one("a", refusal), shares.one("a", refusal):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="too many"), shares.one("a", refusal):
                pass
        with shares.one("b", refusal):
            pass
    with shares.one("a", refusal):
        pass
    assert not shares._held


@pytest.mark.parametrize("seed", range(5))
def test_no_client_waits_for_two_turns_of_another(seed: int) -> None:
    """Clients with any number of requests alternate as long as they have some."""
    generator = random.Random(seed)
    clients = [generator.choice("abbbbbcccccccccc") for _ in range(60)]
    waiting, turns, computed = list(clients), Turns(), []
    while waiting:
        client = waiting.pop(turns.order(waiting)[0])
        turns.served(client)
        computed.append(client)
    assert Counter(computed) == Counter(clients)
    for client in set(clients):
        own = [place for place, each in enumerate(computed) if each == client]
        for before, after in pairwise([-1, *own]):
            between = Counter(computed[before + 1 : after])
            assert all(count == 1 for count in between.values())


def test_the_order_of_one_client_is_that_of_arrival() -> None:
    assert Turns().order(["a"] * 9) == list(range(9))
    turns = Turns()
    turns.served("a")
    assert turns.order(["a", "a", "b", "a", "c", "b"]) == [2, 4, 0, 5, 1, 3]
