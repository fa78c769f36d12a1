"""The table of sizes in docs/strategies.md is what ``docs/sizes.py`` computes, and what the doctor would say of it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lightning_rl.cli.doctor.memory_estimate import too_much

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def sizes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sizes", DOCS / "sizes.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["sizes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_that_of_the_page(sizes: ModuleType) -> None:
    assert f"\n{sizes.table()}{sizes.END}" in (DOCS / "strategies.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "billions"), [("0.5B", 0.494), ("1.5B", 1.544), ("3B", 3.086), ("7B", 7.616), ("32B", 32.76)]
)
def test_the_models_have_the_parameters_of_qwen(sizes: ModuleType, name: str, billions: float) -> None:
    """Those of the model cards of Qwen2.5."""
    model = sizes.model_of(name)
    assert (model.inside + model.outside) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_7b_beside_vllm_on_one_device_of_141_gb_takes_a_smaller_share(sizes: ModuleType) -> None:
    """At 0.4 the second rollout would not fit: optimizer states lie there from the first step on."""
    fit = sizes.fit_of("7B", "141", 1, lora=False)
    assert fit.share == 0.33
    plan = sizes.plan_of(sizes.model_of("7B"), sizes.DEVICES["141"], 1, fit._replace(share=0.4), lora=False)
    (named,) = too_much(plan, sizes.DEVICES["141"])
    assert named.observed.startswith("generate needs about 142")
