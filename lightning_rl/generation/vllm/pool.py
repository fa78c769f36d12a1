"""Servers as a fleet: who may be asked, who is asked next, and how one that was lost comes back."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

from lightning_rl.generation.engine import EngineError
from lightning_rl.generation.vllm.endpoint import Endpoint
from lightning_rl.generation.vllm.http import Calls, Cancelled, Unanswered

LOG = logging.getLogger(__name__)
AT_ONCE = 256  # requests that a server is sent at the same time
POLL = 1.0  # seconds between two looks at a server
BACKOFF, LONGEST_BACKOFF = 0.25, 10.0  # seconds before a server that was lost is asked again; doubles with each loss
Given = TypeVar("Given")
Made = TypeVar("Made")


class Member:
    """One server of a fleet.

    Attributes:
        endpoint: calls it.
        ready: whether it has the current weights and may be asked.
        outstanding: tokens, of prompts and at most of responses, that it has been asked for.
        losses: how often it was lost since its last answer.
        due: when it may come back, by the monotonic clock.
        why: it was lost.
        loading: held by whoever brings it to other weights.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.ready = False
        self.outstanding = 0
        self.losses = 0
        self.due = 0.0
        self.why = "it was not asked yet"
        self.loading = threading.Lock()


class Fleet:
    """Lends servers to requests, the one with the fewest outstanding tokens first, and watches over all of them.

    Args:
        endpoints: of the servers.
        admit: brings a server to the current weights, or raises.
        patience: seconds without any server until requests fail.
    """

    def __init__(self, endpoints: Sequence[Endpoint], admit: Callable[[Endpoint], None], *, patience: float) -> None:
        self.members = [Member(endpoint) for endpoint in endpoints]
        self.patience = patience
        self._admit = admit
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._watchers = [
            threading.Thread(target=self._watch, args=(member,), name=f"watch-{member.endpoint.url}", daemon=True)
            for member in self.members
        ]

    def watch(self) -> None:
        """Begins to look after lost servers, each in a thread of its own, so that none waits for another."""
        for watcher in self._watchers:
            watcher.start()

    def close(self) -> None:
        """Ends the watch and every call; whoever waits is cut short."""
        self._closed.set()
        for member in self.members:
            member.endpoint.close()
        self._wake()
        for watcher in self._watchers:
            if watcher.is_alive():
                watcher.join()

    def ready(self) -> list[Member]:
        """Those that may be asked."""
        with self._changed:
            return [member for member in self.members if member.ready]

    def each(self, function: Callable[[Given, Calls], Made], items: Sequence[Given]) -> list[Made]:
        """What a function of (item, calls) makes of every item, in their order, many at a time.

        After the first failure all others are cut short: the servers notice, and end what they were doing.
        """
        if not items:
            return []
        calls = Calls()
        with ThreadPoolExecutor(min(len(items), AT_ONCE * len(self.members))) as pool:
            made = [pool.submit(function, item, calls) for item in items]
            try:
                for one in as_completed(made):
                    one.result()
            except BaseException:
                calls.cancel()
                self._wake()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [one.result() for one in made]

    @contextmanager
    def lend(self, tokens: int, calls: Calls) -> Iterator[Member]:
        """The server with the fewest outstanding tokens, once there is one.

        Args:
            tokens: that the request may cost.
            calls: that the request belongs to.

        Raises:
            EngineError: if no server came within the patience.
            Cancelled: if the calls were cut short meanwhile.
        """
        with self._changed:
            self.wait_for_one(calls)
            member = min((member for member in self.members if member.ready), key=lambda known: known.outstanding)
            member.outstanding += tokens
        try:
            yield member
        finally:
            with self._changed:
                member.outstanding -= tokens

    def wait_for_one(self, calls: Calls | None = None) -> None:
        """Returns once a server is ready; raises as :meth:`lend` does."""
        begin = time.monotonic()
        with self._changed:
            while not any(member.ready for member in self.members):
                self._check(calls)
                left = begin + self.patience - time.monotonic()
                if left <= 0:
                    reasons = "; ".join(f"{member.endpoint.url}: {member.why}" for member in self.members)
                    raise EngineError(
                        f"expected one of {len(self.members)} servers to be ready within {self.patience:g} s, got none "
                        f"({reasons}): start one by lightning-rl serve, and go on from the last checkpoint"
                    )
                self._changed.wait(left)
            self._check(calls)

    def _check(self, calls: Calls | None) -> None:
        if self._closed.is_set() or (calls is not None and calls.cancelled.is_set()):
            raise Cancelled("the request was cut short")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def lost(self, member: Member, why: Exception) -> None:
        """Takes a server out until it has been looked at, after a pause that doubles with each loss."""
        with self._changed:
            if member.ready or member.why != str(why):
                LOG.warning(
                    "lost %s: %s; it is asked again until it is back, others get its requests meanwhile",
                    member.endpoint.url, why,
                )  # fmt: skip
            member.ready, member.why = False, str(why)
            member.due = time.monotonic() + min(BACKOFF * 2**member.losses, LONGEST_BACKOFF)
            member.losses += 1

    def found(self, member: Member) -> None:
        """A server has the current weights."""
        with self._changed:
            if member.losses and not member.ready:
                LOG.warning("%s is back, with the current weights", member.endpoint.url)
            member.ready = True
            self._changed.notify_all()

    def answered(self, member: Member) -> None:
        """A server did what it was asked."""
        with self._changed:
            if member.ready:
                member.losses = 0

    def refresh(self) -> list[Exception]:
        """Brings every server that is there to the current weights, all at once; those that fail are lost.

        Returns:
            What went wrong.
        """
        now = time.monotonic()
        members = [member for member in self.members if member.ready or member.due <= now]
        with ThreadPoolExecutor(max(1, len(members))) as pool:
            return [error for error in pool.map(self._refreshed, members) if error is not None]

    def _refreshed(self, member: Member) -> Exception | None:
        with member.loading:
            try:
                self._admit(member.endpoint)
            except Cancelled:
                raise
            except (Unanswered, ValueError, RuntimeError) as error:
                self.lost(member, error)
                return error
            self.found(member)
            return None

    def _watch(self, member: Member) -> None:
        while not self._closed.wait(POLL if member.ready else max(0.0, member.due - time.monotonic())):
            try:
                member.endpoint.check_health()
                if not member.ready:
                    self._refreshed(member)
            except Unanswered as error:
                if member.ready:
                    member.endpoint.cut()
                self.lost(member, error)
            except Cancelled:
                return
