"""Figures of the design: ``python -m tests.house`` prints one line for each.

1. Records that a sample is between a data row and the loss. A record is a dataclass, ``NamedTuple``, ``TypedDict`` or
   ``Struct`` of the trunk (the library without :data:`OUTSIDE`). The walk starts at ``Reading`` and ``Prompt`` and goes
   from A to B if a function or method takes A (annotation, or ``self``) and returns or builds B, or if a field of B is
   annotated with A. Calls are resolved through annotated parameters, attributes, properties and locals. Options,
   services and statistics (:data:`NO_SAMPLE`) are left out.
2. Parameters ``module``, ``pl_module`` and ``trainer`` annotated ``Any``.
3. Functions ``of`` whose first argument is a module.
4. Methods of the class that samples and rewards.
5. Files that key a table by ``id(request)``.
6. Files that spell ``rollout_kl``, one per-token output of the forward, callbacks aside.
7. Import lines of the audit outside of it.
8. Files of the audit that import the module, and attribute paths of the module that they read, through aliases too.
9. Class names used twice.
10. Lines of Python in ``lightning_rl/`` and ``callbacks/``.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile(
    r"callbacks/|lightning_rl/(audit|recording|reporting|testing|cli|translation|checkpointing|evaluation)/"
)
FIRST = {"Reading", "Prompt"}
NO_SAMPLE = {
    "SamplingParams", "ModelOptions", "Rewards", "Evaluation", "Conversations", "Critic", "Options",
    "Needs", "WeightPlan", "Kernel", "Hardware", "FunctionLoss", "DrGRPO", "Columns", "Limits", "RunModels",
    "WeightFiles", "WeightSync", "Collector", "Ahead", "Run", "StepLog",
    "Environments", "Algorithm", "ConversationLimits", "RowCheck", "Bridge", "CallStyle", "ModuleValues",
    "ModuleDifference", "Event", "TokenPosition", "Replayed", "Capabilities", "Field", "Items", "Shapes", "Moments",
    "Population", "TurnEstimates", "Stat", "SandboxResult", "Activations", "MemoryPlan", "Head", "Tokens", "Finding",
    "FailureSummary", "RunFailure", "RewardDomain", "Measurement", "PictureProcessor",
    "Goal", "Invitation", "Label", "Member", "Seat", "Server", "WaitingRequest", "WorkerDescription",
}  # fmt: skip
PLAIN = {"NamedTuple", "TypedDict", "BaseModel", "Struct"}
MODULES = ("module", "pl_module", "trainer")
LIVE = ("lightning_rl.module",)
BY_ID = re.compile(r"[\[{]id\(request\)")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Names = set[str]


def name_of(node: ast.expr) -> str:
    """Return the last name of a dotted, called or subscripted expression; empty for another one."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return name_of(inner)
    return ""


def arguments(function: Function) -> list[ast.arg]:
    """Return the parameters of a function."""
    given = function.args
    return [*given.posonlyargs, *given.args, *([given.vararg] if given.vararg else []), *given.kwonlyargs]


