"""Recipe: the arguments of module, data and Trainer, and how they are written as a script or as YAML."""

import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from lightning_rl.translation.values import Call, NoYAMLError, import_of, imports_of, plain, python

STANDARD = ("functools", "math")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a configuration leaves to whoever runs it.

    Attributes:
        devices: processes of the run.
        model: name or folder of the policy, where the configuration has none.
        rewards: dotted names of reward functions, likewise.
        prompts: a file or data set of prompts, likewise.
    """

    devices: int = 1
    model: str | None = None
    rewards: Sequence[str] = ()
    prompts: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A run, as its arguments.

    Attributes:
        origin: what it was made from, in words.
        count: how many options were translated.
        notes: from the name of an option to what has to be known about it.
        module: arguments of ``RLLightningModule``.
        data: arguments of ``PromptDataModule``.
        trainer: arguments of ``Trainer``.
        steps: an expression of Python for the number of optimizer steps, if ``data`` has to be asked; None if the
            Trainer's arguments say it.
        code: statements of the script that it was made from, which arguments refer to.
    """

    origin: str
    module: Mapping[str, Any]
    data: Mapping[str, Any]
    trainer: Mapping[str, Any]
    count: int = 0
    notes: Mapping[str, str] = field(default_factory=dict)
    steps: str | None = None
    code: Sequence[str] = ()

    def script(self) -> str:
        """The run as a script of Python."""
        parts = [
            ("data", Call("lightning_rl.PromptDataModule", self.data)),
            ("module", Call("lightning_rl.RLLightningModule", self.module)),
            ("trainer", Call("lightning.pytorch.Trainer", self.trainer)),
        ]
        needed = {path for _, call in parts for path in imports_of(call)}
        needed |= {"math.ceil"} if self.steps and "ceil(" in self.steps else set()
        carried = [statement for statement in self.code if statement.startswith(("import ", "from "))]
        text = "\n".join([self._docstring(), "", *import_lines(needed), *carried]) + "\n"
        before = ""
        for statement in (statement for statement in self.code if statement not in carried):
            text += ("\n\n" if is_block(statement) or is_block(before) else "\n" * (not before)) + statement + "\n"
            before = statement
        text += "\n\n" if is_block(before) else "\n"
        text += f"data = {python(parts[0][1], beside=7)}\n"
        text += f"steps = {self.steps}\n" if self.steps is not None else ""
        text += "".join(f"{name} = {python(call, beside=len(name) + 3)}\n" for name, call in parts[1:])
        return text + '\nif __name__ == "__main__":\n    trainer.fit(module, data)\n'

    def yaml(self) -> str:
        """The run as a file for ``LightningCLI(RLLightningModule, PromptDataModule)``.

        Raises:
            NoYAMLError: if something of it is code.
        """
        if self.code or self.steps is not None:
            raise NoYAMLError(self.steps or self.code[0])
        seed = {"seed_everything": self.module["seed"]} if "seed" in self.module else {}
        sections = {"trainer": self.trainer, "model": self._module_of_yaml(), "data": self.data}
        text = yaml.safe_dump({**seed, **{name: plain(dict(part)) for name, part in sections.items()}}, sort_keys=False)
        return "".join(f"# {line}\n" for line in self._docstring().strip('"').splitlines()) + text

    def _module_of_yaml(self) -> dict[str, Any]:
        """The module's arguments, with what YAML writes in another form."""
        module = dict(self.module)
        sampling = module.get("sampling")
        if isinstance(sampling, Call):
            module["sampling"] = dict(sampling.options)
        evaluation = module.get("evaluation")
        if isinstance(evaluation, Call):
            module["evaluation"] = dict(evaluation.options)
        return module

    def _docstring(self) -> str:
        notes = [
            textwrap.fill(f"* {name}: {note}.", 119, subsequent_indent="  ", break_on_hyphens=False)
            for name, note in self.notes.items()
        ]
        body = ["", "What has to be known about it:", "", *notes, ""] if notes else []
        return '"""' + "\n".join([f"From {self.origin}.", *body]).replace("\\", "\\\\") + '"""'


def is_block(statement: str) -> bool:
    """Whether a statement defines a function or a class."""
    return statement.startswith(("def", "async def", "class ", "@"))


def import_lines(paths: set[str]) -> list[str]:
    """Import statements for dotted names: the standard library, then the others, each in order."""
    by_module: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        module, name = import_of(path)
        by_module[module].add(name)
    lines = {
        module: f"from {module} import {', '.join(sorted(names, key=_case))}" for module, names in by_module.items()
    }
    first = [lines[module] for module in sorted(lines) if module in STANDARD]
    ours = [lines[module] for module in sorted(lines) if module.partition(".")[0] == "lightning_rl"]
    others = [line for line in (lines[module] for module in sorted(lines)) if line not in first and line not in ours]
    return [line for group in (first, others, ours) if group for line in ("", *group)][1:]


def _case(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)
