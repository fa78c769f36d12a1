"""replay: recomputes a recorded rollout and compares, or compares two recordings or two algorithms."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_rl.algorithm import Algorithm
from lightning_rl.cli.output import say
from lightning_rl.cli.recipes import Recipe, load_recipe, run_until_fit
from lightning_rl.module import RLLightningModule
from lightning_rl.policy.plan import row_of
from lightning_rl.recording import Recording, Replayed, replay
from lightning_rl.recording.differences import (
    SIGNAL,
    Difference,
    difference,
    json_differences,
    recording_differences,
    replay_differences,
    samples_of,
)
from lightning_rl.recording.recorded_algorithm import describe_algorithm, replayable
from lightning_rl.recording.rerun import Rerun, rerun_step
from lightning_rl.utils.inspection import StopRecipe
from lightning_rl.utils.terminal import visible
from lightning_rl.utils.trainer import callbacks_of


def run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Run the command.

    Returns:
        Exit code: 0 if everything was equal that has to be, 1 otherwise.

    Raises:
        SystemExit: If options exclude each other, or if the recording lacks required data.
    """
    if arguments.checkpoint is not None and arguments.recipe is None:
        raise SystemExit("expected --recipe with --checkpoint, got none: pass the script that builds the policy")
    if sum(option is not None for option in (arguments.other, arguments.recipe, arguments.against)) > 1:
        raise SystemExit("expected one of a second recording, --recipe and --against, got several")
    try:
        if arguments.other is not None:
            return compare_recordings(Recording.load(arguments.recording), Recording.load(arguments.other))
        recordings = Recording.of_all_ranks(arguments.recording)
        if arguments.against is not None:
            return compare_algorithms(recordings, arguments.against, options)
        if arguments.checkpoint is not None:
            return repeat_step(recordings, arguments.recipe, options, arguments.checkpoint)
        return repeat(recordings, arguments.recipe, options)
    except (ValueError, OSError, FloatingPointError) as refused:
        raise SystemExit(visible(str(refused))) from refused


def repeat(recordings: Sequence[Recording], recipe: Path | None, options: Sequence[str]) -> int:
    """Recompute signal, loss and gradient; print a table for each rank.

    Args:
        recordings: Recordings of all ranks.
        recipe: Script with the algorithm; None for the recorded one.
        options: Command line of the script.
    """
    if recipe is None:
        algorithms = [recording.algorithm() for recording in recordings]
    else:
        algorithms = [_algorithm_of(load_recipe(recipe, options)) for _ in recordings]
    codes = []
    for recording, replayed in zip(recordings, replay(recordings, algorithms), strict=True):
        say(_title(recording))
        codes.append(_verdict(recording, replay_differences(recording, replayed)))
    return max(codes)


def repeat_step(recordings: Sequence[Recording], recipe: Path, options: Sequence[str], checkpoint: Path) -> int:
    """Load a checkpoint as the recipe's fit would, and repeat the recorded step that started from its weights."""
    at_start = _AtStart(recordings)
    run_until_fit(load_recipe(recipe, options), at_start, checkpoint)
    recording, rerun = at_start.reruns[0]
    say(_title(recording))
    if rerun.step is None:
        weights = ", ".join(step["weights"] for step in recording.header["steps"])
        say(f"{'weights':<24}{rerun.weights}: no recorded step started from them, but from {weights}\n\nNOT EQUAL")
        return 1
    say(f"{'weights':<24}{rerun.weights}, from which step {rerun.step} started")
    return _verdict(recording, _step_differences(recording, rerun))


def compare_recordings(ours: Recording, theirs: Recording) -> int:
    """Print the differences of two recordings, in order of computation."""
    say(f"{_title(ours)}\nagainst {_title(theirs)}")
    differences = list(recording_differences(ours, theirs))
    for each in differences:
        _row(each.what, str(each))
    say("\nNOT EQUAL" if differences else "\nbitwise equal")
    return 1 if differences else 0


def compare_algorithms(recordings: Sequence[Recording], recipe: Path, options: Sequence[str]) -> int:
    """Print the effect of another algorithm on a recorded rollout; always returns 0."""
    ours = [recording.algorithm() for recording in recordings]
    theirs = [_algorithm_of(load_recipe(recipe, options)) for _ in recordings]
    for each in json_differences(describe_algorithm(ours[0]), describe_algorithm(theirs[0])):
        _row(each.what, str(each))
    pairs = zip(replay(recordings, ours), replay(recordings, theirs, restore=False), strict=True)
    for recording, pair in zip(recordings, pairs, strict=True):
        say("\n" + _title(recording))
        for what, change in _changes(recording, *pair):
            _row(what, change)
    return 0


