r"""Teacher KL: on-policy distillation with the reverse KL to a teacher on the student's samples.

.. math::
    r_{b,t} = -\beta\,\operatorname{estimator}\bigl(\log \pi_{\text{old}}(o_{b,t}),\ \log
    \pi_{\text{teacher}}(o_{b,t})\bigr)
    \qquad\text{or, as a loss,}\qquad
    \ell_{b,t} = \operatorname{estimator}\bigl(\log \pi_\theta(o_{b,t}),\ \log \pi_{\text{teacher}}(o_{b,t})\bigr)

The teacher's log-probabilities are in ``token_extras["teacher_logprobs"]``, at the sampling temperature. This callback
provides them if it has a teacher model; otherwise another callback has to, for example from a server.

Source: Agarwal et al. 2024 (on-policy distillation), arXiv:2306.13649; as a reward per token: Lu and Thinking Machines
Lab 2025, "On-policy distillation".
"""

from collections.abc import Mapping

from jaxtyping import Float
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl.callbacks._frozen_kl import FrozenKL
from lightning_rl.corrections import RLCallback
from lightning_rl.module import RLLightningModule
from lightning_rl.policy.build import ModelSource
from lightning_rl.policy.teacher import Teacher
from lightning_rl.rollout import Rollout
from lightning_rl.signal.kl import KLEstimator
from lightning_rl.utils.trainer import callbacks_of

KEY = "teacher_logprobs"


class TeacherKL(FrozenKL):
    """Penalty on the KL to a teacher.

    Logs the estimate of the policy being trained as ``teacher_kl/estimate``, the fraction of tokens where it is
    positive as ``teacher_kl/positive``, and ``kl/penalty`` or ``teacher_kl/loss``.

    Args:
        teacher: Name or path of a model with the policy's vocabulary, or a callable that builds one; None if another
            callback provides ``token_extras/teacher_logprobs``.
        beta: Coefficient of the KL.
        estimator: As for ReferenceKL.
        as_loss: Add the KL to the loss instead of the reward.
        unbiased: As for ReferenceKL.

    Raises:
        ValueError: If an option is out of range; at setup, if neither a teacher nor another callback provides the
            log-probabilities; when a fit starts, if a check of the teacher fails.
    """

    name = "teacher_kl"
    token_wise = True
    provides = (f"token_extras/{KEY}",)
    alternative = "TeacherKL(as_loss=True)"

    def __init__(
        self,
        teacher: ModelSource | None = None,
        beta: float = 1.0,
        *,
        estimator: KLEstimator | str | None = None,
        as_loss: bool = False,
        unbiased: bool = False,
    ) -> None:
        super().__init__(beta, estimator=estimator, as_loss=as_loss, unbiased=unbiased)
        self.teacher = teacher
        self._teacher: Teacher | None = None

    @property
    @override
    def contributes(self) -> frozenset[str]:
        """Methods that the class overrides, without ``provide`` if there is no teacher."""
        return super().contributes - (frozenset() if self.teacher is not None else {"provide"})

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        others = [other for other in callbacks_of(trainer) if isinstance(other, RLCallback) and other is not self]
        if self.teacher is None and not any("provide" in other.contributes for other in others):
            raise ValueError(
                f'expected a teacher or another callback that provides "token_extras/{KEY}" for TeacherKL, got '
                "neither: pass teacher=, or add a callback whose provide returns it"
            )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.teacher is None or not isinstance(pl_module, RLLightningModule):
            return
        precision = trainer.precision_plugin
        with precision.module_init_context():
            self._teacher = Teacher(
                self.teacher,
                temperature=pl_module.options.sampling.temperature,
                max_tokens_per_microbatch=lambda: pl_module.run.progress.max_tokens_per_microbatch,
                packed=pl_module.models.options.packing,
                precise=precision.forward_context,
                policy=pl_module.policy,
            )
        precision.convert_module(self._teacher.scorer.scoring)  # in place
        longest = pl_module.data_module.max_prompt_length() + pl_module.options.sampling.max_new_tokens
        self._teacher.scorer.check_windows(longest)

    @override
    def provide(self, rollout: Rollout) -> Mapping[str, Tensor]:
        if self._teacher is None:
            raise RuntimeError("expected TeacherKL inside of a fit, got none: pass it to Trainer(callbacks=[...])")
        return {f"token_extras/{KEY}": self._teacher(rollout)}

    @override
    def frozen_logprobs(self, rows: Rollout) -> Float[Tensor, "B T"]:
        if KEY not in rows.token_extras:
            raise ValueError(f'expected "token_extras/{KEY}" for TeacherKL, got none: pass teacher= or provide it')
        return rows.token_extras[KEY]
