"""Reader of scripts that train with GRPOTrainer of TRL, which are parsed and never run."""

import ast
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Assigned = Mapping[str, Sequence[ast.expr]]
"""Values that are assigned to each name, or the whole right side if a call is unpacked to several names."""

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
SIGNS: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Not: operator.not_}
BFLOAT16 = ("is_bfloat16_supported", "is_bf16_supported", "is_torch_bf16_gpu_available")
TRAINER = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")  # places in its call
LOADED = {
    "torch_dtype",
    "dtype",
    "attn_implementation",
    "revision",
    "trust_remote_code",
    "load_in_8bit",
    "load_in_4bit",
}
LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
LORA |= {"target_parameters": "lora_target_parameters", "task_type": "lora_task_type"}
LORA |= {name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}


class Function(NamedTuple):
    """Reward function of a script: its name, and the expression that returns it."""

    name: str
    source: str


class Script(NamedTuple):
    """Options of a script, and the source of its imports and definitions that the reward functions use.

    A value that cannot be read without running the script is an ``ast.expr``.
    """

    options: dict[str, Any]
    definitions: str
    names: frozenset[str]


def cells_of(text: str) -> str:
    """Return the code of a Jupyter notebook without its shell commands and magic."""
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    lines = [line for cell in cells for line in [*"".join(cell["source"]).splitlines(), ""]]
    return "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))


def read_script(text: str) -> Script:
    """Return the options of GRPOConfig and GRPOTrainer in a script.

    Raises:
        ValueError: If there is not one of them, or its options are computed.
    """
    tree = ast.parse(text)
    assigned = _assignments(tree)
    trainers, configs = (list(_calls(tree, name)) for name in ("GRPOTrainer", "GRPOConfig"))
    trainer = _arguments(trainers[0], TRAINER) if len(trainers) == 1 else {}
    config = _follow(trainer.get("args"), assigned)
    if config in configs:
        configs = [config]
    elif config is not None:
        raise ValueError(
            f"expected args=GRPOConfig(...), got args={ast.unparse(config)}: pass the YAML file of the run"
        )
    if len(configs) > 1 or not (configs or trainer):
        raise ValueError(f"expected one GRPOConfig(...), got {len(configs)}")
    options = dict[str, Any]()
    for call in configs:
        options |= {name: read(node, assigned) for name, node in _arguments(call, ("output_dir",)).items() if name}
        for node in (keyword.value for keyword in call.keywords if keyword.arg is None):
            values = read(node, assigned)
            if not isinstance(values, dict):
                raise ValueError(f"expected literal options, got **{ast.unparse(node)}")
            options |= values
        options |= {name: read(node, assigned) for name, node in _later(tree, call, assigned)}
    definitions, names = "", frozenset[str]()
    if "reward_funcs" in trainer:
        options["reward_funcs"], definitions, names = _rewards(text, tree, trainer.pop("reward_funcs"), assigned)
    return Script(options | _trainer_options(tree, trainer, assigned), definitions, names)


def read(node: ast.expr, assigned: Assigned) -> Any:
    """Return the value of literals, arithmetic, and names that are assigned once; the node if it is anything else."""
    try:
        return _evaluate(node, assigned)
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        return node


def _evaluate(node: ast.expr, assigned: Assigned) -> Any:  # noqa: C901  one case for each kind of expression
    match node:
        case ast.Name(id=name) if len(assigned.get(name, ())) == 1:
            return _evaluate(assigned[name][0], assigned)
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return name  # of a dtype
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            values = [_evaluate(left, assigned), _evaluate(right, assigned)]
            if not all(isinstance(value, int | float) for value in values) and not isinstance(op, ast.Add):
                raise ValueError("expected numbers")  # "x" * 10**9 is not worth its memory
            return OPERATORS[type(op)](*values)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in SIGNS:
            return SIGNS[type(op)](_evaluate(operand, assigned))
        case ast.List(elts=parts):
            return [_evaluate(part, assigned) for part in parts]
        case ast.Tuple(elts=parts):
            return tuple(_evaluate(part, assigned) for part in parts)
        case ast.Dict(keys=keys, values=values):
            return {_evaluate(k, assigned): _evaluate(v, assigned) for k, v in zip(keys, values, strict=True) if k}
        case ast.JoinedStr(values=parts):
            return "".join(str(_evaluate(part, assigned)) for part in parts)
        case ast.FormattedValue(value=value, format_spec=None):
            return _evaluate(value, assigned)
        case ast.Call(func=function) if _name(function) in BFLOAT16:
            return True
    return ast.literal_eval(node)


def _name(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return ast.unparse(node).rpartition(".")[2]


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == name)


def _arguments(call: ast.Call, places: Sequence[str]) -> dict[str, ast.expr]:
    by_name = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    return dict(zip(places, call.args, strict=False)) | by_name


def _assignments(tree: ast.AST) -> dict[str, list[ast.expr]]:
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[target], value=value):
                pass
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                pass
            case _:
                continue
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            pairs = list(zip(target.elts, parts, strict=False))
        for one, part in pairs:
            if isinstance(one, ast.Name):
                assigned.setdefault(one.id, []).append(part)
    return assigned


