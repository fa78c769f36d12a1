"""One thread, so that tests are bitwise reproducible and two workers share two cores."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