class Types:
    """Classes of some files, what their attributes and methods return by annotation, and the types of expressions."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.trees = list(trees)
        self.classes = dict[str, ast.ClassDef]()
        for node in (node for tree in self.trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            self.classes.setdefault(node.name, node)
        functions = [node for tree in self.trees for node in tree.body if isinstance(node, Function)]
        counts = Counter(node.name for node in functions)
        self.functions = {node.name: node for node in functions if counts[node.name] == 1}
        self.aliases = dict[str, Names]()
        for node in (node for tree in self.trees for node in tree.body if isinstance(node, ast.Assign)):
            if isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Subscript | ast.BinOp):
                self.aliases[node.targets[0].id] = self.named(node.value)

    def named(self, annotation: ast.expr | None, own: str = "") -> Names:
        """Return the classes that an annotation names."""
        found = Names()
        for node in ast.walk(annotation) if annotation else ():
            name = name_of(node) if isinstance(node, ast.Name | ast.Attribute) else ""
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                try:
                    found |= self.named(ast.parse(node.value, mode="eval").body, own)
                except SyntaxError:
                    continue
            found |= {own} if name == "Self" and own else self.aliases.get(name, {name} & self.classes.keys())
        return found

    def is_record(self, name: str) -> bool:
        """Return if a class holds plain values."""
        node = self.classes.get(name)
        if node is None or any(name_of(each) in ("dataclass", "define") for each in node.decorator_list):
            return node is not None
        bases = [name_of(base) for base in node.bases]
        return any(base in PLAIN or (base != name and self.is_record(base)) for base in bases)

    @cached_property
    def members(self) -> dict[str, tuple[dict[str, Names], dict[str, Names]]]:
        """Types of the attributes, and of the results of the methods, of each class."""
        found = dict[str, tuple[dict[str, Names], dict[str, Names]]]()
        for name, node in self.classes.items():
            attributes, methods = found.setdefault(name, ({}, {}))
            for each in node.body:
                if isinstance(each, ast.AnnAssign):
                    attributes[name_of(each.target)] = self.named(each.annotation, name)
                elif isinstance(each, Function):
                    methods[each.name] = self.named(each.returns, name)
                    if {name_of(one) for one in each.decorator_list} & {"property", "cached_property"}:
                        attributes.setdefault(each.name, methods[each.name])
                    if each.name == "__init__":
                        attributes |= dict(self._assigned(each, name)) | attributes
        return found

    def _assigned(self, init: Function, own: str) -> Iterator[tuple[str, Names]]:
        """Yield the attributes that a constructor sets, with the types of its parameters."""
        known = {each.arg: self.named(each.annotation, own) for each in arguments(init)}
        for node in ast.walk(init):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
                yield node.target.attr, self.named(node.annotation, own)
            for target, value in pairs(node):
                if isinstance(target, ast.Attribute) and isinstance(value, ast.Name) and value.id in known:
                    yield target.attr, known[value.id]

    def member(self, owners: Names, name: str, kind: int) -> Names:
        """Return the types of an attribute (kind 0) or of a method's result (1), of classes or of their bases."""
        found = Names()
        for owner in owners:
            line = [owner]
            while line[-1] in self.classes and name not in self.members[line[-1]][kind] and len(line) < 6:
                line.append(
                    next((base for base in map(name_of, self.classes[line[-1]].bases) if base in self.classes), "")
                )
            found |= self.members.get(line[-1], ({}, {}))[kind].get(name, Names())
        return found

    def of(self, node: ast.expr, known: dict[str, Names]) -> Names:  # noqa: C901  # one case per kind of expression
        """Return the types of an expression, with those of the names around it."""
        match node:
            case ast.Name(id=name):
                return known.get(name, Names())
            case ast.Attribute(value=value, attr=name):
                return self.member(self.of(value, known), name, 0)
            case ast.Await(value=value) | ast.Subscript(value=value):
                return self.of(value, known)
            case ast.ListComp(elt=value) | ast.GeneratorExp(elt=value):
                return self.of(value, known)
            case ast.IfExp(body=one, orelse=other):
                return self.of(one, known) | self.of(other, known)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return Names().union(*(self.of(each, known) for each in elements))
            case ast.Call(func=ast.Name(id=name)) if name in self.classes:
                return {name}
            case ast.Call(func=ast.Name(id="replace"), args=[first, *_]):
                return self.of(first, known)
            case ast.Call(func=ast.Name(id=name)) if name in known:
                return self.member(known[name], "__call__", 1)
            case ast.Call(func=ast.Name(id=name)) if name in self.functions:
                return self.named(self.functions[name].returns)
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                own = {value.id} if isinstance(value, ast.Name) and value.id in self.classes else self.of(value, known)
                return self.member(own, name, 1) or self.member(self.member(own, name, 0), "__call__", 1)
        return Names()

    def parameters(self, function: Function, own: str) -> dict[str, Names]:
        """Return the types of a function's parameters."""
        found = {each.arg: self.named(each.annotation, own) for each in arguments(function)}
        return found | {name: {own} for name in ("self", "cls") if own and next(iter(found), "") == name}

    def locals(self, function: Function, own: str) -> dict[str, Names]:
        """Return the types of a function's parameters and local names."""
        known = self.parameters(function, own)
        for node in [*ast.walk(function), *ast.walk(function)]:
            if isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
                known[node.target.id] = known.get(node.target.id, Names()) | self.of(node.iter, known)
            for target, value in pairs(node):
                if isinstance(target, ast.Name):
                    known[target.id] = known.get(target.id, Names()) | self.of(value, known)
        return known

    def steps(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of classes: a function makes the second of the first, or the second has a field of the first."""
        inside = [(node, "") for tree in self.trees for node in tree.body]
        while inside:
            node, own = inside.pop()
            inside += [
                (each, node.name if isinstance(node, ast.ClassDef) else own) for each in ast.iter_child_nodes(node)
            ]
            if isinstance(node, ast.AnnAssign) and own and node in self.classes[own].body:
                yield from ((held, own) for held in self.named(node.annotation, own))
            if not isinstance(node, Function):
                continue
            known = self.locals(node, own)
            takes = Names().union(*(self.parameters(node, own).values())) - (
                {own} if node.name == "__init__" else set()
            )
            calls = [self.of(each, known) for each in ast.walk(node) if isinstance(each, ast.Call)]
            makes = self.named(node.returns, own).union(*calls)
            yield from ((one, other) for one in takes for other in makes)


def pairs(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return targets and values of an assignment."""
    if not isinstance(node, ast.Assign):
        return []
    found = list[tuple[ast.expr, ast.expr]]()
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            found += zip(target.elts, node.value.elts, strict=False)
        else:
            found.append((target, node.value))
    return found


def module_paths(tree: ast.Module) -> Names:
    """Return the attribute paths of a module that a file reads, with names and attributes that hold a part of it."""
    aliases = dict.fromkeys(("module", "self._module", "self.module"), "")

    def path_of(node: ast.expr) -> str | None:
        text = ast.unparse(node)
        if text in aliases or not isinstance(node, ast.Attribute):
            return aliases.get(text)
        held = path_of(node.value)
        return None if held is None else f"{held}.{node.attr}"

    bound = [pair for node in ast.walk(tree) for pair in pairs(node)]
    aliases |= {ast.unparse(name): path for name, value in bound if (path := path_of(value))}
    found = {path for node in ast.walk(tree) if isinstance(node, ast.Attribute) if (path := path_of(node))}
    return {path for path in found if not any(other.startswith(f"{path}.") for other in found)}


def records(trees: Iterable[ast.Module]) -> Names:
    """Return the records that a sample is on its way."""
    types = Types(trees)
    following = defaultdict[str, Names](Names)
    for one, other in types.steps():
        following[one].add(other)
    wanted = {name for name in types.classes if types.is_record(name)} - NO_SAMPLE
    found, fresh = Names(), FIRST & wanted
    while fresh:
        found |= fresh
        fresh = Names().union(*(following[name] for name in fresh)) & wanted - found
    return found


def sources(root: Path = ROOT) -> dict[str, str]:
    """Return the text of each file of the library by its path."""
    paths = [*root.glob("lightning_rl/**/*.py"), *root.glob("callbacks/**/*.py")]
    names = {str(path.relative_to(root)): path for path in sorted(paths)}
    return {name: path.read_text() for name, path in names.items() if "lightning_rl/callbacks" not in name}


def figures(texts: Mapping[str, str]) -> dict[str, int]:
    """Return each figure by its name."""
    trees = {name: ast.parse(text) for name, text in texts.items()}
    audit = {name: text for name, text in texts.items() if name.startswith("lightning_rl/audit/")}
    nodes = [(name, node) for name, tree in trees.items() for node in ast.walk(tree)]
    classes = [node for _, node in nodes if isinstance(node, ast.ClassDef)]
    methods = {node.name: sum(isinstance(each, Function) for each in node.body) for node in classes}
    functions = [(node, arguments(node)) for _, node in nodes if isinstance(node, Function)]
    given = [each for node, given in functions if node.name != "_map_name" for each in given]
    modules = [each.annotation for each in given if each.arg in MODULES]
    makers = [given[0].arg for node, given in functions if node.name == "of" and given]
    imports = [(name, node.module or "") for name, node in nodes if isinstance(node, ast.ImportFrom)]
    outside = [module for name, module in imports if name not in audit]
    live = {name for name, module in imports if name in audit and module in LIVE}
    paths = Names().union(*(module_paths(tree) for name, tree in trees.items() if name in audit and name in live))
    trunk = [tree for name, tree in trees.items() if not OUTSIDE.match(name)]
    return {
        "records of a sample": len(records(trunk)),
        "modules and trainers annotated Any": sum(isinstance(each, ast.Name) and each.id == "Any" for each in modules),
        "factories that take a module": makers.count("module"),
        "methods of the collector": methods["Collector"],
        "files with tables by id(request)": sum(bool(BY_ID.search(text)) for text in texts.values()),
        "files that spell rollout_kl": sum("rollout_kl" in texts[name] for name in texts if "callbacks/" not in name),
        "imports of the audit": sum(module.startswith("lightning_rl.audit") for module in outside),
        "files of the audit that import the module": len(live),
        "attributes of the module that the audit reads": len(paths),
        "class names used twice": sum(number > 1 for number in Counter(node.name for node in classes).values()),
        "lines": sum(len(text.splitlines()) for text in texts.values()),
    }  # fmt: skip


if __name__ == "__main__":
    print(*(f"{number:7,d}  {name}" for name, number in figures(sources()).items()), sep="\n")  # noqa: T201
