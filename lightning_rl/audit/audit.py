"""Signal audit: look for quiet failures of the training signal while it trains.

Every so many rollouts the checks of :data:`lightning_rl.audit.CHECKS` look at the finished rollout, repeat stages of
the run on changed copies of a few rows, and compare what must not differ; then they look at its last optimizer step as
it is made. A finding names the check, the culprit, the rows, what was expected and what to do; a file that reproduces
it is saved.

Source: metamorphic testing (Chen et al. 1998, "Metamorphic testing: a new approach for generating next test cases").
"""

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl import distributed
from lightning_rl.audit.checks import CHECKS, Check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.facts import RunFacts, Subject
from lightning_rl.audit.finding import AuditError, Finding
from lightning_rl.audit.forwards import forwards_plainly, plain_forwards, policy_outputs, reference_weights
from lightning_rl.audit.recompute import recompute_step
from lightning_rl.audit.recorded import RecordedEngine, RecordedRewards
from lightning_rl.audit.run_checks import run_checks
from lightning_rl.audit.saved import save
from lightning_rl.audit.subsample import some_groups, some_rows
from lightning_rl.audit.trace import LoggedStats, StepWatch
from lightning_rl.audit.watch import FieldWatch
from lightning_rl.corrections import RLCallback, Stat
from lightning_rl.data import Ticket
from lightning_rl.metrics import callbacks_of
from lightning_rl.module import RLLightningModule
from lightning_rl.rollout import Rollout

FOLDER = "audit"


