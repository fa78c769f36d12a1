"""Roles of the models of a run: policy, critic, reference and teacher. Every check of a model names its role."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Role = Literal["policy", "critic", "reference", "teacher"]
TRAINED: tuple[Role, ...] = ("policy", "critic")


@contextmanager
def name_role(role: Role) -> Iterator[None]:
    """Put the role of a model before the message of a ValueError that is raised inside."""
    try:
        yield
    except ValueError as error:
        error.args = (f"{role}: {error}",)
        raise
