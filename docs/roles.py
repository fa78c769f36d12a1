"""Turns what docstrings write for Sphinx into Markdown: formulas between dollars, names of classes as code."""

import re
import textwrap

BLOCK = re.compile(r"^([ ]*)\.\. math::(?P<rest>[^\n]*)\n(?P<body>(?:\1[ ]+[^\n]*\n|\s*\n)*)", re.MULTILINE)
ROLE = re.compile(r":(math|class|func|meth|mod|attr):`~?([^`]+)`", re.DOTALL)


def markdown(text: str) -> str:
    """Return a docstring with formulas as TeX and names of classes without their modules."""
    text = BLOCK.sub(_block, f"{text}\n")
    return ROLE.sub(_role, text).rstrip("\n")


def _block(match: re.Match[str]) -> str:
    indent = match[1]
    body = textwrap.dedent(match["body"]).strip("\n")
    formula = "\n".join(part for part in (match["rest"].strip(), body) if part)
    return textwrap.indent(f"$$\n{formula}\n$$", indent) + "\n\n"


def _role(match: re.Match[str]) -> str:
    words = " ".join(match[2].split())
    return f"${words}$" if match[1] == "math" else f"`{words.rpartition('.')[2]}`"