class SignalAudit(RLCallback):
    """Checks the signal of the rollouts 0, n, 2n, ...

    Logs ``signal_audit/findings``, the number of violated invariants so far, and ``signal_audit/seconds``, what audits
    took since the last rollout. Every rank looks at its own rows, and all of them raise if one has to.

    Args:
        every_n_rollouts: how often.
        mode: ``"warn"`` or ``"raise"`` an :class:`~lightning_rl.audit.AuditError`.
        checks: names of those to run; None for all.

    Attributes:
        findings: of this rank so far.
        seconds: what the latest audited rollout took.

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
        self.seconds = self._spent = self._since_last = 0.0
        self._run: _RunWatch | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, RLLightningModule):
            self._run = _RunWatch(pl_module, self)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._release()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        if self._run is not None:
            self._run.release()
        self._run = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._run is not None:
            self._run.begin(batch, audited=batch.cycle % self.every_n_rollouts == 0)

    @override
    def observe(self, rollout: Rollout) -> None:
        begin, self.seconds = time.perf_counter(), 0.0
        evidence = None if self._run is None else self._run.evidence_of(rollout)
        if evidence is not None:
            self._report([c for c in self.checks if not c.of_step], evidence, begin)
        self._since_last, self._spent = self._spent, 0.0

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        begin = time.perf_counter()
        if self._run is not None:
            self._run.before_step(optimizer)
        self._count(begin)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        begin = time.perf_counter()
        evidence = None if self._run is None else self._run.after_step()
        if evidence is not None:
            self._report([c for c in self.checks if c.of_step], evidence, begin)

    def _report(self, checks: Sequence[Check], evidence: Evidence, begin: float) -> None:
        """Looks, saves, and warns or raises, on all ranks alike. A collective."""
        run, number = cast(_RunWatch, self._run), evidence.number
        findings = run_checks(checks, evidence)
        self.findings += findings
        path = Path(run.module.trainer.default_root_dir) / FOLDER / f"rollout-{number}{run.suffix}.pt"
        if findings:
            save(evidence, findings, path)
        text = "\n".join([*map(str, findings), *([f"It lies in {path}."] if findings else [])])
        texts = [str(text) for text in distributed.gathered_objects(text) if text]
        self._count(begin)
        if texts and self.mode == "raise":
            raise AuditError("\n".join(texts))
        if findings:
            warnings.warn(f"the audit of rollout {number} found\n{text}", stacklevel=2)

    def _count(self, begin: float) -> None:
        spent = time.perf_counter() - begin
        self.seconds, self._spent = self.seconds + spent, self._spent + spent

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        return {
            "signal_audit/findings": Stat.single(len(self.findings)).maximum(),
            "signal_audit/seconds": Stat.single(self._since_last).maximum(),
        }


class _RunWatch:
    """A run that is being audited, and what is known of its rollout in progress."""

    def __init__(self, module: RLLightningModule, audit: SignalAudit) -> None:
        self.module = module
        self.suffix = f"-rank-{module.global_rank}" if module.trainer.world_size > 1 else ""
        self._engine, self._rewards = RecordedEngine(module.engine), RecordedRewards(module.rewards)
        others = [callback for callback in callbacks_of(module.trainer) if callback is not audit]
        self._corrections = [callback for callback in others if isinstance(callback, RLCallback)]
        self._fields = FieldWatch(module.trainer, others, self._current_rollout)
        self._reference: Tensor | None = None
        self._evidence: Evidence | None = None
        self._logged: LoggedStats | None = None
        self._step: StepWatch | None = None
        self._audited, self._turn, self._number = False, 0, 0

    def _current_rollout(self) -> Rollout | None:
        held = self.module.run.held
        return None if held is None else held.rollout

    def begin(self, ticket: Ticket, *, audited: bool) -> None:
        """An optimizer step begins, the first one with its rollout."""
        module = self.module
        if ticket.step == 0:
            self.end()
            self._rewards.take()
            self._audited, self._number = audited, ticket.cycle
            if audited:
                self._fields.arm()
                self._logged = LoggedStats(module.run.metrics)
        scaled = getattr(module.trainer.precision_plugin, "scaler", None) is not None
        if self._logged is not None and ticket.step == module.steps_per_rollout - 1 and not scaled:
            self._logged.begin_step()
            self._step = StepWatch(module)

    def evidence_of(self, rollout: Rollout) -> Evidence | None:
        """Evidence of a finished rollout, if it is audited. Every rank takes part."""
        module = self.module
        if not self._audited:
            return None
        self._fields.begin(rollout)
        groups = some_groups(rollout, self._turn)
        rows = some_rows(groups, self._turn)
        self._turn += 1
        critic, weights = module.required_policy.value_head is not None, reference_weights(module)
        self._evidence = Evidence(
            algorithm=Subject.of(module, self._corrections),
            facts=RunFacts.of(module),
            rollout=rollout,
            groups=groups,
            rows=rows,
            number=self._number,
            outputs=policy_outputs(module, rows),
            reversed=policy_outputs(module, rows, reverse=True) if not forwards_plainly(module) else None,
            double_temperature=policy_outputs(module, rows, heat=2.0) if critic else None,
            batches=self._engine.batches_of(module.seed, self._number),
            calls=self._rewards.take(),
            text=module.collector().drawer.text,
            plain=plain_forwards(module, rows),
            reference_weights=(weights if self._reference is None else self._reference, weights),
        )
        self._reference = weights
        return self._evidence

    def before_step(self, optimizer: Any) -> None:
        """The gradient of a step is complete. Every rank takes part."""
        if self._audited:
            self._fields.look()
        if self._step is not None and self._evidence is not None:
            step = self._step.take_gradient(optimizer)
            if step is not None:
                step.expected, step.parts = recompute_step(self._evidence, step)

    def after_step(self) -> Evidence | None:
        """Evidence of an optimizer step that is over, if it was watched, or of edits."""
        if not self._audited or self._evidence is None:
            return None
        self._fields.look()
        watch, self._step = self._step, None
        logged = {} if self._logged is None or self._fields.edited else self._logged.moments
        step = None if watch is None else watch.finish(logged)
        return replace(self._evidence, step=step, edits=self._fields.take())

    def end(self) -> None:
        """Forgets the rollout."""
        self._fields.end()
        for watch in (self._step, self._logged):
            if watch is not None:
                watch.release()
        self._evidence = self._step = self._logged = None

    def release(self) -> None:
        """Puts everything back."""
        self.end()
        for watch in (self._engine, self._rewards, self._fields):
            watch.release()
