"""Hashes of runs, to show that a change of the code changes no number.

``python -m tests.hashes record FOLDER [NAME ...]`` trains the runs in :data:`RUNS`, each in a separate process, with
metrics, a recording of every rollout, sample files and a checkpoint after every step, and writes the hash of each value
to ``FOLDER/NAME.json``. ``compare OLD NEW`` prints the values that differ, and exits with 1 if there is one; names that
changed since ``OLD`` are read through :data:`RENAMED`. ``resume OLD NEW`` continues the runs of ``OLD`` from their
checkpoints in the middle with the code of today: its weights at the end are those of ``OLD``.
"""

import csv
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import AdamW

ROOT = Path(__file__).resolve().parents[1]
RENAMED = {r"rollout/rewards_by_function/": "rollout/task_rewards/"}
"""Patterns of keys of today, and what the key was when the hashes of ``OLD`` were written."""
DIFFERS = re.compile(r"time|idle|second|throughput|memory|_mb\b|mfu|per_s|created|packages|platform|log$|/hparams")
"""Keys of values that differ between two equal runs."""


def agent(**options: Any) -> dict[str, Any]:
    """Options of a run with an environment of several turns."""
    from kit.conversations import CONVERSATIONS, TURN_ENDS

    return {**CONVERSATIONS, "max_new_tokens": 9, "eos_token_ids": TURN_ENDS, **options}


def contexts() -> dict[str, Any]:
    """Contexts that an environment rewrites, with advantages of turns."""
    from kit.conversations import Forgetful

    from lightning_rl import GAEOverTurns

    return agent(environment=Forgetful, advantages=GAEOverTurns(turn_rewards=True), critic="shared", group_size=1)


def routes() -> dict[str, Any]:
    """A mixture of experts whose routes are replayed over several turns."""
    from kit.support import tiny_model

    from lightning_rl.callbacks import RouterAuxLoss, RouterReplay

    policy = partial(tiny_model, "qwen3_moe", dtype=torch.float32)
    return agent(policy=policy, callbacks=[RouterReplay(), RouterAuxLoss(0.1)])


def failing() -> dict[str, Any]:
    """Environments in worker processes, of which some raise in their second turn."""
    from kit.conversations import Echo

    class Breaks(Echo):
        """Raise for a fourth of the seeds."""

        def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:  # noqa: ARG002
            return super().reset({"place": seed}, seed)

    return agent(environment=partial(Breaks, 1), environment_workers=2, max_environment_failure_rate=None)


def scripted(request: Any) -> Sequence[int]:
    """Return some tokens that depend on the sample alone."""
    return [2 + request.sample_id % 7, *range(2, 2 + request.sample_id % 5), 1]


def further_ahead() -> dict[str, Any]:
    """An engine that generates two rollouts ahead."""
    from lightning_rl import FakeEngine

    engine = FakeEngine(scripted)
    engine.capabilities = replace(engine.capabilities, syncs_while_generating=True)
    return {"engine": engine, "max_staleness": 2, "epochs_per_rollout": 2}


def some_fail(prompts: Sequence[Any], completions: Sequence[str], *, completion_ids: Any, **_: Any) -> list[Any]:
    """Return rewards of which some are missing."""
    return [float(len(ids) % 2) if ids[0] % 5 else None for ids in completion_ids]


def answers() -> dict[str, Any]:
    """An evaluation of several answers with a majority."""
    from kit.support import tiny_tokenizer

    from lightning_rl import Evaluation, SamplingParams

    sampling = SamplingParams(temperature=0.7, max_new_tokens=8)
    evaluation = Evaluation("several", [[4], [5]], samples=4, sampling=sampling, answer=lambda text: text[:1] or None)
    return {"evaluation": evaluation, "tokenizer": tiny_tokenizer()}


def lora() -> dict[str, Any]:
    """Adapters, with the model below them as the reference."""
    from kit.strategy_cases import lora_policy

    from lightning_rl.callbacks import ReferenceKL

    return {"policy": partial(lora_policy, torch.float32), "callbacks": [ReferenceKL(0.1, as_loss=True)]}


def corrections() -> dict[str, Any]:
    """Corrections that read every field of the rollout."""
    from lightning_rl.callbacks import OPSM, AdaptiveKL, EntropyBonus, NoEOSMask, OverlongPenalty, TruncatedIS

    found = [
        OPSM(1e-3),
        AdaptiveKL(0.1),
        EntropyBonus(0.01, target=1.0),
        NoEOSMask(),
        TruncatedIS(),
        OverlongPenalty(2, cache=2),
    ]
    return {
        "callbacks": found,
        "advantages": "reinforce_plus_plus",
        "epochs_per_rollout": 2,
        "max_tokens_per_microbatch": 20,
    }


def filtered() -> dict[str, Any]:
    """Groups of equal rewards are drawn again, twice."""
    from lightning_rl.callbacks import DynamicSampling

    return {"callbacks": [DynamicSampling(max_rounds=3)], "rewards": some_fail, "max_reward_failure_rate": None}


