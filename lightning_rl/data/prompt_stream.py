"""PromptStream: prompts of a ``datasets.IterableDataset``, by their index in the run."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedTokenizerBase

from lightning_rl.data.data_fingerprint import fingerprint_of
from lightning_rl.data.encoding import Encoder, LengthOf, TooLong, check_limits
from lightning_rl.data.row_schema import ColumnCheck, PromptForm, Reading
from lightning_rl.samples import Prompt
from lightning_rl.utils.arguments import check_counts
from lightning_rl.utils.template_date import TODAY

CHECKED = 256  # number of rows read before training
PATIENCE = 10_000  # number of too long rows in a row that ends the run


class PromptStream:
    """Prompts of a stream by their index in the run, pass after pass.

    An index is found by reading the rows before it, so a resumed run reads them again. Every rank reads the whole
    stream.

    Args:
        dataset: A ``datasets.IterableDataset``, unsharded on every rank.
        form: Form of the rows.
        shuffle: True to shuffle each pass differently, by the data set's ``shuffle(seed, buffer_size)``.
        seed: Seed of the shuffling.
        shuffle_buffer: Number of rows in the shuffle buffer.
        max_prompt_tokens: As in :class:`.PromptDataset`.
        too_long: As in :class:`.PromptDataset`; ``"error"`` raises during training, as a stream cannot be read ahead.

    Raises:
        ValueError: If an option is wrong, or no column can be the prompt.
    """

    def __init__(
        self,
        dataset: Any,
        form: PromptForm,
        *,
        shuffle: bool = True,
        seed: int = 0,
        shuffle_buffer: int = 1000,
        max_prompt_tokens: int | None = None,
        too_long: TooLong = "error",
    ) -> None:
        check_limits(max_prompt_tokens, too_long)
        check_counts(1, shuffle_buffer=shuffle_buffer)
        if form.preprocess is None and dataset.column_names is not None:
            form.check_names(dataset.column_names, "the stream")
        self.dataset, self.form = dataset.with_format(None), form
        self.shuffle, self.seed, self.shuffle_buffer = shuffle, seed, shuffle_buffer
        self.max_prompt_tokens, self.too_long = max_prompt_tokens, too_long
        self.max_prompt_length = 0
        self.columns: tuple[str, ...] = ()  # of the first rows, once connected
        self._encoder = Encoder.of(form, max_prompt_tokens, None, None, None)
        self._connection: tuple[Any, ...] | None = None
        self._fingerprint: tuple[Any, str] = (None, "")
        self._length_of: LengthOf = lambda _: None
        self._rewind()

    def examples(self, number: int) -> list[Prompt]:
        """Return the first ``number`` prompts."""
        readings = list(islice((self._read(row, place, 0) for place, row in enumerate(self.dataset)), number))
        return self._encoder.prompts(readings)

    def connect(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        max_tokens: int | None = None,
        vocabulary: int | None = None,
        check: ColumnCheck | None = None,
    ) -> None:
        """Set the policy's tokenizer and encode the first rows, so that a wrong option raises before training.

        Arguments are those of :meth:`.PromptDataset.connect`.

        Raises:
            ValueError: If a row is wrong, or if there is none.
        """
        template = getattr(tokenizer, "chat_template", None)
        connection = (tokenizer, template, TODAY.moment, max_tokens, vocabulary, check)
        if connection == self._connection:
            return
        self._encoder = Encoder.of(self.form, self.max_prompt_tokens, tokenizer, max_tokens, vocabulary)
        readings = self._head()
        if not readings:
            raise ValueError("expected at least one prompt in the stream, got none")
        if check is not None:
            for number, reading in enumerate(readings):
                check(reading.columns, f"prompt {number} of the stream")
        self.columns = tuple(sorted({name for reading in readings for name in reading.columns}))
        lengths = [len(prompt.token_ids) for prompt in self._encoder.prompts(readings)]
        self.max_prompt_length, self._connection = max(lengths), connection
        if self.too_long == "error":
            for reading, length in zip(readings, lengths, strict=True):
                self._encoder.check_length(length, reading.name)
        self._rewind()

    def limit(self, length_of: LengthOf) -> None:
        """Handle prompts as too long by another length than that of their token ids; see :class:`.PromptDataset`."""
        self._length_of = length_of
        if self.too_long == "error":
            for reading in self._head():
                self._encoder.check_length(self._length(reading), reading.name)
        self._rewind()

    def _length(self, reading: Reading) -> int:
        return self._length_of_prompt(self._encode(reading, 0))

    def _length_of_prompt(self, prompt: Prompt) -> int:
        length = self._length_of(prompt)
        return len(prompt.token_ids) if length is None else length

    def at(self, places: Iterable[int]) -> list[Prompt]:
        """Return the prompts at indices of the run."""
        return [self._at(place) for place in places]

    def _at(self, place: int) -> Prompt:
        if place < self._place:
            self._rewind()
        while self._place < place:
            self._next()
        reading = self._next()
        prompt = self._encode(reading, place)
        self._encoder.check_length(self._length_of_prompt(prompt), reading.name)
        return prompt

    @property
    def fingerprint(self) -> str:
        """Hash of the first rows, as of :class:`.PromptDataset`."""
        encoder = self._encoder.without_limit()
        if self._fingerprint[0] != encoder:
            head = self._head()
            value = fingerprint_of(lambda numbers: [head[n] for n in numbers], len(head), self.form, encoder)
            self._fingerprint = encoder, value
        return self._fingerprint[1]

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Set the tokenizer for the fingerprint, before :meth:`connect`."""
        if self._encoder.tokenizer is not tokenizer:
            self._encoder = Encoder.of(self.form, self.max_prompt_tokens, tokenizer, None, None)

    def _head(self) -> list[Reading]:
        return [self._read(row, number, 0) for number, row in enumerate(islice(self.dataset, CHECKED))]

    def _read(self, row: Any, number: int, passes: int) -> Reading:
        return self.form.read(row, f"prompt {number} of the stream" + (f" in pass {passes}" if passes else ""))

    def _encode(self, reading: Reading, place: int) -> Prompt:
        return self._encoder.prompts([reading], [place])[0]

    def _rewind(self) -> None:
        self._place, self.drop_count, self._readings = 0, 0, self._passes()

    def _next(self) -> Reading:
        self._place += 1
        return next(self._readings)

    def _passes(self) -> Iterator[Reading]:
        """Yield the rows of pass after pass, without dropped ones."""
        passes = 0
        while True:
            kept = 0
            for reading in self._pass(passes):
                kept += 1
                yield reading
            if not kept:
                raise ValueError(f"expected prompts in every pass over the stream, got none that fits in pass {passes}")
            passes += 1

    def _pass(self, passes: int) -> Iterator[Reading]:
        dataset, lost = self.dataset, 0
        if self.shuffle:
            dataset = dataset.shuffle(seed=hash((self.seed, passes)) % 2**31, buffer_size=self.shuffle_buffer)
        for number, row in enumerate(dataset):
            reading = self._read(row, number, passes)
            if self._fits(reading):
                lost = 0
                yield reading
                continue
            lost += 1
            if lost == PATIENCE:
                raise ValueError(
                    f"expected prompts of at most {self._encoder.max_tokens} tokens ({self._encoder.limit}) in the "
                    f"stream, got {lost} longer ones one after the other: raise the limit"
                )

    def _fits(self, reading: Reading) -> bool:
        limit = self._encoder.max_tokens
        if self.too_long != "drop" or limit is None or self._length(reading) <= limit:
            return True
        self.drop_count += 1
        if self.drop_count & (self.drop_count - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            rank_zero_info(f"dropped {self.drop_count} prompts of the stream longer than {limit} tokens so far")
        return False
