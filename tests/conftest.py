"""One thread, so that tests are bitwise reproducible and two workers share two cores; no deadline, on slow machines."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("reproducible", deadline=None, derandomize=True)
settings.load_profile("reproducible")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
