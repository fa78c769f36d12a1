"""Optional libraries: an error names the extra, and only the rewards that need them import them."""

import subprocess
import sys

import pytest

from lightning_rl.rewards import JSONSchema, Judge, Language, MathMatch

LIBRARIES = {
    "math_verify": ("math", lambda: MathMatch()),
    "jsonschema": ("json", lambda: JSONSchema(schema={})),
    "py3langid": ("language", lambda: Language(language="en")),
    "openai": ("judge", lambda: Judge(model="m")),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_reward_names_its_library_at_construction(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extra, build = LIBRARIES[library]
    for path in list(sys.modules):
        if path.partition(".")[0] == library:
            monkeypatch.delitem(sys.modules, path)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if "PathFinder" in repr(finder)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(ImportError, match=rf"expected {library} to be installed.*'lightning-rl\[{extra}\]'"):
        build()


@pytest.mark.nightly
def test_the_package_imports_none_of_them() -> None:
    program = f"import sys, lightning_rl.rewards; print(sorted(set({list(LIBRARIES)}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
