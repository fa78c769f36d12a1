"""Parser of calls without tags around each: JSON objects, or calls in Python, up to the end of an answer."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl.environments.environment import Action, ToolCall

PYTHON_TAG = "<|python_tag|>"  # before calls of Llama 3
BARE = re.compile(r'(```\w*)?\s*\[?\s*(\{\s*"(name|type|function|arguments|parameters)"|(?<=\[)\s*[A-Za-z_][\w.]*\()')
PYTHON = re.compile(r"\[?\s*([A-Za-z_][\w.]*)\(")
AROUND = re.compile(r"^\s*```\w*|\s*(```|<[|/][^<>]*>\s*)+$")
ARGS = r"(?:\[TOOL_CALLS\])?([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*"  # before the arguments in Mistral's later models
BETWEEN = re.compile(rf"[\s;,\[\]]*(?:{ARGS})?(?=\{{)")
CONSTANTS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class JsonParser:
    """Parser of calls as JSON, alone, in a list or between ``;``, or as calls in Python with named arguments.

    They follow an opening, or are all of the answer after its reasoning. Formats: Llama 3 and 4, Mistral, Granite,
    Phi-4-mini, xLAM. What begins like a call is a call or an error, never text.

    Args:
        tokenizer: Tokenizer of the ids.
        opening: Text that the chat template writes before calls; empty if it writes none.
    """

    tokenizer: PreTrainedTokenizerBase
    opening: str = ""

    def __call__(self, token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]) -> Action:
        """Return the parts of an answer."""
        ids, added = list(token_ids), self.tokenizer.added_tokens_decoder
        while ids and ids[-1] in added and added[ids[-1]].special:
            ids.pop()
        text = str(self.tokenizer.decode(ids))
        thought, closed, said = text.partition("</think>")
        if not closed:
            prefix = str(self.tokenizer.decode(list(prefix_ids)[-8:])).rstrip()
            thinks = prefix.endswith("<think>") or text.lstrip().startswith("<think>")
            thought, said = (text, "") if thinks else ("", text)
        reasoning = thought.replace("<think>", "").strip() or None
        openings = [said.find(mark) for mark in (self.opening, PYTHON_TAG) if mark and mark in said]
        if openings:
            start = min(openings)
            mark = next(mark for mark in (self.opening, PYTHON_TAG) if mark and said.startswith(mark, start))
            calls, errors = _read(said[start + len(mark) :])
            return Action(text=said[:start].strip(), tool_calls=calls, reasoning=reasoning, errors=errors)
        names = {str(tool.get("function", tool).get("name")) for tool in tools}
        named = re.search(rf'\{{\s*"name":\s*"({"|".join(map(re.escape, names))})"', said) if names else None
        if named or BARE.match(said.strip()):
            start = named.start() if named and not BARE.match(said.strip()) else 0
            calls, errors = _read(said[start:], names)
            if calls or errors:
                return Action(text=said[:start].strip(), tool_calls=calls, reasoning=reasoning, errors=errors)
        return Action(text=said.strip(), reasoning=reasoning)


def _read(body: str, names: set[Any] | None = None) -> tuple[list[ToolCall], list[str]]:
    """Return the calls and the faults; where ``names`` are given, what calls none of them may be text."""
    calls, faults, values = list[ToolCall](), list[str](), list[Any]()
    body = AROUND.sub("", body).strip()
    try:
        values = _python_calls(body) if PYTHON.match(body) else []
        place, found = 0, None if values else BETWEEN.match(body)
        if not values and not found:
            raise ValueError("expected JSON objects with a name and arguments")
        while found:
            value, place = json.JSONDecoder().raw_decode(body, found.end())
            values.append({"name": found[1], "arguments": value} if found[1] else value)
            found = BETWEEN.match(body, place)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        python = PYTHON.match(body)
        if names is None or not python or python[1] in names:
            faults.append(f"a tool call could not be read: {error} in {body!r:.500}")
    for value in values:
        function = value.get("function", value) if isinstance(value, Mapping) else {}
        function = function if isinstance(function, Mapping) else value
        arguments = function.get("arguments", function.get("parameters"))
        if names is not None and arguments is None and function.get("name") not in names:
            continue  # an answer in JSON
        if not isinstance(function.get("name"), str) or not isinstance(arguments or {}, Mapping):
            faults.append(f"a tool call needs a name and an object of arguments, got {value!r:.500}")
            continue
        calls.append(ToolCall(name=function["name"], arguments=dict(arguments or {}), id=value.get("id")))
    return calls, faults


def _python_calls(body: str) -> list[dict[str, Any]]:
    """Return calls in Python, such as ``[look(x="one"), look(x="two")]``, as objects; arguments are literals."""
    values = [line.value for line in ast.parse(body).body if isinstance(line, ast.Expr)]
    nodes = [node for value in values for node in (value.elts if isinstance(value, ast.List | ast.Tuple) else [value])]
    calls: list[dict[str, Any]] = []
    for node in nodes:
        if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
            raise ValueError('expected calls with named arguments, such as [look(x="one")]')
        arguments = {one.arg: _literal(one.value) for one in node.keywords}
        calls.append({"name": ast.unparse(node.func).removesuffix(".call"), "arguments": arguments})
    return calls


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, in which constants may be written as in JSON."""

    class Constants(ast.NodeTransformer):
        @override
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.Constant(CONSTANTS[node.id]) if node.id in CONSTANTS else node

    return ast.literal_eval(Constants().visit(node))