def early() -> dict[str, Any]:
    """A reward in a subprocess, which starts while other samples are drawn, beside one that fails."""
    from kit.support import parity_reward

    from lightning_rl.rewards import SubprocessReward

    rewards = {"early": SubprocessReward(parity_reward), "fails": some_fail}
    return {"rewards": rewards, "max_reward_failure_rate": None, "max_staleness": 1}


def centered() -> dict[str, Any]:
    """Likeliest tokens of the engine, with which scores are centered."""
    from lightning_rl.callbacks import ScoreCentering

    return {"callbacks": [ScoreCentering(4)]}


Options = Callable[[], dict[str, Any]]
RUNS: dict[str, tuple[Options, int, str]] = {
    "grpo": (dict, 1, "auto"),
    "ppo": (lambda: {"advantages": "gae", "critic": "shared", "epochs_per_rollout": 2}, 1, "auto"),
    "lora": (lora, 1, "auto"),
    "ahead": (lambda: {"max_staleness": 1}, 1, "auto"),
    "further ahead": (further_ahead, 1, "auto"),
    "agent": (agent, 1, "auto"),
    "agent ahead": (lambda: agent(max_staleness=1), 1, "auto"),
    "contexts": (contexts, 1, "auto"),
    "masks": (lambda: {"top_k": 6, "top_p": 0.8}, 1, "auto"),
    "masks of turns": (lambda: agent(top_k=6), 1, "auto"),
    "routes": (routes, 1, "auto"),
    "remax": (lambda: {"advantages": "remax", "group_size": 1, "epochs_per_rollout": 2}, 1, "auto"),
    "filtered": (filtered, 1, "auto"),
    "early": (early, 1, "auto"),
    "failing": (failing, 1, "auto"),
    "centered": (centered, 1, "auto"),
    "answers": (answers, 1, "auto"),
    "corrections": (corrections, 1, "auto"),
    "ddp": (dict, 2, "ddp"),
    "ddp ahead": (lambda: agent(max_staleness=1), 2, "ddp"),
    "ddp filtered": (filtered, 2, "ddp"),
    "fsdp2": (dict, 2, "fsdp2"),
    **{f"quickstart {seed}": (dict, 1, "quickstart") for seed in range(5)},
}
"""Options of :func:`kit.support.tiny_module` with ``callbacks``, number of ranks, strategy; or a recipe."""
STEPS, MIDDLE = 12, 5


def train(name: str, folder: Path, checkpoint: Path | None) -> None:
    """Train one run below a folder, from its start or from a checkpoint."""
    from kit.ranks import STRATEGIES
    from kit.support import fit, tiny_module, tiny_prompts
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from lightning_rl.recording import RolloutRecorder

    make, ranks, strategy = RUNS[name]
    if strategy == "quickstart":
        from quickstart import main as quickstart

        trainer = quickstart(rollouts=4, updates=2, seed=int(name.split()[-1]))
        torch.save(trainer.lightning_module.state_dict(), folder / "weights.pt")
        return
    options = make()
    callbacks = [*options.pop("callbacks", ()), RolloutRecorder(folder / "recordings")]
    saving = ModelCheckpoint(folder / "checkpoints", "{step}", save_top_k=-1, every_n_train_steps=1)
    options = {
        "minibatches_per_rollout": 2,
        "optimizer": partial(AdamW, lr=1e-2),
        "max_tokens_per_microbatch": 64,
        **options,
    }
    module = tiny_module(**options)
    data = tiny_prompts(STEPS * 4, 8, validation=[[2, 3], [4]])
    fit(
        module, callbacks=[saving, *callbacks], data=data, ckpt_path=checkpoint, logger=CSVLogger(folder, "metrics", 0),
        enable_checkpointing=True, default_root_dir=folder, devices=ranks, max_steps=STEPS, val_check_interval=4,
        check_val_every_n_epoch=None, num_sanity_val_steps=0, strategy=STRATEGIES[strategy]() if ranks > 1 else "auto",
    )  # fmt: skip
    weights = {name: getattr(weight, "full_tensor", lambda w=weight: w)() for name, weight in module.named_parameters()}
    if module.global_rank == 0:
        torch.save(weights, folder / "weights.pt")


def run(name: str, folder: Path, checkpoint: Path | None = None) -> None:
    """Train one run in separate processes, one for each rank."""
    from kit.ranks import run_ranks

    folder.mkdir(parents=True)
    arguments = ["train", name, folder, *([checkpoint] if checkpoint else [])]
    if RUNS[name][1] > 1:
        return run_ranks(__file__, RUNS[name][1], *arguments)
    with (folder / "output.log").open("w") as output:
        command = [sys.executable, __file__, *map(str, arguments)]
        subprocess.run(command, cwd=folder, env=os.environ, stdout=output, stderr=output, check=True)
    return None


def digest(value: object) -> str:
    """Return a short hash of a tensor, or a plain value itself."""
    if isinstance(value, Tensor):
        content = value.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return text if len(text) < 60 else hashlib.sha256(text.encode()).hexdigest()[:16]


