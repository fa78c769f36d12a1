"""Group: rank 0 of a trainer and the workers of its servers, joined so that weights reach all of them by one broadcast.

A process group of its own beside the trainer's and the engine's, of torch's own classes: NCCL from GPU to GPU, gloo
otherwise. Nothing but flat bytes goes through it, and each bucket comes after a header that says how many: both ends
have cut the tensors alike, and -1 says that the trainer's stream has failed. Nothing is unpickled.
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
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from lightning_rl.generation.vllm.address import address_towards
from lightning_rl.generation.weights.buckets import Bytes, Specification, allocate, cut, unpack

BUCKET_BYTES = 2**28  # two of them are held by the sender, and by each receiver besides what is being loaded
STALL = 60.0  # seconds in which a member packs, loads or sends no bucket until the group counts as broken
POLL = 0.001  # seconds between two looks at a broadcast under way
FAILED = -1  # in place of a number of bytes
Value = TypeVar("Value")


class GroupError(RuntimeError):
    """A group that is no more: a member is gone or too slow, or the trainer's stream has failed."""


class Invitation(NamedTuple):
    """What a worker has to know to join a group."""

    name: str  # of one group, never used again
    host: str  # of rank 0
    port: int  # of its store
    size: int  # members, rank 0 included
    backend: str  # gloo or nccl
    bucket_bytes: int


