"""Turns what docstrings write for Sphinx into Markdown, for the reference of the site: formulas, names of classes."""

import ast
import re
import textwrap
from typing import Any

import griffe

BLOCK = re.compile(r"^([ ]*)\.\. math::(?P<rest>[^\n]*)\n(?P<body>(?:\1[ ]+[^\n]*\n|\s*\n)*)", re.MULTILINE)
ROLE = re.compile(r":(math|class|func|meth|mod|attr):`~?([^`]+)`", re.DOTALL)


class Markdown(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_instance(self, *, node: ast.AST | griffe.ObjectNode, obj: griffe.Object, **_: Any) -> None:
        """Rewrites that of one object."""
        del node
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """A docstring with formulas as code and names of classes without their modules."""
    text = BLOCK.sub(_block, f"{text}\n")
    return ROLE.sub(_role, text).rstrip("\n")


def _block(match: re.Match[str]) -> str:
    indent = match[1]
    body = textwrap.dedent(match["body"]).strip("\n")
    formula = "\n".join(part for part in (match["rest"].strip(), body) if part)
    fenced = textwrap.indent(f"```text\n{formula}\n```", indent)
    return f"{fenced}\n\n"


def _role(match: re.Match[str]) -> str:
    words = " ".join(match[2].split())
    return f"`{words}`" if match[1] == "math" else f"`{words.rpartition('.')[2]}`"
