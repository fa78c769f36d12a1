"""Connection of this process to a Ray cluster."""

import os
import signal
import socket
import threading
from contextlib import suppress
from typing import Any

CONNECT_SECONDS = 10.0
CONNECTING = threading.Lock()


def connect_to_ray(address: str | None = None, **options: Any) -> str:
    """Connect this process to a Ray cluster unless it is connected, and return the address.

    Args:
        address: Address; None for that of the variable ``RAY_ADDRESS``, else of the cluster of this machine, which is
            started if there is none.
        options: Options of ``ray.init``.

    Raises:
        ValueError: If ray is not installed, or there is no cluster at the address.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address is None:
        os.environ.pop("RAY_ADDRESS", None)  # one that is empty
    elif address.startswith("ray://"):
        raise ValueError(
            f"expected the address HOST:PORT of a Ray cluster, got {address}: run on a node of the cluster"
        )
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # which would drop tracebacks of workers that differ in numbers
    handler = signal.getsignal(signal.SIGTERM)  # ray replaces it
    try:
        import ray

        with CONNECTING:
            if not ray.is_initialized():
                host, _, port = (address or "").rpartition(":")
                if port.isdecimal() and "//" not in host:  # ray tries for minutes
                    socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
                ray.init(address=address, **{"logging_level": "ERROR", **options})
        return ray.get_runtime_context().gcs_address
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        cluster, cure = address or "this machine", "pip install 'lightning-rl[ray]', or correct RAY_ADDRESS"
        raise ValueError(f"expected a Ray cluster at {cluster}, got {error}: {cure}") from error
    finally:
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, handler)
