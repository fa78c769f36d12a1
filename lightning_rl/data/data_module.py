"""PromptDataModule: the prompt stream, and a step index for each optimizer step."""

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol, cast

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl.corrections import Stat
from lightning_rl.data.dataset import PromptDataset
from lightning_rl.data.encoding import LengthOf, TooLong
from lightning_rl.data.mixture import pick_source, rows_of_picks, whole_weights
from lightning_rl.data.prompt_stream import PromptStream
from lightning_rl.data.row_schema import CONTINUES, ColumnCheck, PromptForm
from lightning_rl.data.rows import MixedRows
from lightning_rl.data.sources import PromptSource, is_hugging_face, open_source
from lightning_rl.data.step_loader import Position, StepIndex, StepLoader
from lightning_rl.samples import Prompt
from lightning_rl.utils.arguments import check_bools, check_counts, refuse_other_names
from lightning_rl.utils.library_hooks import LibraryHooks, check_overrides
from lightning_rl.utils.naming import in_words
from lightning_rl.utils.renamed import Moved


class SteppingModule(Protocol):
    """Module of a Trainer, as far as its data module needs it."""

    @property
    def steps_per_rollout(self) -> int: ...  # noqa: D102

    def begin_step(self, step_index: StepIndex) -> None: ...  # noqa: D102

    def val_dataloader(self) -> Any: ...  # noqa: D102

    def test_dataloader(self) -> Any: ...  # noqa: D102

    def predict_dataloader(self) -> Any: ...  # noqa: D102


