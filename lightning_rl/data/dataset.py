"""PromptDataset: rows of any source, encoded on access."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedTokenizerBase

from lightning_rl.data.data_fingerprint import fingerprint_of
from lightning_rl.data.encoding import Encoder, LengthOf, TooLong, check_limits
from lightning_rl.data.row_schema import ColumnCheck, PromptForm, Reading
from lightning_rl.data.rows import MixedRows, SourceRows
from lightning_rl.data.sources import PromptSource, is_hugging_face, open_source
from lightning_rl.samples import Prompt
from lightning_rl.utils.template_date import TODAY


class PromptDataset:
    """Indexable prompts over the rows of any source.

    Rows are read and encoded on access. :meth:`connect` reads all of them once, in batches, and stores their lengths
    and the names of all columns.

    Args:
        source: Rows; see :func:`open_source`, also for ``name`` and ``split``.
        columns: Option of :class:`.PromptForm`, as are ``preprocess``, ``chat``, ``system``, ``chat_template_kwargs``.
        max_prompt_tokens: Maximum number of tokens per prompt, if below the limit of the context window.
        too_long: Handling of longer prompts: ``"error"`` raises, ``"drop"`` drops them and logs their number.
        label: Name of a row in error messages.

    Raises:
        ValueError: If an option is wrong, a row cannot be read, or no column can be the prompt.

    Example:
        >>> rows = PromptDataset([{"question": [3, 4], "answer": "7"}], columns={"prompt": "question"})
        >>> rows.prompt(0)
        Prompt(index=0, token_ids=(3, 4), content=[3, 4], columns={'answer': '7'})
    """

    def __init__(
        self,
        source: PromptSource,
        *,
        name: str | None = None,
        split: str | None = None,
        columns: Mapping[str, str] | None = None,
        preprocess: Callable[[Any], Any] | None = None,
        chat: bool = False,
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_prompt_tokens: int | None = None,
        too_long: TooLong = "error",
        label: str = "prompt",
    ) -> None:
        self.form = PromptForm(
            columns=columns, preprocess=preprocess, chat=chat, system=system, chat_template_kwargs=chat_template_kwargs
        )
        check_limits(max_prompt_tokens, too_long)
        self.max_prompt_tokens, self.too_long, self.label = max_prompt_tokens, too_long, label
        rows = open_source(source, name=name, split=split)
        if is_hugging_face(rows, "IterableDataset"):
            raise ValueError(
                "expected a data set with a length, got an IterableDataset, which only training supports: take a part "
                "of it, as list(stream.take(200))"
            )
        self.rows: SourceRows = rows
        if not len(self.rows):
            raise ValueError(f"expected at least one {label}, got none")
        self._check_columns()
        self._encoder = self._encoder_of(None, None, None)
        self._fingerprint: tuple[Any, str] = (None, "")
        self._lengths: array[int] = array("i")
        self._keys: array[int] = array("q")  # of the pictures of each row; empty for a policy that reads none
        self._kept: array[int] | None = None
        self._columns: tuple[str, ...] = ()
        self._connection: tuple[Any, ...] = ()
        self._limited = False

    def __len__(self) -> int:
        """Return the number of prompts, without dropped ones."""
        return len(self.rows) if self._kept is None else len(self._kept)

    @property
    def sizes(self) -> list[int]:
        """Number of prompts of each source of a mixture, without dropped ones, or of the data."""
        return self.rows.sizes(self._kept) if isinstance(self.rows, MixedRows) else [len(self)]

    def column(self, name: str) -> list[Any]:
        """Return the value of a column for each prompt, None where it is missing; reads every row."""
        rows = range(len(self.rows)) if self._kept is None else self._kept
        parts = (rows[start : start + 1024] for start in range(0, len(rows), 1024))
        return [reading.columns.get(name) for part in parts for reading in self._take(part)]

    def prompt(self, number: int) -> Prompt:
        """Return one prompt."""
        return self.prompts([number])[0]

    def prompts(self, numbers: Sequence[int], places: Sequence[int] | None = None) -> list[Prompt]:
        """Return several prompts, encoded together; their indices in the stream default to their numbers."""
        rows = numbers if self._kept is None else [self._kept[number] for number in numbers]
        readings = self._take(rows)
        prompts = self._encoder.prompts(readings, numbers if places is None else places, self._columns)
        for prompt, reading, row in zip(prompts, readings, rows, strict=True):
            self._encoder.check_length(len(prompt.token_ids), reading.name)
            if self._keys and _key_of(prompt) != self._keys[row]:
                raise ValueError(
                    f"expected the pictures of {reading.name} as they were at the start, got others: change copies of "
                    "pictures in rewards, environments and preprocess=, and nothing at random"
                )
        return prompts

    def examples(self, number: int) -> list[Prompt]:
        """Return at most ``number`` prompts at even distances."""
        count = min(number, len(self))
        return self.prompts([place * len(self) // count for place in range(count)])

    def connect(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        max_tokens: int | None = None,
        vocabulary: int | None = None,
        check: ColumnCheck | None = None,
    ) -> None:
        """Set the policy's tokenizer and encode every prompt once, so that a bad one raises before training.

        Args:
            tokenizer: Tokenizer for strings and messages; not needed for token ids.
            max_tokens: Maximum number of tokens per prompt in the policy's context window; None for no limit.
            vocabulary: Vocabulary size of the policy; None for no check.
            check: Raises for a row whose columns do not fit the run; compared by ``==`` to skip a repeated check.

        Raises:
            ValueError: If a prompt is empty, too long, or needs a tokenizer or chat template, or if all are too long.
        """
        template = getattr(tokenizer, "chat_template", None)
        connection = (tokenizer, template, TODAY.moment, max_tokens, vocabulary, check)
        if self._lengths and connection == self._connection:
            return
        encoder = self._encoder = self._encoder_of(tokenizer, max_tokens, vocabulary)
        lengths: array[int] = array("i")
        columns, keys = set[str](), array("q")
        for numbers, rows in self.rows.batches():
            readings = self._read(numbers, rows)
            names = [reading.name for reading in readings]
            columns |= {name for reading in readings for name in reading.columns}
            if check is not None:
                for number, reading in zip(numbers, readings, strict=True):
                    check(reading.columns, self._name(number))
            prompts = encoder.prompts(readings)
            batch = [len(prompt.token_ids) for prompt in prompts]
            lengths.extend(batch)
            keys.extend(_key_of(prompt) for prompt in prompts if encoder.processor is not None)
            if self.too_long == "error":
                for length, name in zip(batch, names, strict=True):
                    encoder.check_length(length, name)
        self._lengths, self._connection, self._kept, self._limited = lengths, connection, None, False
        self._keys = keys
        self._columns = tuple(sorted(columns))
        if encoder.max_tokens is not None and max(lengths) > encoder.max_tokens:
            self._drop(encoder.max_tokens)

    def limit(self, length_of: LengthOf) -> None:
        """Handle prompts as too long by another length than that of their token ids, once connected.

        Args:
            length_of: Number of tokens with which the conversation of a prompt begins; None for that of its token ids.

        Raises:
            ValueError: As :meth:`connect`.
        """
        if self._limited or self._encoder.max_tokens is None:
            return
        rows = range(len(self.rows)) if self._kept is None else self._kept
        for start in range(0, len(self), 1024):
            numbers = range(start, min(start + 1024, len(self)))
            for number, prompt in zip(numbers, self.prompts(numbers), strict=True):
                if (length := length_of(prompt)) is not None:
                    self._lengths[rows[number]] = length
                    if self.too_long == "error":
                        self._encoder.check_length(length, self._name(rows[number]))
        self._limited = True
        if max(self._lengths) > self._encoder.max_tokens:
            self._drop(self._encoder.max_tokens)

    def _drop(self, max_tokens: int) -> None:
        self._kept = array("q", (row for row, length in enumerate(self._lengths) if length <= max_tokens))
        rows = [row for row, length in enumerate(self._lengths) if length > max_tokens]
        first = ", ".join(str(row) for row in rows[:5]) + (", ..." if len(rows) > 5 else "")
        what = f"{len(rows)} of {len(self.rows)} {self.label}s longer than {max_tokens} tokens (rows {first})"
        if not self._kept:
            raise ValueError(f"expected prompts of at most {max_tokens} tokens, got none: {what}: raise the limit")
        rank_zero_info(f"dropped {what}")

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of all rows besides the prompt, once connected."""
        return self._columns

    @property
    def drop_count(self) -> int:
        """Number of rows that :meth:`connect` dropped as too long."""
        return len(self.rows) - len(self)

    @property
    def max_prompt_length(self) -> int:
        """Number of tokens of the longest prompt, once connected."""
        limit = self._encoder.max_tokens
        return max((length for length in self._lengths if limit is None or length <= limit), default=0)

    @property
    def fingerprint(self) -> str:
        """Hash of the prompts as token ids and of the columns, the same in every process and from every source.

        Before there is a tokenizer, it is over the prompts as they are. Includes rows that are too long. Of more than
        20,000 rows, 20,000 at even distances and the number of rows are hashed.
        """
        encoder = self._encoder.without_limit()
        if self._fingerprint[0] != encoder:
            self._fingerprint = encoder, fingerprint_of(self._take, len(self.rows), self.form, encoder)
        return self._fingerprint[1]

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Set the tokenizer for the fingerprint, before :meth:`connect`."""
        if self._encoder.tokenizer is not tokenizer:
            self._encoder = self._encoder_of(tokenizer, None, None)

    def _take(self, numbers: Sequence[int]) -> list[Reading]:
        return self._read(numbers, self.rows.take(numbers))

    def _read(self, numbers: Sequence[int], rows: Sequence[Any]) -> list[Reading]:
        return [self.form.read(row, self._name(number)) for number, row in zip(numbers, rows, strict=True)]

    def _name(self, number: int) -> str:
        place = self.rows.place(number)
        return f"{self.label} {number} ({place})" if place else f"{self.label} {number}"

    def _encoder_of(
        self, tokenizer: PreTrainedTokenizerBase | None, max_tokens: int | None, vocabulary: int | None
    ) -> Encoder:
        return Encoder.of(self.form, self.max_prompt_tokens, tokenizer, max_tokens, vocabulary)

    def _check_columns(self) -> None:
        """Check that there is a prompt column, before there is a tokenizer."""
        if self.form.preprocess is not None:
            return
        for number, names in self.rows.headers():
            self.form.check_names(names, "the data set" if number is None else self._name(number))


def _key_of(prompt: Prompt) -> int:
    return 0 if prompt.media is None else prompt.media.key
