"""replay: computes a recorded rollout again and compares, or compares two recordings or two configurations."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_rl.cli.output import say
from lightning_rl.cli.recipes import Recipe, load_recipe, run_until_fit
from lightning_rl.inspection import StopRecipe
from lightning_rl.metrics import callbacks_of
from lightning_rl.module import RLLightningModule
from lightning_rl.recording import Configuration, Recording, Replayed, replay
from lightning_rl.recording.differences import (
    Difference,
    described_differences,
    difference,
    recorded_differences,
    recording_differences,
    samples_of,
)
from lightning_rl.recording.rerun import Rescored, rescored
from lightning_rl.recording.serialize import opaque_places, rebuilt


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``lightning-rl replay`` to the command line."""
    replaying = commands.add_parser("replay", help="compute a recorded rollout again and compare")
    replaying.add_argument("recording", type=Path, help="either file of a recording")
    replaying.add_argument("other", type=Path, nargs="?", help="another recording, to compare with")
    replaying.add_argument("--recipe", type=Path, help="take the configuration from a script, not from the recording")
    replaying.add_argument("--checkpoint", type=Path, help="with --recipe: repeat the step that began with its weights")
    replaying.add_argument("--against", type=Path, help="a script with another configuration, to compare with")
    replaying.epilog = "What stands after -- is passed on to the script."
    replaying.set_defaults(run=run)


def run(given: argparse.Namespace, options: Sequence[str]) -> int:
    """Does what the command line asks for.

    Returns:
        The exit code: 0 if everything that had to be equal was, 1 otherwise.

    Raises:
        SystemExit: if the options do not go together, or the recording does not hold what it takes.
    """
    if given.checkpoint is not None and given.recipe is None:
        raise SystemExit("expected --recipe with --checkpoint: the policy is built by the script that trained it")
    if sum(one is not None for one in (given.other, given.recipe, given.against)) > 1:
        raise SystemExit("expected one of a second recording, --recipe and --against, got several")
    try:
        if given.other is not None:
            return compare_recordings(Recording.load(given.recording), Recording.load(given.other))
        recordings = Recording.of_all_ranks(given.recording)
        if given.against is not None:
            return compare_configurations(recordings, given.against, options)
        if given.checkpoint is not None:
            return repeat_step(recordings, given.recipe, options, given.checkpoint)
        return repeat(recordings, given.recipe, options)
    except (ValueError, FileNotFoundError) as refused:
        raise SystemExit(str(refused)) from refused


def repeat(recordings: Sequence[Recording], recipe: Path | None, options: Sequence[str]) -> int:
    """Computes signal, loss and gradient again; prints a table for each rank.

    Args:
        recordings: of all ranks.
        recipe: a script whose configuration is used; None for the recorded one.
        options: its command line.
    """
    if recipe is None:
        configurations = [_recorded_configuration(recording) for recording in recordings]
    else:
        configurations = [_configuration(load_recipe(recipe, options)) for _ in recordings]
    codes = []
    for recording, found in zip(recordings, replay(recordings, configurations), strict=True):
        say(_title(recording))
        codes.append(_verdict(recording, recorded_differences(recording, found)))
    return max(codes)


def repeat_step(recordings: Sequence[Recording], recipe: Path, options: Sequence[str], checkpoint: Path) -> int:
    """Loads a checkpoint as the recipe's fit would and repeats the recorded step that began with its weights."""
    witness = _AtStart(recordings)
    run_until_fit(load_recipe(recipe, options), witness, checkpoint)
    recording, found = witness.found[0]
    say(_title(recording))
    if found.step is None:
        known = ", ".join(step["weights"] for step in recording.header["steps"])
        say(f"{'weights':<24}{found.weights}: no recorded step began with them, but with {known}\n\nNOT EQUAL")
        return 1
    say(f"{'weights':<24}{found.weights}, those that step {found.step} began with")
    return _verdict(recording, _step_differences(recording, found))


def compare_recordings(ours: Recording, theirs: Recording) -> int:
    """Prints where two recordings differ, in the order in which things come to be."""
    say(f"{_title(ours)}\nagainst {_title(theirs)}")
    found = list(recording_differences(ours, theirs))
    for one in found:
        _row(one.what, str(one))
    say("\nNOT EQUAL" if found else "\nbitwise equal")
    return 1 if found else 0


def compare_configurations(recordings: Sequence[Recording], recipe: Path, options: Sequence[str]) -> int:
    """Prints what another configuration makes of a recorded rollout; nothing has to be equal, so the code is 0."""
    ours = [_recorded_configuration(recording) for recording in recordings]
    theirs = [_configuration(load_recipe(recipe, options)) for _ in recordings]
    for one in described_differences(ours[0].described(), theirs[0].described()):
        _row(one.what, str(one))
    before, after = replay(recordings, ours), replay(recordings, theirs, restored=False)
    for recording, one, other in zip(recordings, before, after, strict=True):
        say("\n" + _title(recording))
        for what, found in _changes(recording, one, other):
            _row(what, found)
    return 0


