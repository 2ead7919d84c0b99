"""Clients by their network address: what each one holds, and whose turn it is."""

import contextlib
import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

CLIENT: ContextVar[str] = ContextVar("client", default="")
"""The client of the request that is being answered."""
REMEMBERED = 4096
"""Clients whose last turn is remembered."""


def client_of(address: str) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 address: one client has all of it.

    >>> client_of("192.0.2.7"), client_of("::ffff:192.0.2.7"), client_of("2001:db8:1:2:3::4")
    ('192.0.2.7', '192.0.2.7', '2001:db8:1:2::/64')
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


class Shares:
    """Counts what every client holds; nobody is remembered who holds nothing."""

    def __init__(self, most: int) -> None:
        """Args: most: the largest amount that one client may hold."""
        self._most = most
        self._held: Counter[str] = Counter()

    def take(self, client: str, amount: int = 1) -> bool:
        """Add to what the client holds; return whether that is within the limit."""
        self._held[client] += amount
        return self._held[client] <= self._most

    def give(self, client: str, amount: int = 1) -> None:
        """Release what the client held."""
        self._held[client] -= amount
        if self._held[client] <= 0:
            del self._held[client]

    @contextlib.contextmanager
    def one(self, client: str, refusal: Exception) -> Iterator[None]:
        """Hold one unit within the block; raise `refusal` above the limit."""
        try:
            if not self.take(client):
                raise refusal
            yield
        finally:
            self.give(client)


class Turns:
    """Round-robin between clients: the one whose last turn is longest ago is next."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, None] = OrderedDict()

    def order(self, clients: Sequence[str]) -> list[int]:
        """Return the order in which requests of these clients, oldest first, are computed."""
        last = {client: place for place, client in enumerate(self._served)}
        before: Counter[str] = Counter()
        keys = []
        for place, client in enumerate(clients):
            keys.append((before[client], last.get(client, -1), place))
            before[client] += 1
        return sorted(range(len(clients)), key=keys.__getitem__)

    def served(self, client: str) -> None:
        """Note that it was this client's turn."""
        self._served[client] = None
        self._served.move_to_end(client)
        if len(self._served) > REMEMBERED:
            self._served.popitem(last=False)
