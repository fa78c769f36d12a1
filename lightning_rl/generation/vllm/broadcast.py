"""Push of the weights to all ready servers through a process group."""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from lightning_rl.generation.vllm.address import LOOPBACK, address_towards
from lightning_rl.generation.vllm.group import Group, GroupError, Invitation, Specification, gpu_of, open_store
from lightning_rl.generation.vllm.server_client import Label, Member, Server
from lightning_rl.generation.weights.weight_stream import Weights
from lightning_rl.utils.event_loop import REQUESTS, run_all
from lightning_rl.utils.http import Cancelled, Refused, Unanswered

LOG = logging.getLogger(__name__)
LOST = (GroupError, Unanswered, Refused, Cancelled)  # errors of a server that does not take part, or stopped to
Answer = TypeVar("Answer")


class Broadcast:
    """Sends the weights to several servers, from the thread that reads the stream.

    A group is reused while the same servers are in it. After a server's restart or an error, all servers join a new
    one.

    Args:
        run: Random name of the run.
        tensors: Tensors of each push, in order.
        device: Device of the trainer's weights.
        served: Type of the device of the servers' weights.
    """

    def __init__(self, run: str, tensors: Sequence[Specification], device: torch.device, served: str) -> None:
        self._run, self._tensors = run, list(tensors)
        nccl = device.type == served == "cuda"
        self._backend, self._device = ("nccl", device) if nccl else ("gloo", torch.device("cpu"))
        self._group: Group | None = None
        self._members: list[Server] = []
        self._groups = 0  # number of groups so far

    def send(self, servers: Sequence[Server], weights: Weights, label: Label) -> list[tuple[str, Tensor]]:
        """Send a stream to servers. A server that has loaded all of it gets the label.

        An error of the stream is raised after every server has stopped receiving; no server gets the label then.

        Returns:
            The weights in main memory, for servers that were not reached or join later.
        """
        group = self._group_of(servers)
        if group is None:
            return [(name, weight.cpu()) for name, weight in self._in_order(weights)]
        answers = REQUESTS.start(run_all(_receive(server, group, label) for server in self._members))
        sent, failure = list[tuple[str, Tensor]](), ""
        try:
            for name, weight in self._in_order(weights):
                failure = failure or _failure_of(group, weight)
                sent.append((name, weight.cpu()))
            if group.is_over:
                self._end_group()
            failures = {failure, *answers.result()} - {""}
        except BaseException:
            self._end_group()  # so that servers that wait for a tensor stop
            answers.result()
            raise
        for why in failures:
            LOG.warning("version %d did not reach every server by broadcast: %s", label.version, why)
        if group.is_over:
            self._end_group()
        return sent

    def _in_order(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield copies in the dtypes of the servers; the last one after the end of the stream, which may fail there.

        Raises:
            ValueError: If the order differs from that of the first sync.
        """
        tensors = iter(weights)
        for place, (expected, _, dtype) in enumerate(self._tensors, 1):
            name, weight = next(tensors, ("nothing", torch.empty(0)))
            if name != expected:
                raise ValueError(f"expected {expected} next, as in the first sync, got {name}")
            copied = weight.detach().to(device=self._device, dtype=getattr(torch, dtype), copy=True).contiguous()
            del weight
            if place == len(self._tensors):
                deque(tensors, maxlen=0)
            yield name, copied

    def _group_of(self, servers: Sequence[Server]) -> Group | None:
        """Return the group of all servers that answer, a new one if needed; None if there are none."""
        members = _ask(servers, lambda server: server.client.members())
        names = {member.group for workers in members.values() for member in workers}
        if self._group is not None and self._members == servers == list(members) and names == {self._group.name}:
            return self._group
        self._end_group()
        while members and self._group is None:
            joined = self._form(members)
            members = {server: members[server] for server in joined}
        return self._group

    def _form(self, members: Mapping[Server, Sequence[Member]]) -> list[Server]:
        """Form a group if every server joins; return the servers that joined.

        Raises:
            ValueError: If two members share a GPU, which NCCL does not support.
        """
        if self._backend == "nccl":
            self._check_gpus(members)
        servers = list(members)
        host = _host_for(servers)
        store = open_store(host)
        self._groups += 1
        name = f"{self._run}/{self._groups}"
        *firsts, size = itertools.accumulate(map(len, members.values()), initial=1)
        invitation = Invitation(name, host, store.port, size, self._backend)
        ranks = dict(zip(servers, firsts, strict=True))
        joined = _ask(servers, lambda server: server.client.join(invitation, ranks[server], self._tensors))
        if len(joined) == len(servers):
            self._group = Group(invitation, self._tensors, rank=0, device=self._device, store=store)
            self._members = servers
        return list(joined)

    def _check_gpus(self, members: Mapping[Server, Sequence[Member]]) -> None:
        owners = {gpu_of(self._device): "the trainer"}
        for server, workers in members.items():
            for worker in workers:
                if (owner := owners.setdefault(worker.gpu, server.client.url)) != server.client.url:
                    raise ValueError(
                        f'expected a GPU for each member of a group with transfer="broadcast", got one for {owner} and '
                        f'{server.client.url}: pass transfer="file", or use a separate GPU for each'
                    )

    def _end_group(self) -> None:
        group, self._group, self._members = self._group, None, []
        if group is not None:
            group.close()

    def close(self) -> None:
        """Close the group, and make its servers leave it."""
        members = [server for server in self._members if server.listed]
        self._end_group()
        _ask(members, lambda server: server.client.leave())


async def _receive(server: Server, group: Group, label: Label) -> str:
    """Make a server receive the stream; return the error, or an empty string."""
    try:
        async with server.loading:
            await server.client.receive(group.name, label)
    except LOST as error:
        group.give_up()
        return str(error)
    except RuntimeError as error:  # the server has read everything, and can load a file
        return str(error)
    return ""


def _failure_of(group: Group, tensor: Tensor) -> str:
    """Send a tensor; return the message of an error, which would keep connections alive if it were raised."""
    try:
        group.broadcast(tensor)
    except GroupError as error:
        group.give_up()
        return str(error)
    return ""


def _ask(servers: Sequence[Server], call: Callable[[Server], Coroutine[Any, Any, Answer]]) -> dict[Server, Answer]:
    """Return the answers of servers called in parallel; log and leave out those that fail."""

    async def ask(server: Server) -> list[tuple[Server, Answer]]:
        try:
            return [(server, await call(server))]
        except LOST as error:
            LOG.warning("%s is left out of a broadcast: %s", server.client.url, error)
            return []

    return dict(pair for pairs in REQUESTS.run(run_all(map(ask, servers))) for pair in pairs)


def _host_for(servers: Sequence[Server]) -> str:
    """Return the address of this machine as seen from the servers; loopback if all of them are on it."""
    parts = [urlsplit(server.client.url) for server in servers]
    beyond = [part for part in parts if part.hostname not in LOOPBACK]
    return address_towards(str(beyond[0].hostname), beyond[0].port or 80) if beyond else LOOPBACK[0]
