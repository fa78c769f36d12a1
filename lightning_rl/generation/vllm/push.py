"""WeightPush: the trainer's weights on the way to servers: what is written where, and who has loaded it."""

import shutil
import threading
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.generation.vllm.endpoint import Endpoint, Label, Push, Sample
from lightning_rl.generation.vllm.http import Unanswered
from lightning_rl.generation.vllm.sampling import SCORING
from lightning_rl.generation.vllm.worker import Description
from lightning_rl.generation.weights.canary import Canary, CanaryError
from lightning_rl.generation.weights.files import write_weights
from lightning_rl.generation.weights.stream import Shape, Stream

PROBED = 500  # token ids whose text tells two tokenizers apart


class Proof(NamedTuple):
    """What a server with proven weights said about a fixed row."""

    label: Label
    ids: tuple[int, ...]
    logprobs: Tensor


class WeightPush:
    """Brings one server at a time to the current weights, however it comes: for the first time, late, or again.

    Args:
        run: a random name, the same on every rank.
        storage: the folder that trainer and servers share.
        writes: whether this rank writes the weights and has servers load them; the others wait until they have.
        model: the trainer's, which every server has to serve.
        tokenizer: the trainer's.
        canary: its bounds say whether a server that came back says what the others say; None for no comparison.

    Attributes:
        speaks: whether every server has the trainer's tokenizer, so that it finds stop strings where the trainer would.
        held: what the servers hold, once one has answered.
        sent: names and shapes that every sync brings, once they are known.
        current: the weights that a server should have.
        proof: of them, by a server that the canary has seen.
    """

    def __init__(
        self,
        run: str,
        storage: Path,
        *,
        writes: bool,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        canary: Canary | None,
    ) -> None:
        self.run, self.folder, self.writes = run, storage / f"lightning-rl-{run}", writes
        self.held: Description | None = None
        self.sent: list[tuple[str, Shape]] = []
        self.current: Push | None = None
        self.proof: Proof | None = None
        self.speaks = tokenizer is not None
        self._tokenizer, self._canary = tokenizer, canary
        self._architecture = (model.config.architectures or [type(model).__name__])[0]
        self._vocabulary = model.config.get_text_config().vocab_size
        self._served: set[str] = set()
        self._lock = threading.Lock()

    def admit(self, endpoint: Endpoint) -> None:
        """Brings a server to the current weights, unless it has them.

        Raises:
            Unanswered: if it is not there, or rank 0 has not brought the weights yet.
            ValueError: if it is not the server that the run needs.
            RuntimeError: if it could not load the weights, or they are not the trainer's afterwards.
        """
        push = None
        while push is None or push is not self.current:
            push = self.current
            label = endpoint.label()
            if label is None or label.run != self.run:
                self._check(endpoint, label)
            if push is None:
                return
            if label != push.label:
                self._bring(endpoint, push)

    def _bring(self, endpoint: Endpoint, push: Push) -> None:
        if not self.writes:
            raise Unanswered(f"{endpoint.url} waits for rank 0 to bring the weights of version {push.label.version}")
        endpoint.load(push)
        self._served.add(endpoint.url)
        try:
            self._prove(endpoint, push)
        except (Unanswered, CanaryError):
            endpoint.disown()
            raise

    def _check(self, endpoint: Endpoint, label: Label | None) -> None:
        if label is not None and endpoint.url in self._served:
            raise ValueError(
                f"expected {endpoint.url} to serve one trainer, but another one has loaded weights into it"
            )
        found = endpoint.describe()
        for what, ours, theirs in (
            ("architecture", self._architecture, found.architecture),
            ("vocabulary", self._vocabulary, found.vocabulary),
        ):
            if ours != theirs:
                raise ValueError(f"expected {what} {ours} at {endpoint.url}, as the policy has, got {theirs}")
        with self._lock:
            self.held = self.held or found
        if found != self.held:
            pairs = zip(Description._fields, self.held, found, strict=True)
            name, ours, theirs = next(pair for pair in pairs if pair[1] != pair[2])
            raise ValueError(f"expected {name} {ours} at {endpoint.url}, as the other servers have, got {theirs}")
        if self._tokenizer is not None:
            ids = list(range(min(self._vocabulary, len(self._tokenizer), PROBED)))
            alike = found.speaks and endpoint.decoded(ids) == self._tokenizer.decode(ids)
            self.speaks = self.speaks and alike
        if self.sent:
            endpoint.compare(self.sent)

    def _prove(self, endpoint: Endpoint, push: Push) -> None:
        proof = self.proof
        if proof is None or proof.label != push.label or self._canary is None:
            return
        sample = endpoint.sample(f"proof-{push.label}-{token_hex(4)}", proof.ids, SCORING)
        exact = self.known().dtype == "float32"
        difference = (scored(sample) - proof.logprobs).double().abs()
        if not self._canary.within(difference, exact=exact):
            raise CanaryError(
                f"expected {endpoint.url} to say what another server says of version {push.label.version}, but its "
                f"log-probabilities differ by up to {float(difference.max()):.2g}"
            )

    def known(self) -> Description:
        """What the servers hold; one has answered."""
        if self.held is None:
            raise RuntimeError("expected a server that has said what it holds, got none")
        return self.held

    def latest(self) -> Label:
        """Of the current weights; some have been written."""
        if self.current is None:
            raise RuntimeError("expected weights that were pushed, got none")
        return self.current.label

    def following(self, version: int) -> Push:
        """The push after the current one."""
        number = 0 if self.current is None else self.current.label.number + 1
        return Push(self.folder / str(number), Label(self.run, number, version))

    def write(self, stream: Stream, version: int) -> Path | None:
        """Writes weights, which are the current ones from then on.

        Returns:
            The folder of those before, which may go once no server loads them any more.
        """
        before, following = self.current, self.following(version)
        write_weights(stream, following.folder)
        self.current = following
        return None if before is None else before.folder

    def close(self) -> None:
        """Removes what was written."""
        if self.writes:
            shutil.rmtree(self.folder, ignore_errors=True)


def scored(sample: Sample) -> Tensor:
    """Log-probabilities of a prompt that was scored.

    Raises:
        Unanswered: if the server sent none.
    """
    if sample.prompt_logprobs is None:
        raise Unanswered("expected log-probabilities of the prompt, got none")
    return sample.prompt_logprobs
