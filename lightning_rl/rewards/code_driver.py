"""Program that a sandbox runs for a call or a test of code, which it needs nothing but Python for.

Its text and a call of :func:`main` are sent. The tested program is a module that is imported, and the last line of the
output has the result as JSON, after a mark.
"""

import builtins
import importlib.util
import json
import re
import sys
import tempfile
import types
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NAMES = ("solution", "main", "program", "submission", "answer", "candidate", "implementation", "module", "script")
NAMES += ("your_module", "your_solution", "your_code", "my_module", "my_solution")
"""Names under which tests import the program."""
UNFIT = re.compile(r"fixture '\w+' not found|async def functions are not natively supported")


def main(
    program: str,
    mark: str,
    *,
    code: str = "",
    imports: str = "",
    modules: Sequence[str] = (),
    runner: str | None = None,
    tests: Sequence[str] = (),
    entered: bool = False,
    function: str = "",
    arguments: Any = (),
    int_keys: bool = False,
) -> None:
    """Import a program, run code or call a function in its module, and print the result after the mark.

    Args:
        program: Source of the program.
        mark: Text that the program does not know.
        code: Code that runs after the program, if there is no function.
        imports: Imports whose names the program may use like built-in ones.
        modules: Modules that the code imports.
        runner: ``"unittest"`` or ``"pytest"`` for tests that it runs; None if the code runs all tests.
        tests: Names of the tests of the runner.
        entered: The code needs no name of the program but the one that it takes as ``candidate``.
        function: Function of the module, or method of its class ``Solution``, to call.
        arguments: Positional arguments, or keyword arguments as a mapping.
        int_keys: Pass mappings whose keys are all digits with integers as keys.
    """

    def say(**result: Any) -> None:
        (sys.__stdout__ or sys.stdout).write(f"\n{mark}{json.dumps(result, default=plain)}\n")

    module, path = types.ModuleType(NAMES[0]), Path(tempfile.mkdtemp(), f"{NAMES[0]}.py")
    path.write_text(program, encoding="utf-8")
    scope = vars(module)
    scope["__file__"] = str(path)
    sys.modules.update(dict.fromkeys(NAMES, module))
    needed = [*modules, *(["pytest"] if runner == "pytest" else [])]
    missing = [name for name in needed if name not in sys.modules and importlib.util.find_spec(name) is None]
    if missing:
        say(missing=missing)
        return
    names: dict[str, Any] = {}
    exec(imports, names)
    for name, value in names.items():
        vars(builtins).setdefault(name, value)
    vars(builtins)["__build_class__"] = _class_builder(str(path), code)
    exec(compile(program, path, "exec"), scope)
    if function:
        owner = scope["Solution"]() if hasattr(scope.get("Solution"), function) else None
        call = getattr(owner, function) if owner else scope[function]
        arguments = json.loads(json.dumps(arguments), object_hook=with_int_keys) if int_keys else arguments
        say(result=call(**arguments) if isinstance(arguments, dict) else call(*arguments))
        return
    scope["__name__"] = "test_solution" if runner else "__main__"
    sys.modules[scope["__name__"]] = module
    if runner:
        vars(unittest)["main"] = lambda *_, **__: None
    try:
        exec(compile(code, "test_solution.py", "exec"), scope)
    except NameError as error:
        place = error.__traceback__
        while place and place.tb_next:
            place = place.tb_next
        own = place is not None and place.tb_frame.f_code.co_filename == "test_solution.py"
        if not (entered and own and type(error) is NameError and "candidate" in scope):
            raise
        say(undefined=error.name)
        return
    if runner is None:
        say(passed=True)
    else:
        say(
            **_run_pytest(path.with_name("test_program.py"), tests)
            if runner == "pytest"
            else _run_unittest([scope[name] for name in tests])
        )


def _class_builder(program: str, tests: str) -> Callable[..., Any]:
    """Return a ``__build_class__`` under which objects of a program equal only objects of its classes in tests.

    Otherwise an object that equals everything would pass ``assert f(2) == 4``. Classes that tests name are as written.

    Args:
        program: Path of the program, whose own comparisons are as written. Classes of other code are not changed.
        tests: Code of the tests.
    """
    kinds, build_class = list[type](), builtins.__build_class__

    def guard(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def compare(self: Any, other: Any) -> Any:
            inside = sys._getframe(1).f_code.co_filename == program  # noqa: SLF001  the code that compares
            return method(self, other) if inside or any(type(other) is kind for kind in kinds) else NotImplemented

        return compare

    def build(function: Any, name: str, *bases: Any, **options: Any) -> Any:
        kind = build_class(function, name, *bases, **options)
        own = isinstance(kind, type) and function.__code__.co_filename == program
        if own and not re.search(rf"\b{re.escape(name)}\b", tests):
            kinds.append(kind)
            for method in {"__eq__", "__ne__"} & vars(kind).keys():
                type.__setattr__(kind, method, guard(getattr(kind, method)))
        return kind

    return build


def _run_unittest(classes: Sequence[type[unittest.TestCase]]) -> dict[str, Any]:
    result = unittest.TestResult()
    unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, classes)).run(result)
    ran = result.testsRun > len(result.skipped) or not result.wasSuccessful()
    return {"passed": result.wasSuccessful()} if ran else {"unfit": "it ran no test"}


def _run_pytest(path: Path, tests: Sequence[str]) -> dict[str, Any]:
    import pytest

    class Reports:
        def __init__(self) -> None:
            self.kept: list[Any] = []

        def pytest_runtest_logreport(self, report: Any) -> None:
            self.kept.append(report)

    reports = Reports()
    kept = "{name: value for name, value in vars(test_solution).items() if name[:2] != '__'}"
    path.write_text(f"import test_solution\nglobals().update({kept})\n")
    options = ["-p", "no:terminal", "-p", "no:cacheprovider", "--rootdir", str(path.parent)]
    pytest.main([*options, *(f"{path}::{name}" for name in tests)], plugins=[reports])
    failed = [report.longreprtext for report in reports.kept if report.failed]
    if unfit := next(filter(None, map(UNFIT.search, failed)), None):
        return {"unfit": unfit.group()}
    ran = failed or any(report.when == "call" and report.passed for report in reports.kept)
    return {"passed": not failed} if ran else {"unfit": "it ran no test"}


def plain(value: Any) -> Any:
    """Return an array or another collection as a list, sorted if it is a set, and a number as a float."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if hasattr(value, "__iter__") else float(value)


def with_int_keys(value: dict[str, Any]) -> dict[Any, Any]:
    """Return a mapping with integers as keys if all of its keys are integers as text."""
    integers = all(re.fullmatch("0|-?[1-9][0-9]{0,99}", key) for key in value)
    return {int(key): each for key, each in value.items()} if integers else value
