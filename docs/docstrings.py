"""Shows docstrings that are written for Sphinx in the reference of the site."""

import ast
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.append(str(Path(__file__).parent))  # last: site.py beside this file is no module of Python's

from roles import markdown


class Markdown(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_instance(self, *, node: ast.AST | griffe.ObjectNode, obj: griffe.Object, **_: Any) -> None:
        """Rewrites that of one object."""
        del node
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
