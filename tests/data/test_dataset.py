"""PromptDataset: checks of all rows, long prompts, the types of columns, memory, and the fingerprint."""

import json
import logging
import os
import pickle
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from kit.support import fit, tiny_module, tiny_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from lightning_rl import PromptDataModule
from lightning_rl.data import PromptDataset
from lightning_rl.data.data_fingerprint import canonical_json

LONG = [[2], [3] * 5, [4] * 2, [5] * 6, [6] * 3]
ROOT = Path(__file__).resolve().parents[2]


def test_a_long_prompt_is_refused_with_both_limits_and_both_cures() -> None:
    with pytest.raises(
        ValueError, match=r"at most 4 tokens \(context window minus max_new_tokens\), got prompt 1 with 5"
    ):
        PromptDataset(LONG).connect(None, 4)
    message = (
        r'at most 4 tokens \(max_prompt_tokens\), got prompt 1 with 5: .*too_long="drop" drops all .*, or raise it'
    )
    with pytest.raises(ValueError, match=message):
        PromptDataset(LONG, max_prompt_tokens=4).connect(None, 100)
    PromptDataset(LONG, max_prompt_tokens=6).connect(None, 6)


def test_long_prompts_are_dropped_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    rows = PromptDataset(LONG, too_long="drop")
    assert len(rows) == 5
    with caplog.at_level(logging.INFO):
        rows.connect(None, 4)
    assert "dropped 2 of 5 prompts longer than 4 tokens (rows 1, 3)" in caplog.text
    assert (len(rows), rows.drop_count, rows.max_prompt_length) == (3, 2, 3)
    assert [prompt.token_ids[0] for prompt in rows.prompts(range(3))] == [2, 4, 6]
    rows.connect(None, 5)
    assert (len(rows), rows.drop_count, rows.max_prompt_length) == (4, 1, 5), "another limit, another choice"
    rows.connect(None, None)
    assert (len(rows), rows.drop_count, rows.max_prompt_length) == (5, 0, 6)


def test_too_few_prompts_after_dropping_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at most 0 tokens, got none: 5 of 5 prompts .*\(rows 0, 1, 2, 3, 4\)"):
        PromptDataset(LONG, too_long="drop").connect(None, 0)
    data = PromptDataModule(LONG, 4, too_long="drop")
    with pytest.raises(
        ValueError, match="at least 4 prompts for a rollout, got 3 after 2 that are too long were dropped"
    ):
        data.connect(None, 4)


def test_a_run_logs_how_many_prompts_it_dropped() -> None:
    rows = [[2, 3], *[[4] * 60] * 3, [3, 4], [5, 6], [2, 6]]
    module, data = tiny_module(), PromptDataModule(rows, 2, too_long="drop", shuffle=False)
    trainer = fit(module, data=data, max_steps=2)
    assert module.run.log.rollout_stats["prompts/dropped"].value() == 3
    assert trainer.num_training_batches == 2 * module.steps_per_rollout and data.pass_length == 4
    kept = PromptDataModule([row for row in rows if len(row) < 60], 2, shuffle=False)
    kept.connect(None, None)
    assert [p.token_ids for p in data.at(range(9))] == [p.token_ids for p in kept.at(range(9))]
    assert "prompts/dropped" not in fit_stats(PromptDataModule(rows[4:], 2))


def fit_stats(data: PromptDataModule) -> dict[str, Any]:
    module = tiny_module()
    fit(module, data=data, max_steps=1)
    return dict(module.run.log.rollout_stats)


WHEN = datetime(2024, 2, 29, 12, 30, tzinfo=UTC)
TYPED = {
    "prompt": [2],
    "when": WHEN,
    "nested": {"a": [1, None], "b": {"c": 2.5}},
    "n": 2**40,
    "flag": True,
    "raw": b"\0",
}


@pytest.mark.parametrize("kind", ["list", "Dataset", "numpy", "parquet"])
def test_columns_reach_the_rewards_with_their_types(kind: str, tmp_path: Path) -> None:
    table = datasets.Dataset.from_list([TYPED])
    if kind == "parquet":
        table.to_parquet(tmp_path / "a.parquet")
    source = {"list": [TYPED], "Dataset": table, "parquet": tmp_path / "a.parquet", "numpy": table.with_format("numpy")}
    columns = dict(PromptDataset(source[kind]).prompt(0).columns)
    assert columns == {key: value for key, value in TYPED.items() if key != "prompt"}
    assert [type(columns[name]) for name in ("when", "n", "flag")] == [datetime, int, bool]


def test_token_ids_of_any_integer_type_are_ids() -> None:
    ids = PromptDataset([{"prompt": [np.int64(3), np.int32(4)]}]).prompt(0).token_ids
    assert ids == (3, 4) and {type(token) for token in ids} == {int}


def test_a_dataset_reads_rows_only_when_it_is_asked() -> None:
    read: list[int] = []

    class Counted:
        def __len__(self) -> int:
            return 3000

        def __getitem__(self, number: int) -> Any:
            read.append(number)
            return {"prompt": [2 + number % 9]}

    source: Any = Counted()
    rows = PromptDataset(source)
    assert read == [0], "one row shows the columns"
    rows.connect(None, 10, 20)
    assert sorted(read[1:]) == list(range(3000))
    rows.connect(None, 10, 20)
    assert len(read) == 3001, "the same policy is not asked twice"
    assert rows.prompt(7).token_ids == (9,) and read[-1] == 7


def test_the_list_that_was_passed_may_change() -> None:
    rows = [[2], [3]]
    data = PromptDataset(rows)
    rows.clear()
    assert data.prompt(1).token_ids == (3,)


