"""Blocks of Python on the pages run as pasted; commands and their options exist."""

import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from environments.templates import tokenizer_of
from kit.chatter import chat_tokenizer, chatter
from kit.skips import need_sandbox
from kit.support import fit, tiny_module, tiny_policy, tiny_tokenizer

from lightning_rl.audit import SignalAudit
from lightning_rl.cli.parser import command_line

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

# Replacements of code that needs a GPU, a download or hours; nothing else of a block is changed.
SUBSTITUTIONS = {
    '"Qwen/Qwen2.5-0.5B-Instruct"': '"policy"',
    '"Qwen/Qwen2.5-7B-Instruct"': '"policy"',
    '"Qwen/Qwen3-0.6B"': '"qwen3"',
    'accelerator="gpu"': 'accelerator="cpu"',
    "devices=8": 'accelerator="cpu", devices=2',
    "max_steps=500": "max_steps=1, logger=False, enable_checkpointing=False",
    "sampling=SamplingParams(max_new_tokens=512)": "sampling=SamplingParams(max_new_tokens=4), group_size=2",
    "max_turn_tokens=64": "max_turn_tokens=2",
    "max_turn_tokens=128": "max_turn_tokens=2",
    "prompts_per_rollout=32))": "prompts_per_rollout=2))",
    'policy = "Qwen/Qwen2.5-VL-3B-Instruct"': "import vision_task; policy = lambda: vision_task.untrained_policy(0)",
    "AutoProcessor.from_pretrained(policy)": "vision_task.color_processor()",
    "MathMatch(timeout=4.0)": "MathMatch(timeout=2.0)",  # waited out
}

# Pages that say that their blocks go on from one another; every other block stands alone.
CONTINUED = {"evaluation.md"}

# What a block needs whose package is an extra that no other test needs: `make test-adapters` runs it.
NEEDS = {
    "ReasoningGym": "reasoning_gym",
    "GemEnvironment": "gem",
    "TextArenaEnvironment": "textarena",
    "Program(": "openai",
}

# What a block says lies beside it.
FILES = {
    "my_rewards.py": "",  # the block of docs/concepts.md
    "train.py": (
        "from kit.support import parity_reward, tiny_module, tiny_prompts\n"
        "from lightning.pytorch import Trainer\n"
        "module, corrections, data = tiny_module(), [], tiny_prompts(4, 4)\n"
        "trainer = Trainer(accelerator='cpu', max_steps=1, logger=False, enable_checkpointing=False)\n"
    ),
    "prompts.jsonl": '{"prompt": "a b c", "answer": "d"}\n' * 2,
}


class Block(NamedTuple):
    """A fenced block, by its page and its number there."""

    page: Path
    number: int
    kind: str
    text: str

    def __str__(self) -> str:
        """A test id."""
        return f"{self.page.name}-{self.number}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for number, (kind, text) in enumerate(FENCED.findall(page.read_text()), 1):
            yield Block(page, number, kind, text)


