"""Advice for errors of connections between ranks."""

import os
import socket

LOOPBACK = "127.0.0.1"
MESH = ("connectFullMesh", "makeDeviceForHostname", "Unable to find address for")  # errors of gloo
TAKEN = ("EADDRINUSE", "Address already in use")
UNREACHED = (
    "client socket has timed out",
    "client socket has failed to connect",
    "waiting for clients",  # on the first node, while the others use another address
    "Ping failed",  # another program listens on the port
)


def cure_of(error: BaseException) -> str:
    """Return the variable to set for an error of torch's stores and groups; empty for any other error.

    Example:
        >>> cure_of(RuntimeError("name: EADDRINUSE, message: address already in use")).partition(":")[0]
        'set MASTER_PORT to a free port, the same on all nodes'
    """
    text = str(error)
    if any(words in text for words in TAKEN):
        return (
            "set MASTER_PORT to a free port, the same on all nodes: another run uses this one, as with two SLURM jobs "
            "whose ids end in the same digits"
        )
    if any(words in text for words in MESH):
        return _cure_of_mesh()
    if any(words in text for words in UNREACHED):
        return (
            "set MASTER_ADDR and MASTER_PORT to an address of the first node that the others reach, and to a port that "
            "is open between them"
        )
    port = os.environ.get("MASTER_PORT", "0")
    if isinstance(error, ValueError) and not port.isdecimal() and repr(port) in text:
        return f"set MASTER_PORT to the number of a free port, the same on all nodes, got {port!r}"
    return ""


def _cure_of_mesh() -> str:
    """Return advice for ranks that have reached the store but not each other."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        return f"set GLOO_SOCKET_IFNAME to the interface that reaches the other nodes, got {name!r}"
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if again and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return (
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started: restarted ranks read the addresses "
            "of dead ones from a shared store"
        )
    host = socket.gethostname()
    return (
        "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface that reaches the other nodes: without it "
        f"gloo listens on the address of the host name, for {host} {_address_of(host)}"
    )


def _address_of(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return LOOPBACK  # the fallback of gloo
