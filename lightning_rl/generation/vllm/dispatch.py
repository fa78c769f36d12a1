"""Dispatch: sends each request to a server of a fleet until one gives a sound answer, and takes exactly one."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_rl.generation.engine import EngineError
from lightning_rl.generation.vllm.endpoint import Endpoint, Sample, Stale
from lightning_rl.generation.vllm.http import Calls, Unanswered
from lightning_rl.generation.vllm.pool import Fleet, Member

ATTEMPTS = 6  # of one request, each at a server that was healthy a moment before


class Dispatch:
    """Asks a fleet.

    Args:
        fleet: whom to ask.
        run: that pushed the weights which answers have to come from.
        rank: of this process.

    Attributes:
        oldest: number of the oldest push that answers may come from; that of the last one that every server has.
    """

    def __init__(self, fleet: Fleet, run: str, rank: int) -> None:
        self.fleet, self.run, self.rank = fleet, run, rank
        self.oldest = 0
        self._numbers = itertools.count()

    def ask(self, ids: Sequence[int], parameters: Mapping[str, Any], calls: Calls, *, name: str, oldest: int) -> Sample:
        """One answer, by whichever server gives it; the others get what it left undone.

        Args:
            ids: of the prompt.
            parameters: vLLM's sampling parameters.
            calls: that it belongs to.
            name: of the request, for logs and errors.
            oldest: number of the oldest push, pinned before the first request of a batch was sent.

        Raises:
            EngineError: if there was no server, or none with a sound answer.
            ValueError: if a server refuses the request.
        """
        why: Exception | None = None
        for _ in range(ATTEMPTS):
            with self.fleet.lend(len(ids) + parameters["max_tokens"], calls) as member:
                try:
                    sample = self._answer(member.endpoint, ids, parameters, calls, name=name, oldest=oldest)
                except Unanswered as error:
                    self.fleet.lost(member, error)
                    why = error
                    continue
                self.fleet.answered(member)
                return sample
        raise EngineError(f"expected an answer to request {name} in {ATTEMPTS} attempts, got none") from why

    def ask_all(self, ids: Sequence[int], parameters: Mapping[str, Any], *, name: str) -> dict[str, Sample]:
        """The answer of every server that is there, by its URL; who has none is lost.

        Raises:
            EngineError: if nobody answered.
        """

        def ask(member: Member, calls: Calls) -> Sample | None:
            try:
                return self._answer(member.endpoint, ids, parameters, calls, name=name, oldest=self.oldest)
            except Unanswered as error:
                self.fleet.lost(member, error)
                return None

        for _ in range(ATTEMPTS):
            self.fleet.wait_for_one()
            members = self.fleet.ready()
            answers = zip(members, self.fleet.each(ask, members), strict=True)
            if found := {member.endpoint.url: answer for member, answer in answers if answer is not None}:
                return found
        raise EngineError(f"expected a server to answer request {name} in {ATTEMPTS} attempts, got none")

    def _answer(
        self, endpoint: Endpoint, ids: Sequence[int], parameters: Mapping[str, Any], calls: Calls,
        *, name: str, oldest: int,
    ) -> Sample:  # fmt: skip
        """One answer of one server: whole, and from weights that are new enough."""
        name = f"{self.run}-{name}-{self.rank}-{next(self._numbers)}"  # no server may see it twice
        sample = endpoint.sample(name, ids, parameters, calls)
        if sample.finish_reason == "abort" or not sample.token_ids:
            raise Unanswered(f"expected a whole response from {endpoint.url}, got one that somebody aborted")
        for label in sample.labels:
            if label.run != self.run or label.number < oldest:
                raise Stale(f"expected weights of push {self.run}/{oldest} at {endpoint.url}, got {label}")
        return sample
