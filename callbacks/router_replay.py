r"""Router replay: train a mixture-of-experts policy through the experts that its engine selected.

.. math::
    y_{b,s} = \sum_{e \in E^{\text{engine}}_{b,s}} g_e(x_{b,s}; \theta)\, \operatorname{expert}_e(x_{b,s}; \theta),
    \qquad g = \text{the current router's softmax, divided by its sum over } E^{\text{engine}}_{b,s}
    \text{ where the model does so}

Rounding differences between kernels can swap two experts of nearly equal score, which changes every later
log-probability. So every forward of the policy (old log-probabilities, update, prepass of a loss) uses the engine's
experts :math:`E`, of prompt and response tokens. Only expert indices are replayed: router and experts keep their
gradient. Reference, teacher and a separate critic use their own routers. Denominators do not change.

Source: Ma et al. 2025 (rollout routing replay), arXiv:2510.11370.
"""

from contextlib import AbstractContextManager

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_rl.corrections import RLCallback
from lightning_rl.module import RLLightningModule
from lightning_rl.policy.expert_routes import ExpertReplay
from lightning_rl.rollout import ROUTES, Rollout


class RouterReplay(RLCallback):
    """Replay of the engine's expert routes in every training forward of a mixture-of-experts policy.

    The engine records them for every rollout token (``token_extras/routed_experts``) and prompt token
    (``prompt_extras/routed_experts``). Logs no metrics; ``kl/rollout`` shows the effect.

    Raises:
        ValueError: At setup, if the engine cannot record routes; when a fit starts, if the policy is dense or its
            routers are of an unknown kind.
    """

    name = "router_replay"
    records = (ROUTES,)

    def __init__(self) -> None:
        self._replay: ExpertReplay | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.teardown(trainer, pl_module, "fit")
        if isinstance(pl_module, RLLightningModule):
            self._replay = ExpertReplay(pl_module.required_policy.model)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._replay is not None:
            self._replay.remove()
            self._replay = None

    @override
    def forward_context(self, rows: Rollout) -> AbstractContextManager[object]:
        if self._replay is None:
            raise RuntimeError("expected RouterReplay inside of a fit, got none: pass it to Trainer(callbacks=[...])")
        return self._replay.replay(rows)
