"""Every place that reads what others wrote is known: SECURITY.md lists them, and this refuses new ones."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [path for folder in ("lightning_rl", "callbacks") for path in (ROOT / folder).rglob("*.py")]
SOURCES = [path for path in SOURCES if path.relative_to(ROOT).parts[:2] != ("lightning_rl", "callbacks")]
LOADS = re.compile(
    r"\b(?:torch\.load|(?:cloud)?pickle\.loads?|Unpickler|marshal\.loads?|shelve\.open|np\.load|joblib\.load|yaml\.(?!safe_)\w*load"
    r"|dill\.loads?|runpy\.run_\w+|(?<!\.)exec|(?<![.\w])eval|__import__|trust_remote_code=True|import_module)\("
    r"|trust_remote_code=True|(?<!save_)weights_only=False"
)
KNOWN = {
    "lightning_rl/__init__.py": "import_module(",  # names of this package
    "lightning_rl/checkpointing/checksum.py": "torch.load(",  # weights_only, as every other one
    "lightning_rl/checkpointing/folder_pickles.py": "torch.load(",
    "lightning_rl/checkpointing/pretrained.py": "torch.load(",
    "lightning_rl/generation/vllm/lora_adapter.py": "import_module(",
    "lightning_rl/cli/export.py": "import_module(",  # of --policy module:function
    "lightning_rl/cli/main.py": "import_module(",  # of a command
    "lightning_rl/cli/recipes.py": "runpy.run_path(",
    "lightning_rl/distributed/zero.py": "import_module(",
    "lightning_rl/environments/workers.py": "pickle.loads(",
    "lightning_rl/generation/vllm/recorded_modules.py": "import_module(",  # of layers of vLLM, by fixed names
    "lightning_rl/generation/vllm/vllm_engine.py": "import_module(",
    "lightning_rl/generation/vllm/internals.py": "import_module(",
    "lightning_rl/generation/vllm/vllm_version.py": "import_module(",
    "lightning_rl/optimizers.py": "import_module(",
    "lightning_rl/policy/attention.py": "import_module(",  # of FlashAttention, by two fixed names
    "lightning_rl/policy/build.py": "trust_remote_code=True",  # in a message
    "lightning_rl/processes/pool.py": "pickle.loads(",
    "lightning_rl/processes/worker.py": "cloudpickle.loads(",
    "lightning_rl/rewards/code_driver.py": "exec(",  # of a tested program, inside of the sandbox
    "lightning_rl/serialization.py": "import_module(",  # of modules with fixed names
    "lightning_rl/testing/__init__.py": "import_module(",  # names of this package
    "lightning_rl/testing/environments.py": "cloudpickle.loads(",  # of what it has just pickled
}


def test_nothing_else_is_unpickled_imported_or_run_by_name() -> None:
    sources = [*(ROOT / "lightning_rl").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]
    found = {
        path.relative_to(ROOT).as_posix(): set(LOADS.findall(path.read_text(encoding="utf-8"))) for path in sources
    }
    assert {path: calls for path, calls in found.items() if calls and "lightning_rl/callbacks" not in path} == {
        path: set(calls.split()) for path, calls in KNOWN.items()
    }


@pytest.mark.nightly
def test_every_model_and_tokenizer_is_loaded_without_code_of_its_own() -> None:
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    calls = [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)]
    loads = [call for call in calls if re.match(r"Auto\w+\.from_pretrained\(|load\(self\.model", call)]
    assert len(loads) >= 6
    assert [call for call in loads if "trust_remote_code=False" not in call] == []


def test_the_list_in_security_names_files_that_are_there() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"\]\(([\w./]+)\)", text)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []
