"""Declares the operators of torchvision that its modules name, when torchvision is imported.

The package of the index has them in a library for CUDA, which does not load beside a CPU build of torch; pictures are
resized without it. ``make`` copies this file into the environment of vLLM, where every process runs it at its start.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

from typing_extensions import override


class Operators(MetaPathFinder):
    """Finder that finds nothing, but declares the operators before torchvision is looked for."""

    @override
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Declare the operators once."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            KEPT.append(self)


KEPT: list[Operators] = []  # the declarations end with their library
sys.meta_path.insert(0, Operators())
