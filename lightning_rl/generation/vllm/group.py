"""Process group of a trainer's rank 0 and the workers of its servers, for the broadcast of weights.

It is separate from the groups of trainer and engine: NCCL between GPUs, otherwise gloo. It transfers the bytes of one
tensor at a time, whose names, shapes and dtypes both ends know; nothing is unpickled.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore

from lightning_rl.generation.vllm.address import address_towards
from lightning_rl.generation.weights.weight_stream import Shape

STALL = 60.0  # seconds without progress of a member after which the group counts as broken
POLL = 0.001  # seconds between two checks of a broadcast
Value = TypeVar("Value")
Specification = tuple[str, Shape, str]
"""Name, shape and dtype of a tensor, such as ``("lm_head.weight", (16, 8), "bfloat16")``."""


class GroupError(RuntimeError):
    """Broken group: a member left or is too slow."""


class Invitation(NamedTuple):
    """Data that a worker needs to join a group."""

    name: str  # unique
    host: str  # address of rank 0
    port: int  # port of its store
    size: int  # number of members, with rank 0
    backend: str  # gloo or nccl


class Group:
    """Member of a group. The members connect to each other with the first tensor.

    NCCL blocks there until all members have connected, so the first broadcast runs in a thread, with the usual
    deadline.

    Args:
        invitation: Invitation, equal for every member.
        tensors: Tensors of each stream in order, equal for every member.
        rank: Rank of this member; 0 sends.
        device: Device of the tensors.
        store: Store of rank 0; other members connect to it.

    Raises:
        ValueError: If the invitation or the tensors are invalid.
        RuntimeError: If rank 0 cannot be reached.
    """

    def __init__(
        self,
        invitation: Invitation,
        tensors: Sequence[Specification],
        *,
        rank: int,
        device: torch.device,
        store: TCPStore | None = None,
    ) -> None:
        self.invitation, self.rank, self.device = invitation, rank, device
        self.tensors = [(name, shape, getattr(torch, dtype)) for name, shape, dtype in tensors]
        self._store = connect(invitation.host, invitation.port) if store is None else store
        self._group: Any = None
        self._first: Future[Any] | None = None  # first broadcast, in which NCCL connects
        self._work: tuple[dist.Work, Tensor] | None = None  # last broadcast
        self._broken = threading.Event()
        self.whole = False  # True once the last stream has been received completely

    @property
    def name(self) -> str:
        """Name of the group."""
        return self.invitation.name

    @property
    def is_over(self) -> bool:
        """True if a member has left."""
        return self._broken.is_set()

    def give_up(self) -> None:
        """Make a member that waits in another thread raise."""
        self._broken.set()

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of one stream.

        Raises:
            GroupError: If the group is broken.
        """
        self.whole = False
        for number, (name, shape, dtype) in enumerate(self.tensors, 1):
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            self.broadcast(tensor)
            self.whole = number == len(self.tensors)
            yield name, tensor

    def broadcast(self, tensor: Tensor) -> None:
        """Send a contiguous tensor from rank 0, or receive it.

        Raises:
            GroupError: If the group is broken.
        """
        self._connect()
        options, flat = dist.BroadcastOptions(), tensor.view(-1).view(torch.uint8)
        options.rootRank = 0
        broadcast, connects = partial(self._group.broadcast, [flat], options), self._first is None
        if self._first is None:
            self._first = call_in_thread(broadcast)
        self._await(self._first.done)
        try:  # check the first every time: after its error NCCL would connect, and block, again
            first = self._first.result()
            work = first if connects else broadcast()
            self._work = work, flat
            self._await(work.is_completed)
            work.wait()
        except GroupError:
            raise
        except RuntimeError as error:
            raise self._end_error(str(error)) from error

    def _await(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + STALL
        while not done():
            if self._broken.wait(POLL):
                raise self._end_error("a member has left it")
            if time.monotonic() > end:
                raise self._end_error(f"no tensor in {STALL:g} s")

    def _end_error(self, why: str) -> GroupError:
        return GroupError(f"group {self.name} is broken: {why}")

    def _connect(self) -> None:
        """Create the process group, unless it exists."""
        if self._group is not None:
            return
        store = PrefixStore(self.name, self._store)
        try:
            kind = _nccl if self.invitation.backend == "nccl" else _gloo
            self._group = kind(store, self.rank, self.invitation)
        except RuntimeError as error:
            raise GroupError(f"expected {self.invitation.size} members in group {self.name}, got {error}") from error

    def close(self) -> None:
        """Leave the group without waiting for broadcasts."""
        connecting, nccl = self._first is not None and not self._first.done(), self.invitation.backend == "nccl"
        if nccl and self._group is not None and not connecting:
            self._group.abort()
        stuck = connecting or (self._work is not None and not self._work[0].is_completed())
        parts = [self._group, self._work]
        self._group = self._first = self._work = None
        if stuck:  # the destructor of a gloo group waits for its broadcasts
            threading.Thread(target=parts.clear, name="leave-group", daemon=True).start()
        else:  # now: a gloo thread that outlives the interpreter aborts the process
            parts.clear()


def call_in_thread(call: Callable[[], Value]) -> "Future[Value]":
    """Call a function that may block without a deadline in a daemon thread.

    Example:
        >>> call_in_thread(lambda: 3).result()
        3
    """
    future: Future[Value] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  for the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, name="connect-group", daemon=True).start()
    return future


def gpu_of(device: torch.device) -> str:
    """Return the UUID of a GPU. NCCL accepts each GPU only once per group."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _gloo(store: Store, rank: int, invitation: Invitation) -> Any:
    """Return a gloo group on the interface that leads to rank 0; by default gloo uses the address of the host name."""
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()  # noqa: SLF001  torch has no public name
    address = invitation.host if rank == 0 else address_towards(invitation.host, invitation.port)
    options._devices = [kind.create_device(hostname=address)]  # noqa: SLF001
    options._timeout = timedelta(seconds=2 * STALL)  # noqa: SLF001
    return kind(store, rank, invitation.size, options)


def _nccl(store: Store, rank: int, invitation: Invitation) -> Any:
    """Return an NCCL group with a timeout longer than ours, as NCCL's own timeout ends the process."""
    kind: Any = cast(Any, dist).ProcessGroupNCCL
    return kind(store, rank, invitation.size, timedelta(seconds=2 * STALL))


def open_store(host: str) -> TCPStore:
    """Return the store of rank 0, which listens only at this address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening:
        port = listening.getsockname()[1]
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=STALL),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def connect(host: str, port: int) -> TCPStore:
    """Return a connection to the store of rank 0.

    Raises:
        RuntimeError: If it cannot be reached.
    """
    return TCPStore(host, port, timeout=timedelta(seconds=STALL / 2), wait_for_workers=False)
