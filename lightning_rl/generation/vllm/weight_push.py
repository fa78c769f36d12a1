"""Push of the trainer's weights to servers: files, labels, and the check of each server."""

import asyncio
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.generation.vllm.server_client import Label, ServerClient
from lightning_rl.generation.vllm.storage import WeightFolder
from lightning_rl.generation.vllm.vllm_sampling import SCORING
from lightning_rl.generation.vllm.worker_extension import WorkerDescription
from lightning_rl.generation.weights.canary import Canary, CanaryError, Rounding
from lightning_rl.generation.weights.weight_folder import write_weights
from lightning_rl.generation.weights.weight_stream import Shape, Weights
from lightning_rl.utils.atomic_write import write_atomically
from lightning_rl.utils.http import Unanswered, quote

DECODED = 500  # token ids that are decoded to compare two tokenizers


class Proof(NamedTuple):
    """Log-probabilities of a fixed row by a server whose weights the canary checked."""

    label: Label
    ids: tuple[int, ...]
    logprobs: Tensor


class WeightPush:
    """Brings one server at a time to the current weights, whether it is new, late, or restarted.

    Args:
        run: Random name of the run, equal on every rank.
        storage: Folder shared by trainer and servers.
        writes: True on the rank that writes the weights and makes servers load them; other ranks wait.
        model: Model of the trainer, which every server has to serve.
        tokenizer: Tokenizer of the trainer.
        canary: Canary that compares a server with the others; None to skip it.
        private: True if only servers of this user may read the weights.
        lora_rank: ``max_lora_rank`` of servers that get the base once and then LoRA adapters; otherwise 0.

    Attributes:
        base: Label of the base weights of adapters, push 0; None if each push is of all weights.
        has_tokenizer: True if every server has the trainer's tokenizer and can find stop strings.
        sent: Names and shapes of the synced tensors, once known.
        current: Label of the current weights.
        proof: Log-probabilities under the current weights, from a server that the canary checked.
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
        lora_rank: int = 0,
    ) -> None:
        self.run, self.folder, self.writes = run, WeightFolder(storage, run, private=private), writes
        self.base = Label(run, 0, 0) if lora_rank else None
        self.sent: list[tuple[str, Shape]] = []
        self.current: Label | None = None
        self.proof: Proof | None = None
        self.has_tokenizer = tokenizer is not None
        self._canary, self._lora_rank = canary, lora_rank
        self._architecture = (model.config.architectures or [type(model).__name__])[0]
        self._vocabulary = model.config.get_text_config().vocab_size
        self._ids = [] if tokenizer is None else list(range(min(self._vocabulary, len(tokenizer), DECODED)))
        self._text = None if tokenizer is None else tokenizer.decode(self._ids)
        self._description: WorkerDescription | None = None
        self._versions: dict[int, int] = {}  # by number of the push
        self._loaded: set[str] = set()
        self._described: set[str] = set()
        self._spare: tuple[Label, Weights] | None = None
        self._writing = threading.Lock()

    @property
    def description(self) -> WorkerDescription:
        """Description common to all servers."""
        if self._description is None:
            raise RuntimeError("expected the description of a server, got none")
        return self._description

    @property
    def label(self) -> Label:
        """Label of the current weights."""
        if self.current is None:
            raise RuntimeError("expected weights that were pushed, got none")
        return self.current

    def next_label(self, version: int) -> Label:
        """Return the label of the next weights."""
        before = self.current or self.base
        return Label(self.run, 0 if before is None else before.number + 1, version)

    def advance(self, label: Label) -> None:
        """Make the weights of a label the current ones."""
        self._versions[label.number] = label.version
        self.current = label

    def knows(self, label: Label) -> bool:
        """Return True if these weights were pushed, or may be in a push by rank 0, ahead of this rank."""
        ahead = self.current is not None and label.number == self.current.number + 1
        return label.run == self.run and (label.version == self._versions.get(label.number) or ahead)

    def write(self, weights: Weights, label: Label) -> None:
        """Write weights."""
        write_weights(weights, self._folder_of(label))

    def write_adapter(self, save: Callable[[Path], object], label: Label) -> None:
        """Write an adapter by a function that gets its folder."""
        write_atomically(self._folder_of(label), save)

    def send(self, send: Callable[[Label], Weights], label: Label) -> None:
        """Send weights to servers; they are written only if a server needs a file.

        During the transfer a returning server finds no weights, as two copies would take twice the memory.
        """
        with self._writing:
            self._spare = None
        spare = send(label)
        with self._writing:
            self._spare = label, spare

    def delete_earlier(self, oldest: int) -> None:
        """Delete earlier weights, once no server loads them. The base stays, and so do adapters from a version on."""
        for folder in [path for path in self.folder.path.iterdir() if path.name.isdecimal()]:
            number, adapters = int(folder.name), self.base is not None
            needed = adapters and (number == 0 or self._versions[number] >= oldest)
            if number < self.label.number and not needed:
                shutil.rmtree(folder, ignore_errors=True)

    def _folder_with(self, label: Label) -> Path:
        """Return the folder with the weights of a label, which is written now if they were only sent."""
        folder = self._folder_of(label)
        with self._writing:
            if not folder.exists():
                if self._spare is None or self._spare[0] != label:
                    raise Unanswered(f"expected weights of version {label.version} to load, but newer ones are coming")
                write_weights(self._spare[1], folder)
        return folder

    def _folder_of(self, label: Label) -> Path:
        return self.folder.path / str(label.number)

    def open(self) -> None:
        """Create the folder, and delete those of trainers that were killed."""
        if self.writes:
            self.folder.open()

    def forget(self, url: str) -> None:
        """Drop what is known of a removed server."""
        self._loaded.discard(url)
        self._described.discard(url)

    def lacks_proof(self) -> bool:
        """Return True if the canary has not checked the current weights at any server yet."""
        unproven = self.proof is None or self.proof.label != self.current
        return self._canary is not None and self.current is not None and unproven

    def close(self) -> None:
        """Delete the folder."""
        self.folder.close()

    async def update(self, client: ServerClient) -> None:
        """Bring a server to the current weights, unless it has them, and compare it with the proof if there is one.

        Raises:
            Unanswered: If it cannot be reached, or rank 0 has not pushed the weights yet.
            ValueError: If it does not suit the run.
            RuntimeError: If it could not load the weights, or differs from the trainer afterwards.
        """
        current = None
        while current is None or current != self.current:  # it may change meanwhile
            current, label = self.current, await client.label()
            if label is None or label.run != self.run or client.url not in self._described:
                await self._check(client, label)
            if current is None:
                return
            if label != current:
                if not self.writes:
                    waits = "waits for rank 0 to push the weights of version"
                    raise Unanswered(f"{client.url} {waits} {current.version}")
                await self._load(client, label, current)
                self._loaded.add(client.url)
            client.adapter = None if self.base is None else current
            try:
                await self._prove(client, current)
            except CanaryError:
                await client.clear_label()
                raise

    async def _load(self, client: ServerClient, held: Label | None, current: Label) -> None:
        whole = self.base or current
        if self.base is None or held is None or held.run != self.run:
            await client.load(await asyncio.to_thread(self._folder_with, whole), whole)
        if self.base is not None:
            await client.load_adapter(self._folder_of(current), current)

    async def _check(self, client: ServerClient, label: Label | None) -> None:
        if label is not None and label.run != self.run and client.url in self._loaded:
            raise ValueError(f"expected {client.url} to serve one trainer, but another one has loaded weights into it")
        description = await client.describe()
        policy = {"architecture": self._architecture, "vocabulary": self._vocabulary}
        _compare(client.url, description, policy, "the policy has")
        if description.max_lora_rank < self._lora_rank:
            raise ValueError(
                f"expected {client.url} to take adapters of rank {self._lora_rank}, got at most "
                f"{description.max_lora_rank}: start it by lightning-rl serve ... -- --enable-lora --max-lora-rank "
                f"{self._lora_rank}"
            )
        self._description = self._description or description
        _compare(client.url, description, self._description._asdict(), "the other servers have")
        if self._text is not None:
            alike = description.has_tokenizer and await client.detokenize(self._ids) == self._text
            if self.has_tokenizer and not alike and self.current is not None:
                raise ValueError(f"expected the trainer's tokenizer at {client.url}, as the other servers have")
            self.has_tokenizer = self.has_tokenizer and alike
        if self.sent:
            await client.compare(self.sent)
        self._described.add(client.url)  # last, so that a server that was refused is checked again

    async def _prove(self, client: ServerClient, label: Label) -> None:
        proof = self.proof
        if proof is None or proof.label != label or self._canary is None:
            return
        sample = await client.draw(f"proof-{label}-{token_hex(4)}", proof.ids, SCORING)
        gap = (sample.prompt_logprobs - proof.logprobs).double().abs()
        served = self.description
        rounding = Rounding.of({getattr(torch, served.dtype)}, tf32=served.device != "cpu")
        if not self._canary.within(gap, rounding):
            raise CanaryError(
                f"expected {client.url} to agree with another server on version {label.version}, but its "
                f"log-probabilities differ by up to {float(gap.max()):.2g}"
            )


def _compare(url: str, description: WorkerDescription, expected: Mapping[str, Any], who: str) -> None:
    for name, value in expected.items():
        if getattr(description, name) != value:
            got = quote(str(getattr(description, name)))
            raise ValueError(f"expected {name} {value} at {url}, as {who}, got {got}")
