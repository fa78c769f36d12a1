"""Rollout recorder: save rollouts with all inputs of their signal, loss and gradient.

Recording does not change the weights, bit for bit. ``lightning-rl replay`` reads the files on any machine, without the
model.
"""

import platform
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from safetensors import SafetensorError
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import RLCallback, StepTrace
from lightning_rl.data import StepIndex
from lightning_rl.module import RLLightningModule
from lightning_rl.policy.plan import RowLists
from lightning_rl.policy.tensor_hash import fingerprint
from lightning_rl.recording.recorded_algorithm import describe_algorithm, replayable
from lightning_rl.recording.recording import Recording
from lightning_rl.rewards import RewardCall
from lightning_rl.rollout import FinishReason, Rollout, spans_of
from lightning_rl.serialization import describe
from lightning_rl.utils.arguments import check_counts
from lightning_rl.utils.trainer import callbacks_of

SPACE = "\u2581"  # SentencePiece's space, dropped at the start of a text
PACKAGES = ("lightning-rl", "torch", "lightning", "transformers")
RECORDED_ELSEWHERE = {"policy", "rewards", "advantages", "loss", "reduction", "reference", "critic"}
RECORDED_ELSEWHERE |= {"tokenizer", "engine", "optimizer", "lr_scheduler", "evaluation", "self"}
OPTIONS = [name for name in signature(RLLightningModule.__init__).parameters if name not in RECORDED_ELSEWHERE]


class RolloutRecorder(RLCallback):
    """Records the rollouts 0, n, 2n, ... of this rank after their last optimizer step, or at the end of the run.

    A recorded step costs a hash of all weights and a copy of [B, T] tensors to the CPU. A rollout in the middle of
    which a run resumes is not recorded.

    Args:
        folder: Folder of the files.
        every_n_rollouts: Interval n.
        keep: Number of newest recordings to keep; None for all.

    Raises:
        ValueError: If a number is below 1.
    """

    name = "rollout_recorder"

    def __init__(self, folder: str | Path, every_n_rollouts: int = 1, *, keep: int | None = None) -> None:
        check_counts(1, every_n_rollouts=every_n_rollouts)
        check_counts(1, optional=True, keep=keep)
        self.folder = Path(folder)
        self.every_n_rollouts = every_n_rollouts
        self.keep = keep
        self.written: list[Path] = []
        self._draft: RecordingDraft | None = None
        self._vocabulary: Vocabulary | None = None

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: StepIndex, batch_idx: int
    ) -> None:
        module = cast(RLLightningModule, pl_module)
        if batch.step == 0:
            self._vocabulary = self._vocabulary or Vocabulary(module.options.tokenizer)
            due = batch.rollout % self.every_n_rollouts == 0
            self._draft = RecordingDraft(module, batch.rollout, self._vocabulary) if due else None
        if self._draft is not None:
            self._draft.begin_step(batch)

    @override
    def observe_rewards(self, rollout: Rollout, calls: Sequence[RewardCall]) -> None:
        if self._draft is not None:
            self._draft.scored.update(zip(rollout.sample_ids.tolist(), rollout.rewarded.tolist(), strict=True))

    @override
    def observe(self, rollout: Rollout) -> None:
        if self._draft is not None:
            self._draft.rollout = rollout

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._draft is not None:
            self._draft.keep_states()

    @override
    def traces_step(self, rollout_number: int, step: int) -> bool:
        return self._draft is not None

    @override
    def observe_step(self, trace: StepTrace) -> None:
        if self._draft is not None:
            self._draft.keep_step(trace)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StepIndex, batch_idx: int
    ) -> None:
        if self._draft is None:
            return
        self._draft.end_step(outputs if isinstance(outputs, Mapping) else {})
        if batch.step == self._draft.module.steps_per_rollout - 1:
            self._write()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._write()

    def _write(self) -> None:
        draft, self._draft = self._draft, None
        if draft is None or draft.rollout is None or not draft.tensors or not self.collectives.generates:
            return  # one process per data rank is enough
        number = draft.header["rollout"]
        try:
            self.written.append(draft.recording().save(self.folder))
        except (OSError, SafetensorError) as failure:  # a full disk does not end the run
            text = (
                f"expected to write a recording of rollout {number} to {self.folder}, got {failure}; the run continues"
            )
            warnings.warn(text, stacklevel=2)
            return
        while self.keep is not None and len(self.written) > self.keep:
            oldest = self.written.pop(0)
            oldest.unlink(missing_ok=True)
            oldest.with_suffix(".safetensors").unlink(missing_ok=True)


