"""The recipe with a tool runs from its own command line, and its small policy learns to ask the calculator."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_tools
import torch
from tiny_gsm8k import IGNORED
from tools import calculate

from lightning_rl.environments import Action, ToolCall, ToolEnvironment, parser_for
from lightning_rl.rewards import NumberMatch

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tools.py"


@pytest.mark.nightly
def test_held_out_greedy_success_rises(tmp_path: Path) -> None:
    command = [sys.executable, RECIPE, "--tiny"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = re.search(r"^val/greedy/pass@1 before=(\S+) after=(\S+)$", ran.stderr, re.MULTILINE)
    assert found, ran.stderr[-500:]
    assert float(found[1]) <= 0.4 and float(found[2]) >= 0.7
    (folder,) = (tmp_path / "runs" / "tools").iterdir()
    rows = (folder / "metrics.csv").read_text().splitlines()
    assert "env/tool_calls" in rows[0] and "env/parse_errors" in rows[0] and len(rows) > 16


@pytest.mark.parametrize(
    ("a", "operation", "b", "said"),
    [(48, "/", 2, "24"), (0.1, "+", 0.2, "0.3"), (7, "*", -3, "-21"), (1, "-", 2, "-1"), (1, "/", 3, "0.3333333333")],
)
def test_the_calculator_says_the_result_alone(a: float, operation: str, b: float, said: str) -> None:
    assert calculate(a, operation, b) == said


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"a": 1, "operation": "/", "b": 0}, "ZeroDivisionError"),
        ({"a": 1, "operation": "^", "b": 2}, r"operation: '\^' is not one of"),
        ({"a": "1", "operation": "+", "b": 2}, "a: '1' is not of type 'number'"),
    ],
)
def test_what_cannot_be_calculated_goes_back_to_the_policy(arguments: dict[str, object], error: str) -> None:
    call = ToolCall(name="calculate", arguments=arguments)
    (message,) = ToolEnvironment([calculate]).step(Action(text="", tool_calls=[call])).messages
    assert re.search(error, json.loads(str(message["content"]))["error"])


def test_every_calculation_has_a_right_result_and_no_question_lies_in_both_splits() -> None:
    train, test = map(tiny_tools.calculations, ("train", "test"))
    assert len(train) > 500 and len(test) > 50
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    for row in [*train, *test]:
        left, operation, right = row["question"].removeprefix("What is ").removesuffix("?").split()
        said = calculate(int(left), operation, int(right))
        assert NumberMatch(strict=True)(["?"], [f"#### {said}"], completion_ids=[], answer=[row["answer"]]) == [1.0]


def test_a_demonstration_is_what_the_chat_template_writes_and_the_parser_reads() -> None:
    tokenizer, row = tiny_tools.tiny_tokenizer(), tiny_tools.calculations("train")[0]
    assert row == {"question": "What is 48 / 2?", "answer": "#### 24"}
    question, call, said, answer = (text for text, _ in tiny_tools.demonstration(row, None))
    function = {"name": "calculate", "arguments": {"a": 48, "operation": "/", "b": 2}}
    messages = [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "24"},
        {"role": "assistant", "content": row["answer"]},
    ]
    tools = [{"type": "function", "function": {"name": "calculate"}}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)  # pyrefly: ignore[bad-argument-type]
    assert text == question + call + said + answer
    parsed = parser_for(tokenizer)(tokenizer(call)["input_ids"], tokenizer(question)["input_ids"], [])
    assert [(each.name, dict(each.arguments)) for each in parsed.tool_calls] == [tuple(function.values())]


def test_the_warm_start_counts_what_the_policy_says_alone() -> None:
    ids, labels = next(tiny_tools.warm_start_batches(0))
    assert torch.equal(ids[labels != IGNORED], labels[labels != IGNORED])
    texts = [
        str(tiny_tools.tiny_tokenizer().decode(row[mask])) for row, mask in zip(labels, labels != IGNORED, strict=True)
    ]
    assert all(
        re.fullmatch(r'<tool_call>\{"name": .*\}\}</tool_call><\|end\|>#### \d+<\|end\|>', text) for text in texts
    )
