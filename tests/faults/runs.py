"""Short audited runs with a fault or without one."""

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from kit.support import fit, tiny_module, tiny_policy
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW

from lightning_rl import PromptDataModule
from lightning_rl.audit import SignalAudit

TEMPERATURE = 0.5


def audit_run(
    callbacks: Sequence[Callback],
    options: dict[str, Any],
    data: PromptDataModule,
    *,
    folder: Path,
    max_steps: int = 6,
    trainer: dict[str, Any] | None = None,
    patches: Sequence[Any] = (),
) -> tuple[list[tuple[str, str]], str]:
    """Audit every rollout of a fit.

    Returns:
        Check and culprit of each finding, and the error that ended the run, or an empty string.
    """
    settings = {"temperature": TEMPERATURE, "optimizer": partial(AdamW, lr=0.05), "policy": tiny_policy}
    audit, raised = SignalAudit(1), ""
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for patched in patches:
            stack.enter_context(patched)
        module = tiny_module(**{**settings, **options})
        limits: dict[str, Any] = {"max_steps": max_steps, "default_root_dir": folder, **(trainer or {})}
        try:
            fit(module, callbacks=[*callbacks, audit], data=data, logger=CSVLogger(folder), **limits)
        except Exception as error:  # noqa: BLE001  a fault may also break the run
            raised = f"{type(error).__name__}: {error}"
    return [(finding.check, finding.culprit) for finding in audit.findings], raised