class Vocabulary:
    """Texts of token ids, each decoded once, so that a recording can be displayed without its tokenizer.

    Args:
        tokenizer: Tokenizer of the run; None for a run on token ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def texts(self, ids: Iterable[int]) -> Mapping[str, str]:
        """Return texts by id, ids as decimal strings; empty without a tokenizer.

        A token with part of a multi-token character has the text U+FFFD.
        """
        if self._tokenizer is None:
            return {}
        chosen = sorted(set(ids))
        for number in chosen:
            if number not in self._texts:
                self._texts[number] = self._text(number)
        return {str(number): self._texts[number] for number in chosen}

    def _text(self, number: int) -> str:
        text = self._tokenizer.decode([number])
        piece = self._tokenizer.convert_ids_to_tokens(number)
        begins = isinstance(piece, str) and piece.startswith(SPACE) and not text.startswith(" ")
        return f" {text}" if begins else text


class RecordingDraft:
    """Recording in progress."""

    def __init__(self, module: RLLightningModule, number: int, vocabulary: Vocabulary) -> None:
        trainer, self.vocabulary = module.trainer, vocabulary
        self.module, self.algorithm = module, replayable(module.algorithm, callbacks_of(trainer))
        self.header = {
            "rollout": number,
            "rank": module.parallel.rank,
            "ranks": module.parallel.ranks,
            "device": module.device.type,
            "precision": str(trainer.precision),
            "threads": torch.get_num_threads(),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
            "options": {name: describe(module.options[name]) for name in OPTIONS},
            "trainer_callbacks": [type(callback).__name__ for callback in callbacks_of(trainer)],
            "algorithm": describe_algorithm(self.algorithm),
            "states": self._states(),
        }
        self.scored: dict[int, bool] = {}
        self.rollout: Rollout | None = None
        self.plan: RowLists = []
        self.steps: list[dict[str, Any]] = []
        self.tensors: dict[str, Tensor] = {}

    def _states(self) -> dict[str, Any]:
        callbacks = self.algorithm.corrections.callbacks
        return {callback.name: describe(dict(state)) for callback in callbacks if (state := callback.state_dict())}

    def begin_step(self, step_index: StepIndex) -> None:
        """Store the hash of the weights before a step."""
        weights = fingerprint(self.module.parallel.full_parameters(self.module.required_policy))
        empty = {"states": None, "scale": 1.0, "parts": {}, "grad_norm": None, "made": False}
        self.steps.append({"step_index": step_index.index, "weights": weights, **empty})

    def keep_states(self) -> None:
        """Store the callback states used by the loss of a step."""
        if self.steps[-1]["states"] is None:
            self.steps[-1]["states"] = self._states()

    def keep_step(self, trace: StepTrace) -> None:
        """Store the plan, and the outputs and gradients of a step."""
        current = self.module.run.progress.current
        if current is None or self.rollout is None:
            return
        self.plan = current.plan.rows()
        self.steps[-1] |= {"scale": trace.scale, "made": trace.made}
        for microbatch in trace.microbatches:
            view = microbatch.view.sanitize()
            values = {spec.output: output for spec, output in view.outputs()} | {"gradient": microbatch.gradient}
            rows = (view.sample_ids[:, None] == self.rollout.sample_ids).int().argmax(-1)[view.real]
            for name, tensor in values.items() if len(rows) else ():
                empty = torch.zeros(self.rollout.response_ids.shape, dtype=tensor.dtype)
                table = self.tensors.setdefault(
                    f"pass/{trace.step // self.module.options.minibatches_per_rollout}/{name}", empty
                )
                row, column = view.valid_tokens[view.real].nonzero(as_tuple=True)
                table[rows[row].cpu(), column.cpu()] = tensor[view.real][row, column].detach().cpu()

    def end_step(self, outputs: Mapping[str, Tensor]) -> None:
        """Store this rank's share of the loss, and the gradient norm of all ranks before clipping."""
        figures = {name: float(value) for name, value in outputs.items() if value.numel() == 1}
        parts = {name: value for name, value in figures.items() if name != "optim/grad_norm"}
        self.steps[-1] |= {"parts": parts, "grad_norm": figures.get("optim/grad_norm")}

    def recording(self) -> Recording:
        """Return the recording; steps that the run did not reach are missing."""
        rollout, tokenizer = cast(Rollout, self.rollout).to("cpu"), self.module.options.tokenizer
        scored = torch.tensor([self.scored[sample] for sample in rollout.sample_ids.tolist()], dtype=torch.bool)
        tensors = {f"rollout/{name}": tensor for name, tensor in rollout.tensors()}

        def text(ids: Tensor) -> Any:
            return ids.tolist() if tokenizer is None else tokenizer.decode(ids.tolist())

        samples = [
            {
                "sample": int(rollout.sample_ids[row]),
                "group": int(rollout.groups[row]),
                "finish": FinishReason(int(rollout.finish[row])).name.lower(),
                "reward": float(rollout.rewards[row]),
                "prompt": text(rollout.prompt_ids[row, : rollout.prompt_lengths[row]]),
                "response": text(rollout.response_ids[row, : rollout.response_lengths[row]]),
                **(
                    {"turns": [[drawn, text(torch.tensor(ids))] for drawn, ids in spans_of(rollout, row)]}
                    if rollout.segments is not None
                    else {}
                ),
            }
            for row in range(len(rollout))
        ]
        ids = torch.cat([rollout.prompt_ids.flatten(), rollout.response_ids.flatten()]).unique().tolist()
        read: dict[str, Any] = {"samples": samples, "tokens": self.vocabulary.texts(ids)}
        if rollout.prompt_items:
            prompts = self.module.run.data.at(sorted(set(rollout.groups[rollout.real].tolist())))
            read["pictures"] = {str(each.index): each.media.thumbnails for each in prompts if each.media is not None}
        return Recording(
            header={**self.header, "plan": self.plan, "steps": self.steps, **read},
            tensors={**tensors, "sampled/scored": scored, **self.tensors},
        )
