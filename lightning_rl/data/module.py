"""PromptDataModule: the prompt stream, and a ticket for each optimizer step."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl.data.dataset import PromptDataset
from lightning_rl.data.prompts import Prompt, PromptBatches
from lightning_rl.data.sources import PromptSource
from lightning_rl.data.tickets import Ticket, TicketLoader


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
        self.prompts = PromptDataset(prompts)
        self.validation = None if validation is None else PromptDataset(validation, label="validation prompt")
        if prompts_per_rollout < 1 or validation_batch_size < 1:
            raise ValueError(f"expected positive sizes, got {prompts_per_rollout} and {validation_batch_size}")
        self.prompts_per_rollout = prompts_per_rollout
        self.validation_batch_size = validation_batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.cursor = 0
        self._limit: int | float | None = None
        self._loader: TicketLoader | None = None
        self._check_size()

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
        for prompts in (self.prompts, self.validation):
            if prompts is not None:
                prompts.connect(tokenizer, max_tokens, vocabulary)
        self._check_size()

    def _check_size(self) -> None:
        number, dropped = len(self.prompts), self.prompts.drop_count
        if number < self.prompts_per_rollout:
            lost = f" after {dropped} that are too long were dropped: raise the limit, or lower prompts_per_rollout"
            raise ValueError(
                f"expected at least {self.prompts_per_rollout} prompts for a rollout, got {number}"
                + lost * bool(dropped)
            )

    def max_prompt_length(self) -> int:
        """Tokens of the longest prompt to train on, once a tokenizer is connected."""
        return self.prompts.max_prompt_length

    @override
    def setup(self, stage: str) -> None:
        """Switches validation off in a fit without validation prompts; Lightning would warn of an empty loader."""
        if stage == "fit" and self.validation is None and self.trainer is not None:
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
        return [self.prompts.prompt(self._row_of(place), place) for place in places]

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
        self._loader = TicketLoader(len(self.prompts) // self.prompts_per_rollout * steps, steps, start)
        return self._loader

    @override
    def val_dataloader(self) -> PromptBatches:
        """Batches of validation prompts."""
        return PromptBatches([] if self.validation is None else list(self.validation), self.validation_batch_size)

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
        number, offset = divmod(place, len(self.prompts))
        return int(_order(len(self.prompts), self.seed, number)[offset]) if self.shuffle else offset


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
def _order(size: int, seed: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash((seed, number)) % 2**31)
    return torch.randperm(size, generator=generator)