def test_an_id_outside_of_the_vocabulary_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"token ids in \[0, 16\), got -1 to 3 in prompt 1: the tokenizer does not fit"
    ):
        PromptDataset([[2], [3, -1]]).connect(None, None, 16)


def test_a_dataset_survives_pickling(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,n\na b,1\nc,2\n")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a b", "n": "1"}\n')
    (tmp_path / "a.json").write_text('[{"prompt": "a b", "n": "1"}]')
    row = {"prompt": "a b", "n": "1"}
    files = [tmp_path / "a.csv", tmp_path / "a.jsonl", tmp_path / "a.json"]
    for source in (*files, [row], datasets.Dataset.from_list([row])):
        rows = PromptDataset(source)
        rows.connect(tiny_tokenizer(), 10)
        again = pickle.loads(pickle.dumps(rows))
        assert again.prompt(0) == rows.prompt(0) and again.prompt(0).columns == {"n": "1"}


ROWS = [{"prompt": f"a {n}", "answer": n, "tags": {"x", "y", str(n)}} for n in range(50)]


@pytest.mark.nightly
def test_a_fingerprint_is_the_same_in_every_process() -> None:
    row = "{'prompt': 'a', 'tags': {'x', 'y', 'z'}, 'n': 1.5}"
    code = f"from lightning_rl.data import PromptDataset; print(PromptDataset([{row}]).fingerprint)"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    here = PromptDataset([{"prompt": "a", "tags": {"z", "y", "x"}, "n": 1.5}]).fingerprint
    assert run.stdout.strip() == here and len(here) == 16


def test_a_fingerprint_changes_with_whatever_the_policy_is_shown() -> None:
    def of(rows: Any, **options: Any) -> str:
        return PromptDataset(rows, **options).fingerprint

    changes = [
        of(ROWS),
        of(ROWS[1:]),
        of(ROWS[::-1]),
        of([*ROWS[:-1], {**ROWS[-1], "answer": -1}]),
        of(ROWS, chat=True),
        of(ROWS, system="b"),
        of(ROWS, chat=True, chat_template_kwargs={"x": 1}),
        of(ROWS, preprocess=lambda row: {**row, "prompt": "b"}),
    ]
    assert len(set(changes)) == len(changes)
    assert of(ROWS) == of(list(ROWS)) == of([dict(reversed(row.items())) for row in ROWS]), "no order of columns"
    assert of(ROWS, columns={"gold": "answer"}) != of(ROWS)


def test_a_table_has_the_fingerprint_of_its_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"a {n}", "answer": str(n)} for n in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    prints = {
        PromptDataset(source).fingerprint for source in (rows, datasets.Dataset.from_list(rows), tmp_path / "a.jsonl")
    }
    assert len(prints) == 1


def test_a_data_module_has_the_fingerprint_of_what_it_trains_on() -> None:
    data = PromptDataModule(ROWS, 1, validation=ROWS[:3])
    assert data.fingerprint == PromptDataset(ROWS).fingerprint


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": (1, 2), "a": None}, b'{"a":null,"b":[1,2]}'),
        ({1: "x", "1": {2: "y"}}, b'{"\'1\'":{"2":"y"},"1":"x"}'),
        (WHEN, b'{"datetime":"2024-02-29T12:30:00+00:00"}'),
        (b"\x01\xff", b'{"bytes":"01ff"}'),
        (np.array([1.5, 2.0]), b'{"ndarray":[1.5,2.0]}'),
        (object(), b'{"object":null}'),
        ({"b", "a"}, b'{"set":["a","b"]}'),
        (1 + 2j, b'{"complex":"(1+2j)"}'),
    ],
    ids=["plain", "keys", "datetime", "bytes", "array", "object", "set", "other"],
)
def test_canonical_json_has_a_form_for_everything(value: Any, text: bytes) -> None:
    assert canonical_json(value) == text


def test_rewards_get_every_column_of_the_data_and_none_where_a_row_has_none() -> None:
    answers, rest = list[Any](), list[Any]()

    def right(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
        answers.append(answer[0])
        rest.append(columns["hint"][0])
        return [float(len(text) % 2) for text in columns["completion_ids"]]

    rows = [{"prompt": [3, 4], "answer": "7"}, {"prompt": [5, 4], "hint": 1}, {"prompt": [6, 4]}]
    fit(tiny_module(rewards=right), data=PromptDataModule(rows, 1, shuffle=False))
    assert answers == ["7", None, None] and rest == [None, 1, None]


@pytest.mark.parametrize("row", ["What now", [{"role": "user", "content": "What now"}]], ids=["string", "chat"])
def test_a_prompt_of_unknown_words_alone_is_refused(row: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} </s>{% endfor %}"
    with pytest.raises(
        ValueError, match=r"expected prompt 1 to have words that the tokenizer knows, got <unk> alone: "
    ):
        PromptDataset(["a", row]).connect(tokenizer, vocabulary=16)
    PromptDataset(["What a", [0, 0]]).connect(tokenizer, vocabulary=16)


@pytest.mark.parametrize("row", ["b zzz", {"prompt": [{"role": "user", "content": "b zzz"}]}], ids=["string", "chat"])
def test_a_text_that_the_tokenizer_cannot_encode_is_named_with_its_row(row: Any) -> None:
    words = Tokenizer(WordLevel({"a": 0, "b": 1}))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    with pytest.raises(
        ValueError, match=r"expected prompt 1 .*got 'b zzz ?', on which it raises .*: pass the tokenizer"
    ):
        PromptDataset(["a", row, "b"]).connect(tokenizer)
