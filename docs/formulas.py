"""Sets the formulas of the site as MathML, which browsers draw by themselves: no script, no font, no request.

A hook of MkDocs: the Markdown extension arithmatex finds formulas between dollars, and marks them.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

MARKED = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(page_html: str, **_: Any) -> str:
    """A page with its formulas set."""
    return MARKED.sub(_set, page_html)


def _set(match: re.Match[str]) -> str:
    display = "inline" if match[2] == "(" else "block"
    formula = convert(html.unescape(match[3]).replace(r"\operatorname*", r"\operatorname"), display=display)
    return formula if display == "inline" else f'<div class="formula">{formula}</div>'
