r"""Router replay: the policy of a mixture of experts trains through the experts that its engine took.

.. math::
    y_{b,s} = \sum_{e \in E^{\text{engine}}_{b,s}} g_e(x_{b,s}; \theta)\, \operatorname{expert}_e(x_{b,s}; \theta),
    \qquad g = \text{the current router's softmax, divided by its sum over } E^{\text{engine}}_{b,s}
    \text{ where the model does so}

Two experts of nearly equal score change places by the rounding of another kernel, and one flip moves every
log-probability after it. So the engine's choice :math:`E` is replayed in every forward of the policy: old
log-probabilities, update, a loss's prepass. Only the numbers of the experts are carried, so router and experts keep
their gradient. The prompt is covered as well, because the response attends to what the prompt's experts put out. The
reference is another model and routes by itself, as do a teacher and a critic of its own. Nothing is masked or weighed,
so denominators stay.

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
    """Replays the engine's expert routes in every training forward of a mixture-of-experts policy.

    The engine records them for every rollout token (``token_extras/routed_experts``) and prompt token
    (``prompt_extras/routed_experts``) by itself. Logs nothing of its own: the core's ``kl/rollout`` shows what it does.

    Raises:
        ValueError: at setup, if the engine cannot record routes; when a fit starts, if the policy is dense or its
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
            raise RuntimeError("expected RouterReplay to know the policy, but no fit has begun: pass it to a Trainer")
        return self._replay.replay(rows)
