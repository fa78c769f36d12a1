"""Audit that detects silent failures of the training signal while a run trains.

At every n-th rollout the checks of :data:`lightning_rl.audit.CHECKS` inspect the finished rollout, repeat stages of the
run on changed copies of a few rows and compare the results. Then they inspect the last optimizer step of the rollout. A
finding names the check, the culprit, the rows, the expected value and the cure; a file that reproduces it is saved.

Source: metamorphic testing (Chen et al. 1998, "Metamorphic testing: a new approach for generating next test cases").
"""

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_rl.algorithm import Algorithm
from lightning_rl.audit.checks import CHECKS
from lightning_rl.audit.checks.reward_checks import samples_of_calls
from lightning_rl.audit.conversation_evidence import (
    conversation_figures,
    conversations_of,
    judged_otherwise,
    words_logprob,
)
from lightning_rl.audit.environment_repeats import ReplayWatch
from lightning_rl.audit.evaluation_watch import EvaluationWatch
from lightning_rl.audit.evidence import Evidence, recompute_step
from lightning_rl.audit.facts import RunFacts
from lightning_rl.audit.forwards import (
    fixed_scores,
    plain_forwards,
    plain_logits,
    policy_outputs,
    reference_weights,
    silent_parameters,
    token_gradients,
    value_moves,
)
from lightning_rl.audit.live import LiveRun, live_run
from lightning_rl.audit.logged_rows import RowWatch
from lightning_rl.audit.parameter_tracer import ParameterTracer
from lightning_rl.audit.prompt_watch import PromptWatch
from lightning_rl.audit.rates import StepRates
from lightning_rl.audit.recheck import save
from lightning_rl.audit.recomputed_metrics import callback_figures, sampling_figures
from lightning_rl.audit.resumed import Fingerprint, compare_with_checkpoint, forgotten_states, of_checkpoint
from lightning_rl.audit.reward_repeats import RewardWatch
from lightning_rl.audit.sampling_statistics import KEPT_ROLLOUTS, Earlier, earlier_of, score_draws
from lightning_rl.audit.schedule import OF_TRACE, in_turn, part_of, takes_turn
from lightning_rl.audit.step_evidence import StepEvidence
from lightning_rl.audit.turn_boundaries import unsampled_tokens
from lightning_rl.audit.user_hooks import suspects
from lightning_rl.audit.watch import FieldWatch
from lightning_rl.corrections import RLCallback, Stat, StepTrace
from lightning_rl.data import StepIndex
from lightning_rl.distributed import process_objects
from lightning_rl.generation import Completion, Request
from lightning_rl.rewards import RewardCall
from lightning_rl.rollout import Rollout
from lightning_rl.run.step_metrics import StepMetrics
from lightning_rl.signal.masked import row_mean
from lightning_rl.testing.properties.check import Check, judge
from lightning_rl.testing.properties.copies import CopyError, numbers_of, repeatable
from lightning_rl.testing.properties.subsample import some_groups, some_rows
from lightning_rl.utils.arguments import check_choices, check_counts
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.seeding import fork_generators
from lightning_rl.utils.terminal import visible
from lightning_rl.utils.trainer import callbacks_of

FOLDER = "audit"
ROW_LOGGED = f"[Callback]{StepMetrics.__qualname__}.on_train_batch_end"


class AuditError(RuntimeError):
    """Raised by ``SignalAudit(mode="raise")``; the message contains all findings."""


