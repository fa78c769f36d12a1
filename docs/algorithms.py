"""Write docs/algorithms.md from the registries of the code. Run ``python docs/algorithms.py``.

Everything but the entries of :data:`RECORDED` is read from docstrings.
"""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from lightning_rl import advantages, callbacks, losses
from lightning_rl.advantages import ESTIMATORS, Estimator, TraceDecay
from lightning_rl.corrections import CONTRIBUTIONS, RLCallback
from lightning_rl.losses import LOSSES, FunctionLoss, PolicyLoss, ValueLoss
from lightning_rl.signal.kl import KL_ESTIMATORS
from lightning_rl.signal.reductions import REDUCTIONS, SequenceSumNorm

sys.path.append(str(Path(__file__).parent))

from roles import markdown

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_suffix(".md")
HELPS = re.compile(r"^Helps .*?\.(?=\s|$)", re.MULTILINE | re.DOTALL)
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")
CASES = ("tests/data/goldens", "tests/data/goldens_more")
HEAD = """# Algorithms

The table lists losses, estimators, reductions, KL estimators and corrections. Each algorithm links to its formula and
options. Pass corrections to the Trainer, as `Trainer(callbacks=[...])`. Pass any other algorithm, as an object or by
the name in the second column, as `loss=`, `advantages=`, `reduction=`, `Critic(loss=)`, `GAE(lam=)` or
`ReferenceKL(estimator=)`. [Choosing](choosing.md) lists when each algorithm helps. In definitions, the score of a
response is its reward including bonuses, and a row is one response. "Also in" lists the libraries whose
[recorded results](evidence.md#parity) are compared with lightning-rl's.

Each figure shows the effect of an algorithm on one rollout of the [quickstart](index.md)'s task, with 256 responses,
four optimizer steps and a staleness of one rollout. The default algorithm is grey. The figures do not compare the
quality of algorithms. `python docs/figures.py` draws the figures, and `python docs/algorithms.py` writes this page.

| Algorithm | Name | Changes | Definition | Also in | Paper | Figure |
|---|---|---|---|---|---|---|
"""

RECORDED: Mapping[str, tuple[str, ...]] = {
    "ClippedSurrogate": ("ppo_clip", "ppo_clip_dual", "ppo_clip_two_sided_delta"),
    "Reinforce": ("policy_loss/reinforce", "policy_loss/gpg"),
    "GSPO": ("gspo", "gspo_token", "gspo_dual", "gspo_rollout_anchor", "luspo"),
    "CISPO": ("cispo", "cispo_rollout_anchor"),
    "DPPO": ("dppo_binary_tv", "dppo_binary_kl"),
    "DRO": ("dro",),
    "SAPO": ("sapo",),
    "GMPO": ("gmpo",),
    "VESPO": ("vespo", "vespo_weights"),
    "ClipCov": ("clip_cov",),
    "KLCov": ("kl_cov",),
    "M2PO": ("m2po", "m2po_mask"),
    "ValueLoss": ("value_clip", "value_mse"),
    "GRPO": ("grpo",),
    "DrGRPO": ("dr_grpo",),
    "RLOO": ("rloo",),
    "MaxRL": ("maxrl",),
    "OPO": ("opo",),
    "RawReward": ("raw_reward",),
    "ReinforcePlusPlus": ("reinforce_plus_plus",),
    "ReinforcePlusPlusBaseline": ("reinforce_plus_plus_baseline",),
    "ReMax": ("remax",),
    "GAE": ("gae", "gae_decoupled", "gae_packed", "gae_pipeline"),
    "GAEOverTurns": ("gae_turn_level",),
    "GPG": ("advantages_outcome/gpg",),
    "PassAtK": ("grpo_passk",),
    "OptimalTokenBaseline": ("optimal_token_baseline", "tir_optimal_token_baseline"),
    "Normalized": ("grpo_batch_std", "reward_norm"),
    "LengthAdaptive": ("gae_vapo_length_adaptive", "gae_length_adaptive"),
    "RelativePosition": ("gae_relative_position",),
    "token_mean": ("token-mean",),
    "sequence_mean": ("seq-mean-token-mean", "seq-sum-token-mean"),
    "prompt_mean": ("prompt-mean",),
    "SequenceSumNorm": ("seq-mean-token-sum", "seq-mean-token-sum-norm"),
    "k1": ("kl_k1",),
    "absolute": ("kl_abs",),
    "k2": ("kl_k2",),
    "k3": ("kl_k3", "kl_low_var_clamped"),
    "binary_kl": ("kl_binary",),
    "OPSM": ("opsm",),
    "DivergenceMask": ("kpop_binary_kl_mask", "sequence_kl_mask", "token_kl_mask"),
    "EntropyBonus": ("entropy_loss",),
    "IcePop": ("icepop", "icepop_token_mask"),
    "LinearLengthPenalty": ("grpo_linear_length_penalty",),
    "NoEOSMask": ("overlong_filtering", "no_eos_reward_norm"),
    "OffPolicyIS": ("off_policy_is_current_over_rollout",),
    "OutlierMask": ("outlier_token_veto",),
    "OverlongPenalty": ("dapo_overlong",),
    "PositiveNLL": ("vapo_positive_nll",),
    "ReferenceKL": ("reference_kl_loss", "ppo_clip_with_kl", "kl_shaped_reward"),
    "RewardNormalization": ("reward_norm", "reward_norm_masked"),
    "RolloutKL": ("rollout_kl_loss",),
    "SequenceRatioMask": (
        "geometric_sequence_mask",
        "sequence_geometric_mask",
        "product_sequence_mask",
        "sequence_product_mask",
        "sequence_max_ratio_mask",
    ),
    "StopProperly": ("stop_properly",),
    "TotalVariationMask": ("sequence_tv_mask",),
    "TruncatedIS": ("tis_token", "tis_sequence", "tis_token_two_sided", "sequence_geometric_truncate"),
}
"""By class or function: the recorded algorithms, or ``topic/algorithm``, that it is compared with."""


