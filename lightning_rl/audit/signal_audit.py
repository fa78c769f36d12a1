"""Signal audit: look for quiet failures of the training signal while it trains.

Every so many rollouts the checks of :data:`lightning_rl.audit.CHECKS` look at the finished rollout, repeat stages of
the run on changed copies of a few rows, and compare what must not differ. A finding names the check, the culprit, the
rows, what was expected and what to do; the rollout that shows it is saved.

Source: metamorphic testing (Chen et al. 1998, "Metamorphic testing: a new approach for generating next test cases").
"""

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl.audit import draw_checks, loss_checks, metric_checks, score_checks, signal_checks
from lightning_rl.audit.checks import CHECKS, Check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import AuditError, Finding
from lightning_rl.generation import Completion, Request
from lightning_rl.hooks import RLCallback, Stat
from lightning_rl.losses import PolicyLoss
from lightning_rl.module import RLLightningModule
from lightning_rl.rollout import Rollout

REGISTERED = (draw_checks, loss_checks, metric_checks, score_checks, signal_checks)  # importing them fills CHECKS
FOLDER = "audit"


class SignalAudit(RLCallback):
    """Checks the signal of the rollouts 0, n, 2n, ...

    Logs ``signal_audit/findings``, the number of violated invariants so far, and ``signal_audit/seconds``, what the
    last audit took.

    Args:
        every_n_rollouts: how often.
        mode: ``"warn"`` or ``"raise"`` an :class:`~lightning_rl.audit.AuditError`.
        checks: names of those to run; None for all.

    Raises:
        ValueError: if an option is out of range or a check unknown; the message lists the known ones.
    """

    name = "signal_audit"

    def __init__(
        self, every_n_rollouts: int = 10, mode: Literal["warn", "raise"] = "warn", checks: Sequence[str] | None = None
    ) -> None:
        if every_n_rollouts < 1 or mode not in ("warn", "raise"):
            raise ValueError(f"expected every_n_rollouts >= 1 and mode warn or raise, got {every_n_rollouts}, {mode!r}")
        unknown = sorted(set(checks or ()) - CHECKS.keys())
        if unknown:
            raise ValueError(f"expected checks out of {', '.join(CHECKS)}, got {unknown[0]!r}")
        self.every_n_rollouts = every_n_rollouts
        self.mode = mode
        self.checks: tuple[Check, ...] = tuple(CHECKS[name] for name in (CHECKS if checks is None else checks))
        self.findings: list[Finding] = []
        self.seconds = 0.0
        self._module: RLLightningModule | None = None
        self._drawn: dict[int, tuple[Request, Completion]] = {}
        self._raw: dict[str, Tensor] = {}
        self._generate: Any = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, RLLightningModule):
            return
        self._module = pl_module
        engine, self._generate = pl_module.engine, pl_module.engine.generate

        def generate(requests: Sequence[Request], *, logprobs: bool = False) -> list[Completion]:
            completions = self._generate(requests, logprobs=logprobs)
            drawn = {request.sample_id: (request, one) for request, one in zip(requests, completions, strict=True)}
            self._drawn.update(drawn)
            return completions

        engine.generate = generate

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._release()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        if self._module is not None and self._generate is not None:
            vars(self._module.engine).pop("generate", None)
        self._module = self._generate = None

    @override
    def observe(self, rollout: Rollout) -> None:
        module, drawn, self._raw, self.seconds = self._module, dict(self._drawn), {}, 0.0
        cycle = 0 if module is None else max(module.engine.version, 0)
        oldest_to_come = cycle + 1 - (0 if module is None else module.max_staleness)
        for sample, (_, completion) in drawn.items():  # one by one, because a thread may be adding others
            if completion.version < oldest_to_come:
                del self._drawn[sample]
        if module is None or cycle % self.every_n_rollouts:
            return
        begin = time.perf_counter()
        self._raw = {name: tensor.clone() for name, tensor in rollout.tensors() if tensor.is_floating_point()}
        evidence, found = Evidence(module, rollout, cycle, drawn), list[Finding]()
        for check in self.checks:
            found += _looked(check, evidence)
        found += self._edited(rollout)
        self.seconds = time.perf_counter() - begin
        self._report(found, evidence)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        held = None if self._module is None else self._module.run.held
        if held is not None and self._raw:
            found = self._edited(held.rollout)
            self._raw = {} if found else self._raw
            self._report(found, Evidence(self._module, held.rollout, held.cycle)) if found and self._module else None

    def _edited(self, rollout: Rollout) -> list[Finding]:
        """Fields whose values are no longer what they were, by whatever way they were written."""
        own = dict(rollout.tensors())
        return [
            Finding(
                check="raw_fields", culprit=f"whoever writes to {name} past the version counters (.data, numpy views)",
                expected="the values of the finished rollout", observed="others",
                cure="return new tensors from every contribution",
            )
            for name, raw in self._raw.items()
            if name in own and not torch.equal(own[name].nan_to_num(), raw.nan_to_num())
        ]  # fmt: skip

    def _report(self, found: list[Finding], evidence: Evidence) -> None:
        if not found:
            return
        self.findings += found
        path = Path(evidence.module.trainer.default_root_dir) / FOLDER / f"rollout-{evidence.cycle}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"rollout": evidence.rollout.to("cpu").state(), "findings": [str(one) for one in found]}, path)
        text = "\n".join(str(finding) for finding in found) + f"\nThe rollout lies in {path}."
        if self.mode == "raise":
            raise AuditError(text)
        warnings.warn(f"the audit of rollout {evidence.cycle} found\n{text}", stacklevel=2)

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        return {
            "signal_audit/findings": Stat.single(len(self.findings)).maximum(),
            "signal_audit/seconds": Stat.single(self.seconds).maximum(),
        }


def _looked(check: Check, evidence: Evidence) -> list[Finding]:
    """The findings of a check; what raises on a changed copy is a finding too, of whoever raised."""
    try:
        return check.function(evidence)
    except Exception as raised:  # noqa: BLE001
        culprit = "a stage of the run"
        frame = raised.__traceback__
        while frame is not None:
            own = frame.tb_frame.f_locals.get("self")
            if isinstance(own, RLCallback) and not isinstance(own, SignalAudit):
                culprit = f"callback {own.name}.{frame.tb_frame.f_code.co_name}"
            elif isinstance(own, PolicyLoss):
                culprit = f"loss {type(own).__name__}"
            frame = frame.tb_next
        return [
            Finding(
                check=check.name, culprit=culprit, expected="the stages of the run to take a changed copy of its rows",
                observed=f"{type(raised).__name__}: {raised}", cure="carry every field to every row, padding included",
            )
        ]  # fmt: skip