def flat(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested values with their keys."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from flat(f"{key}/{name}", each)
    elif (
        isinstance(value, list | tuple)
        and len(value) < 1000
        and any(isinstance(each, Mapping | list) for each in value)
    ):
        for number, each in enumerate(value):
            yield from flat(f"{key}/{number}", each)
    else:
        yield key, value


def with_turns(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a recording with turn numbers for segments, as in older recordings."""
    from lightning_rl.rollout import Rollout, turn_numbers

    parts = {name.removeprefix("rollout/"): tensor for name, tensor in tensors.items() if name.startswith("rollout/")}
    others = {name: tensor for name, tensor in tensors.items() if "/segments/" not in name}
    if len(others) == len(tensors):
        return others
    return {**others, "rollout/token_extras/turns": turn_numbers(Rollout.from_state(parts))}


def values(folder: Path) -> Iterator[tuple[str, object]]:
    """Yield every value in the files of a run; of checkpoints, those of PyTorch."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        key = str(path.relative_to(folder))
        match path.suffix:
            case ".pt":
                yield from flat(key, torch.load(path, weights_only=False))
            case ".ckpt":
                state = torch.load(path, weights_only=False)
                yield from flat(key, {part: state[part] for part in ("state_dict", "optimizer_states", "global_step")})
            case ".safetensors":
                yield from flat(key, with_turns(load_file(path)))
            case ".json":
                yield from flat(key, json.loads(path.read_text()))
            case ".jsonl":
                yield from flat(key, [json.loads(line) for line in path.read_text().splitlines()])
            case ".csv":
                yield from flat(key, list(csv.DictReader(path.open())))
            case _:
                pass


def hashes(folder: Path) -> dict[str, str]:
    """Return the hash of each value of a run that is the same in an equal run."""
    return {key: digest(value) for key, value in values(folder) if not DIFFERS.search(key)}


def record(folder: Path, names: Sequence[str]) -> int:
    """Train runs and write their hashes."""
    for name in names or RUNS:
        run(name, folder / name)
        (folder / f"{name}.json").write_text(json.dumps(hashes(folder / name), indent=1))
        print(name, flush=True)  # noqa: T201
    return 0


def old_name(key: str) -> str:
    """Return the key that a value had when the old hashes were written."""
    for pattern, name in RENAMED.items():
        key = re.sub(pattern, name, key)
    return key


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the keys whose values differ, or that only one of two runs has."""
    from lightning_rl.serialization import FORMER_PATHS

    old = {key: FORMER_PATHS.get(value, value) for key, value in old.items()}
    new = {old_name(key): value for key, value in new.items()}
    keys = (key for key in old.keys() | new.keys() if not DIFFERS.search(key))
    return sorted(key for key in keys if old.get(key) != new.get(key))


def compare(old: Path, new: Path) -> int:
    """Print the differing values of the runs that are in two folders; return 1 if there is one, else 0."""
    found = 0
    for path in sorted(path for path in old.glob("*.json") if (new / path.name).exists()):
        one, other = (json.loads((folder / path.name).read_text()) for folder in (old, new))
        keys = differences(one, other)
        found += len(keys)
        print(f"{path.stem}: {len(one)} values, {len(keys)} differ")  # noqa: T201
        for key in keys[:20]:
            print(f"    {key}: {one.get(key)} != {other.get(old_name(key))}")  # noqa: T201
    return int(found > 0)


def resume(old: Path, new: Path) -> int:
    """Continue runs from their checkpoints in the middle; return 1 if the weights at the end of one differ, else 0.

    A checkpoint with rollouts generated ahead by an older version may be refused.
    """
    found = 0
    for path in sorted(old.glob("*.json")):
        checkpoint = old / path.stem / "checkpoints" / f"step={MIDDLE}.ckpt"
        if not checkpoint.exists():
            continue
        try:
            run(path.stem, new / path.stem, checkpoint.resolve())
        except (subprocess.CalledProcessError, pytest.fail.Exception) as error:  # one rank, or several
            logs = [log.read_text() for log in (new / path.stem).rglob("*.log")]
            if "which was generated ahead of training, got" not in "".join([str(error), *logs]):
                raise
            print(f"{path.stem}: refused", flush=True)  # noqa: T201
            continue
        one, other = (torch.load(folder / path.stem / "weights.pt") for folder in (old, new))
        apart = [name for name in one if not torch.equal(one[name], other[name])]
        found += len(apart)
        print(f"{path.stem}: {len(apart)} weights differ", flush=True)  # noqa: T201
    return int(found > 0)


def main(arguments: Sequence[str]) -> int:
    """Run one command."""
    command, *given = arguments
    match command:
        case "train":
            torch.set_num_threads(1)
            train(given[0], Path(given[1]), Path(given[2]) if given[2:] else None)
            return 0
        case "record":
            return record(Path(given[0]).resolve(), given[1:])
        case "compare" | "resume":
            return {"compare": compare, "resume": resume}[command](*(Path(each).resolve() for each in given))
    raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "recipes")]
    sys.exit(main(sys.argv[1:]))
