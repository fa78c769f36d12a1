"""Figures of the design that must not rise again; ``python -m tests.house`` prints them."""

import ast

import pytest

from tests.house import figures, records, sources

AT_MOST = {
    "modules and trainers annotated Any": 0,
    "factories that take a module": 0,
    "methods of the collector": 12,
    "files with tables by id(request)": 0,
    "files that spell rollout_kl": 5,
    "imports of the audit": 0,
    "files of the audit that import the module": 1,
    "attributes of the module that the audit reads": 15,
    "class names used twice": 0,
}


@pytest.mark.parametrize("name", AT_MOST)
def test_a_figure_of_the_design_does_not_rise(name: str) -> None:
    assert figures(sources())[name] <= AT_MOST[name]


def test_records_are_found_through_annotations_attributes_and_calls() -> None:
    text = """
from dataclasses import dataclass
@dataclass
class Prompt: ids: list[int]
@dataclass
class Request: prompt: "Prompt"
@dataclass
class Completion: ids: list[int]
@dataclass
class Score: value: float
@dataclass
class Apart: value: float
class Engine:
    def generate(self, requests: list[Request]) -> list[Completion]: ...
class Service:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
    def run(self, request: Request) -> float:
        found = self.engine.generate([request])
        return sum(Score(value=1.0).value for one in found)
    def make(self) -> Apart: ...
"""
    assert records([ast.parse(text)]) == {"Prompt", "Request", "Completion", "Score"}
