"""From a row to the prompt: columns, chats, system prompts; every wrong row is named with row and column."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
from kit.support import tiny_tokenizer

from lightning_rl import PromptDataModule
from lightning_rl.data import PromptDataset
from lightning_rl.data.row_schema import PromptForm

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m['role'] }} {{ m.get('content', 'n') }} "
    "{% for call in m.get('tool_calls', []) %}{{ call['name'] }} {% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}b{% endif %}"
    "{% if thinking is defined and thinking %} m{% endif %}"
)
USER = {"role": "a", "content": "c d"}
SYSTEM = {"role": "system", "content": "e"}


def chat_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def prompt_of(row: Any, **options: Any) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    rows = PromptDataset([row], **options)
    rows.connect(chat_tokenizer())
    prompt = rows.prompt(0)
    return prompt.content, prompt.token_ids, dict(prompt.columns)


@pytest.mark.parametrize(
    ("row", "options", "content", "ids", "columns"),
    [
        ({"messages": [USER], "n": 1}, {}, [USER], (2, 4, 5, 3), {"n": 1}),
        ({"prompt": "a", "messages": 1}, {"columns": {"prompt": "prompt"}}, "a", (2,), {"messages": 1}),
        ({"question": "a b", "n": 1}, {"columns": {"prompt": "question"}}, "a b", (2, 3), {"n": 1}),
        (
            {"question": "a", "prompt": "b", "gold": 2},
            {"columns": {"prompt": "question", "answer": "gold"}},
            "a",
            (2,),
            {"answer": 2},
        ),
        ({"q": "a"}, {"columns": {"prompt": "q", "question": "q"}}, "a", (2,), {"question": "a"}),
        ({"chat": [USER]}, {"columns": {"messages": "chat"}}, [USER], (2, 4, 5, 3), {}),
        (
            {"x": "a", "y": "b"},
            {"preprocess": lambda row: {"prompt": row["x"] + " " + row["y"], "n": 3}},
            "a b",
            (2, 3),
            {"n": 3},
        ),
        ({"x": "a"}, {"preprocess": lambda row: row["x"]}, "a", (2,), {}),
        ({"x": "a"}, {"preprocess": lambda row: {"q": row["x"]}, "columns": {"prompt": "q"}}, "a", (2,), {}),
        ("c", {"chat": True}, [{"role": "user", "content": "c"}], (0, 4, 3), {}),
        ("c", {"system": "e"}, [SYSTEM, {"role": "user", "content": "c"}], (0, 6, 0, 4, 3), {}),
        ([USER], {"system": "e"}, [SYSTEM, USER], (0, 6, 2, 4, 5, 3), {}),
        (
            [{**SYSTEM, "content": "f"}, USER],
            {"system": "e"},
            [{**SYSTEM, "content": "f"}, USER],
            (0, 7, 2, 4, 5, 3),
            {},
        ),
        ([USER], {"chat_template_kwargs": {"thinking": True}}, [USER], (2, 4, 5, 3, 14), {}),
        ([{**USER, "name": None, "tool_calls": None}], {}, [USER], (2, 4, 5, 3), {}),
        (
            [{"role": "a", "content": None, "tool_calls": [{"name": "d"}]}, USER],
            {},
            [{"role": "a", "tool_calls": [{"name": "d"}]}, USER],
            (2, 15, 5, 2, 4, 5, 3),
            {},
        ),
        ([4, 5], {"chat": True}, [4, 5], (4, 5), {}),
    ],
)
def test_a_row_becomes_a_prompt(
    row: Any, options: dict[str, Any], content: Any, ids: tuple[int, ...], columns: dict[str, Any]
) -> None:
    assert prompt_of(row, **options) == (content, ids, columns)


def test_chats_are_the_same_in_a_table_where_every_message_has_every_entry() -> None:
    rows = [{"messages": [{**USER, "name": "x"}, USER]}, {"messages": [USER]}]
    table = PromptDataset(datasets.Dataset.from_list(rows))
    table.connect(chat_tokenizer())
    listed = PromptDataset(rows)
    listed.connect(chat_tokenizer())
    assert table.prompts([0, 1]) == listed.prompts([0, 1])
    assert table.prompt(1).content == [USER], "and no name: None"


QUESTION = [{"prompt": [2]}, {"question": "a", "answer": "b"}]


@pytest.mark.parametrize("table", [False, True], ids=["list", "Dataset"])
def test_a_prompt_column_of_another_name_is_named_with_how_to_map_it(table: bool) -> None:
    source = datasets.Dataset.from_list(QUESTION[1:]) if table else QUESTION
    where = "the data set" if table else "prompt 1"
    message = rf'or "messages", got none in {where}, which has "question", "answer": name the prompt column by '
    with pytest.raises(ValueError, match=message + r'columns=\{"prompt": "question"\}'):
        PromptDataModule(source, 1)


def test_a_row_of_a_file_without_prompt_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": [2]}\n\n{"question": "a"}\n')
    with pytest.raises(ValueError, match=r"got none in prompt 1 \(.*a\.jsonl, line 3\), which has \"question\""):
        PromptDataset(file)


@pytest.mark.parametrize("table", [False, True], ids=["list", "Dataset"])
def test_a_mapped_column_that_does_not_exist_is_named_with_those_that_do(table: bool) -> None:
    source = datasets.Dataset.from_list(QUESTION[1:]) if table else QUESTION[1:]
    message = r'got no "qestion" in .*, which has "question", "answer": write columns=\{"prompt": "question"\}'
    with pytest.raises(ValueError, match=message):
        PromptDataset(source, columns={"prompt": "qestion"})
    with pytest.raises(ValueError, match=r'got no "text" in .*: write one of these in columns='):
        PromptDataset(source, columns={"prompt": "text"})


def failing(row: Any) -> Any:
    return row["x"]


@pytest.mark.parametrize(
    ("options", "row", "message"),
    [
        ({}, 3.5, r"a string, a list of token ids, or a list of chat messages, got a float \(3\.5\) in prompt 0"),
        ({}, {"prompt": None}, r"got a NoneType \(None\) in prompt 0 \(column prompt\)"),
        ({}, {"prompt": ["a", "b"]}, r"got a list of str \(\['a', 'b'\]\) in prompt 0"),
        ({}, {"prompt": [True, False]}, r"got a list of bool"),
        ({}, {"prompt": [1, "a"]}, r"got a list of int and str"),
        ({}, {"prompt": b"ab"}, r"got a bytes \(b'ab'\)"),
        (
            {},
            {"messages": {"role": ["user"], "content": ["a"]}},
            r'got a mapping with "role", "content" in prompt 0 \(column messages\)',
        ),
        ({}, [USER, "a"], r"expected message 1 of prompt 0 to be a mapping such as .*, got a str"),
        ({}, [{"content": "a"}], r'message 0 of prompt 0 to have a string "role", as \{"role": "user"'),
        ({}, [{"role": 1, "content": "a"}], r'to have a string "role", .*got \{\'role\': 1'),
        (
            {"columns": {"messages": "m"}},
            {"m": [USER, {"role": "a"}]},
            r'message 1 of prompt 0 \(column m\) to have a string "content"',
        ),
        ({}, [{"role": "a", "content": None}], r"got \{.*None\}: write its text, or leave the message out"),
        ({}, [{"role": "a", "content": 5}], r"'content': 5\}: write its text, or leave the message out"),
        (
            {},
            [{"role": "a", "content": [{"type": "text"}]}],
            r'a string "content", .*sound and videos are not',
        ),
        (
            {},
            [USER, {"role": "assistant", "content": "4"}],
            r"got its answer as the last one in prompt 0: leave it out, as preprocess=",
        ),
        (
            {},
            [{"role": "tool", "content": "c"}],
            r"the tokenizer's chat template takes, but it refuses prompt 0, whose roles are tool: no tools here",
        ),
        ({"system": "e"}, [4, 5], r"because system= is set, got token ids in prompt 0"),
        (
            {"columns": {"prompt": "q"}},
            "a",
            r"expected prompt 0 to have columns, because columns=\{'prompt': 'q'\}, got a str",
        ),
        (
            {"preprocess": failing},
            {"y": 1},
            r"preprocess=failing to return a row, but it failed on prompt 0: KeyError\('x'\)",
        ),
        (
            {"preprocess": lambda _: None},
            {"y": 1},
            r"preprocess=<lambda> to return a row, got None for prompt 0: end",
        ),
        ({"columns": {"x": "prompt"}}, {"x": "a"}, r'got no "prompt" in prompt 0.*: write columns=\{"prompt": "x"\}'),
        ({"preprocess": dict}, {"y": 1}, r'got none in prompt 0, which has "y": name the prompt column'),
    ],
)
def test_a_wrong_row_is_named(options: dict[str, Any], row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prompt_of(row, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"columns": "question"},
            r"expected columns to map new names to names of columns, as \{\"prompt\": .*got 'question'",
        ),
        ({"columns": {"prompt": 3}}, r"got \{'prompt': 3\}"),
        ({"preprocess": "strip"}, "expected preprocess to be a function of a row, got 'strip'"),
        ({"chat": "yes"}, "expected chat to be True or False, got 'yes'"),
        ({"system": [SYSTEM]}, "expected system to be a string, got .*: write the text alone"),
        ({"chat_template_kwargs": ["thinking"]}, "expected chat_template_kwargs to be a mapping, got"),
        ({"chat_template_kwargs": {"tokenize": True}}, r'variables of the chat template, got "tokenize": leave it out'),
        ({"max_prompt_tokens": 0}, "expected max_prompt_tokens to be a whole number above 0 or None, got 0"),
        ({"too_long": "skip"}, "expected too_long error or drop, got 'skip'"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptDataset([{"prompt": "a", "question": "b"}], **options)
    with pytest.raises(ValueError, match=message):
        PromptDataModule([{"prompt": "a", "question": "b"}], 1, **options)


def test_options_beside_a_prompt_dataset_are_refused() -> None:
    rows = PromptDataset([{"q": [2], "n": 1}], columns={"prompt": "q"})
    with pytest.raises(ValueError, match='expected options in the PromptDataset, got "system", "split" next to it'):
        PromptDataModule(rows, 1, system="e", split="train")
    data = PromptDataModule(rows, 1, validation=[{"p": [3]}], columns={"prompt": "p"})
    data.connect(None, None)
    assert data.take(1)[0].token_ids == (2,) and data.validation is not None
    assert data.validation.prompt(0).token_ids == (3,)


@pytest.mark.parametrize(
    "name", ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"]
)
def test_a_column_that_would_take_the_place_of_what_rewards_are_given_is_refused(name: str) -> None:
    message = rf'which are arguments of rewards, got "{name}" in .*: rename, as in columns=\{{"my_{name}": "{name}"'
    rows = [{"prompt": "a", name: [7]}]
    with pytest.raises(ValueError, match=message):
        PromptDataModule(rows, 1).setup("fit")
    with pytest.raises(ValueError, match=message):
        PromptDataset(datasets.Dataset.from_list(rows))
    with pytest.raises(ValueError, match=message):
        prompt_of({"prompt": "a"}, preprocess=lambda row: {**row, name: [7]})
    assert prompt_of(rows[0], columns={"mine": name})[2] == {"mine": [7]}


VERL = {
    "prompt": "a b",
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"at": {"split": "c"}},
}


@pytest.mark.parametrize("table", [False, True], ids=["list", "Dataset"])
def test_an_entry_of_a_column_is_a_column(table: bool) -> None:
    source = datasets.Dataset.from_list([VERL]) if table else [VERL]
    columns = {"prompt": "extra_info.at.split", "answer": "reward_model.ground_truth"}
    rows = PromptDataset(source, columns=columns)
    rows.connect(chat_tokenizer())
    prompt = rows.prompt(0)
    assert prompt.content == "c" and prompt.columns["answer"] == "7"
    assert prompt.columns["reward_model"] == VERL["reward_model"], "the column itself stays"
    with pytest.raises(ValueError, match=r'an entry "truth" of "reward_model.truth" in prompt 0, got "style", "grou'):
        PromptDataset(source, columns={"answer": "reward_model.truth"}).connect(chat_tokenizer())
    with pytest.raises(ValueError, match=r'got no "reward.truth" in .*, which has "prompt"'):
        PromptDataset(source, columns={"answer": "reward.truth"})


def test_a_column_with_a_dot_in_its_name_is_that_column() -> None:
    row = {"prompt": "a", "x.y": 1, "x": {"y": 2}}
    assert prompt_of(row, columns={"answer": "x.y"})[2] == {"answer": 1, "x": {"y": 2}}


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "arguments": arguments}}


CALLS = [
    {"prompt": [USER, {"role": "b", "content": "", "tool_calls": [call(city="Bonn", at=[{"x": "1"}])]}, USER], "n": {}},
    {"prompt": [USER, {"role": "b", "content": "", "tool_calls": [call(a="1", at=[{"y": {"z": "2"}}])]}, USER]},
]
WITH_NULL = call(city="Bonn", a=None, at=[{"x": "1", "y": None}])
NULLS = [{"prompt": [USER, {"role": "b", "content": "", "tool_calls": [WITH_NULL]}, USER]}, CALLS[1]]


def written_calls() -> Any:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }} {% for call in m['tool_calls'] %}"
        "{{ call['function']['name'] }} {{ call['function']['arguments'] | tojson }} {% endfor %}{% endfor %}"
    )
    return tokenizer


@pytest.mark.parametrize("kind", ["Dataset", "parquet", "pandas", "jsonl", "null"])
def test_the_same_calls_are_the_same_prompts_and_data_from_every_source(kind: str, tmp_path: Path) -> None:
    rows = [{"prompt": row["prompt"], "info": row["prompt"][1]} for row in CALLS]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {
        "Dataset": lambda: table,
        "parquet": lambda: tmp_path / "a.parquet",
        "pandas": lambda: pandas.read_parquet(tmp_path / "a.parquet").to_dict("records"),
        "jsonl": lambda: tmp_path / "a.jsonl",
        "null": lambda: [{**row, "prompt": other["prompt"]} for row, other in zip(rows, NULLS, strict=True)],
    }[kind]()
    listed, other = PromptDataset(rows), PromptDataset(source)
    assert listed.fingerprint == other.fingerprint
    for each in (listed, other):
        each.connect(written_calls())
    assert [prompt.content for prompt in other.prompts([0, 1])] == [row["prompt"] for row in rows]
    assert other.prompt(0).token_ids == listed.prompt(0).token_ids and listed.fingerprint == other.fingerprint


def test_the_fingerprint_is_over_what_the_policy_reads() -> None:
    def connected(template: str, rows: Any = ("a",), **options: Any) -> str:
        tokenizer, data = chat_tokenizer(), PromptDataset(list(rows), **options)
        tokenizer.chat_template = template
        data.connect(tokenizer)
        return data.fingerprint

    first = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    prints = [connected(first, chat=True), connected(first + "b", chat=True), connected("b" + first, chat=True)]
    assert prints[0] == connected(first, [[{"role": "user", "content": "a"}]]), "one content in two forms"
    assert len(set(prints)) == 3
    assert prints[0] == connected(first + "{% if x is defined %}b{% endif %}", chat=True)


SCHEMA = {"type": "function", "function": {"name": "d", "description": "e", "parameters": {"type": "object"}}}
WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
    "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}b{% endif %}"
    "{% if thinking is defined and thinking %} m{% endif %}"
)
ASK = {"role": "user", "content": "c"}
ROW_OPTIONS: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"tools": [SCHEMA]}, (5, 4, 3)),
    ({"tools": json.dumps([SCHEMA])}, (5, 4, 3)),
    ({"tools": [SCHEMA["function"]]}, (5, 4, 3)),
    ({"tools": []}, (4, 3)),
    ({"tools": None, "chat_template_kwargs": None}, (4, 3)),
    ({"chat_template_kwargs": {"thinking": True}}, (4, 3, 14)),
    ({"chat_template_kwargs": {"thinking": False}}, (4, 3)),
    ({"chat_template_kwargs": {"thinking": True}, "tools": [SCHEMA]}, (5, 4, 3, 14)),
]


@pytest.mark.parametrize("kind", ["list", "Dataset", "stream"])
@pytest.mark.parametrize(("columns", "ids"), ROW_OPTIONS, ids=str)
def test_tools_and_variables_of_a_row_are_in_its_prompt(
    columns: dict[str, Any], ids: tuple[int, ...], kind: str
) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = WITH_TOOLS
    rows: Any = [{"prompt": [ASK], **columns}]
    if kind != "list":
        rows = datasets.Dataset.from_list([*rows, {"prompt": [ASK], **columns}])
        rows = rows.to_iterable_dataset() if kind == "stream" else rows
    data = PromptDataModule(rows, 1, epoch_length=1, shuffle=False, chat_template_kwargs={"thinking": None})
    data.connect(tokenizer, None)
    (prompt,) = data.take(1)
    assert prompt.token_ids == ids and columns.keys() <= prompt.columns.keys()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tools": ["search"]}, r"expected tools of prompt 0 .* to be a list of JSON schemas.* got \['search'\]"),
        ({"tools": "search"}, r"expected tools of prompt 0 .* to be a list of JSON schemas"),
        ({"chat_template_kwargs": ["thinking"]}, r"expected chat_template_kwargs of prompt 0 .* to be a mapping"),
        ({"chat_template_kwargs": {"tokenize": False}}, r'variables of the chat template, got "tokenize"'),
    ],
)
def test_wrong_tools_and_variables_of_a_row_are_named(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptDataset([{"prompt": [ASK], **columns}]).connect(chat_tokenizer())


def test_tools_that_the_template_drops_are_named_for_each_row() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = WITH_TOOLS.replace("tools or []", "(tools or [])[:1]")
    second = {"type": "function", "function": {**SCHEMA["function"], "name": "f"}}
    rows = [{"prompt": [ASK]}, {"prompt": [ASK], "tools": [SCHEMA]}, {"prompt": [ASK], "tools": [SCHEMA, second]}]
    with pytest.raises(ValueError, match=r"all parts of prompt 2 .* drops the tool f"):
        PromptDataset(rows).connect(tokenizer)


def test_parts_of_text_are_a_text() -> None:
    parts = [{"type": "text", "text": "c "}, {"type": "text", "text": "d"}]
    assert prompt_of([{"role": "a", "content": parts}])[:2] == ([USER], (2, 4, 5, 3))
    table = datasets.Dataset.from_list([{"prompt": [{"role": "a", "content": parts}]}])
    data = PromptDataset(table)
    data.connect(chat_tokenizer())
    assert data.prompt(0).content == [USER]
    for other in ([*parts, {"type": "image"}], [{"type": "image", "image": "x"}], [{"text": 3}]):
        with pytest.raises(ValueError, match=r"no pictures|sound and videos"):
            prompt_of([{"role": "a", "content": other}])


def test_an_answer_that_the_policy_goes_on_with_is_at_the_end_of_the_prompt() -> None:
    begun = [ASK, {"role": "assistant", "content": "d e"}]
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = WITH_TOOLS
    rows = [{"prompt": begun, "chat_template_kwargs": {"continue_final_message": True}}]
    for data in (
        PromptDataset(rows),
        PromptDataset([begun], chat_template_kwargs={"continue_final_message": True}),
        PromptDataset([begun, [ASK]], chat_template_kwargs={"continue_final_message": True}),
    ):
        data.connect(tokenizer)
        assert data.prompt(0).token_ids == (4, 5, 6)
        assert data.prompt(len(data) - 1).token_ids == ((4, 5, 6) if len(data) == 1 else (4, 3))
    with pytest.raises(ValueError, match=r'"continue_final_message": True'):
        PromptDataset([begun]).connect(tokenizer)


def test_a_chat_that_a_table_has_as_text_is_a_chat(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": 'say "c"'}, {"role": "assistant", "content": "d"}, ASK]
    texts = [json.dumps(chat), json.dumps(chat, indent=1), f" {chat}"]
    for text in texts:
        for form in (PromptForm(), PromptForm(chat=True), PromptForm(system="e")):
            assert form.read({"prompt": text}, "row").content[-3:] == form.read(text, "row").content[-3:] == chat
    pandas.DataFrame({"messages": [chat, [ASK]], "options": [{"thinking": True}] * 2}).to_csv(
        tmp_path / "a.csv", index=False
    )
    rows = PromptDataset(tmp_path / "a.csv", columns={"chat_template_kwargs": "options"})
    rows.connect(chat_tokenizer())
    assert rows.prompt(0).content == chat and rows.prompt(1).token_ids[-1] == 14
    for text in ("[3, 4]", '["a"]', "[{x}]", '[{"roles": 3}]', "The chat [{'role': 'user'}] is", "[]", "[{}]"):
        assert PromptForm().read({"prompt": text}, "row").content == text
    for text in (json.dumps(chat)[:-3], "[{'from': 'human', 'value': 'c'}]", str(np.array(chat))):
        with pytest.raises(ValueError, match=r"expected .* row \(column prompt\)"):
            PromptForm().read({"prompt": text}, "row")


@pytest.mark.parametrize("kind", ["run", "row", "stream"])
def test_a_variable_that_the_template_does_not_have_is_refused_with_the_nearest(kind: str) -> None:
    options: Any = {"chat_template_kwargs": {"thinkng": False}}
    rows: Any = [{"prompt": [ASK], **(options if kind != "run" else {})}, {"prompt": [ASK]}]
    if kind == "stream":
        rows = datasets.Dataset.from_list(rows).to_iterable_dataset()
    data = PromptDataModule(rows, 1, epoch_length=1, **(options if kind == "run" else {}))
    with pytest.raises(
        ValueError, match=r'variables of the chat template, got "thinkng" for prompt .*: write "thinking"'
    ):
        data.connect(chat_tokenizer(), None)
    for name in ("contents", "raise", "role", "of"):
        with pytest.raises(ValueError, match=f'variables of the chat template, got "{name}"'):
            PromptDataset([{"prompt": [ASK]}], chat_template_kwargs={name: 1}).connect(chat_tokenizer())
    PromptDataset([{"prompt": [ASK]}], chat_template_kwargs={"documents": None}).connect(chat_tokenizer())


def test_an_entry_of_nothing_is_none() -> None:
    rows = [{"prompt": [2], "rm": None}, {"prompt": [3], "rm": {"g": {"h": "1"}}}, {"prompt": [4], "rm": {"g": None}}]
    for source in (rows, datasets.Dataset.from_list(rows)):
        data = PromptDataset(source, columns={"answer": "rm.g.h"})
        assert [data.prompt(number).columns["answer"] for number in range(3)] == [None, "1", None]
    with pytest.raises(ValueError, match=r'expected an entry "h" of "rm.h" in prompt 1, got "g"'):
        PromptDataset(rows, columns={"answer": "rm.h"}).prompt(1)
