"""Prompts of the training data at the places of a rollout, prompts that rewards get, and held-out prompts."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

from lightning_rl.audit.cursor import CursorWatch, Ids
from lightning_rl.audit.live import LiveRun
from lightning_rl.audit.picture_rows import strange_outputs, strange_pictures, strange_requests, value_text
from lightning_rl.data import Prompt, PromptDataModule
from lightning_rl.data.prompt_stream import PromptStream
from lightning_rl.data.row_schema import CONTINUES, TOOLS, VARIABLES, Reading, is_token_ids, own_variables
from lightning_rl.environments.outcome import REWARD_COLUMNS
from lightning_rl.evaluation.prompt_encoding import encode_prompts
from lightning_rl.policy.processor import processor_of
from lightning_rl.rewards import RewardCall
from lightning_rl.rollout import Rollout
from lightning_rl.samples import Request
from lightning_rl.testing.properties.subsample import order_of
from lightning_rl.utils.chat_rendering import apply_template
from lightning_rl.utils.template_date import TODAY

MAX_HELD_OUT, MAX_GROUPS = 4096, 4
MAX_ROWS = 2048  # of the training data to read
STREAM_ROWS = 256  # of a stream to read
CONVERSATIONS = "the conversations"


class HeldOut(NamedTuple):
    """Held-out prompts of one set that were trained.

    Attributes:
        number: Number of distinct prompts in the set.
        trained: Number of them trained so far.
        longest: Number of tokens of the longest one in this rollout.
        samples: Ids of the samples of this rollout that answer them.
        shared: Number of them in the training data.
        chance: Probability of at least this overlap if rows of one source were split at random.
        name: Name of the evaluation; empty for the validation set of the data module.
    """

    number: int
    trained: int
    longest: int
    samples: Sequence[int]
    shared: int = 0
    chance: float = 1.0
    name: str = ""


class Repeats(NamedTuple):
    """Counts of repeated rows of the training data.

    Attributes:
        shared: Number of groups of this rollout on several ranks.
        strayed: Number of places of the stream that this rollout should contain or should not, by its number.
        again: Number of rows drawn more often in this pass than the data contains them, over all ranks.
        own_order: True if the data module's own order is used, which draws no row twice.
        nats: Log of the likelihood ratio of a stopped source to random draws, over all rollouts so far.
        order_nats: The same of passes in one order, if each should be shuffled differently by the data module.
        samples: Ids of samples of this rank whose rows were drawn again, or are on another rank too.
    """

    shared: int
    strayed: int
    again: int
    own_order: bool
    nats: float
    order_nats: float
    samples: Sequence[int]


class PromptWatch:
    """Looks up the prompts of rollouts in data that has a length."""

    def __init__(self, live: LiveRun) -> None:
        self._live, self._data, self._has_environments = live, live.data, live.environments is not None
        self._trained, self._places = set[Ids](), set[int]()
        self._begin: int | None = None  # place of rollout 0, by the first audited rollout
        processor = processor_of(live.tokenizer)
        self._processor: Any = None if processor is None else deepcopy(processor.processor)  # that no run changes

    def of_stream(self, rollout: Rollout) -> dict[int, Prompt]:
        """Return the prompts of the training data for a few samples of a rollout, by sample id."""
        if self._data.pass_length is None:
            return {}
        groups = rollout.groups[rollout.real].unique().tolist()[:MAX_GROUPS]
        prompts = dict(zip(groups, self._data.at(groups), strict=True))
        rows = zip(rollout.sample_ids.tolist(), rollout.groups.tolist(), strict=True)
        return {sample: prompts[group] for sample, group in rows if group in prompts}

    def strange_pictures(
        self, rollout: Rollout, requests: Iterable[Request] = (), number: int = 0
    ) -> dict[str, tuple[list[int], dict[int, str]]]:
        """Return places of a few prompts by data set, if any has pictures, and samples of a few requests.

        First those with other pictures than their rows, then those with another output than the processor makes of
        their pictures, with its options at the start of the fit, by name.
        """
        processor = self._processor
        if processor is None:
            return {}
        validation = self._data.validation
        sets = {"the training data": [*{each.index: each for each in self.of_stream(rollout).values()}.values()]}
        if validation is not None:
            sets["the validation set"] = validation.prompts(range(min(len(validation), MAX_GROUPS)))
        for questions in self._live.evaluator.questions("val", None):
            sets[f"evaluation {questions.name}"] = [*questions.prompts[:MAX_GROUPS]]
        strange = strange_requests(sorted(requests, key=lambda one: order_of(one.sample_id, number)), processor)
        return ({CONVERSATIONS: ([], strange)} if strange else {}) | {
            name: (strange_pictures(prompts), strange_outputs(prompts, processor, self._text_of))
            for name, prompts in sets.items()
            if any(prompt.media for prompt in prompts)
        }

    def _text_of(self, prompt: Prompt) -> str:
        """Return a chat as the chat template writes it."""
        variables = {**(self._data.prompts.form.chat_template_kwargs or {}), **own_variables(prompt.columns, "a row")}
        content: Any = prompt.content
        continues = bool(variables.pop(CONTINUES, False)) and content[-1]["role"] == "assistant"
        options = {"add_generation_prompt": not continues, CONTINUES: continues, "tokenize": False}
        tokenizer: Any = self._live.tokenizer
        return str(apply_template(tokenizer, content, **TODAY.options(tokenizer, **options, **variables)))

    def strange_columns(self, calls: Sequence[RewardCall], samples: Sequence[Sequence[int]]) -> dict[str, list[int]]:
        """Return the samples of a few groups for which a reward got columns of another row, by name of the reward."""
        if self._data.pass_length is None:
            return {}
        size, wrong = self._live.options.group_size, dict[str, list[int]]()
        groups = sorted({sample // size for ids in samples for sample in ids})[:MAX_GROUPS]
        rows = dict(zip(groups, self._data.at(groups), strict=True))
        for call, ids in zip(calls, samples, strict=True):
            for place, sample in enumerate(ids):
                columns = rows[sample // size].columns if sample // size in rows else {}
                if any(
                    name in call.columns and value_text(call.columns[name][place]) != value_text(columns[name])
                    for name in columns
                ):
                    wrong.setdefault(call.name, []).append(sample)
        return wrong

    def of_rewards(self, calls: Sequence[RewardCall], samples: Sequence[Sequence[int]]) -> dict[int, Ids]:
        """Return the token ids of the prompts that rewards get for a few samples, by sample id."""
        if self._data.pass_length is None and processor_of(self._live.tokenizer) is not None:
            return {}  # a stream has read the pictures
        contents = dict[int, tuple[Any, Mapping[str, Any]]]()
        for call, ids in zip(calls, samples, strict=True):
            stride = max(len(ids) // MAX_GROUPS, 1)
            read = [(name, call.columns[name]) for name in (TOOLS, VARIABLES) if name in call.columns]
            for place, sample in list(enumerate(ids[: len(call.prompts)]))[::stride][:MAX_GROUPS]:
                contents[sample] = call.prompts[place], {name: values[place] for name, values in read}
        size = self._live.options.group_size
        few = list(contents.items())[:MAX_GROUPS]
        return {sample: self._encode(*shown, place=sample // size) for sample, shown in few}

    def _encode(self, content: Any, columns: Mapping[str, Any], *, place: int | None = None) -> Ids:
        tokenizer: Any = self._live.tokenizer
        if is_token_ids(content):
            return tuple(map(int, content))
        if isinstance(content, str):
            return tuple(tokenizer(content)["input_ids"])
        variables = {**(self._data.prompts.form.chat_template_kwargs or {}), **own_variables(columns, "a row")}
        continues = bool(variables.pop(CONTINUES, False)) and content[-1]["role"] == "assistant"
        options = {"add_generation_prompt": not continues, CONTINUES: continues, "tokenize": True, "return_dict": False}
        ids = tuple(apply_template(tokenizer, content, **TODAY.options(tokenizer, **options, **variables)))
        if (processor := processor_of(tokenizer)) is None or place is None or self._data.pass_length is None:
            return ids
        media = self._data.at([place])[0].media
        return ids if media is None else processor.expand(ids, media.pictures, "a row")[0]

    def held_out(
        self, rollout: Rollout, calls: Sequence[RewardCall] = (), samples: Sequence[Sequence[int]] = ()
    ) -> HeldOut | None:
        """Return the trained held-out prompts of the set that shares most with the training data.

        None without held-out sets, if they are intentionally the training set, or if the policy reads pictures, which
        tell prompts of the same token ids apart.
        """
        if processor_of(self._live.tokenizer) is not None:
            return None
        own = self._own_rows(rollout, calls, samples)
        sets = [self._held_out_of(name, prompts, own) for name, prompts in self._held_out_prompts.items()]
        return max(sets, key=lambda one: (one.longest, one.shared / one.number, one.trained / one.number), default=None)

    def _own_rows(
        self, rollout: Rollout, calls: Sequence[RewardCall], samples: Sequence[Sequence[int]]
    ) -> Mapping[int, Ids]:
        """Return the data row of each sample.

        Rows are identified by their prompt, and by prompt and columns in environments, which may change the beginning
        of a conversation.
        """
        return _rows_of(calls, samples) if self._has_environments else dict(_prompts_of(rollout))

    def _held_out_of(self, name: str, held_out: frozenset[Ids], own: Mapping[int, Ids]) -> HeldOut:
        trained = [(sample, prompt) for sample, prompt in own.items() if prompt in held_out]
        self._trained.update(prompt for _, prompt in trained)
        longest, shared = max((len(prompt) for _, prompt in trained), default=0), len(held_out & self._rows.keys())
        return HeldOut(
            number=len(held_out),
            trained=len(self._trained & held_out),
            longest=longest,
            samples=[sample for sample, _ in trained][:4],
            shared=shared,
            chance=_chance_of_overlap(shared, len(held_out), self._rows),
            name=name,
        )

    @cached_property
    def _held_out_prompts(self) -> dict[str, frozenset[Ids]]:
        """Identities of every held-out set by name."""
        sets, validation = dict[str, Sequence[Prompt]](), self._data.validation
        if validation is not None and validation.fingerprint != self._data.fingerprint:
            sets[""] = validation.prompts(range(min(len(validation), MAX_HELD_OUT)))
        for evaluation in self._live.evaluator.evaluations:
            encoded = encode_prompts(
                evaluation.prompts,
                self._live.tokenizer,
                self._live.policy.model,
                self._live.sampling.max_new_tokens,
            )
            sets[evaluation.name] = encoded[:MAX_HELD_OUT]
        found = {name: frozenset(map(self._row_identity, prompts)) for name, prompts in sets.items()}
        return {name: one for name, one in found.items() if one and one != self._rows.keys()}

    def _row_identity(self, prompt: Prompt) -> Ids:
        """Return the identity of a row."""
        return _identity(prompt.content, prompt.columns) if self._has_environments else prompt.token_ids

    @cached_property
    def _rows(self) -> Counter[Ids]:
        """Number of rows of the training data by identity; a subset of large data, the first rows of a stream."""
        if self._has_environments:
            return Counter(_identity(row.content, row.columns) for row in self._read())
        rows = self._read()
        return Counter(
            row.token_ids if isinstance(row, Prompt) else self._encode(row.content, row.columns) for row in rows
        )

    @cached_property
    def _cursor(self) -> CursorWatch:
        """Counter of drawn rows."""
        return CursorWatch(self._rows, self._data.pass_length or self._rows.total(), self._data.prompts_per_rollout)

    def _read(self) -> Sequence[Prompt | Reading]:
        prompts = self._data.prompts
        if isinstance(prompts, PromptStream):
            return [prompts.form.read(row, "a row of the stream") for row in islice(prompts.dataset, STREAM_ROWS)]
        return prompts.prompts(range(0, len(prompts), -(-len(prompts) // MAX_ROWS)))

    def repeats(
        self, rollout: Rollout, number: int, calls: Sequence[RewardCall] = (), samples: Sequence[Sequence[int]] = ()
    ) -> Repeats | None:
        """Return counts of repeated rows over all ranks; None if repeats are intended. A collective."""
        rows = self._own_rows(rollout, calls, samples)
        size, real = self._live.options.group_size, [sample for sample, _ in _prompts_of(rollout)]
        own: dict[int, Ids | None] = {sample // size: None for sample in real}
        own |= {sample // size: rows[sample] for sample in real if sample in rows}
        shares = self._live.parallel.collectives.objects(own)
        if self._live.trainer.overfit_batches:  # pyrefly: ignore[missing-attribute]
            return None
        owners = Counter(place for share in shares for place in share)
        shared = {place for place, number in owners.items() if number > 1}
        fresh = (pair for share in shares for pair in share.items() if pair[0] not in self._places)
        drawn = {place: prompt for place, prompt in fresh if prompt is not None}
        again, self._places = self._cursor.draw(drawn), self._places.union(drawn)
        places = {place for place in own if place in shared or place in again}
        found = [sample for sample in real if sample // size in places]
        kept = ("at", "take", "rows_at")
        own_order = (
            self._data.pass_length is not None
            and self._data.in_passes
            and all(getattr(type(self._data), name) is getattr(PromptDataModule, name) for name in kept)
        )
        strayed = self._misplacements(owners.keys(), number)
        order_nats = self._cursor.order_nats if own_order and self._data.shuffle else 0.0
        return Repeats(
            len(shared), strayed, len(again), own_order, self._cursor.nats, order_nats, found[:4] or real[:4]
        )

    def _misplacements(self, places: Collection[int], number: int) -> int:
        """Return the number of places that a rollout without filters should contain or should not."""
        if not places or self._live.corrections.contributors("keep_groups"):
            return 0
        length = self._data.prompts_per_rollout
        if self._begin is None:
            self._begin = min(places) - number * length
        begin = self._begin + number * length
        return len(set(range(begin, begin + length)).symmetric_difference(places))


def _prompts_of(rollout: Rollout) -> list[tuple[int, Ids]]:
    """Return the real samples with their prompts."""
    columns = (rollout.sample_ids.tolist(), rollout.prompt_ids.tolist(), rollout.prompt_lengths.tolist())
    return [(sample, tuple(ids[:length])) for sample, ids, length in zip(*columns, strict=True) if sample >= 0]


def _rows_of(calls: Sequence[RewardCall], samples: Sequence[Sequence[int]]) -> dict[int, Ids]:
    """Return the data row of each sample as rewards see it."""
    return {
        sample: _identity(call.prompts[place], {name: values[place] for name, values in call.columns.items()})
        for call, ids in zip(calls, samples, strict=True)
        for place, sample in enumerate(ids)
    }


def _identity(content: Any, columns: Mapping[str, Any]) -> Ids:
    """Return a digest of prompt and columns of a row; absent columns equal None, as in reward calls."""
    held = [(name, columns[name]) for name in sorted(columns.keys() - REWARD_COLUMNS) if columns[name] is not None]
    return tuple(blake2b(repr((content, held)).encode("utf-8", "replace"), digest_size=16).digest())


def _chance_of_overlap(shared: int, held_out: int, rows: Counter[Ids]) -> float:
    """Return a bound of the probability that a random split separates this many pairs of equal rows (Chernoff)."""
    number, within = rows.total(), sum(count > 1 for count in rows.values())
    every, cards = shared + within, number + held_out
    expected, part = 2 * number * held_out / (cards * (cards - 1)), shared / max(every, 1)
    if part <= expected:
        return 1.0
    rest = 0.0 if part == 1 else (1 - part) * math.log((1 - part) / (1 - expected))
    return math.exp(-every * (part * math.log(part / expected) + rest))
