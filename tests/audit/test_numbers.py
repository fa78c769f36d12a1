"""Numbers of a correction on another rank must not change its contribution."""

from dataclasses import replace

import pytest
from kit.evidence import culprits, evidence_of
from torch import Tensor
from typing_extensions import override

from lightning_rl import LossView, RLCallback
from lightning_rl.testing.properties.copies import numbers_of


class Adapted(RLCallback):
    """A weight with an adaptive number, and another number that is only logged."""

    name = "adapted"

    def __init__(self) -> None:
        self.coef, self.seconds = 0.5, 1.0

    @override
    def token_weight(self, view: LossView) -> Tensor:
        return self.coef * view.valid_tokens.to(view.logprobs.dtype)


@pytest.mark.parametrize(
    ("theirs", "found"),
    [
        ({"coef": 0.5, "seconds": 1.0}, []),
        ({"coef": 0.5, "seconds": 7.0}, []),
        ({"coef": 0.5 + 1e-9}, []),  # another order of a sum
        ({"coef": 0.6}, ["callback adapted.token_weight"]),
    ],
)
def test_a_coefficient_of_one_rank_alone_is_found(theirs: dict[str, float], found: list[str]) -> None:
    evidence = evidence_of(Adapted())
    numbers = [{"adapted": numbers_of(Adapted())}, {"adapted": theirs}]
    assert culprits("contributions_agree", replace(evidence, numbers=numbers)) == found