@LibraryHooks(
    rules={"on_before_batch_transfer": "before", "load_state_dict": "before", "state_dict": "joined"},
    refused=dict.fromkeys(
        ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
        "pass rows as prompts= and validation=, and change them by preprocess=",
    ),
)
class PromptDataModule(LightningDataModule):
    """Data module of prompts for training and evaluation.

    A prompt is a string, a list of token ids, or a list of chat messages, which the chat template renders with the
    generation prompt. It is a row by itself, or the entry ``"prompt"`` or ``"messages"`` of a mapping whose other
    entries are columns for the rewards. The order depends on ``seed`` and the number of prompts only, so it is the same
    on any number of ranks, and a run can resume at any prompt.

    Args:
        prompts: A list; the path of a file (``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``) or folder, a
            pattern such as ``"data/*.jsonl"``, or a list of these; the name of a data set of the hub; a
            ``datasets.Dataset`` or, for training only, ``IterableDataset``; a :class:`PromptDataset`, which has its own
            options. A mapping from names to several of these with a length mixes them; each row gets a column
            ``source`` with its name.
        prompts_per_rollout: Number of prompts per rollout, over all ranks.
        validation: Prompts for evaluation, in the same forms and with the same options.
        validation_batch_size: Number of validation prompts per batch.
        weights: Share of each data set of a mapping, by name, in any unit; defaults to its number of rows.
        shuffle: True to shuffle each pass over the prompts differently, each data set of a mapping by itself.
        seed: Seed of the shuffling.
        epoch_length: Number of rollouts per epoch; defaults to one pass over the prompts. Required for a stream.
        shuffle_buffer: Number of rows in the shuffle buffer of a stream.
        name: Configuration of a data set of the hub.
        split: Split of a data set for training.
        validation_split: Split for evaluation, of ``validation`` or else of ``prompts``.
        columns: Mapping from new to existing column names, such as ``{"prompt": "question"}``, or to entries of
            columns, such as ``{"answer": "reward_model.ground_truth"}``.
        preprocess: Function from a row to the row to use; must be deterministic.
        chat: True to turn a string prompt into the user message of a chat.
        system: System message of chats without one; turns a string prompt into a chat.
        chat_template_kwargs: Further variables of the tokenizer's chat template.
        max_prompt_tokens: Maximum number of tokens per prompt, if below the limit of the context window.
        too_long: Handling of longer prompts: ``"error"`` raises, ``"drop"`` drops them and logs their number as
            ``prompts/dropped``.

    Attributes:
        position: Live position, which :meth:`take` and the loader of step indices advance.
        committed: Position of the last commit, which a checkpoint stores and the next fit begins at.
        chooser: Function that returns the rows of a number of next prompts, set by the run; None for the order above.
        chosen: Numbers of the rows that it has returned, by index in the stream.

    Raises:
        ValueError: If an option is wrong, a row cannot be read, or there are fewer prompts than a rollout needs.
    """

    cursor = Moved("position.cursor")
    weights: Mapping[str, float] | None = None

    @refuse_other_names("PromptDataModule")
    def __init__(
        self,
        prompts: PromptDataset | PromptSource,
        prompts_per_rollout: int,
        *,
        validation: PromptDataset | PromptSource | None = None,
        validation_batch_size: int = 256,
        weights: Mapping[str, float] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        epoch_length: int | None = None,
        shuffle_buffer: int = 1000,
        name: str | None = None,
        split: str | None = None,
        validation_split: str | None = None,
        columns: Mapping[str, str] | None = None,
        preprocess: Callable[[Any], Any] | None = None,
        chat: bool = False,
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_prompt_tokens: int | None = None,
        too_long: TooLong = "error",
    ) -> None:
        super().__init__()
        check_overrides(self)
        check_counts(1, prompts_per_rollout=prompts_per_rollout, validation_batch_size=validation_batch_size)
        check_counts(1, optional=True, epoch_length=epoch_length)
        check_counts(0, seed=seed)
        check_bools(shuffle=shuffle)
        options: dict[str, Any] = {
            "columns": columns,
            "preprocess": preprocess,
            "chat": chat,
            "system": system,
            "chat_template_kwargs": chat_template_kwargs,
            "max_prompt_tokens": max_prompt_tokens,
            "too_long": too_long,
        }
        if validation is None and validation_split is not None:
            validation = prompts
        _check_use({**options, "name": name, "split": split}, prompts, validation)
        self.prompts = _prompts(prompts, name, split, options, shuffle=shuffle, seed=seed, buffer=shuffle_buffer)
        self.validation: PromptDataset | None = None
        if isinstance(validation, PromptDataset):
            self.validation = validation
        elif validation is not None:
            same = validation is prompts or (isinstance(validation, str) and validation == prompts)
            where: dict[str, Any] = {"name": name if same else None, "split": validation_split}
            self.validation = PromptDataset(validation, **where, **options, label="validation prompt")
        self.prompts_per_rollout = prompts_per_rollout
        self.validation_batch_size = validation_batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch_length = epoch_length
        self.position = self.committed = Position()
        self.chooser: Callable[[int], Sequence[int]] | None = None
        self.chosen = array("q")
        if weights is not None:
            self.weights = dict(weights)
        self._shares = self._whole_weights()
        self._check_size()

    def connect(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        max_tokens: int | None,
        vocabulary: int | None = None,
        check: ColumnCheck | None = None,
    ) -> None:
        """Set the policy's tokenizer and encode every prompt once, so that a bad one raises before training.

        Arguments and errors are those of :meth:`.PromptDataset.connect`.
        """
        for prompts in (self.prompts, self.validation):
            if prompts is not None:
                prompts.connect(tokenizer, max_tokens, vocabulary, check)
        self._check_size()

    def limit(self, length_of: LengthOf) -> None:
        """Handle prompts as too long by the length with which conversations begin; see ``PromptDataset.limit``."""
        for prompts in (self.prompts, self.validation):
            if prompts is not None:
                prompts.limit(length_of)
        self._check_size()

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Set the tokenizer for the fingerprints, before :meth:`connect`."""
        for prompts in (self.prompts, self.validation):
            if prompts is not None:
                prompts.use_tokenizer(tokenizer)

    def _check_size(self) -> None:
        number = self.pass_length
        sizes = self.prompts.sizes if isinstance(self.prompts, PromptDataset) else []
        if self._shares and any(share and not size for share, size in zip(self._shares, sizes, strict=True)):
            raise ValueError(
                f"expected prompts of each data set with a weight, got {sizes} after "
                f"{self.prompts.drop_count} that are too long were dropped: raise the limit, or leave the data set out"
            )
        if number is None and self.epoch_length is None:
            raise ValueError(
                "expected epoch_length=, the number of rollouts of an epoch, because a stream has no length: pass one "
                "such as epoch_length=1000"
            )
        if number is not None and number < self.prompts_per_rollout:
            dropped, cure = self.prompts.drop_count, ""
            if dropped:
                cure = f" after {dropped} that are too long were dropped: raise the limit, or lower prompts_per_rollout"
            raise ValueError(f"expected at least {self.prompts_per_rollout} prompts for a rollout, got {number}{cure}")

    def _whole_weights(self) -> list[int] | None:
        rows = getattr(self.prompts, "rows", None)
        if self.weights is None:
            return None
        if not isinstance(rows, MixedRows):
            raise ValueError(
                f"expected weights= with a mapping from names to data sets, got {self.weights}: leave it out"
            )
        return whole_weights(self.weights, rows.names)

    @property
    def pass_length(self) -> int | None:
        """Number of prompts in a pass over the data; None for a stream."""
        return None if isinstance(self.prompts, PromptStream) else len(self.prompts)

    @property
    def fingerprint(self) -> str:
        """Hash of the training prompts and their columns; see :class:`.PromptDataset`."""
        return self.prompts.fingerprint

    @property
    def template_options(self) -> Mapping[str, Any]:
        """Further variables of the chat template."""
        options = self.prompts.form.chat_template_kwargs or {}
        return {name: value for name, value in options.items() if name != CONTINUES}

    def max_prompt_length(self) -> int:
        """Return the number of tokens of the longest training prompt, once connected."""
        return self.prompts.max_prompt_length

    def take(self, number: int) -> list[Prompt]:
        """Return the next prompts of the stream and advance the cursor; ranks get the same and use their share."""
        first = self.position.cursor
        if self.chooser is not None and self._overfit_span is None:
            del self.chosen[first:]  # taken by a fit that ended before their rollout
            self.chosen.extend(self._in_order(range(len(self.chosen), first)))
            self.chosen.extend(self.chooser(number))
        self.position = replace(self.position, cursor=first + number)
        return self.at(range(first, first + number))

    def at(self, places: Iterable[int]) -> list[Prompt]:
        """Return the prompts at indices of the stream, without advancing the cursor."""
        places = list(places)
        span = self._overfit_span
        drawn = places if span is None else [place % span for place in places]
        if isinstance(self.prompts, PromptStream):
            prompts = self.prompts.at(drawn)
            return [replace(prompt, index=place) for prompt, place in zip(prompts, places, strict=True)]
        return self.prompts.prompts(self.rows_at(drawn), places)

    def rows_at(self, places: Iterable[int]) -> list[int]:
        """Return the numbers of the rows at indices of the stream, in data with a length."""
        places, chosen = list(places), self.chosen
        ordered = iter(self._in_order([place for place in places if place >= len(chosen)]))
        return [chosen[place] if place < len(chosen) else next(ordered) for place in places]

    def _in_order(self, places: Sequence[int]) -> list[int]:
        """Return the numbers of the rows that the places of a stream have by weights and seed alone."""
        sizes: list[int] = self.prompts.sizes  # pyrefly: ignore[missing-attribute]
        picks = [pick_source(place, self._shares or sizes) for place in places]
        rows, starts = rows_of_picks(picks, sizes, self.seed if self.shuffle else None), [0, *accumulate(sizes)]
        return [starts[source] + row for (source, _), row in zip(picks, rows, strict=True)]

    @property
    def in_passes(self) -> bool:
        """True if each pass over the data has every row once."""
        return self._shares is None and not self.chosen

    def first(self) -> Prompt | None:
        """Return the first prompt; None for a stream."""
        return None if self.pass_length is None else self.at([0])[0]

    @property
    def _overfit_span(self) -> int | None:
        """Number of prompts that repeat under Trainer(overfit_batches=); None for all."""
        batches = 0 if self.trainer is None else self.trainer.overfit_batches  # pyrefly: ignore[missing-attribute]
        if not batches:
            return None
        steps = self._module.steps_per_rollout
        step_indices = batches if isinstance(batches, int) else int(batches * self._epoch_rollouts * steps)
        return min(max(-(-step_indices // steps), 1), self._epoch_rollouts) * self.prompts_per_rollout

    @property
    def _epoch_rollouts(self) -> int:
        return self.epoch_length or (self.pass_length or 0) // self.prompts_per_rollout

    def fit_steps(self) -> float:
        """Return the number of optimizer steps of the Trainer's fit by its flags; infinity without a bound."""
        trainer: Any = self.trainer
        length, limit = self._epoch_rollouts * self._module.steps_per_rollout, trainer.limit_train_batches
        epoch = min(length, limit) if isinstance(limit, int) else int(length * limit)
        bounds = [trainer.max_steps] if trainer.max_steps >= 0 else []
        bounds += [trainer.max_epochs * epoch] if (trainer.max_epochs or -1) >= 0 else []
        return min(bounds, default=math.inf)

    def stats(self) -> dict[str, Stat]:
        """Return ``prompts/dropped``, the number of prompts dropped as too long so far, if dropping is on."""
        if self.prompts.too_long != "drop":
            return {}
        return {"prompts/dropped": Stat.single(self.prompts.drop_count)}

    def commit(self, index: int) -> None:
        """Commit the cursor, with the index of the next optimizer step."""
        self.committed = replace(self.position, index=index)

    @property
    def rollout(self) -> int:
        """Number of the rollout of the next optimizer step, as of the last commit."""
        return self.committed.index // self._module.steps_per_rollout

    def start_rollout(self) -> None:
        """Move from the committed position to the first step of a rollout, where a new fit begins."""
        steps = self._module.steps_per_rollout
        self.position = self.committed = replace(self.committed, index=-(-self.committed.index // steps) * steps)

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Pass the step index to the module before any other hook of the batch."""
        if isinstance(batch, StepIndex):
            self._module.begin_step(batch)
        return batch

    @override
    def train_dataloader(self) -> StepLoader:
        """Return the step indices of one epoch, from the committed position on."""
        steps = self._module.steps_per_rollout
        self.position = self.committed
        return StepLoader(self._epoch_rollouts * steps, steps, self)

    def validation_prompts(self) -> list[Prompt]:
        """Return all validation prompts in order."""
        return [] if self.validation is None else self.validation.prompts(range(len(self.validation)))

    def prediction_prompts(self) -> list[Prompt]:
        """Return every prompt once, in the order of the data, for ``trainer.predict``.

        Raises:
            ValueError: If the prompts are a stream.
        """
        if isinstance(self.prompts, PromptStream):
            raise ValueError(
                "expected a data set with a length to predict, got an IterableDataset: take a part of it, as "
                "list(stream.take(200))"
            )
        return self.prompts.prompts(range(len(self.prompts)))

    @override
    def val_dataloader(self) -> Any:
        """Return the module's loader of evaluations and validation prompts."""
        return self._module.val_dataloader()

    @override
    def test_dataloader(self) -> Any:
        """Return the module's loader of evaluations and validation prompts for a test."""
        return self._module.test_dataloader()

    @override
    def predict_dataloader(self) -> Any:
        """Return the module's loader of these prompts."""
        return self._module.predict_dataloader()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the committed position, and the rows that were chosen up to there.

        Lightning restores the state of a loader within an epoch only.
        """
        rows = self.chosen[: self.committed.cursor]
        chosen = {"rows": torch.tensor(rows, dtype=torch.int64)} if rows else {}
        return {"cursor": self.committed.cursor, "step_index": self.committed.index, **chosen}

    def load_rows(self, state: Mapping[str, Any]) -> None:
        """Restore the rows that were chosen from :meth:`state_dict`; without them, forget those of before."""
        self.chosen[:] = array("q", state["rows"].tolist() if "rows" in state else ())

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position in a fit; ignored when a checkpoint is evaluated. The run restores the chosen rows."""
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            self.position = self.committed = Position(int(state_dict["cursor"]), state_dict.get("step_index") or 0)

    @property
    def _module(self) -> SteppingModule:
        if self.trainer is None:
            raise RuntimeError("expected a data module with a Trainer, got none: pass it to fit or validate")
        return cast(SteppingModule, self.trainer.lightning_module)


def data_module_of(trainer: Trainer) -> PromptDataModule:
    """Return the PromptDataModule of a Trainer.

    Raises:
        TypeError: If the Trainer has none.
    """
    data = trainer.datamodule  # pyrefly: ignore[missing-attribute]
    if not isinstance(data, PromptDataModule):
        got = "no data module" if data is None else f"a {type(data).__name__}"
        raise TypeError(
            f"expected Trainer.fit(module, PromptDataModule(...)), got {got}: pass prompts as "
            "PromptDataModule(prompts, prompts_per_rollout=32), and no DataLoader"
        )
    return data


def find_data_module(trainer: Trainer | None) -> PromptDataModule | None:
    """Return the PromptDataModule of a Trainer; None without a Trainer, or outside of a fit if it has none."""
    if trainer is None or (trainer.state.fn != TrainerFn.FITTING and trainer.datamodule is None):  # pyrefly: ignore[missing-attribute]
        return None
    return data_module_of(trainer)


def _prompts(
    source: PromptDataset | PromptSource,
    name: str | None,
    split: str | None,
    options: Mapping[str, Any],
    *,
    shuffle: bool,
    seed: int,
    buffer: int,
) -> PromptDataset | PromptStream:
    if isinstance(source, PromptDataset):
        return source
    rows = open_source(source, name=name, split=split)
    if not is_hugging_face(rows, "IterableDataset"):
        return PromptDataset(rows, **options)
    limits = {option: options[option] for option in ("max_prompt_tokens", "too_long")}
    form = PromptForm(**{option: value for option, value in options.items() if option not in limits})
    return PromptStream(rows, form, shuffle=shuffle, seed=seed, shuffle_buffer=buffer, **limits)


def _check_use(options: Mapping[str, Any], *sources: Any) -> None:
    """Raise for options next to sources that are all PromptDatasets, which have their own."""
    plain = [source for source in sources if source is not None and not isinstance(source, PromptDataset)]
    used = [option for option, value in options.items() if value not in (None, False, "error")]
    if used and not plain:
        raise ValueError(
            f"expected options in the PromptDataset, got {in_words(used)} next to it: pass them to PromptDataset"
        )
