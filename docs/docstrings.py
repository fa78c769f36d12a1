"""Shows docstrings that are written for Sphinx in the reference of the site."""

import ast
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.append(str(Path(__file__).parent))  # last: site.py beside this file is no module of Python's

from roles import markdown


class Markdown(griffe.Extension):
    """Extension that rewrites each docstring before it is parsed."""

    def on_instance(self, *, node: ast.AST | griffe.ObjectNode, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object; if its file has the formula of a class, prepend that of the file."""
        del node
        if obj.docstring is None:
            return
        obj.docstring.value = markdown(obj.docstring.value)
        file = obj.parent.docstring if obj.is_class and obj.parent is not None and obj.parent.is_module else None
        if file is not None and "$$" in file.value and "$$" not in obj.docstring.value:
            obj.docstring.value = f"{file.value}\n\n{obj.docstring.value}"