class _AtStart(Callback):
    """Callback that repeats a recorded step after a fit has loaded its checkpoint, and ends the fit."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.recordings = recordings
        self.reruns: list[tuple[Recording, Rerun]] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = cast(RLLightningModule, pl_module)
        rank, ranks = module.parallel.rank, module.parallel.ranks
        if ranks != len(self.recordings):
            raise ValueError(f"expected a Trainer of {len(self.recordings)} ranks as recorded, got {ranks}")
        self.reruns.append((self.recordings[rank], rerun_step(module, self.recordings[rank])))
        raise StopRecipe(pl_module)


def _algorithm_of(recipe: Recipe) -> Algorithm:
    return replayable(recipe.module.algorithm, callbacks_of(recipe.trainer))


def _step_differences(recording: Recording, rerun: Rerun) -> Iterable[tuple[str, Difference | None]]:
    step, samples = int(rerun.step or 0), samples_of(recording)
    planned = recording.header["plan"][step % recording.minibatches]
    rows = sorted({row_of(entry) for microbatch in planned for entry in microbatch})
    names = [samples[row] for row in rows]
    for name, theirs in (("logprobs", rerun.logprobs), ("entropy", rerun.entropy)):
        before, after = (None if side is None else side[rows] for side in (recording.of_step(step, name), theirs))
        yield name, difference(name, before, after, names)
    recorded = torch.tensor([recording.header["steps"][step]["grad_norm"]], dtype=torch.float64)
    norm = None if rerun.norm is None else rerun.norm.double().cpu().reshape(1)
    yield "parameter gradient norm", difference("norm", recorded, norm, [f"step {step}"])


def _changes(recording: Recording, before: Replayed, after: Replayed) -> Iterable[tuple[str, str]]:
    samples = samples_of(recording)
    for name in SIGNAL:
        sides = getattr(before.rollout, name), getattr(after.rollout, name)
        yield name, str(difference(name, *sides, samples) or "equal")
    yield "shaped reward", str(difference("shaped", before.shaped, after.shaped, samples) or "equal")
    for number, parts in enumerate(zip(before.parts, after.parts, strict=True)):
        totals = [float(side.get("loss/total", torch.tensor(torch.nan))) for side in parts]
        yield f"loss of step {number}", f"{totals[0]:.6g} against {totals[1]:.6g}"
    for number, gradients in enumerate(zip(before.gradients, after.gradients, strict=True)):
        norms = [float(side.norm()) for side in gradients]
        product = float((gradients[0].double() * gradients[1]).sum()) / max(norms[0] * norms[1], 1e-300)
        yield f"gradient of pass {number}", f"norm {norms[0]:.6g} against {norms[1]:.6g}, cosine {product:.4f}"
    for number, masks in enumerate(zip(before.rejected, after.rejected, strict=True)):
        yield f"rejected in pass {number}", f"{int(masks[0].sum())} tokens against {int(masks[1].sum())}"


def _verdict(recording: Recording, differences: Iterable[tuple[str, Difference | None]]) -> int:
    """Print every quantity; return 1 if one differs by more than rounding, or at all on the same CPU and torch."""
    header = recording.header
    exact = header["device"] == "cpu" and header["versions"]["torch"] == torch.__version__
    unequal: list[Difference] = []
    for what, each in differences:
        _row(what, "equal" if each is None else f"DIFFERS: {each}")
        unequal += [] if each is None else [each]
    failed = any(exact or not each.rounding for each in unequal)
    words = "NOT EQUAL" if failed else "equal up to rounding, on another device or torch version" if unequal else ""
    say(f"\n{words or 'bitwise equal'}")
    return 1 if failed else 0


def _title(recording: Recording) -> str:
    header = recording.header
    rank = f", rank {header['rank']} of {header['ranks']}" if header["ranks"] > 1 else ""
    return (
        f"rollout {header['rollout']}{rank}: {len(header['samples'])} samples, {len(header['steps'])} optimizer steps, "
        f"recorded on {header['device']} with torch {header['versions']['torch']}"
    )


def _row(what: str, text: str) -> None:
    say(f"{what:<24}{text}" if len(what) < 24 else f"{what}  {text}")