class _AtStart(Callback):
    """Repeats a recorded step when a fit has loaded its checkpoint, and ends the fit."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.recordings = recordings
        self.found: list[tuple[Recording, Rescored]] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parallel = cast(RLLightningModule, pl_module).parallel
        if parallel.ranks != len(self.recordings):
            raise ValueError(f"expected a Trainer of {len(self.recordings)} ranks as recorded, got {parallel.ranks}")
        own = self.recordings[parallel.rank]
        self.found.append((own, rescored(cast(RLLightningModule, pl_module), own)))
        raise StopRecipe(pl_module)


def _configuration(given: Recipe) -> Configuration:
    return Configuration.of(given.module, callbacks_of(given.trainer))


def _recorded_configuration(recording: Recording) -> Configuration:
    description = recording.header["configuration"]
    for place, text in opaque_places(description):
        if not place.startswith("callbacks."):
            raise ValueError(
                f"expected a configuration that can be imported, got {text} as {place}, which a recording keeps as a "
                "text: pass --recipe with the script that made the run, or move it into a module"
            )
    return Configuration.rebuilt(description)


def _step_differences(recording: Recording, found: Rescored) -> Iterable[tuple[str, Difference | None]]:
    step, samples = int(found.step or 0), samples_of(recording)
    rows = torch.zeros(len(samples), dtype=torch.bool)
    for own in recording.header["plan"][step % recording.minibatches]:
        rows[own] = True
    names = [name for name, chosen in zip(samples, rows.tolist(), strict=True) if chosen]
    for name, theirs in (("logprobs", found.logprobs), ("entropy", found.entropy)):
        ours = recording.of_step(step, name)
        sides = [None if each is None else each[rows] for each in (ours, theirs)]
        yield name, difference(name, sides[0], sides[1], names)
    recorded = torch.tensor([rebuilt(recording.header["steps"][step]["grad_norm"])], dtype=torch.float64)
    norm = None if found.norm is None else found.norm.double().cpu().reshape(1)
    yield "parameter gradient norm", difference("norm", recorded, norm, [f"step {step}"])


def _changes(recording: Recording, one: Replayed, other: Replayed) -> Iterable[tuple[str, str]]:
    samples = samples_of(recording)
    for name in ("trained", "rewarded", "valid_tokens", "advantages", "returns"):
        found = difference(name, getattr(one.rollout, name), getattr(other.rollout, name), samples)
        yield name, str(found or "equal")
    yield "shaped reward", str(difference("shaped", one.shaped, other.shaped, samples) or "equal")
    for number, parts in enumerate(zip(one.parts, other.parts, strict=True)):
        totals = [float(each.get("loss/total", torch.tensor(torch.nan))) for each in parts]
        yield f"loss of step {number}", f"{totals[0]:.6g} against {totals[1]:.6g}"
    for number, gradients in enumerate(zip(one.gradients, other.gradients, strict=True)):
        norms = [float(each.norm()) for each in gradients]
        product = float((gradients[0].double() * gradients[1]).sum()) / max(norms[0] * norms[1], 1e-300)
        yield f"gradient of pass {number}", f"norm {norms[0]:.6g} against {norms[1]:.6g}, cosine {product:.4f}"
    for number, masks in enumerate(zip(one.rejected, other.rejected, strict=True)):
        counts = [int(each.sum()) for each in masks]
        yield f"rejected in pass {number}", f"{counts[0]} tokens against {counts[1]}"


def _verdict(recording: Recording, found: Iterable[tuple[str, Difference | None]]) -> int:
    """Prints every quantity; 1 if one differs by more than it may: not at all on the CPU and torch of the recording."""
    header = recording.header
    exact = header["device"] == "cpu" and header["versions"]["torch"] == torch.__version__
    unequal = []
    for what, one in found:
        _row(what, "equal" if one is None else f"DIFFERS: {one}")
        unequal += [one] if one is not None else []
    failed = [one for one in unequal if exact or not one.rounding]
    words = "NOT EQUAL" if failed else "equal up to rounding, as another device or torch allows" if unequal else ""
    say(f"\n{words or 'bitwise equal'}")
    return 1 if failed else 0


def _title(recording: Recording) -> str:
    header = recording.header
    rank = f", rank {header['rank']} of {header['world_size']}" if header["world_size"] > 1 else ""
    return (
        f"rollout {header['cycle']}{rank}: {len(header['samples'])} samples, {len(header['steps'])} optimizer steps, "
        f"recorded on {header['device']} with torch {header['versions']['torch']}"
    )


def _row(what: str, found: str) -> None:
    say(f"{what:<24}{found}" if len(what) < 24 else f"{what}  {found}")
