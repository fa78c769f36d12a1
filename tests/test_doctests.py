"""The examples in the docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import lightning_rl
from lightning_rl import callbacks

MODULES = sorted(
    {"lightning_rl", "lightning_rl.callbacks"}.union(
        module.name
        for package in (lightning_rl, callbacks)  # without its symlink, callbacks is not found below lightning_rl
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    )
)


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_the_module_are_true(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    assert any(found.examples for module in MODULES for found in finder.find(importlib.import_module(module)))
