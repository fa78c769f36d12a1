"""Which addresses are of this machine alone, and which one of its own leads to another machine."""

import socket
from contextlib import closing

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def address_towards(host: str, port: int) -> str:
    """The address of this machine from which it reaches another one; nothing is sent.

    Raises:
        OSError: if there is no way.

    Example:
        >>> address_towards("127.0.0.1", 8000)
        '127.0.0.1'
    """
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind)) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
