"""Prompts in every form, every error they can raise, the one cursor, and the step indices."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from jsonargparse import ArgumentParser
from kit.support import fit, recorder, tiny_module, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from lightning_rl import PromptDataModule, Rollout
from lightning_rl.data import Position, Prompt, StepIndex, StepLoader

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}b{% endif %}"
)
CHAT = [{"role": "a", "content": "c d"}]


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def connected(
    prompts: Any, number: int = 1, *, longest: int | None = None, tokenizer: Any = None, **options: Any
) -> PromptDataModule:
    data = PromptDataModule(prompts, number, **options)
    data.connect(tokenizer, longest)
    return data


def held_by_a_trainer(data: PromptDataModule, steps: int) -> PromptDataModule:
    """Stands in for a Trainer, which step indices ask for the steps of a rollout."""
    seen: list[StepIndex] = []
    module = SimpleNamespace(steps_per_rollout=steps, begin_step=seen.append, seen=seen)
    data.trainer = SimpleNamespace(lightning_module=module)  # pyrefly: ignore[bad-assignment]
    return data


def ids_of(step_indices: list[StepIndex]) -> list[tuple[int, int, int]]:
    return [(step_index.rollout, step_index.step, step_index.index) for step_index in step_indices]


@pytest.mark.parametrize(
    ("row", "ids", "columns"),
    [
        ("a b", (2, 3), {}),
        ([4, 5], (4, 5), {}),
        ((4, 5), (4, 5), {}),
        (CHAT, (2, 4, 5, 3), {}),
        ({"prompt": "a b", "answer": 3, "level": "x"}, (2, 3), {"answer": 3, "level": "x"}),
        ({"prompt": [4]}, (4,), {}),
        ({"prompt": CHAT, "answer": None}, (2, 4, 5, 3), {"answer": None}),
    ],
)
def test_a_prompt_may_have_any_of_these_forms(row: Any, ids: tuple[int, ...], columns: dict[str, Any]) -> None:
    (prompt,) = connected([row], tokenizer=chat_tokenizer()).take(1)
    content = row["prompt"] if isinstance(row, dict) else row
    assert prompt == Prompt(0, ids, content, columns)


@pytest.mark.parametrize("as_text", [True, False], ids=["str", "Path"])
def test_prompts_are_read_from_json_lines(tmp_path: Path, as_text: bool) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a b", "answer": "\u00e9"}\n\n[4, 5]\r\n"c"\n', encoding="utf-8")
    data = connected(str(file) if as_text else file, 3, tokenizer=tiny_tokenizer(), shuffle=False)
    assert [prompt.token_ids for prompt in data.take(3)] == [(2, 3), (4, 5), (4,)]
    assert data.take(1)[0].columns == {"answer": "\u00e9"}


@pytest.mark.parametrize("character", ["\u2028", "\x85", "\u2029"])
def test_json_lines_are_split_at_newlines_only(tmp_path: Path, character: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": [2], "text": f"x{character}y"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert connected(file).take(1)[0].columns == {"text": f"x{character}y"}


@pytest.mark.parametrize(
    ("prompts", "number", "options", "message"),
    [
        ([], 1, {}, "expected at least one prompt, got none"),
        ([[2]], 1, {"validation": []}, "expected at least one validation prompt, got none"),
        ([[2]] * 3, 4, {}, "expected at least 4 prompts for a rollout, got 3"),
        ([[2]], 0, {}, "prompts_per_rollout to be a whole number above 0, got 0"),
        ([[2]], 1, {"validation_batch_size": 0}, "validation_batch_size to be a whole number above 0, got 0"),
        ([[2], {"question": "a"}], 1, {}, 'got none in prompt 1, .* by columns={"prompt": "question"}'),
    ],
)
def test_what_cannot_be_a_source_is_refused_at_construction(
    prompts: Any, number: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PromptDataModule(prompts, number, **options)


@pytest.mark.parametrize(
    ("row", "tokenizer", "message"),
    [
        ([], None, r"{} 1 to have at least one token, got none: \[\]"),
        ("", tiny_tokenizer(), "{} 1 to have at least one token, got none: ''"),
        ([2] * 5, None, "prompts of at most 4 tokens .* got {} 1 with 5: shorten or drop it"),
        ("a", None, "expected a tokenizer for {} 1, got none: pass tokenizer= to the module"),
        (CHAT, tiny_tokenizer(), "a chat template, because {} 1 is a list of messages"),
    ],
)
@pytest.mark.parametrize("kind", ["prompt", "validation prompt"])
def test_a_bad_prompt_is_named_before_training(row: Any, tokenizer: Any, message: str, kind: str) -> None:
    rows: list[Any] = [[2], row]
    data = PromptDataModule(rows, 1) if kind == "prompt" else PromptDataModule([[2]], 1, validation=rows)
    with pytest.raises(ValueError, match=message.format(kind)):
        data.connect(tokenizer, 4)


def test_every_pass_covers_all_prompts_once_in_an_order_of_its_own() -> None:
    data = connected([[2 + n] for n in range(10)], 4)
    passes = [[prompt.token_ids[0] - 2 for prompt in data.take(10)] for _ in range(4)]
    assert all(sorted(order) == list(range(10)) for order in passes)
    assert len({tuple(order) for order in passes}) == 4 and list(range(10)) not in passes


def test_the_stream_does_not_depend_on_how_much_is_taken_at_once() -> None:
    rows = [[2 + n] for n in range(7)]
    whole, bits = connected(rows, 3), connected(rows, 3)
    assert whole.take(20) == [prompt for number in (1, 6, 0, 9, 4) for prompt in bits.take(number)]
    assert whole.position.cursor == bits.position.cursor == 20


def test_an_index_is_never_used_twice_even_for_the_same_prompt() -> None:
    data = connected([[2], [3], [4]], 2)
    assert [prompt.index for number in (2, 4, 3) for prompt in data.take(number)] == list(range(9))


def test_order_is_set_by_the_seed_or_left_alone() -> None:
    rows = [[2 + n] for n in range(10)]
    first, same, other = (connected(rows, seed=seed).take(10) for seed in (0, 0, 1))
    assert first == same != other
    torch.manual_seed(7)
    assert connected(rows).take(10) == first, "the global generator plays no part"
    plain = connected(rows, shuffle=False).take(20)
    assert [prompt.token_ids for prompt in plain] == [tuple(row) for row in rows] * 2


def test_a_saved_cursor_continues_the_stream() -> None:
    rows = [[2 + n] for n in range(5)]
    data, again = connected(rows, 2), connected(rows, 2)
    data.take(7)
    assert again.position == Position(0) and data.position == Position(7) and data.committed == Position(0)
    data.commit(0)
    again.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert again.take(6) == data.take(6)


def test_tickets_count_rollouts_steps_and_themselves_through_epochs() -> None:
    loader = StepLoader(4, 2, connected([[2]]))
    assert len(loader) == 4
    assert ids_of(list(loader)) == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
    assert ids_of(list(loader)) == [(2, 0, 4), (2, 1, 5), (3, 0, 6), (3, 1, 7)]


def test_a_loader_continues_where_its_state_says() -> None:
    loader, again = StepLoader(6, 3, connected([[2]])), StepLoader(6, 3, connected([[2]]))
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    loader.data.committed = loader.data.position
    resumed = iter(again)
    again.load_state_dict(loader.state_dict())  # Lightning makes the iterator first
    assert ids_of([next(resumed)]) == ids_of([next(iterator)]) == [(1, 1, 4)]


def test_an_epoch_is_a_pass_of_whole_rollouts() -> None:
    data = held_by_a_trainer(connected([[2]] * 11, 3), 4)
    assert len(data.train_dataloader()) == 3 * 4


def test_a_new_fit_begins_with_a_new_rollout() -> None:
    data = held_by_a_trainer(connected([[2]] * 4, 2), 3)
    data.commit(4)
    assert ids_of([next(iter(data.train_dataloader()))]) == [(1, 1, 4)], "the next epoch of a fit"
    data.start_rollout()
    assert ids_of([next(iter(data.train_dataloader()))]) == [(2, 0, 6)]


def test_generators_are_keyed_by_tickets_and_by_nothing_else() -> None:
    data = held_by_a_trainer(connected([[2]]), 1)
    step_index, batch = StepIndex(1, 2, 3), object()
    assert data.on_before_batch_transfer(batch, 0) is batch and data.trainer.lightning_module.seen == []  # pyrefly: ignore[missing-attribute]
    assert data.on_before_batch_transfer(step_index, 0) is step_index
    assert data.trainer.lightning_module.seen == [step_index]  # pyrefly: ignore[missing-attribute]


def test_validation_prompts_keep_their_order_and_leave_the_cursor_alone() -> None:
    data = connected([[9]], validation=[{"prompt": [2 + n], "answer": n} for n in range(5)])
    found = data.validation_prompts()
    assert data.position.cursor == 0
    assert [(prompt.index, prompt.token_ids, prompt.columns["answer"]) for prompt in found] == [
        (n, (2 + n,), n) for n in range(5)
    ]
    assert connected([[9]]).validation_prompts() == []


def test_prompts_to_predict_keep_the_order_of_the_data_and_leave_the_cursor_alone() -> None:
    data = connected([[9], [8], [7]], shuffle=True)
    assert [(prompt.index, prompt.token_ids) for prompt in data.prediction_prompts()] == [
        (0, (9,)), (1, (8,)), (2, (7,)),
    ] and data.position.cursor == 0  # fmt: skip


def test_a_fit_without_validation_prompts_leaves_later_validation_alone() -> None:
    module = tiny_module()
    trainer = fit(module, data=connected([[2], [3], [4]], 1))
    (found,) = trainer.validate(module, connected([[9]], validation=[[2], [3]]), verbose=False)
    assert "val/reward/task" in found


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("overfit", "minibatches", "prompts"),
    [(1, 1, 2), (2, 1, 4), (1, 2, 2), (3, 2, 4), (0.5, 1, 4), (99, 1, 8)],
)
def test_overfit_batches_samples_the_same_prompts_again(overfit: float, minibatches: int, prompts: int) -> None:
    rollouts: list[Rollout] = []
    module, data = tiny_module(minibatches_per_rollout=minibatches), PromptDataModule([[2 + n] for n in range(8)], 2)
    options: dict[str, Any] = {"overfit_batches": overfit, "max_steps": 8 * minibatches, "max_epochs": -1}
    fit(module, callbacks=[recorder(rollouts)("recorder")], data=data, **options)
    drawn = [{int(ids) for ids in rollout.prompt_ids[:, 0]} for rollout in rollouts]
    period = prompts // 2
    assert len(drawn) == 8 and len(set[int]().union(*drawn)) == prompts
    assert all(drawn[number] == drawn[number % period] for number in range(8)), "the same prompts in the same order"
    assert len({int(row) for rollout in rollouts for row in rollout.sample_ids}) == 8 * 8, "and new samples of them"


def test_overfit_batches_reads_the_head_of_a_stream_again() -> None:
    rows = datasets.Dataset.from_list([{"prompt": [2 + n]} for n in range(8)]).to_iterable_dataset()
    rollouts: list[Rollout] = []
    data = PromptDataModule(rows, 2, epoch_length=3, shuffle_buffer=4)
    fit(tiny_module(), callbacks=[recorder(rollouts)("recorder")], data=data, overfit_batches=1, max_epochs=3)
    drawn = [rollout.prompt_ids[:, 0].tolist() for rollout in rollouts]
    assert len(drawn) == 3 and drawn[0] == drawn[1] == drawn[2]
    assert len({int(row) for rollout in rollouts for row in rollout.sample_ids}) == 3 * 8
    with pytest.raises(ValueError, match="expected a data set with a length to predict, got an IterableDataset"):
        data.prediction_prompts()


def test_a_data_module_without_a_trainer_says_so() -> None:
    with pytest.raises(RuntimeError, match="expected a data module with a Trainer"):
        connected([[2]]).train_dataloader()


@pytest.mark.parametrize("source", ["openai/gsm8k", "rows.jsonl"])
def test_a_command_line_passes_names_as_they_are(source: str) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(PromptDataModule, "data")
    options = ["--data.prompts_per_rollout=4", "--data.columns={prompt: question}"]
    parsed = parser.parse_args([f"--data.prompts={source}", *options]).data
    assert type(parsed.prompts) is str and parsed.prompts == source and parsed.columns == {"prompt": "question"}
