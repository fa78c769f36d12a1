"""The critic's value of a token is read from the hidden state that predicts it."""

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts
from torch import Tensor
from torch.optim import AdamW

from lightning_rl.audit import SignalAudit
from lightning_rl.policy import PolicyModel

VALUES = PolicyModel._values  # noqa: SLF001


def shifted(self: PolicyModel, states: Tensor, layout: Any, *, places: int) -> Tensor | None:
    """Return at each token the value of an earlier one, or of a later one."""
    values = VALUES(self, states, layout)
    if values is None:
        return None
    columns = torch.arange(values.shape[1]) - places
    return values[:, columns.clamp(0, values.shape[1] - 1)]


@pytest.mark.parametrize(
    ("places", "observed"),
    [(0, None), (1, "of an earlier position"), (2, "of an earlier position"), (-1, "of a later position")],
)
def test_a_critic_that_reads_another_position_is_found(places: int, observed: str | None) -> None:
    options = {"advantages": "gae", "critic": "shared", "policy": tiny_policy, "optimizer": partial(AdamW, lr=0.05)}
    audit = SignalAudit(1, checks=["value_positions", "first_forward"])
    with patch.object(PolicyModel, "_values", lambda *given: shifted(*given, places=places)):
        module = tiny_module(**options)
        with pytest.warns(UserWarning, match="value_positions") if observed else nullcontext():
            fit(module, callbacks=[audit], data=tiny_prompts(16, 4), max_steps=6)
    found = {(finding.check, finding.observed.partition(", such as those ")[2]) for finding in audit.findings}
    assert found == ({("value_positions", observed)} if observed else set())
