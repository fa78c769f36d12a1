"""Broadcast: one push of the weights to all servers that are there, through a group that they have joined."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TypeVar
from urllib.parse import urlsplit

import torch

from lightning_rl.generation.vllm.address import LOOPBACK, address_towards
from lightning_rl.generation.vllm.endpoint import Label
from lightning_rl.generation.vllm.group import BUCKET_BYTES, Group, GroupError, Invitation, gpu_of, open_store
from lightning_rl.generation.vllm.http import Cancelled, Refused, Unanswered
from lightning_rl.generation.vllm.places import Server
from lightning_rl.generation.vllm.pool import ServerPool
from lightning_rl.generation.weights.buckets import Bytes, Spare, Specification, cut, pack
from lightning_rl.generation.weights.stream import Stream

LOG = logging.getLogger(__name__)
LOST = (GroupError, Unanswered, Refused, Cancelled)  # what a server that takes no part (any more) makes of a call
Answer = TypeVar("Answer")


class Broadcast:
    """Brings the weights to the servers of a pool that are ready; whom it does not reach is left to files.

    A group lasts from push to push, as long as the same servers are in it. A server that has lost it, by a restart or
    an error, gets into the next one, which all of them join.

    Args:
        pool: of servers, one of which has said what it holds.
        tensors: what each push brings, in order.
        device: of the trainer's weights.
    """

    def __init__(self, pool: ServerPool, tensors: Sequence[Specification], device: torch.device) -> None:
        self._pool, self._tensors = pool, list(tensors)
        nccl = device.type == "cuda" and pool.push.description.device == "cuda"
        self._backend, self._device = ("nccl", device) if nccl else ("gloo", torch.device("cpu"))
        self._buckets = cut(self._tensors, BUCKET_BYTES)
        self._group: Group | None = None
        self._members: list[Server] = []
        self._groups = 0  # that there have been

    def send(self, stream: Stream, label: Label) -> Spare:
        """Sends a stream to every server that is ready; one that has loaded all of it has the label afterwards.

        What the stream raises is raised once every server has stopped to receive; none has the label then.

        Returns:
            The same weights in main memory, for servers that were not reached, and those that come later.
        """
        servers = self._pool.ready()
        with ExitStack() as stack:
            for server in servers:
                stack.enter_context(server.loading)
            group = self._group_of(servers)
            flats = self._pack(stream) if group is None else self._send(group, stream, label)
            return Spare(list(flats), self._buckets)

    def _pack(self, stream: Stream) -> Iterator[Bytes]:
        for flat in pack(stream, self._buckets, self._device):
            yield flat.cpu()

    def _send(self, group: Group, stream: Stream, label: Label) -> list[Bytes]:
        with ThreadPoolExecutor(len(self._members)) as threads:
            answers = [threads.submit(_receive, server, group, label) for server in self._members]
            try:
                flats, failure = self._send_buckets(group, stream)
            except BaseException:
                self._end_group()
                raise
            if group.is_over:
                self._end_group()  # so that those who still wait for a bucket hear of it
        for why in {failure, *(answer.result() for answer in answers)} - {""}:
            LOG.warning("version %d did not reach every server by broadcast: %s", label.version, why)
        if group.is_over:
            self._end_group()
        return flats

    def _send_buckets(self, group: Group, stream: Stream) -> tuple[list[Bytes], str]:
        """The buckets, all of them even if the group broke meanwhile, and what it broke of."""
        flats, failure = list[Bytes](), ""
        try:
            for flat in pack(stream, self._buckets, self._device):
                failure = failure or _failure_of(group, lambda flat=flat: group.send(flat))
                flats.append(flat.cpu())
        except BaseException:
            with suppress(GroupError):
                group.send_failure()
            raise
        return flats, failure or _failure_of(group, group.flush)

    def _group_of(self, servers: Sequence[Server]) -> Group | None:
        """The group of all servers that answer, a new one if need be; None if nobody joins."""
        names = _ask(servers, lambda server: server.endpoint.membership())
        if self._group is not None and self._members == servers and set(names.values()) == {self._group.name}:
            return self._group
        self._end_group()
        left = [server for server in servers if server in names]
        while left and self._group is None:
            left = self._form(left)
        return self._group

    def _form(self, servers: Sequence[Server]) -> list[Server]:
        """Makes a group of servers if all of them join; returns those that would.

        Raises:
            ValueError: if two members share a GPU, which NCCL refuses.
        """
        counts = _ask(servers, lambda server: server.endpoint.count_workers())
        if len(counts) < len(servers):
            return list(counts)
        if self._backend == "nccl":
            self._check_gpus(servers)
        host = _host_for(servers)
        store = open_store(host)
        self._groups += 1
        name = f"{self._pool.push.run}/{self._groups}"
        size = 1 + sum(counts.values())
        invitation = Invitation(name, host, store.port, size, self._backend, BUCKET_BYTES)
        firsts = {server: 1 + sum(list(counts.values())[:number]) for number, server in enumerate(servers)}
        joined = _ask(servers, lambda server: server.endpoint.join(invitation, firsts[server], self._tensors))
        if len(joined) == len(servers):
            self._group = Group(invitation, self._tensors, rank=0, device=self._device, store=store)
            self._members = list(servers)
        return list(joined)

    def _check_gpus(self, servers: Sequence[Server]) -> None:
        owners = {gpu_of(self._device): "the trainer"}
        for server, gpus in _ask(servers, lambda server: server.endpoint.gpus()).items():
            for gpu in gpus:
                if (owner := owners.setdefault(gpu, server.endpoint.url)) != server.endpoint.url:
                    raise ValueError(
                        f'expected a GPU for each member of a group with transfer="broadcast", got one for {owner} and '
                        f'{server.endpoint.url}: pass transfer="file", or give each a GPU of its own'
                    )

    def _end_group(self) -> None:
        group, self._group, self._members = self._group, None, []
        if group is not None:
            group.close()

    def close(self) -> None:
        """Ends the group; the servers leave it, if they answer."""
        members = [server for server in self._members if server in self._pool.servers]
        self._end_group()
        _ask(members, lambda server: server.endpoint.leave())


def _receive(server: Server, group: Group, label: Label) -> str:
    """Has a server receive what is sent; says what went wrong."""
    try:
        server.endpoint.receive(group.name, label)
    except LOST as error:
        group.give_up()
        return str(error)
    except RuntimeError as error:  # it has read all, and can load a file
        return str(error)
    return ""


def _failure_of(group: Group, send: Callable[[], None]) -> str:
    """What went wrong, as a text: the error would keep connections alive that have to end."""
    try:
        send()
    except GroupError as error:
        group.give_up()
        return str(error)
    return ""


def _ask(servers: Sequence[Server], call: Callable[[Server], Answer]) -> dict[Server, Answer]:
    """What servers answer, all asked at once; those that do not are left out, and the log says why."""

    def ask(server: Server) -> list[tuple[Server, Answer]]:
        try:
            return [(server, call(server))]
        except LOST as error:
            LOG.warning("%s takes no part in a broadcast: %s", server.endpoint.url, error)
            return []

    with ThreadPoolExecutor(max(1, len(servers))) as threads:
        return dict(pair for pairs in threads.map(ask, servers) for pair in pairs)


def _host_for(servers: Sequence[Server]) -> str:
    """The address at which servers reach this machine; loopback if all of them are on it."""
    parts = [urlsplit(server.endpoint.url) for server in servers]
    beyond = [part for part in parts if part.hostname not in LOOPBACK]
    return address_towards(str(beyond[0].hostname), beyond[0].port or 80) if beyond else LOOPBACK[0]
