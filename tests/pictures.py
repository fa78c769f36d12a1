"""Takes the pictures of a page of docs: of a run of the quickstart whose engine has old weights from rollout 12 on.

python -m tests.pictures docs/report
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "recipes")]

import sorting_task as task  # noqa: E402
from kit.browser import Browser, chromium  # noqa: E402
from kit.stale_engine import StaleEngine  # noqa: E402
from lightning.pytorch import Callback, Trainer  # noqa: E402
from PIL import Image  # noqa: E402
from torch.optim import AdamW  # noqa: E402

from lightning_rl import GRPO, PromptDataModule, RLLightningModule, SamplingParams  # noqa: E402
from lightning_rl.audit import SignalLedger  # noqa: E402
from lightning_rl.callbacks import OPSM, NoEOSMask  # noqa: E402
from lightning_rl.reporting import RolloutSummary, RunReport  # noqa: E402

ROLLOUTS, SINCE, COLOURS = 24, 12, 160


def stale_run(folder: Path) -> Path:
    """Trains; returns the report."""
    module = RLLightningModule(
        policy=partial(task.warm_started_policy, 0), tokenizer=task.sorting_tokenizer(), rewards=task.exactly_sorted,
        engine=StaleEngine(SINCE), sampling=SamplingParams(max_new_tokens=12), group_size=8, advantages=GRPO(),
        optimizer=partial(AdamW, lr=3e-4, weight_decay=0.0, fused=True),
    )  # fmt: skip
    data = PromptDataModule(task.sorting_prompts(64, seed=0, exclude=task.held_out_prompts()), 32)
    callbacks: list[Callback] = [NoEOSMask(), OPSM(1e-3), SignalLedger(ROLLOUTS), RolloutSummary(), RunReport(1)]
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=ROLLOUTS, logger=False, enable_checkpointing=False,
        callbacks=callbacks, default_root_dir=folder / "sorting" / "stale",
    )  # fmt: skip
    trainer.fit(module, data)
    return folder / "sorting" / "stale" / "report" / "report.html"


def keep(picture: Image.Image, path: Path) -> None:
    """Writes a picture in few colours."""
    picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def take(browser: Browser, target: Path, name: str) -> None:
    """A picture of what is shown."""
    browser.ask("new Promise((done) => setTimeout(done, 400))")
    path = target / f"{name}.png"
    browser.picture(path)
    keep(Image.open(path), path)


def main(target: Path) -> None:
    """Runs, clicks, and keeps what is seen."""
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder)) as browser:
        report = stale_run(Path(folder))
        browser.size(1280, 800)
        browser.open(report)
        take(browser, target, "curves")
        browser.size(1280, 1000, dark=True)
        browser.open(report, browser.ask("document.querySelector('#main .notice a').getAttribute('href')"))
        take(browser, target, "point")
        browser.size(1280, 800)
        browser.open(report, browser.ask("document.querySelector('#moved-tokens a').getAttribute('href')"))
        take(browser, target, "tokens")
        browser.size(400, 800, dark=True)
        browser.open(report, "#rollout?rollout=20&colour=advantage")
        take(browser, target, "narrow")
        browser.size(400, 800)
        browser.open(report, "#flow?step=11")
        take(browser, target, "flow")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
