"""WeightPush: the trainer's weights on the way to servers: what is written where, and who has loaded it."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.generation.vllm.endpoint import Endpoint, Label, Sample
from lightning_rl.generation.vllm.http import Unanswered, quote
from lightning_rl.generation.vllm.sampling import SCORING
from lightning_rl.generation.vllm.storage import RunFolder
from lightning_rl.generation.vllm.worker import Description
from lightning_rl.generation.weights.buckets import Spare
from lightning_rl.generation.weights.canary import Canary, CanaryError, Rounding
from lightning_rl.generation.weights.files import write_weights
from lightning_rl.generation.weights.stream import Shape, Stream

DECODED = 500  # token ids whose text tells two tokenizers apart


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
        canary: says whether a server that came back agrees with the others; None for no comparison.
        private: whether only this user's servers may read the weights.

    Attributes:
        has_tokenizer: whether every server has the trainer's, so that it finds stop strings where the trainer would.
        sent: names and shapes that every sync brings, once they are known.
        current: label of the weights that a server should have.
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
        private: bool = False,
    ) -> None:
        self.run, self.folder, self.writes = run, RunFolder(storage, run, private=private), writes
        self.sent: list[tuple[str, Shape]] = []
        self.current: Label | None = None
        self.proof: Proof | None = None
        self.has_tokenizer = tokenizer is not None
        self._tokenizer, self._canary = tokenizer, canary
        self._architecture = (model.config.architectures or [type(model).__name__])[0]
        self._vocabulary = model.config.get_text_config().vocab_size
        self._description: Description | None = None
        self._versions: dict[int, int] = {}  # by the number of their push
        self._loaded: set[str] = set()
        self._processes: dict[str, str] = {}  # of servers that said what they hold, by their URL
        self._spare: tuple[Label, Spare] | None = None
        self._lock, self._writing = threading.Lock(), threading.Lock()

    @property
    def description(self) -> Description:
        """What every server holds; one has answered."""
        if self._description is None:
            raise RuntimeError("expected a server that has said what it holds, got none")
        return self._description

    @property
    def label(self) -> Label:
        """Of the current weights; some have been written."""
        if self.current is None:
            raise RuntimeError("expected weights that were pushed, got none")
        return self.current

    def next_label(self, version: int) -> Label:
        """Of the weights after the current ones."""
        return Label(self.run, 0 if self.current is None else self.current.number + 1, version)

    def advance(self, label: Label) -> None:
        """Makes the weights of a label the current ones."""
        self._versions[label.number] = label.version
        self.current = label

    def knows(self, label: Label) -> bool:
        """Whether these weights were pushed, or may be being pushed by rank 0, ahead of this rank."""
        ahead = self.current is not None and label.number == self.current.number + 1
        return label.run == self.run and (label.version == self._versions.get(label.number) or ahead)

    def write(self, stream: Stream, version: int) -> Path | None:
        """Writes weights, which are the current ones from then on.

        Returns:
            The folder of those before, which may go once no server loads them any more.
        """
        label = self.next_label(version)
        write_weights(stream, self._folder_of(label))
        return self._move_to(label)

    def send(self, send: Callable[[Label], Spare], version: int) -> Path | None:
        """Has weights sent to servers; they are the current ones from then on, and written if a server needs a file.

        Until they have been sent there are none for a server that comes back, because two would take twice the memory.

        Returns:
            The folder of those before, as :meth:`write`.
        """
        label = self.next_label(version)
        with self._writing:
            self._spare = None
        spare = send(label)
        with self._writing:
            self._spare = label, spare
        return self._move_to(label)

    def _move_to(self, label: Label) -> Path | None:
        before = self.current
        self.advance(label)
        return None if before is None else self._folder_of(before)

    def _folder_with(self, label: Label) -> Path:
        """The folder with the weights of a label, which is made now if they were only sent."""
        folder = self._folder_of(label)
        with self._writing:
            if not folder.exists():
                if self._spare is None or self._spare[0] != label:
                    raise Unanswered(f"expected weights of version {label.version} to load, but newer ones are coming")
                write_weights(self._spare[1].tensors(), folder)
        return folder

    def _folder_of(self, label: Label) -> Path:
        return self.folder.path / str(label.number)

    def open(self) -> None:
        """Makes room for what will be written, and removes what trainers that were killed have left."""
        if self.writes:
            self.folder.open()

    def forget(self, url: str) -> None:
        """Lets a server go, to which another trainer may bring weights from now on, or this one by another name."""
        self._loaded.discard(url)
        with self._lock:
            self._processes.pop(url, None)

    def lacks_proof(self) -> bool:
        """Whether the canary has yet to see the current weights at some server."""
        unproven = self.proof is None or self.proof.label != self.current
        return self._canary is not None and self.current is not None and unproven

    def close(self) -> None:
        """Removes what was written."""
        self.folder.close()

    def update(self, endpoint: Endpoint) -> None:
        """Brings a server to the current weights, unless it has them, and has it prove them if another one has.

        Raises:
            Unanswered: if it is not there, or rank 0 has not brought the weights yet.
            ValueError: if it is not the server that the run needs.
            RuntimeError: if it could not load the weights, or they are not the trainer's afterwards.
        """
        current = None
        while current is None or current != self.current:  # which may move on meanwhile
            current, label = self.current, endpoint.label()
            if label is None or label.run != self.run or endpoint.url not in self._processes:
                self._check(endpoint, label)
            if current is None:
                return
            if label != current:
                if not self.writes:
                    waits = "waits for rank 0 to bring the weights of version"
                    raise Unanswered(f"{endpoint.url} {waits} {current.version}")
                endpoint.load(self._folder_with(current), current)
                self._loaded.add(endpoint.url)
            try:
                self._prove(endpoint, current)
            except CanaryError:
                endpoint.clear_label()
                raise

    def _check(self, endpoint: Endpoint, label: Label | None) -> None:
        if label is not None and label.run != self.run and endpoint.url in self._loaded:
            raise ValueError(
                f"expected {endpoint.url} to serve one trainer, but another one has loaded weights into it"
            )
        description = endpoint.describe()
        self._note_process(endpoint.url, description.process)
        description = description._replace(process="")
        policy = {"architecture": self._architecture, "vocabulary": self._vocabulary}
        _compare(endpoint.url, description, policy, "the policy has")
        with self._lock:
            self._description = self._description or description
        _compare(endpoint.url, description, self._description._asdict(), "the other servers have")
        if self._tokenizer is not None:
            ids = list(range(min(self._vocabulary, len(self._tokenizer), DECODED)))
            alike = description.has_tokenizer and endpoint.detokenize(ids) == self._tokenizer.decode(ids)
            if self.has_tokenizer and not alike and self.current is not None:
                raise ValueError(f"expected the trainer's tokenizer at {endpoint.url}, as the other servers have")
            self.has_tokenizer = self.has_tokenizer and alike
        if self.sent:
            endpoint.compare(self.sent)

    def _note_process(self, url: str, process: str) -> None:
        """Refuses a server that is known by another URL: weights would come twice, and twice the requests."""
        with self._lock:
            others = [other for other, known in self._processes.items() if known == process and other != url]
            if process and others:
                raise ValueError(
                    f"expected each server once, but {url} leads to the server of {others[0]}: list one of them"
                )
            self._processes[url] = process

    def _prove(self, endpoint: Endpoint, label: Label) -> None:
        proof = self.proof
        if proof is None or proof.label != label or self._canary is None:
            return
        sample = endpoint.sample(f"proof-{label}-{token_hex(4)}", proof.ids, SCORING)
        gap = (prompt_logprobs(sample) - proof.logprobs).double().abs()
        served = self.description
        rounding = Rounding.of({getattr(torch, served.dtype)}, tf32=served.device != "cpu")
        if not self._canary.within(gap, rounding):
            raise CanaryError(
                f"expected {endpoint.url} to say what another server says of version {label.version}, but its "
                f"log-probabilities differ by up to {float(gap.max()):.2g}"
            )


def _compare(url: str, description: Description, expected: Mapping[str, Any], who: str) -> None:
    for name, value in expected.items():
        if getattr(description, name) != value:
            got = quote(str(getattr(description, name)))
            raise ValueError(f"expected {name} {value} at {url}, as {who}, got {got}")


def prompt_logprobs(sample: Sample) -> Tensor:
    """Log-probabilities of a prompt that was scored.

    Raises:
        Unanswered: if the server sent none.
    """
    if sample.prompt_logprobs is None:
        raise Unanswered("expected log-probabilities of the prompt, got none")
    return sample.prompt_logprobs