class SignalAudit(RLCallback):
    """Checks the signal of the rollouts 0, n, 2n, ...

    Logs ``signal_audit/findings``, the number of violations so far, ``signal_audit/skipped``, the number of checks that
    were skipped at their latest turn, and ``signal_audit/seconds``, the duration of audits since the previous rollout.
    Every rank checks its own rows; all ranks raise if one does. Skipped checks are logged at the end of a fit.

    Args:
        every_n_rollouts: Number of rollouts between audits; the first rollout after a resume is audited as well.
        mode: ``"warn"``, or ``"raise"`` an :class:`~lightning_rl.audit.AuditError`.
        checks: Names of the checks to run at every audit; by default all, each at its turns
            (:func:`~lightning_rl.audit.schedule.takes_turn`).
        deliberate: Prefixes of printed findings that are intended, such as ``"group_isolation: estimator whitened"``.
            Such findings go to ``declared`` and never warn or raise.

    Attributes:
        findings: Findings on this rank so far.
        declared: Intended findings.
        skipped: Reason why a check was skipped, in whole or in part, at its latest turn, by name.
        seconds: Duration of the audit of the latest audited rollout.

    Raises:
        ValueError: If an option is out of range or a check is unknown, with a list of the known ones.
    """

    name = "signal_audit"

    def __init__(
        self,
        every_n_rollouts: int = 10,
        mode: Literal["warn", "raise"] = "warn",
        checks: Sequence[str] | None = None,
        deliberate: Sequence[str] = (),
    ) -> None:
        check_counts(1, every_n_rollouts=every_n_rollouts)
        check_choices(("warn", "raise"), mode=mode)
        unknown = sorted(set(checks or ()) - CHECKS.keys())
        if unknown:
            raise ValueError(f"expected checks out of {', '.join(CHECKS)}, got {unknown[0]!r}")
        for meant in [deliberate] if isinstance(deliberate, str) else deliberate:
            if isinstance(deliberate, str) or str(meant).partition(":")[0] not in CHECKS:
                raise ValueError(
                    f"expected deliberate= a list of prefixes of findings, each with a check out of "
                    f"{', '.join(CHECKS)}, got {meant!r}: copy the text of the finding up to the culprit"
                )
        self.deliberate = tuple(deliberate)
        self.every_n_rollouts = every_n_rollouts
        self.mode = mode
        self._rotates = checks is None
        self.checks: tuple[Check, ...] = tuple(CHECKS[name] for name in (CHECKS if checks is None else checks))
        self.findings: list[Finding] = []  # pyrefly: ignore[bad-override-mutable-attribute]
        self.declared: list[Finding] = []
        self.skipped: dict[str, str] = {}
        self.seconds = self._spent = self._since_last = 0.0
        self._run: _RunWatch | None = None
        self._checkpoint: Fingerprint = {}
        self._resumes, self._first = False, -1  # rollout that a resumed run begins with

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._checkpoint, self._resumes, self._first = {}, False, -1

    def note_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record numbers of a checkpoint that a fit resumes from, as it was read."""
        self._checkpoint = of_checkpoint(checkpoint)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (live := live_run(trainer, pl_module)) is not None:
            self._run = _RunWatch(live, self, rotates=self._rotates)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._release()
        if self.skipped:
            lines = [f"  {name}: {why}" for name, why in self.skipped.items()]
            rank_zero_info("\n".join(["Skipped checks of the audit:", *lines]))

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        if self._run is not None:
            self._run.release()
        self._run = None

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: StepIndex, batch_idx: int
    ) -> None:
        if self._run is not None:
            self._resumes = self._resumes or bool(self._checkpoint)
            self._run.compare_with_checkpoint(self._checkpoint)
            self._checkpoint = {}
            if batch.step == 0 and self._resumes:
                self._first, self._resumes = batch.rollout, False
            self._run.begin_step(batch, audited=self._audits(batch.rollout))

    @override
    def observe_generated(self, pairs: Sequence[tuple[Request, Completion]]) -> None:
        if self._run is not None and self._run.audited:
            self._run.batches.append(pairs)

    @override
    def observe_rewards(self, rollout: Rollout, calls: Sequence[RewardCall]) -> None:
        if self._run is not None and self._run.audited:
            self._run.calls += calls
            self._run.rounds.append((rollout, calls))

    @override
    def observe(self, rollout: Rollout) -> None:
        begin, self.seconds = time.perf_counter(), 0.0
        if self._run is not None and self._run.audited:
            with fork_generators(rollout.groups.device):
                self._report(self._run.look_at(rollout), begin, of_step=False)
        self._since_last, self._spent = self._spent, 0.0

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        begin = time.perf_counter()
        if self._run is not None:
            self._run.keep_algorithm()
        self._count(begin)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.fields.end_backward()

    @override
    def reads_logprobs(self, rollout_number: int) -> bool:
        return self._audits(rollout_number)

    def _audits(self, rollout: int) -> bool:
        """Return True for every n-th rollout, and for the first one after a resume."""
        return rollout % self.every_n_rollouts == 0 or rollout == self._first

    @override
    def traces_step(self, rollout_number: int, step: int) -> bool:
        return self._run is not None and self._run.begin_trace()

    @override
    def observe_step(self, trace: StepTrace) -> None:
        begin = time.perf_counter()
        if self._run is not None:
            self._run.end_trace()
            with fork_generators(self._run.live.device):
                self._run.look_at_step(trace) if trace.made else self._run.miss_step(trace)
            self._run.expect_row()
        self._count(begin)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StepIndex, batch_idx: int
    ) -> None:
        begin = time.perf_counter()
        run = self._run
        if run is None:
            return
        evidence = run.end_step()
        if batch.step == run.live.options.steps_per_rollout - 1:
            run.begin_next(batch.rollout + 1)
        if evidence is not None:
            with fork_generators(run.live.device):
                self._report(evidence, begin, of_step=True)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.evaluations.begin()

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        begin = time.perf_counter()
        if self._run is not None and not trainer.sanity_checking:
            self._run.note_evaluations()
        self._count(begin)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        begin = time.perf_counter()
        if self._run is not None and not trainer.sanity_checking:
            self._run.evaluations.end({name: float(value) for name, value in trainer.callback_metrics.items()})
        self._count(begin)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (run := self._run) is not None:  # a validation after the last step
            names, begin = {check.name for check in self.checks}, time.perf_counter()
            left = [finding for finding in run.evaluations.take() if finding.check in names]
            self._publish(left, run.evidence, begin)

    def _report(self, evidence: Evidence, begin: float, *, of_step: bool) -> None:
        """Run the checks, and publish their findings. A collective."""
        turn = cast(_RunWatch, self._run).checks_in_turn(of_step=of_step)
        findings, skipped = judge(turn, evidence)
        for check in turn:
            self.skipped.pop(check.name, None)
        self.skipped |= skipped
        self._publish(findings, evidence, begin)

    def _publish(self, findings: Sequence[Finding], evidence: Evidence | None, begin: float) -> None:
        """Save the evidence of findings, and warn or raise on all ranks. A collective."""
        run = cast(_RunWatch, self._run)
        self.declared += [finding for finding in findings if str(finding).startswith(self.deliberate)]
        findings = [finding for finding in findings if not str(finding).startswith(self.deliberate)]
        self.findings += findings
        lines = [*map(str, findings)]
        if findings and evidence is not None:
            run.found += findings
            path = save(run.live, evidence, run.found, Path(run.live.trainer.default_root_dir) / FOLDER, run.suffix)
            lines.append(f"Evidence: {path}")
        text = visible("\n".join(lines))
        texts = [text for text in process_objects(text) if text]
        self._count(begin)
        if texts and self.mode == "raise":
            raise AuditError("\n".join(texts))
        if findings:
            name = f"rollout {evidence.number}" if evidence is not None else "evaluations"
            warnings.warn(f"the audit of {name} found\n{text}", stacklevel=2)

    def _count(self, begin: float) -> None:
        spent = time.perf_counter() - begin
        self.seconds, self._spent = self.seconds + spent, self._spent + spent

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        return {
            "signal_audit/findings": Stat.single(len(self.findings)).maximum(),
            "signal_audit/skipped": Stat.single(len(self.skipped)).maximum(),
            "signal_audit/seconds": Stat.single(self._since_last).maximum(),
        }


class _RunWatch:
    """An audited run, with the state of its current rollout."""

    def __init__(self, live: LiveRun, audit: SignalAudit, *, rotates: bool) -> None:
        self.live, self._checks, self._rotates = live, audit.checks, rotates
        self.suffix = f"-rank-{live.trainer.global_rank}" if live.trainer.world_size > 1 else ""
        others = [callback for callback in callbacks_of(live.trainer) if callback is not audit]
        self._corrections = [callback for callback in others if isinstance(callback, RLCallback)]
        self._row = RowWatch(live)
        self.tracer: ParameterTracer | None = None
        self.fields = FieldWatch(live, others, before=self._before_action, after=self._after_action)
        self.audited, self.turn, self._number = False, 0, 0
        self.batches: list[Sequence[tuple[Request, Completion]]] = []
        self.calls: list[RewardCall] = []
        self.found: list[Finding] = []  # of this rollout, in its file
        self.rounds: list[tuple[Rollout, Sequence[RewardCall]]] = []
        self._reference: Tensor | None = None
        self._fixed_scores: Tensor | None = None
        self._conversation_figures: dict[str, Stat] = {}
        self._own_figures: dict[str, Stat] = {}
        self.evidence: Evidence | None = None
        self._step: StepEvidence | None = None
        self._algorithm: Algorithm | None = None
        self._scheduled: int | None = None
        self._step_index, self._every = 0, audit.every_n_rollouts
        self._passes: dict[int, Tensor] = {}
        self.fields.state.active = True
        self._rates = StepRates(live, lambda: self.fields.state.idled, rates_set=bool(self.fields.state.setting))
        self._rewards, self._replays = RewardWatch(live.rewards.by_name), ReplayWatch()
        self._prompts, self._earlier = PromptWatch(live), list[Earlier]()
        self._resumed = list(forgotten_states(live))
        self.evaluations = EvaluationWatch()

    def note_evaluations(self) -> None:
        """Record the reward calls of a batch of evaluations."""
        if self.live.parallel.ranks == 1 and self.live.environments is None:
            self.evaluations.note_batch(self.live.evaluator.latest_batch)

    def compare_with_checkpoint(self, checkpoint: Fingerprint) -> None:
        """Compare the state before the first optimizer step with the checkpoint that was loaded."""
        if checkpoint:
            self._resumed += compare_with_checkpoint(checkpoint, self.live)

    def checks_in_turn(self, *, of_step: bool) -> list[Check]:
        """Return the checks of this audit; all of them if they were selected by name."""
        return in_turn(self._checks, self._place, self._every, of_step=of_step)

    @property
    def _place(self) -> int:
        """Place of this audit in the schedule, counted from 1; 1 if the checks were selected by name."""
        return self.turn if self._rotates else 1

    def _looks_at(self, *names: str) -> bool:
        return any(check.name in names and takes_turn(check, self._place, self._every) for check in self._checks)

    def begin_step(self, step_index: StepIndex, *, audited: bool) -> None:
        """Begin an optimizer step, and with the first step a rollout."""
        self._scheduled, self._step_index = _epoch_of(self.live), step_index.index
        self._step = self._algorithm = None
        if step_index.step == 0:
            self.audited, self._number = audited, step_index.rollout
            self.batches, self.calls, self.rounds, self.found, self.evidence, self._passes = [], [], [], [], None, {}
            self.fields.state.active = audited
            self.fields.arm() if audited else self.fields.end()
            if audited:
                self.fields.state.compare_state("code that runs between two rollouts")
        if self.audited:
            self._rates.begin_step()

    def look_at(self, rollout: Rollout) -> Evidence:
        """Return the evidence of a finished rollout. A collective."""
        live, factories = self.live, {} if self.live.environments is None else self.live.environments.factories
        self.fields.state.compare_state(
            "the draw of the rollout: a reward, an environment, the engine or a hook of the module"
        )
        self.fields.state.forget_state()
        self.fields.begin(rollout)
        groups = some_groups(rollout, self._number)
        rows = some_rows(groups, self._number)
        self.turn += 1
        critic = live.policy.value_head is not None
        facts, samples = RunFacts.of(live), samples_of_calls(self.batches, self.calls)
        conversations = conversations_of(list(factories), self.batches, self.rounds)
        draws = score_draws(
            live.sampling,
            partial(plain_logits, live),
            self.batches,
            self._number,
            facts.tolerance,
            earlier=self._earlier,
            part=part_of(self._place),
        )
        outputs, engine, apart = policy_outputs(live, rows), rows.rollout_logprobs, list[int]()
        if outputs is not None and engine is not None:
            gaps = row_mean((engine - outputs.logprobs).abs(), rows.valid_tokens)
            apart = [int(gaps.argmax())] if bool((gaps > facts.engine_tolerance).any()) else []
        weights, reference_scores = self._look_at_reference() if self._looks_at("reference_stays") else ((), ())
        self.evidence = Evidence(
            algorithm=repeatable(live.algorithm, self._corrections),
            facts=facts,
            rollout=rollout,
            groups=groups,
            rows=rows,
            number=self._number,
            outputs=outputs,
            double_temperature=(
                policy_outputs(live, rows, heat=2.0) if critic and self._looks_at("values_ignore_temperature") else None
            ),
            value_moves=value_moves(live, rows, outputs) if critic and self._looks_at("value_positions") else None,
            batches=self.batches,
            calls=self.calls,
            rounds=[part for part, _ in self.rounds],
            draws=draws,
            earlier=self._earlier,
            stream_prompts=self._prompts.of_stream(rollout),
            strange_pictures=self._prompts.strange_pictures(
                rollout, [one.turns[-1][0] for one in conversations if one.turns and one.messages], self._number
            ),
            strange_columns=self._prompts.strange_columns(self.calls, samples),
            reward_prompts=self._prompts.of_rewards(self.calls, samples),
            repeats=self._prompts.repeats(rollout, self._number, self.calls, samples),
            held_out=self._prompts.held_out(rollout, self.calls, samples),
            text=partial(_decode, live.tokenizer, live.sampling.eos_token_ids or ()),
            numbers=live.parallel.collectives.objects(
                {callback.name: numbers_of(callback) for callback in self._corrections if callback.affects}
            ),
            plain=plain_forwards(live, rows, apart) if apart or self._looks_at("logprob_alignment") else (),
            token_gradients=token_gradients(live, rows) if self._looks_at("token_gradients") else (),
            written=unsampled_tokens(live.environments, conversations, self._number),
            words_logprob=words_logprob(partial(policy_outputs, live), live.parallel.collectives, rollout)
            if factories
            else None,
            judged_otherwise=judged_otherwise(conversations),
            reference_weights=weights,
            reference_scores=reference_scores,
            reference_mover=self.fields.state.reference_mover,
            replies=[*self._rewards.ask(self.calls, samples), *self.evaluations.ask()],
            replays=self._replays.ask(live.environments, live.data, conversations, self._number),
        )
        self._own_figures = {}
        known = {} if live.algorithm.advantages.needs_greedy else factories
        self._conversation_figures = conversation_figures(conversations, known, has_turns=all(self.batches))
        latest = earlier_of(self._number, self.batches, draws, self.evidence.sample_repeats, self.evidence.odds)
        self._earlier = [*self._earlier, latest][-KEPT_ROLLOUTS:]
        return self.evidence

    def _look_at_reference(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
        """Return a few weights of the reference at its latest check and now, and its scores of fixed tokens.

        The first scores are those at the first audit. A collective.
        """
        live, reference, weights = self.live, self.live.models.reference, reference_weights(self.live)
        before, self._reference = weights if self._reference is None else self._reference, weights
        if reference is None:
            return (before, weights), ()
        now = fixed_scores(live, reference)
        if self._fixed_scores is None:
            copied = live.models.sources["reference"] is None and not live.models.stepped
            self._fixed_scores = fixed_scores(live, live.policy) if copied else now
        return (before, weights), (self._fixed_scores, now)

    def _traces_step(self) -> bool:
        """Return True to request the trace of an optimizer step; a gradient scaler rules it out."""
        scaled = getattr(self.live.trainer.precision_plugin, "scaler", None) is not None
        return self.audited and not scaled and (not self._rotates or self._looks_at(*OF_TRACE))

    def begin_trace(self) -> bool:
        """Trace the parameters through the optimizer step that begins now, and return True to request its trace."""
        self.release_tracer()  # of a step that ran out of memory and is repeated
        traced, live = self._traces_step(), self.live
        if traced and live.parallel.ranks == 1 and not live.parallel.sharded:
            self.tracer = ParameterTracer(live.policy, live.optimizers[0])
        return traced

    def _before_action(self, action: str) -> None:
        if action == "optimizer_step" and self.tracer is not None:  # started before the hooks and clipping
            self.tracer.before_optimizer()

    def _after_action(self, action: str) -> None:
        if action == ROW_LOGGED:
            self._row.close()
        of_module = action.startswith("[LightningModule]")  # runs after the same hook of every callback
        if of_module and action.endswith(".on_before_optimizer_step") and self.tracer is not None:
            self.tracer.before_step()

    def end_trace(self) -> None:
        """Record the parameters after an optimizer step."""
        if self.tracer is not None:
            self.tracer.after_step()

    def release_tracer(self) -> None:
        """Remove the hooks of the tracer."""
        if self.tracer is not None:
            self.tracer.release()
            self.tracer = None

    def keep_algorithm(self) -> None:
        """Copy the corrections before the backward pass, since they may adapt after the step."""
        if self.evidence is not None and self._algorithm is None and self._traces_step():
            self._algorithm = repeatable(self.live.algorithm, self._corrections)

    def look_at_step(self, trace: StepTrace) -> None:
        """Add the evidence of an optimizer step. A collective."""
        evidence, live = self.evidence, self.live
        if evidence is None:
            return
        self.fields.look()
        evidence = replace(evidence, algorithm=self._algorithm or evidence.algorithm)
        collectives, rank = live.parallel.collectives, live.parallel.rank
        step = StepEvidence.of(trace, evidence.rollout, evidence.algorithm.reduction, collectives, rank)
        step.other_inputs = StepEvidence.inputs_of_others(trace, evidence.rollout, packed=live.models.options.packing)
        self._passes[trace.step] = step.rows.sample_ids
        step.planned, step.passes = self._rows_of_plan(trace.step), dict(self._passes)
        recompute_step(evidence, step)
        if self.tracer is not None:
            step.optimizer = type(self.tracer.optimizer).__name__
            step.norm, step.unclipped_norm = self.tracer.norm, self.tracer.unclipped_norm
            step.parameters = self.tracer.parameters
        step.stepping = self._rates.note(trace.rollout_number, step.parameters, step.optimizer)
        step.frozen = self._rates.names_without_gradient()
        step.silent = silent_parameters(live, step)
        step.blamed = self._culprits()
        if not self._own_figures:  # a collective, so on all ranks even if only one has an edit
            self._own_figures = callback_figures(self._corrections, evidence.rollout)
        if self.fields.edited:
            step.logged = {}
        else:
            sampled = sampling_figures(self.rounds, evidence.rollout, evidence.facts) | self._conversation_figures
            try:
                step.figures = self._row.note(trace, evidence, step, self._own_figures | sampled)
            except CopyError as error:
                step.logged, step.unknown = {}, str(error)
        self.evidence, self._step = evidence, step

    def _culprits(self) -> dict[str, str]:
        """Return the code that changed, or could have changed, each part of a step."""
        seen = self.fields.state.blamed
        hooked = {"hooked gradients": seen["gradients"]} if "gradients" in seen else {}
        return {**suspects(self.live, self.fields.callbacks), **hooked, **seen}

    def miss_step(self, trace: StepTrace) -> None:
        """Count the rows of a skipped optimizer step as seen."""
        ids = [microbatch.view.sample_ids[microbatch.view.real] for microbatch in trace.microbatches]
        self._passes[trace.step] = torch.cat(ids).unique() if ids else torch.zeros(0, dtype=torch.int64)

    def expect_row(self) -> None:
        """Record the row that the core may log next."""
        self._row.open()
        self.fields.state.keep_state()

    def _rows_of_plan(self, step: int) -> Tensor | None:
        current = self.live.current
        if current is None:
            return None
        return current.rollout.sample_ids[current.plan.rows_of_step(step)]

    def end_step(self) -> Evidence | None:
        """Return the evidence of a finished optimizer step, with edits; None if the rollout is not audited."""
        row, row_figures = self._row.end_step(self._step_index, seen=self._step is not None and bool(self._step.logged))
        if self.evidence is None:
            return None
        self.fields.look()
        before, after = self._scheduled, _epoch_of(self.live)
        if self._step is not None:
            if before is not None and after is not None:
                self._step.scheduler_steps = after - before
            self._step.row, self._step.row_figures, self._step.missing = row, row_figures, self._row.missing
            self._step.blamed = self._culprits()
        self.fields.state.compare_state("code that runs after the optimizer step, such as a logger")
        resumed, self._resumed = self._resumed, []
        return replace(self.evidence, step=self._step, edits=[*self.fields.take(), *resumed, *self.evaluations.take()])

    def begin_next(self, number: int) -> None:
        """Begin the next rollout early, so that hooks before those of the audit are watched too."""
        self.fields.state.begin(active=number % self._every == 0)

    def release(self) -> None:
        """Remove all instrumentation from the run."""
        self.fields.release()
        self.release_tracer()
        self._row.close()


def _decode(tokenizer: Any, ends: Sequence[int], token_ids: Sequence[int]) -> str:
    """Return the text that a reward should get: all but the special tokens that begin, end or fill sequences."""
    if tokenizer is None:
        return ""
    names = ("bos_token", "eos_token", "pad_token", "cls_token", "sep_token", "mask_token")
    out = {str(getattr(tokenizer, name, None)) for name in names} | set(tokenizer.convert_ids_to_tokens(list(ends)))
    known = tokenizer.added_tokens_decoder
    words = [
        number
        for number in token_ids
        if number not in known or not (known[number].special and str(known[number]) in out)
    ]
    return str(tokenizer.decode(words))


def _epoch_of(live: LiveRun) -> int | None:
    return None if live.scheduler is None else int(live.scheduler.last_epoch)
