"""Streams: what has no length is read in order, shuffled in a buffer, and found again at any place."""

from collections.abc import Iterator
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.support import fit, tiny_module, tiny_tokenizer

from lightning_rl import PromptDataModule
from lightning_rl.data import PromptDataset
from lightning_rl.data import prompt_stream as streams

WORDS = "abcdefghij"


def rows_of(number: int = 10) -> Iterator[dict[str, Any]]:
    for place in range(number):
        yield {"question": " ".join(WORDS[: 1 + place % 5]), "n": place}


def stream_of(number: int = 10) -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"number": number})


def connected(number: int = 10, max_tokens: int | None = None, **options: Any) -> PromptDataModule:
    defaults: dict[str, Any] = {"epoch_length": 3, "columns": {"prompt": "question"}, "shuffle_buffer": 4}
    data = PromptDataModule(stream_of(number), 2, **{**defaults, **options})
    data.connect(tiny_tokenizer(), max_tokens)
    return data


def numbers(data: PromptDataModule, count: int) -> list[int]:
    return [prompt.columns["n"] for prompt in data.take(count)]


def test_a_stream_is_read_in_order_and_begins_again() -> None:
    data = connected(shuffle=False)
    assert numbers(data, 23) == [*range(10), *range(10), 0, 1, 2]
    assert [prompt.index for prompt in data.at([0, 7, 12])] == [0, 7, 12]
    assert data.at([3])[0].token_ids == (2, 3, 4, 5) and data.at([3])[0].content == "a b c d"
    assert data.position.cursor == 23 and data.pass_length is None


def test_a_buffer_shuffles_each_pass_in_an_order_of_its_own_set_by_the_seed() -> None:
    order = numbers(connected(), 30)
    passes = [order[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(each) == list(range(10)) for each in passes)
    assert len({tuple(each) for each in [*passes, list(range(10))]}) == 4
    assert numbers(connected(), 30) == order != numbers(connected(seed=1), 30)


def test_a_table_as_a_stream_has_every_row_once() -> None:
    table = datasets.Dataset.from_list(list(rows_of())).to_iterable_dataset(num_shards=3)
    data = PromptDataModule(table, 2, epoch_length=5, columns={"prompt": "question"}, shuffle_buffer=3)
    data.connect(tiny_tokenizer(), None)
    assert sorted(numbers(data, 10)) == list(range(10))


@given(
    cursor=st.integers(0, 35), before=st.lists(st.integers(0, 6), max_size=3), shuffle=st.booleans(), drop=st.booleans()
)
@settings(max_examples=25)
def test_a_stream_resumes_at_any_row(cursor: int, before: list[int], shuffle: bool, drop: bool) -> None:
    limits: dict[str, Any] = {"max_tokens": 3, "too_long": "drop"} if drop else {}
    whole = connected(shuffle=shuffle, **limits)
    rows = whole.take(45)
    again = connected(shuffle=shuffle, **limits)
    for count in before:
        again.take(count)
    again.load_state_dict({"cursor": cursor})
    assert again.take(8) == rows[cursor : cursor + 8]
    assert again.at([cursor + 1, cursor]) == [rows[cursor + 1], rows[cursor]], "what was generated ahead comes again"


def test_long_prompts_of_a_stream_are_dropped_and_counted() -> None:
    data = connected(shuffle=False, too_long="drop", max_prompt_tokens=3)
    assert numbers(data, 8) == [0, 1, 2, 5, 6, 7, 0, 1]
    assert data.prompts.drop_count == 4 and data.stats()["prompts/dropped"].value() == 4


def test_a_long_prompt_of_a_stream_is_named_before_training_or_where_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"got prompt 3 of the stream \(column question\) with 4: shorten or drop it"):
        connected(max_tokens=3)
    monkeypatch.setattr(streams, "CHECKED", 2)
    data = connected(max_tokens=3, shuffle=False)
    assert numbers(data, 3) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"got prompt 3 of the stream \(column question\) with 4"):
        data.take(1)


def test_a_stream_of_nothing_that_fits_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="prompts in every pass over the stream, got none that fits in pass 0"):
        connected(max_tokens=0, too_long="drop").take(1)
    monkeypatch.setattr(streams, "PATIENCE", 7)
    with pytest.raises(
        ValueError, match=r"at most 0 tokens \(context .*\) in the stream, got 7 longer ones one after the"
    ):
        connected(max_tokens=0, too_long="drop").take(1)
    with pytest.raises(ValueError, match="expected at least one prompt in the stream, got none"):
        connected(0)


def test_a_wrong_row_of_a_stream_is_named() -> None:
    bad = datasets.IterableDataset.from_generator(lambda: iter([{"prompt": [2]}, {"prompt": "", "n": 1}]))
    data = PromptDataModule(bad, 1, epoch_length=1)
    with pytest.raises(
        ValueError, match=r"expected prompt 1 of the stream \(column prompt\) to have at least one token"
    ):
        data.connect(tiny_tokenizer(), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epoch_length": None}, "expected epoch_length=, the number of rollouts of an epoch, because a stream has no"),
        ({"epoch_length": 0}, "expected epoch_length to be a whole number above 0 or None, got 0"),
        ({"shuffle_buffer": 0}, "expected shuffle_buffer to be a whole number above 0, got 0"),
        ({"columns": None}, r'got none in .*, which has "question", "n": name the prompt column'),
    ],
)
def test_a_wrong_option_of_a_stream_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        connected(**options)


def test_a_stream_is_nothing_to_evaluate_on() -> None:
    with pytest.raises(ValueError, match=r"with a length, got an IterableDataset, .*: take a part .*take\(200\)"):
        PromptDataset(stream_of())
    with pytest.raises(ValueError, match="got an IterableDataset, which only training supports"):
        PromptDataModule([[2]], 1, validation=stream_of())
    assert len(PromptDataset(list(stream_of().take(3)), columns={"prompt": "question"})) == 3


def test_a_stream_has_a_fingerprint_of_its_first_rows() -> None:
    assert connected().fingerprint == connected(seed=3).fingerprint != connected(9).fingerprint


def test_a_fit_draws_from_a_stream_and_its_epoch_has_the_length_it_was_given() -> None:
    module, data = tiny_module(tokenizer=tiny_tokenizer()), connected()
    trainer = fit(module, data=data, max_epochs=2)
    assert trainer.num_training_batches == 3 * module.steps_per_rollout and data.position.cursor == 2 * 3 * 2


def test_a_list_may_have_an_epoch_length_too() -> None:
    module, data = tiny_module(), PromptDataModule([[2], [3], [4]], 2, epoch_length=4)
    trainer = fit(module, data=data, max_epochs=1)
    assert trainer.num_training_batches == 4 * module.steps_per_rollout and data.position.cursor == 8