class Group:
    """One member of a group. The members connect to each other with the first bucket.

    NCCL blocks in it until all of them have come, so that it has a thread, and the deadline of any other bucket.

    Args:
        invitation: the same for every member.
        tensors: what each stream brings, in order; the same for every member.
        rank: of this member; 0 sends.
        device: of the buckets.
        store: rank 0's, which the others connect to.

    Raises:
        ValueError: if the invitation or the tensors are not what they should be.
        RuntimeError: if rank 0 cannot be reached.
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
        self.buckets = cut(tensors, invitation.bucket_bytes)
        self._store = connect(invitation.host, invitation.port) if store is None else store
        self._group: Any = None
        self._first: Future[Any] | None = None  # broadcast, in which the members of NCCL connect
        self._under_way: list[tuple[dist.Work, Tensor]] = []
        self._broken = threading.Event()
        self.whole = False  # whether the last stream has come to its end here

    @property
    def name(self) -> str:
        """Of the group."""
        return self.invitation.name

    @property
    def is_over(self) -> bool:
        """Whether somebody takes no part any more."""
        return self._broken.is_set()

    def give_up(self) -> None:
        """Has the member that waits in another thread raise, because somebody will not take part any more."""
        self._broken.set()

    def send(self, flat: Bytes) -> None:
        """Sends a bucket while the next one is packed.

        Raises:
            GroupError: if the group is no more.
        """
        self._connect()
        self._wait()
        self._post(self._header(flat.nbytes))
        self._post(flat)

    def flush(self) -> None:
        """Returns once the last bucket has been sent.

        Raises:
            GroupError: if the group is no more.
        """
        self._wait()

    def send_failure(self) -> None:
        """Has the receivers stop, because there will be no more buckets of this stream.

        Raises:
            GroupError: if the group is no more.
        """
        self._connect()
        self._post(self._header(FAILED))
        self._wait()

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one stream, a bucket while the next one comes. Their memory is nobody else's.

        Raises:
            GroupError: if the group is no more, or the stream has failed.
        """
        self.whole = False
        self._connect()
        flat = self._ask(0)
        for number, bucket in enumerate(self.buckets):
            last = number == len(self.buckets) - 1
            coming = flat if last else self._ask(number + 1)
            self._wait(leave=0 if last else 1)
            self.whole = last
            yield from unpack(flat, bucket)
            flat = coming

    def _ask(self, number: int) -> Bytes:
        """Memory that a bucket will be in once it was waited for."""
        header, expected = self._header(0), self.buckets[number][-1].end
        self._post(header)
        work, _ = self._under_way.pop()
        self._finish(work)
        if (size := int(header)) != expected:
            why = "the trainer's stream failed" if size == FAILED else f"got {size} bytes"
            raise GroupError(f"expected {expected} bytes in bucket {number} of group {self.name}, but {why}")
        flat = allocate(self.buckets[number], self.device)
        self._post(flat)
        return flat

    def _header(self, value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int64, device=self.device)

    def _post(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        broadcast, connects = partial(self._group.broadcast, [tensor], options), self._first is None
        if self._first is None:
            self._first = call_in_thread(broadcast)
        self._await(self._first.done)
        try:  # the first is asked every time: after its error NCCL would connect, and block, a second time
            first = self._first.result()
            work = first if connects else broadcast()
        except RuntimeError as error:
            raise self._end_error(str(error)) from error
        self._under_way.append((work, tensor))

    def _wait(self, *, leave: int = 0) -> None:
        """Finishes what is under way, but for the last few."""
        while len(self._under_way) > leave:
            work, _ = self._under_way.pop(0)
            self._finish(work)

    def _finish(self, work: dist.Work) -> None:
        self._await(work.is_completed)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._end_error(str(error)) from error

    def _await(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + STALL
        while not done():
            if self._broken.wait(POLL):
                raise self._end_error("a member has left it")
            if time.monotonic() > end:
                raise self._end_error(f"no bucket in {STALL:g} s")

    def _end_error(self, why: str) -> GroupError:
        return GroupError(f"group {self.name} is no more: {why}")

    def _connect(self) -> None:
        """Connects to all members, who have to come within the time of a stall."""
        if self._group is not None:
            return
        store = PrefixStore(self.name, self._store)
        try:
            kind = _nccl if self.invitation.backend == "nccl" else _gloo
            self._group = kind(store, self.rank, self.invitation)
        except RuntimeError as error:
            raise GroupError(f"expected {self.invitation.size} members in group {self.name}, got {error}") from error

    def close(self) -> None:
        """Leaves. What is under way is ended by others or by its timeout, and nobody here waits for it."""
        connecting, nccl = self._first is not None and not self._first.done(), self.invitation.backend == "nccl"
        if nccl and self._group is not None and not connecting:
            self._group.abort()
        stuck = connecting or any(not work.is_completed() for work, _ in self._under_way)
        parts = [self._group, *self._under_way]
        self._group = self._first = None
        self._under_way.clear()
        if stuck:  # the end of a gloo group waits for its broadcasts
            threading.Thread(target=parts.clear, name="leave-group", daemon=True).start()
        else:  # here and now: a thread of gloo that outlives the interpreter aborts the process
            parts.clear()


def call_in_thread(call: Callable[[], Value]) -> "Future[Value]":
    """Call what may block without a deadline, in a thread that ends with the process at the latest.

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
    """Return the name of a GPU that no other one has, on any machine.

    NCCL takes each GPU once.
    """
    return str(torch.cuda.get_device_properties(device).uuid)


def _gloo(store: Store, rank: int, invitation: Invitation) -> Any:
    """At the address that leads to rank 0, and not, as gloo would by itself, at that of the host's name."""
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()  # noqa: SLF001  which torch has no public name for
    address = invitation.host if rank == 0 else address_towards(invitation.host, invitation.port)
    options._devices = [kind.create_device(hostname=address)]  # noqa: SLF001
    options._timeout = timedelta(seconds=2 * STALL)  # noqa: SLF001
    return kind(store, rank, invitation.size, options)


def _nccl(store: Store, rank: int, invitation: Invitation) -> Any:
    """With a timeout after our own, because that of NCCL ends the process."""
    kind: Any = cast(Any, dist).ProcessGroupNCCL
    return kind(store, rank, invitation.size, timedelta(seconds=2 * STALL))


def open_store(host: str) -> TCPStore:
    """The store of a rank 0, which listens at one address and at no other."""
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
    """The store of rank 0, seen from another member.

    Raises:
        RuntimeError: if it cannot be reached.
    """
    return TCPStore(host, port, timeout=timedelta(seconds=STALL / 2), wait_for_workers=False)