class Algorithm(NamedTuple):
    """A row of the table."""

    value: Any  # class or function
    name: str  # that options accept; empty for none
    changes: str


def algorithms() -> Iterator[Algorithm]:
    """Yield everything in the registries and modules of the library."""
    yield from _of_module(losses, PolicyLoss, LOSSES, "policy loss", leave_out=FunctionLoss)
    yield Algorithm(ValueLoss, "", "value loss")
    yield from _of_module(advantages, Estimator, ESTIMATORS, "advantages", leave_out=advantages.FunctionEstimator)
    yield from _of_module(advantages, TraceDecay, {}, "decay of GAE")
    for name, reduction in REDUCTIONS.items():
        yield Algorithm(reduction if inspect.isfunction(reduction) else type(reduction), name, "weights of tokens")
    yield Algorithm(SequenceSumNorm, "", "weights of tokens")
    for name, estimator in KL_ESTIMATORS.items():
        yield Algorithm(estimator, name, "a KL")
    for name in callbacks.__all__:
        yield Algorithm(getattr(callbacks, name), "", ", ".join(_bent(getattr(callbacks, name))))


def _of_module(
    module: ModuleType, kind: type, registry: Mapping[str, Any], changes: str, *, leave_out: type | None = None
) -> Iterator[Algorithm]:
    names = {type(value): name for name, value in reversed(list(registry.items()))}
    exported = [getattr(module, name) for name in module.__all__]
    for value in exported:
        if inspect.isclass(value) and issubclass(value, kind) and not inspect.isabstract(value) and value != leave_out:
            yield Algorithm(value, names.get(value, ""), changes)


def _bent(kind: type[RLCallback]) -> list[str]:
    """Return the parts of the signal that a correction changes, from the table of contributions."""
    methods = [name for name in CONTRIBUTIONS if getattr(kind, name) is not getattr(RLCallback, name)]
    return list(dict.fromkeys(CONTRIBUTIONS[name].affects for name in methods if CONTRIBUTIONS[name].affects))


def recorded_peers() -> dict[str, set[str]]:
    """Map each recorded algorithm, also as ``topic/name``, to the systems that have it."""
    peers: dict[str, set[str]] = {}
    for folder in CASES:
        for manifest in sorted((ROOT / folder).glob("*/manifest.json")):
            for case in json.loads(manifest.read_text())["cases"]:
                for name in (case["algorithm"], f"{manifest.parent.name}/{case['algorithm']}"):
                    peers.setdefault(name, set()).add(case["peer"])
    return peers


def _is_correction(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, RLCallback)


def _texts(value: Any) -> tuple[str, str]:
    """Return the docstring, and the one with the source: its own or that of its file."""
    text = inspect.getdoc(value) or ""
    return text, text if "Source:" in text else importlib.import_module(value.__module__).__doc__ or text


def _row(algorithm: Algorithm, peers: Mapping[str, set[str]]) -> str:
    value = algorithm.value
    text, source = _texts(value)
    does = text.partition("\n\n")[0]
    if _is_correction(value):
        does = _after_title(source).partition("\n\n")[0]
        does += "".join(f" {helps}" for helps in HELPS.findall(source))
    also = sorted(set().union(*(peers.get(name, set()) for name in RECORDED.get(value.__name__, ()))), key=str.lower)
    cells = (
        f"[`{value.__name__}`](../{_file(value)}#{value.__name__})",
        f"`{algorithm.name}`" if algorithm.name else "",
        algorithm.changes,
        _cell(does),
        ", ".join(also) or "none recorded",
        ", ".join(_papers(source)) or "no paper",
        f"[figure](figures/{value.__name__}.svg)",
    )
    return "| " + " | ".join(cells) + " |"


def _file(value: Any) -> Path:
    return Path(inspect.getsourcefile(value) or "").resolve().relative_to(ROOT)


def _papers(text: str) -> Iterable[str]:
    source = _source(text)
    numbers = dict.fromkeys(ARXIV.findall(source))
    return [f"[{number}](https://arxiv.org/abs/{number})" for number in numbers] or [source]


def _source(text: str) -> str:
    return " ".join(text.partition("Source:")[2].partition("\n\n")[0].split())


def _cell(text: str) -> str:
    return _prose(text).replace("|", r"\|")


def _prose(text: str) -> str:
    """Return a docstring as Markdown, literals and examples included."""
    return markdown(text).replace("``", "`").replace(">>>", "    >>>")


def _after_title(text: str) -> str:
    """Return the docstring of a file without its title."""
    title, _, rest = text.partition(": ")
    first, _, rest = rest.partition("\n\n")
    del title
    return f"{first[0].upper()}{first[1:]}\n\n{rest}"


def page() -> str:
    """Return the page."""
    peers = recorded_peers()
    return HEAD + "\n".join(_row(algorithm, peers) for algorithm in algorithms()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
