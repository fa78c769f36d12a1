"""Parser of calls without tags around each: JSON objects, or calls in Python, up to the end of an answer."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from lightning_rl.environments.environment import Action, ToolCall
from lightning_rl.environments.thoughts import ThoughtParser

PYTHON_TAG = "<|python_tag|>"  # before calls of Llama 3
BARE = re.compile(r'(```\w*)?\s*\[?\s*(\{\s*"(name|type|function|arguments|parameters)"|(?<=\[)\s*[A-Za-z_][\w.]*\()')
PYTHON = re.compile(r"\[?\s*([A-Za-z_][\w.]*)\(")
AROUND = re.compile(r"^\s*```\w*|\s*(```|<[|/][^<>]*>\s*)+$")
ARGS = r"(?:\[TOOL_CALLS\])?([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*"  # before the arguments in Mistral's later models
BETWEEN = re.compile(rf"[\s;,\[\]]*(?:{ARGS})?(?=\{{)")
KEYS = r"(?:name|function|function_name|tool|tool_name|recipient_name|action)"
MARK = r"(?:<[|\uff5c]?[^<>/\n]*(?:tool|call|func|python|invoke)[^<>/\n]*>|\[[A-Z_]*(?:TOOL|CALL|FUNC)[A-Z_]*\])"
CALL_FORMS = (  # with NAME for the names of tools
    rf"""\b{KEYS}\\?["']?\s*[:=]\s*\\?["'](?:functions\.)?NAME\\?["']""",  # JSON, a dictionary, an attribute
    r"""<(?:function|tool|call|invoke|tool_call)?\s*[=:]?\s*["']?NAME["']?[\s>/]""",  # a tag with the name
    rf"{MARK}\s*(?:functions\.)?NAME\b|\bfunctions\.NAME\b|\bNAME\s*(?:<arg_|\[ARGS\])",
    r"^[^\w\n]*(?:(?:tool|function|call|action)\W{1,4})?NAME\W{0,4}\{",  # the name before an object
    r"^[^\w\n]*(?i:action|tool|function|tool call|function call)\W{0,4}:\W{0,4}NAME[^\w\n]*$",
    r"""\bNAME(?:\.call)?\(\s*(?:\w+\s*=(?!=)|\{|["'])[^\n]*?(?:\)[^\w\n]*$|\Z)""",  # Python up to the end of a line
    r"^[^\w\n]*(?:\w+\s*=\s*|await\s+|print\()?NAME(?:\.call)?\([^()\n]*\)[^\w\n]*$",
)
UNREAD = "is in a form that is not read here, so it was not made"
ARGUMENTS = {"arguments": 0, "parameters": 0}.keys()
CALL_KEYS = {*ARGUMENTS, "name", "id", "type", "index"}
CONSTANTS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class JsonParser(ThoughtParser):
    """Parser of calls as JSON, alone, in a list or between ``;``, or as calls in Python with named arguments.

    They follow an opening, or are all of the answer but its thoughts. Formats: Llama 3 and 4, Mistral, Granite,
    Phi-4-mini, xLAM. What begins like a call is a call or an error, never text.

    Args:
        tokenizer: Tokenizer of the ids.
        opening: Text that the chat template writes before calls; empty if it writes none.
    """

    opening: str = ""

    @override
    def read(self, token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]) -> Action:
        ids, added, marks = list(token_ids), self.tokenizer.added_tokens_decoder, (self.opening, PYTHON_TAG)
        while ids and ids[-1] in added and added[ids[-1]].special and added[ids[-1]].content not in marks:
            ids.pop()
        said = str(self.tokenizer.decode(ids))
        openings = [said.find(mark) for mark in marks if mark and mark in said]
        if openings:
            start = min(openings)
            mark = next(mark for mark in marks if mark and said.startswith(mark, start))
            calls, errors = _read(said[start + len(mark) :])
            return Action(text=said[:start].strip(), tool_calls=calls, errors=errors)
        names = {str(tool.get("function", tool).get("name")) for tool in tools}
        named = re.search(rf'(?:\[\s*)?\{{\s*"name":\s*"({"|".join(map(re.escape, names))})"', said) if names else None
        if named or BARE.match(said.strip()):
            start = named.start() if named and not BARE.match(said.strip()) else 0
            calls, errors = _read(said[start:], names)
            if calls or errors:
                return Action(text=said[:start].strip(), tool_calls=calls, errors=errors)
        return with_unread_call(Action(text=said.strip()), tools)


def with_unread_call(answer: Action, tools: Sequence[Any]) -> Action:
    """Return an answer without calls with an error if its text names a tool in a form of calls of any family."""
    names = [str(tool.get("function", tool).get("name")) for tool in tools]
    if not names or answer.tool_calls or answer.errors:
        return answer
    any_name = f"(?:{'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})"
    for form in CALL_FORMS:
        if found := re.search(form.replace("NAME", any_name), answer.text, re.MULTILINE):
            name = next(name for name in names if name in found[0])
            return replace(answer, errors=[f"the call of {name} {UNREAD}"])
    return answer


def function_in(value: Any) -> Any:
    """Return the function of a call, which may be the call itself."""
    function = value.get("function", value) if isinstance(value, Mapping) else value
    return function if isinstance(function, Mapping) else value


def read_call(function: Any, **more: Any) -> ToolCall:
    """Return a call from its name and its arguments, or parameters, as an object or JSON text.

    Raises:
        ValueError: If there is no name, or the arguments are something else or under another key.
    """
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"a tool call needs a name and an object of arguments, got {function!r:.500}")
    name, given = function["name"], [key for key in ARGUMENTS if function.get(key) is not None]
    got = given[1:] if given else sorted(function.keys() - CALL_KEYS)
    if got:
        raise ValueError(f"a call of {name} needs all of its arguments in the object arguments, got {', '.join(got)}")
    arguments = function[given[0]] if given else {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments of {name} are no JSON: {arguments!r:.500}: {error}") from error
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of {name} have to be an object, got {arguments!r:.500}")
    return ToolCall(name=name, arguments=dict(arguments), **more)


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
        function = function_in(value)
        if names is not None and not ARGUMENTS & function.keys() and function.get("name") not in names:
            continue  # an answer in JSON
        try:
            calls.append(read_call(function, id=value.get("id")))
        except ValueError as error:
            faults.append(str(error))
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