def _follow(node: ast.expr | None, assigned: Assigned) -> ast.expr | None:
    """Return the expression that a name stands for, if it is assigned once."""
    while isinstance(node, ast.Name) and len(assigned.get(node.id, ())) == 1 and assigned[node.id][0] is not node:
        node = assigned[node.id][0]
    return node


def _later(tree: ast.AST, config: ast.Call, assigned: Assigned) -> Iterator[tuple[str, ast.expr]]:
    """Yield the options that are assigned to a configuration: ``config.max_steps = 10``."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name() as name, attr=option)], value=value):
                if _follow(name, assigned) is config:
                    yield option, value


def _trainer_options(tree: ast.AST, trainer: Mapping[str, ast.expr], assigned: Assigned) -> dict[str, Any]:
    """Return the arguments of GRPOTrainer as options of ``trl grpo``; the others as they are."""
    options: dict[str, Any] = {name: node for name, node in trainer.items() if name not in TRAINER}
    if "model" in trainer:
        options |= _model(trainer["model"], assigned)
    adapters = [_arguments(call, ()) for call in _calls(tree, "get_peft_model")]
    configured = _follow(options.pop("peft_config", None), assigned)
    adapters += [_arguments(configured, ())] if isinstance(configured, ast.Call) else []
    if isinstance(configured, ast.expr) and not isinstance(configured, ast.Call | ast.Constant):
        options["peft_config"] = configured
    for adapter in adapters:
        options |= {LORA[name]: read(node, assigned) for name, node in adapter.items() if name in LORA}
        options["use_peft"] = True
    if "train_dataset" in trainer:
        options |= _dataset(trainer["train_dataset"], assigned)
    return options


def _model(node: ast.expr, assigned: Assigned) -> dict[str, Any]:
    """Return name and options of the model: a literal, or a call of ``from_pretrained`` that is assigned to it."""
    values = assigned.get(node.id, ()) if isinstance(node, ast.Name) else [node]
    for value in values:
        if isinstance(value, ast.Call) and _name(value.func) == "from_pretrained":
            arguments = _arguments(value, ("model_name",))
            names = ("model_name", "pretrained_model_name_or_path")
            name = next((arguments[name] for name in names if name in arguments), node)
            loaded = {option: read(part, assigned) for option, part in arguments.items() if option in LOADED}
            return {"model_name_or_path": read(name, assigned)} | {k: v for k, v in loaded.items() if v is not None}
    return {"model_name_or_path": read(node, assigned)}


def _dataset(node: ast.expr, assigned: Assigned) -> dict[str, Any]:
    """Return the options of a data set that ``load_dataset`` returns; one that is changed afterwards stays a node."""
    value, split = _follow(node, assigned), None
    if isinstance(value, ast.Subscript):
        value, split = _follow(value.value, assigned), value.slice
    if not isinstance(value, ast.Call) or _name(value.func) != "load_dataset":
        return {"dataset_name": node}
    arguments = _arguments(value, ("path", "name"))
    if split is not None:
        arguments["split"] = split
    names = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
    unread = {name for name in arguments if name not in names}
    return (
        {names[k]: read(v, assigned) for k, v in arguments.items() if k in names}
        if not unread
        else {"dataset_name": node}
    )


def _rewards(
    text: str, tree: ast.Module, node: ast.expr, assigned: Assigned
) -> tuple[list[str | Function], str, frozenset[str]]:
    """Return the rewards, and the source and names of the statements at the top level that they use."""
    value = _follow(node, assigned) or node
    rewards = list[str | Function]()
    parts = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    for part in parts:
        literal = read(part, assigned)
        called = part.func if isinstance(part, ast.Call) else part
        rewards.append(literal if isinstance(literal, str) else Function(_name(called), ast.unparse(part)))
    bound = [(statement, _names(statement)) for statement in tree.body]
    used, todo = set[str](), [name for part in parts for name in _read_names(part)]
    while todo:
        name = todo.pop()
        if name not in used:
            used.add(name)
            todo += [more for statement, names in bound if name in names for more in _read_names(statement)]
    kept = [(statement, names & used) for statement, names in bound if names & used]
    sources = [ast.get_source_segment(text, statement) or "" for statement, _ in kept]
    decorated = ["".join(f"@{ast.unparse(d)}\n" for d in getattr(s, "decorator_list", ())) for s, _ in kept]
    definitions = "\n\n\n".join(f"{before}{source}" for before, source in zip(decorated, sources, strict=True))
    return rewards, definitions, frozenset[str]().union(*(names for _, names in kept))


def _names(statement: ast.stmt) -> set[str]:
    """Return the names that an import, a definition or an assignment binds."""
    match statement:
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return {alias.asname or alias.name.partition(".")[0] for alias in aliases}
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign() | ast.AnnAssign():
            return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        case ast.Try(body=body) | ast.If(body=body):
            imports = [one for one in body if isinstance(one, ast.Import | ast.ImportFrom)]
            return set[str]().union(*map(_names, imports))
    return set()


def _read_names(node: ast.AST) -> list[str]:
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]
