"""Loopback addresses, and the address of this machine as seen from another one."""

import socket
from contextlib import closing

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine on the route to another one, without sending anything.

    Raises:
        OSError: If there is no route.

    Example:
        >>> address_towards("127.0.0.1", 8000)
        '127.0.0.1'
    """
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind)) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
