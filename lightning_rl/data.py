"""PromptDataModule: the prompt stream, and a ticket for each optimizer step."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

PromptSource = Path | str | Sequence[Any]


class Ticket:
    """Admits to one optimizer step: number of the rollout, step within it, and number of the ticket in the run."""

    __slots__ = ("index", "rollout", "step")

    def __init__(self, rollout: int, step: int, index: int) -> None:
        self.rollout = rollout
        self.step = step
        self.index = index


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with its place in the stream.

    Args:
        index: number in the stream; unique in a run.
        token_ids: what the model continues.
        content: the prompt as given, for rewards.
        columns: whatever else its row of the data holds, for rewards.
    """

    index: int
    token_ids: tuple[int, ...]
    content: Any
    columns: Mapping[str, Any]


class TicketLoader:
    """Yields ``epoch_length`` tickets for each pass; resumes where its state says. The position outlives epochs."""

    def __init__(self, epoch_length: int, steps_per_rollout: int, start: int = 0) -> None:
        self.epoch_length = epoch_length
        self.steps_per_rollout = steps_per_rollout
        self.index = start

    def __len__(self) -> int:
        """Tickets of one epoch."""
        return self.epoch_length

    def __iter__(self) -> Iterator[Ticket]:
        """The next tickets. The body runs at the first ``next``, so after a possible ``load_state_dict``."""
        for _ in range(self.epoch_length):
            rollout, step = divmod(self.index, self.steps_per_rollout)
            ticket = Ticket(rollout, step, self.index)
            self.index += 1
            yield ticket

    def state_dict(self) -> dict[str, int]:
        """Position in the run; Lightning itself knows how much of the epoch is left."""
        return {"index": self.index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues at a saved position."""
        self.index = state["index"]


class PromptBatch:
    """Validation prompts that are evaluated together, as a plain object, which Lightning passes on as it is."""

    __slots__ = ("prompts",)

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = tuple(prompts)


class PromptBatches:
    """The validation loader. A plain list would count as several loaders."""

    def __init__(self, prompts: Sequence[Prompt], size: int) -> None:
        self.batches = [PromptBatch(prompts[start : start + size]) for start in range(0, len(prompts), size)]

    def __len__(self) -> int:
        """How many batches."""
        return len(self.batches)

    def __iter__(self) -> Iterator[PromptBatch]:
        """Every batch."""
        return iter(self.batches)


class PromptDataModule(LightningDataModule):
    """Prompts to train on and to evaluate on.

    A prompt is a string, a list of token ids, or a list of chat messages (rendered by the tokenizer's chat template
    with the generation prompt); alone, or under ``"prompt"`` in a mapping whose other entries become columns for the
    rewards.

    Args:
        prompts: a sequence of prompts, or the path of a JSON Lines file of them.
        prompts_per_rollout: prompts drawn for each rollout, over all ranks.
        validation: prompts to evaluate on, in the same forms.
        validation_batch_size: prompts evaluated together.
        shuffle: whether every pass over the prompts has an order of its own.
        seed: of the shuffling.

    Raises:
        ValueError: if there are no prompts, or fewer than a rollout needs.
    """

    def __init__(
        self,
        prompts: PromptSource,
        prompts_per_rollout: int,
        *,
        validation: PromptSource | None = None,
        validation_batch_size: int = 256,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.rows = _rows(prompts)
        self.validation_rows = None if validation is None else _rows(validation)
        if prompts_per_rollout < 1 or validation_batch_size < 1:
            raise ValueError(f"expected positive sizes, got {prompts_per_rollout} and {validation_batch_size}")
        if len(self.rows) < prompts_per_rollout:
            raise ValueError(f"expected at least {prompts_per_rollout} prompts for a rollout, got {len(self.rows)}")
        self.prompts_per_rollout = prompts_per_rollout
        self.validation_batch_size = validation_batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.cursor = 0
        self._limit: int | float | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._loader: TicketLoader | None = None

    def connect(
        self, tokenizer: PreTrainedTokenizerBase | None, max_tokens: int | None, vocabulary: int | None = None
    ) -> None:
        """Takes the policy's tokenizer and encodes every prompt once, so that a bad one is found before training.

        Args:
            tokenizer: for strings and messages; token ids need none.
            max_tokens: how many tokens a prompt may have; None for no limit.
            vocabulary: how many token ids the policy knows; None for no check.

        Raises:
            ValueError: naming the prompt that is empty, too long, or needs a tokenizer or chat template.
        """
        self._tokenizer = tokenizer
        for kind, rows in (("prompt", self.rows), ("validation prompt", self.validation_rows or [])):
            for number, row in enumerate(rows):
                name = f"{kind} {number}"
                ids = self._encode(row, name)
                if not ids:
                    raise ValueError(f"expected {name} to have at least one token, got none: {row!r:.200}")
                if vocabulary is not None and not 0 <= min(ids) <= max(ids) < vocabulary:
                    raise ValueError(
                        f"expected token ids in [0, {vocabulary}), got {min(ids)} to {max(ids)} in {name}: the "
                        "tokenizer does not fit the policy"
                    )
                if max_tokens is not None and len(ids) > max_tokens:
                    raise ValueError(
                        f"expected prompts of at most {max_tokens} tokens (context window minus max_new_tokens), got "
                        f"{name} with {len(ids)}: shorten or drop it, or lower max_new_tokens"
                    )

    def max_prompt_length(self) -> int:
        """Tokens of the longest prompt to train on, once a tokenizer is connected."""
        return max(len(self._encode(row, f"prompt {number}")) for number, row in enumerate(self.rows))

    @override
    def setup(self, stage: str) -> None:
        """Switches validation off in a fit without validation prompts; Lightning would warn of an empty loader."""
        if stage == "fit" and self.validation_rows is None and self.trainer is not None:
            self._limit, self.trainer.limit_val_batches = self.trainer.limit_val_batches, 0

    @override
    def teardown(self, stage: str) -> None:
        """Gives the Trainer its limit back."""
        if stage == "fit" and self._limit is not None and self.trainer is not None:
            self.trainer.limit_val_batches, self._limit = self._limit, None

    def take(self, number: int) -> list[Prompt]:
        """The next prompts of the stream; moves the one cursor. Every rank calls it alike and uses its share."""
        places = range(self.cursor, self.cursor + number)
        self.cursor += number
        return self.at(places)

    def at(self, places: Iterable[int]) -> list[Prompt]:
        """The prompts at some places of the stream; moves nothing."""
        return [self._prompt(self.rows[self._row_of(place)], place) for place in places]

    def give_back(self, ticket: Ticket, cursor: int) -> None:
        """Undoes a ticket that led to no optimizer step, and the prompts taken since the cursor stood where it says."""
        self.cursor = cursor
        if self._loader is not None:
            self._loader.index = ticket.index

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Keys the global generators to the ticket: after the loader and before every other hook of the batch."""
        if isinstance(batch, Ticket):
            self._module.seed_generators(batch)  # pyright: ignore[reportCallIssue]
        return batch

    @override
    def train_dataloader(self) -> TicketLoader:
        """Tickets of one pass over the prompts; a new fit begins with a new rollout."""
        steps = int(self._module.steps_per_rollout)  # pyright: ignore[reportArgumentType]
        start = 0 if self._loader is None else -(-self._loader.index // steps) * steps
        self._loader = TicketLoader(len(self.rows) // self.prompts_per_rollout * steps, steps, start)
        return self._loader

    @override
    def val_dataloader(self) -> PromptBatches:
        """Batches of validation prompts."""
        prompts = [self._prompt(row, place) for place, row in enumerate(self.validation_rows or [])]
        return PromptBatches(prompts, self.validation_batch_size)

    @override
    def state_dict(self) -> dict[str, int]:
        """The cursor of the prompt stream."""
        return {"cursor": self.cursor}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues the stream at a saved cursor, in a fit; an evaluation of a checkpoint leaves it alone."""
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            self.cursor = int(state_dict["cursor"])

    @property
    def _module(self) -> LightningModule:
        if self.trainer is None:
            raise RuntimeError("expected a data module that a Trainer holds: pass it to fit or validate")
        return self.trainer.lightning_module

    def _row_of(self, place: int) -> int:
        number, offset = divmod(place, len(self.rows))
        return _order(len(self.rows), self.seed, number)[offset] if self.shuffle else offset

    def _prompt(self, row: Any, place: int) -> Prompt:
        columns = {key: value for key, value in row.items() if key != "prompt"} if isinstance(row, Mapping) else {}
        return Prompt(place, self._encode(row, f"prompt {place}"), _content(row), columns)

    def _encode(self, row: Any, name: str) -> tuple[int, ...]:
        content = _content(row)
        if isinstance(content, Sequence) and not isinstance(content, str) and all(isinstance(i, int) for i in content):
            return tuple(content)
        if self._tokenizer is None:
            raise ValueError(f"expected a tokenizer for {name}, got none: pass tokenizer= to the module, or token ids")
        if isinstance(content, str):
            return tuple(self._tokenizer(content)["input_ids"])
        if self._tokenizer.chat_template is None:
            raise ValueError(f"expected a tokenizer with a chat template, because {name} is a list of messages")
        rendered = self._tokenizer.apply_chat_template(list(content), add_generation_prompt=True, tokenize=False)
        return tuple(self._tokenizer(str(rendered), add_special_tokens=False)["input_ids"])


def prompt_stream_of(trainer: Trainer) -> PromptDataModule:
    """The data module that a Trainer was given.

    Raises:
        TypeError: if it is none of prompts.
    """
    data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(data, PromptDataModule):
        raise TypeError(f"expected Trainer.fit(module, PromptDataModule(...)), got {type(data).__name__}")
    return data


@lru_cache(maxsize=2)
def _order(size: int, seed: int, number: int) -> list[int]:
    generator = torch.Generator().manual_seed(hash((seed, number)) % 2**31)
    return torch.randperm(size, generator=generator).tolist()


def _rows(source: PromptSource) -> list[Any]:
    if isinstance(source, str | Path):
        lines = Path(source).read_text(encoding="utf-8").split("\n")
        source = [json.loads(line) for line in lines if line.strip()]
    rows = list(source)
    if not rows:
        raise ValueError("expected at least one prompt, got none")
    missing = [number for number, row in enumerate(rows) if isinstance(row, Mapping) and "prompt" not in row]
    if missing:
        raise ValueError(f'expected every row to have an entry "prompt", got none in row {missing[0]}')
    return rows


def _content(row: Any) -> Any:
    return row["prompt"] if isinstance(row, Mapping) else row
