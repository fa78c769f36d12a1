"""Picture of a rollout: rewards by group, and token log-probabilities of a few samples."""

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from lightning_rl.rollout import Rollout

FLOOR = -5.0  # nats; lower log-probabilities have the same color


def rollout_picture(rollout: Rollout, rows: Sequence[int]) -> UInt8[np.ndarray, "H W 3"] | None:
    """Return a picture of rewards and log-probabilities without model text; None without matplotlib.

    Left: one row per group, sorted by mean reward, with one cell per sample, sorted by reward. Groups of one color
    teach nothing. Right: one row for each of ``rows`` with the log-probabilities of the sampled tokens, in nats, from
    the policy before the update, else from the engine.

    Args:
        rollout: Rollout of this rank.
        rows: Rows on the right.
    """
    if find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), dpi=80, layout="constrained")
    canvas, (left, right) = FigureCanvasAgg(figure), figure.subplots(1, 2)
    drawn = left.imshow(group_rewards(rollout).numpy(), aspect="auto", interpolation="nearest")
    left.set(title="reward", xlabel="sample, from worst to best", ylabel="group, from worst to best")
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.colorbar(drawn, ax=left)
    drawn = right.imshow(
        token_logprobs(rollout, rows).numpy(),
        aspect="auto",
        interpolation="nearest",
        cmap="magma",
        vmin=FLOOR,
        vmax=0.0,
    )
    right.set(title="log-probability of each token", xlabel="token", ylabel="sample, as in the table")
    right.set_yticks(range(len(rows)), [str(int(rollout.sample_ids[row])) for row in rows])
    figure.colorbar(drawn, ax=right)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def group_rewards(rollout: Rollout) -> Float[Tensor, "N G"]:
    """Return rewards by group, sorted within groups and by group mean; NaN for missing samples or rewards."""
    rewards = torch.where(rollout.rewarded, rollout.rewards, torch.nan).float().cpu()
    groups, place = rollout.groups.cpu()[rollout.real.cpu()].unique(return_inverse=True)
    known = rewards[rollout.real.cpu()]
    members = [known[place == group].sort().values for group in range(len(groups))]
    table = torch.nn.utils.rnn.pad_sequence(members, batch_first=True, padding_value=torch.nan)
    return table[table.nanmean(1).argsort(stable=True)]


def token_logprobs(rollout: Rollout, rows: Sequence[int]) -> Float[Tensor, "R T"]:
    """Return log-probabilities of the tokens of ``rows`` that the policy sampled; NaN elsewhere."""
    width = max(1, int(rollout.response_lengths[list(rows)].max()))
    logprobs = rollout.rollout_logprobs if rollout.old_logprobs is None else rollout.old_logprobs
    if logprobs is None:
        return torch.full((len(rows), width), torch.nan)
    return torch.where(rollout.action_mask, logprobs, torch.nan)[list(rows), :width].float().cpu()
