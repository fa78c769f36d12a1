"""Parts of a conversation that a chat template drops, by role and kind, and that no other part counts as dropped."""

from typing import Any

import pytest
from jinja2 import Environment
from kit.support import tiny_tokenizer

from lightning_rl.data import PromptDataset
from lightning_rl.data.dropped_parts import dropped_parts
from lightning_rl.environments import Bridge, BridgeError

USER, SYSTEM = {"role": "user", "content": "2 + 2?"}, {"role": "system", "content": "Add."}
ANSWER, RESULT = {"role": "assistant", "content": "4"}, {"role": "tool", "name": "add", "content": "4"}
CALL = {"function": {"name": "add", "arguments": {"a": 2}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "add_all")]
EVERY = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ (call.function or call).name }}{% endfor %}{% endfor %}"
)
CHATML = "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim | tojson }}{% endfor %}"
LAST = "{{ messages[-1].content }}"
NO_SYSTEM = "{% for m in messages if m.role in ('user', 'assistant', 'tool') %}{{ m.content }}{% endfor %}"
EITHER = "{{ messages[0].content if messages[0].role == 'system' else tools | tojson }}{{ messages[-1].content }}"
FIRST_TOOL = "{{ tools[0] | tojson }}{{ messages[-1].content }}"
FIRST_CALL = "{% for m in messages %}{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}{% endfor %}"
SYSTEM_TEXT, CALL_TEXT = "the text of the role system", "a tool call of the role assistant"
BOTH_TOOLS = ["the tool add", "the tool add_all"]


def render(template: str) -> Any:
    environment = Environment(autoescape=False)
    return lambda messages, tools: environment.from_string(template).render(messages=messages, tools=tools or None)


@pytest.mark.parametrize(
    ("template", "messages", "tools", "lost"),
    [
        pytest.param(EVERY, [SYSTEM, USER, CALLING, RESULT, ANSWER, USER], TOOLS, [], id="every part"),
        pytest.param(EVERY, [USER, {**CALLING, "tool_calls": [CALL["function"]]}, RESULT], (), [], id="flat call"),
        pytest.param(CHATML, [SYSTEM, USER], (), [], id="trimmed and escaped"),
        pytest.param(CHATML.replace("trim", "upper"), [SYSTEM, USER], (), [], id="capitalized"),
        pytest.param(CHATML, [SYSTEM, USER], TOOLS, BOTH_TOOLS, id="tools"),
        pytest.param(CHATML, [{"role": "user", "content": "add or add_all"}], TOOLS, BOTH_TOOLS, id="names in a text"),
        pytest.param(CHATML, [USER, CALLING, RESULT], (), [CALL_TEXT], id="calls"),
        pytest.param(FIRST_CALL, [USER, CALLING, RESULT], (), [CALL_TEXT], id="second call"),
        pytest.param(FIRST_TOOL, [USER], TOOLS, ["the tool add_all"], id="second tool"),
        pytest.param(EITHER, [USER], TOOLS, [], id="tools without a system message"),
        pytest.param(EITHER, [SYSTEM, USER], TOOLS, BOTH_TOOLS, id="tools beside a system message"),
        pytest.param(NO_SYSTEM, [SYSTEM, USER], (), [SYSTEM_TEXT], id="system message"),
        pytest.param(NO_SYSTEM, [USER], (), [], id="no system message"),
        pytest.param(
            LAST,
            [USER, ANSWER, USER],
            (),
            ["the text of the role user", "the text of the role assistant"],
            id="earlier messages",
        ),
        pytest.param(CHATML, [{"role": "system", "content": " "}, USER], (), [], id="empty text"),
        pytest.param(
            FIRST_CALL, [USER, {**CALLING, "content": "So:", "tool_calls": [CALL]}], (), [], id="text of a call"
        ),
        pytest.param("{{ missing.name }}", [USER], TOOLS, [], id="a template that raises"),
    ],
)
def test_the_parts_that_a_template_drops_are_named(template: str, messages: Any, tools: Any, lost: list[str]) -> None:
    assert dropped_parts(render(template), messages, tools) == lost


def test_a_row_whose_system_message_the_template_drops_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = NO_SYSTEM
    rows = PromptDataset([{"prompt": [USER]}, {"prompt": [SYSTEM, USER]}])
    message = "expected a chat template that writes all parts of prompt 1 .*drops the text of the role system: set a"
    with pytest.raises(ValueError, match=message):
        rows.connect(tokenizer)
    tokenizer.chat_template = CHATML
    rows.connect(tokenizer)


def test_messages_before_are_not_compared() -> None:
    assert dropped_parts(render(LAST), [USER], before=[SYSTEM, USER, ANSWER]) == []
    assert dropped_parts(render(LAST), [RESULT, USER], before=[USER]) == ["the text of the role tool"]


def search(query: str) -> str:
    """Search.

    Args:
        query: Words.
    """
    return query


@pytest.mark.parametrize("tool", [TOOLS[0], search])
def test_tools_among_the_options_of_the_template_have_to_be_written(tool: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML
    rows = PromptDataset([{"prompt": [USER]}], chat_template_kwargs={"tools": [tool]})
    with pytest.raises(ValueError, match=r"all parts of prompt 0.*drops the tool (add|search): set a"):
        rows.connect(tokenizer)
    tokenizer.chat_template = EVERY
    PromptDataset([{"prompt": [USER]}], chat_template_kwargs={"tools": [tool]}).connect(tokenizer)


FRONT = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ m.role }}{{ m.content }}{% endfor %}"
)


def test_a_late_system_message_that_the_template_moves_to_the_front_is_refused() -> None:
    roles = ["system", "user", "assistant", "system", "user"]
    talk = [{"role": role, "content": "a"} for role in roles]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = FRONT
    moved = "writes the text of the role system before the answer that it follows"
    with pytest.raises(ValueError, match=f"{moved}.*: give it the role user"):
        PromptDataset([{"prompt": talk}]).connect(tokenizer)
    PromptDataset([{"prompt": talk[:2]}, {"prompt": talk[:3] + talk[4:]}]).connect(tokenizer)
    with pytest.raises(BridgeError, match=moved):
        Bridge(tokenizer, [1]).check_parts(talk[1:])