PYTHON = [block for block in blocks() if block.kind == "python"]
COMMANDS = [
    pytest.param(line, id=f"{block}-{line[:40]}")
    for block in blocks()
    for line in block.text.splitlines()
    if block.kind in ("", "bash") and re.search(r"\b(?:lightning-rl|lightning_rl\.cli|make|python) ", line)
    and not line.startswith("#")
]  # fmt: skip


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what blocks find beside them."""
    (rewards,) = [block.text for block in PYTHON if "def brevity" in block.text]
    for name, text in {**FILES, "my_rewards.py": rewards}.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    tiny_policy().save_pretrained(tmp_path / "policy")
    tiny_tokenizer().save_pretrained(tmp_path / "policy")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VLLM_API_KEY", "of-this-test")
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    return tmp_path


def run(block: Block) -> dict[str, Any]:
    """Execute a block as a module, so that a main guard is left out."""
    before = [other.text for other in PYTHON if other.page == block.page and other.number < block.number]
    text = "\n".join([*(before if block.page.name in CONTINUED else ()), block.text])
    for written, small in SUBSTITUTIONS.items():
        text = text.replace(written, small)
    namespace: dict[str, Any] = {"__name__": "block"}
    exec(compile(text, str(block), "exec"), namespace)
    if "TracerProvider(" in text:
        namespace["provider"].shutdown()  # later tests of this process export nothing
    return namespace


def evidence(folder: Path) -> None:
    """The file of an audit that found something, as docs/checking.md names it."""

    def last_wins(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(place == len(prompts) - 1) for place in range(len(prompts))]

    with pytest.warns(UserWarning, match="reward_order"):
        fit(tiny_module(rewards=last_wins), callbacks=[SignalAudit()], default_root_dir=folder, limit_train_batches=1)
    for found in (folder / "audit").glob("rollout-*"):
        found.rename(found.with_name(f"rollout-000040{found.suffix}"))


def chat(folder: Path) -> None:
    """A policy that speaks ChatML, as conversations need it."""
    chatter(("1", "2")).save_pretrained(folder / "policy")
    chat_tokenizer().save_pretrained(folder / "policy")


def checkpoint(folder: Path) -> None:
    """That of a run with a policy by its name, as docs/concepts.md loads it."""
    trainer = fit(tiny_module(policy=str(folder / "policy"), tokenizer=str(folder / "policy")), limit_train_batches=1)
    trainer.save_checkpoint(folder / "runs" / "last.ckpt")


def taskset(folder: Path) -> None:
    """The module that docs/environments.md has beside its script, and a policy with the tokens of Qwen3."""
    (module,) = [block.text for block in PYTHON if "class HigherLower" in block.text]
    (folder / "higher_lower.py").write_text(module)
    tokenizer = tokenizer_of("qwen3")
    tiny_policy(vocab_size=len(tokenizer), max_position_embeddings=1024).save_pretrained(folder / "qwen3")
    for name in ("qwen3", "tokenizer"):
        tokenizer.save_pretrained(folder / name)


@pytest.mark.parametrize("block", PYTHON, ids=str)
@pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval")
@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary")
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX` has been removed")
def test_a_block_runs_as_pasted(block: Block, beside: Path) -> None:
    if "verifiers" in block.text.lower():
        pytest.importorskip("verifiers")  # in a separate environment
        taskset(beside)
    for name, library in NEEDS.items():
        if name in block.text:
            pytest.importorskip(library)
            chat(beside)
    if "CodeTests(" in block.text:
        need_sandbox()
    if "recheck(" in block.text:
        evidence(beside)
    if "load_from_checkpoint(" in block.text:
        checkpoint(beside)
    namespace = run(block)
    if "trainer.fit(" in block.text:
        assert namespace["trainer"].global_step >= 1
    if "(after,) = trainer.validate" in block.text:
        before, after = (namespace[name]["val/reward/task"] for name in ("before", "after"))
        assert before < 0.2 and after > 0.9
    for name in [name for name in namespace if name.startswith("test_")]:
        namespace[name]()


def test_every_substitution_is_needed() -> None:
    text = "\n".join(block.text for block in PYTHON)
    for written, small in SUBSTITUTIONS.items():
        assert written in text, written
        text = text.replace(written, small)


def parser_of(words: list[str]) -> tuple[ArgumentParser, list[str]]:
    """The parser of a command of ours, and its arguments."""
    (choices,) = [action.choices for action in command_line()._actions if isinstance(action.choices, dict)]  # noqa: SLF001
    return choices[words[0]], words[1:]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_exists_with_its_options(line: str) -> None:
    words = shlex.split(line.removeprefix("$ "), comments=True)
    if "make" in words:
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[words.index("make") + 1 :]) <= set(targets)
        return
    place = next((number for number, word in enumerate(words) if word in ("lightning-rl", "lightning_rl")), None)
    if place is None:
        script = Path(words[words.index("python") + 1])
        assert script.name in FILES or (ROOT / script).exists() or script.name == "-m", line
        return
    cut = words.index("--") if "--" in words else len(words)
    parser, arguments = parser_of(words[place + 1 : cut])
    parser.parse_args(arguments)
