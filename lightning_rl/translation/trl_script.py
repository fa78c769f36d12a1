"""Reader of scripts that train with GRPOTrainer of TRL, which are parsed and never run."""

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_rl.translation.trl_options import FURTHER, OPTIONS, RENAMED

UNKNOWN = ast.Name(id="?", ctx=ast.Load())
"""A value in a loop, or in a branch whose condition is not known: assigned twice, because it cannot be followed."""

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
LOADER = re.compile(r"(?<!Peft)Model$|(?<!PeftModel)ForCausalLM$")
UNSLOTH = re.compile(r"\bFast\w*$")
UNSLOTH_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
UNSLOTH_LORA = {"r": 16, "lora_alpha": 16, "target_modules": UNSLOTH_TARGETS}  # its defaults
TOKENIZER = ("padding_side", "use_fast", "model_max_length", "token", "cache_dir")  # without an effect on the samples
WANDB = {"project": "project", "name": "run_name", "entity": "wandb_entity", "group": "wandb_run_group"}
HARMLESS = {"to", "cuda", "print", "info", "pad_token", "pad_token_id", "padding_side", "use_cache", "for_training"}
HARMLESS |= {"gradient_checkpointing_enable", "enable_input_require_grads", "print_trainable_parameters"}
HARMLESS |= {"train", "evaluate"}  # not of the trainer with arguments


class Function(NamedTuple):
    """Reward function of a script: its name, and the expression that returns it."""

    name: str
    source: str


class SourceLine(NamedTuple):
    """Part of a script that is not translated: a description, and if training is the same without it."""

    text: str
    harmless: bool = False


class TrainerScript(NamedTuple):
    """Options of a script, and the source of its imports and definitions that the reward functions use.

    A value that cannot be read without running the script is an ``ast.expr``. A statement that is not translated is
    a :class:`SourceLine` with the name ``line7``.
    """

    options: dict[str, Any]
    definitions: str
    names: frozenset[str]


def cells_of(text: str) -> str:
    """Return the code of a Jupyter notebook without its shell commands and magic."""
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    lines = [line for cell in cells for line in [*"".join(cell["source"]).splitlines(), ""]]
    return "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))


def read_script(text: str) -> TrainerScript:
    """Return the options of GRPOConfig and GRPOTrainer in a script.

    Raises:
        ValueError: If there is not one of them, or its options are computed.
    """
    tree = ast.parse(text)
    trainer_classes, config_classes = _subclasses(tree, "GRPOTrainer"), _subclasses(tree, "GRPOConfig")
    trainers, configs = list(_calls(tree, *trainer_classes)), list(_calls(tree, *config_classes))
    reader = _Reader(tree, [*trainers, *configs], {*trainer_classes, *config_classes})
    trainer = reader.arguments(trainers[0], TRAINER) if len(trainers) == 1 else {}
    config = reader.follow(trainer.get("args"))
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
        options |= {name: reader.read(node) for name, node in reader.arguments(call, ("output_dir",)).items()}
    options |= {name: reader.read(node) for name, node in reader.later(configs, trainers)}
    definitions, names = "", frozenset[str]()
    if "reward_funcs" in trainer:
        node = trainer.pop("reward_funcs")
        options["reward_funcs"], definitions, names = _rewards(text, tree, node, reader)
    options |= reader.trainer_options(trainer)
    changed = {**trainer_classes, **config_classes}
    for name in {_name(call.func) for call in [*trainers[:1], *configs]} & {*changed}:
        methods = [one.name for one in getattr(changed[name], "body", ()) if isinstance(one, ast.FunctionDef)]
        if changed[name] is not None:
            has = ", ".join(methods) or "other attributes"
            options[name] = SourceLine(
                f"expected a class of TRL, got a subclass, with {has}: write a loss or a callback"
            )
    return TrainerScript(options | reader.unread(trainers, configs, trainer, names), definitions, names)


class _Reader:
    """Reader of the statements that run where the trainer is made: of the module, and of the function around it.

    Attributes:
        statements: The statements in their order, each with True if it is certain that it runs.
        assigned: Values by the name that they are assigned to; the whole right side if a call is unpacked.
        watched: Names that were followed, and the classes of TRL: a statement that touches them is not lost.
        understood: Nodes that were translated, by ``id``.
    """

    def __init__(self, tree: ast.Module, calls: Sequence[ast.Call], watched: set[str]) -> None:
        self.statements: list[tuple[ast.stmt, bool]] = []
        self.definitions: list[ast.FunctionDef] = []
        self.assigned: dict[str, list[ast.expr]] = {}
        self.watched = watched
        self.calls = calls
        self.understood = {id(call) for call in calls}
        self._visit(tree.body, certain=True)

    def _visit(self, body: Sequence[ast.stmt], *, certain: bool) -> None:
        """Add statements and what they assign."""
        for statement in body:
            match statement:
                case ast.If(test=test, body=then, orelse=otherwise):
                    true = self._truth(test)
                    self._visit(then if true is not False else (), certain=certain and true is True)
                    self._visit(otherwise if true is not True else (), certain=certain and true is False)
                case ast.Try():
                    self._visit([*statement.body, *statement.orelse], certain=certain)
                    self._visit([one for handler in statement.handlers for one in handler.body], certain=False)
                    self._visit(statement.finalbody, certain=certain)
                case ast.For() | ast.While() | ast.With():
                    self._add(statement, certain=certain)
                    self._visit(statement.body, certain=certain and isinstance(statement, ast.With))
                case ast.FunctionDef() | ast.ClassDef() if any(one in self.calls for one in ast.walk(statement)):
                    self._visit(statement.body, certain=certain)
                case ast.FunctionDef():
                    self.definitions.append(statement)
                case ast.ClassDef() | ast.AsyncFunctionDef():
                    pass
                case _:
                    self._add(statement, certain=certain)

    def _add(self, statement: ast.stmt, *, certain: bool) -> None:
        self.statements.append((statement, certain))
        pairs = dict(_pairs(statement)) if certain else {}
        for part in _header(statement):
            for name in _targets(part):
                self.assigned.setdefault(name, []).extend([pairs[name]] if name in pairs else [UNKNOWN] * 2)

    def _truth(self, test: ast.expr) -> bool | None:
        """Return the value of a condition, None if it is not known."""
        if ast.unparse(test) == "__name__ == '__main__'":
            return True
        value = self.read(test)
        return bool(value) if isinstance(value, int) else None

    # Values.

    def read(self, node: ast.expr) -> Any:
        """Return the value of literals, arithmetic, and names that are assigned once; else the node."""
        try:
            return self._evaluate(node)
        except (ValueError, TypeError, ArithmeticError, RecursionError):
            return node

    def _evaluate(self, node: ast.expr) -> Any:  # noqa: C901  one case for each kind of expression
        match node:
            case ast.Name(id=name) if len(self.assigned.get(name, ())) == 1:
                value = self._evaluate(self.assigned[name][0])
                if isinstance(value, list | dict):
                    self.watched.add(name)
                return value
            case ast.Attribute(value=ast.Name(id="torch" | "TaskType"), attr=name):
                return name  # of a dtype
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                values = [self._evaluate(left), self._evaluate(right)]
                if not all(isinstance(value, int | float) for value in values) and not isinstance(op, ast.Add):
                    raise ValueError("expected numbers")  # "x" * 10**9 is not worth its memory
                return OPERATORS[type(op)](*values)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in SIGNS:
                return SIGNS[type(op)](self._evaluate(operand))
            case ast.List(elts=parts):
                return [self._evaluate(part) for part in parts]
            case ast.Tuple(elts=parts):
                return tuple(self._evaluate(part) for part in parts)
            case ast.Dict(keys=keys, values=values) if None not in keys:
                return {self._evaluate(k): self._evaluate(v) for k, v in zip(keys, values, strict=True) if k}
            case ast.JoinedStr(values=parts):
                return "".join(str(self._evaluate(part)) for part in parts)
            case ast.FormattedValue(value=value, format_spec=None):
                return self._evaluate(value)
            case ast.Call(func=function) if _name(function) in BFLOAT16:
                return True
            case ast.Call(func=ast.Name(id="dict"), args=[]) | ast.Dict():
                return {name: self._evaluate(value) for name, value in self._entries(node).items()}
        return ast.literal_eval(node)

    def follow(self, node: ast.expr | None) -> ast.expr | None:
        """Return the expression that a name stands for, if it is assigned once."""
        while isinstance(node, ast.Name):
            self.watched.add(node.id)
            values = self.assigned.get(node.id, ())
            if len(values) != 1 or values[0] is node:
                break
            node = values[0]
        return node

    def arguments(self, call: ast.Call, places: Sequence[str]) -> dict[str, ast.expr]:
        """Return the arguments of a call by name, with those of ``**options``.

        Raises:
            ValueError: If there are further arguments by place, or ``options`` is computed.
        """
        if len(call.args) > len(places) or any(isinstance(one, ast.Starred) for one in call.args):
            raise ValueError(f"expected arguments by name, got {ast.unparse(call)[:100]}")
        arguments = dict(zip(places, call.args, strict=False))
        for keyword in call.keywords:
            arguments |= self._entries(keyword.value) if keyword.arg is None else {keyword.arg: keyword.value}
        return arguments

    def _entries(self, node: ast.expr) -> dict[str, ast.expr]:
        match self.follow(node):
            case ast.Dict(keys=keys, values=values) if all(k is None or isinstance(k, ast.Constant) for k in keys):
                pairs = [(getattr(key, "value", None), value) for key, value in zip(keys, values, strict=True)]
                parts = [self._entries(value) if key is None else {str(key): value} for key, value in pairs]
                return {name: value for part in parts for name, value in part.items()}
            case ast.Call(func=ast.Name(id="dict"), args=[]) as call:
                return self.arguments(call, ())
        raise ValueError(f"expected literal options, got **{ast.unparse(node)}")

    # Parts of the trainer.

    def later(self, configs: Sequence[ast.Call], trainers: Sequence[ast.Call]) -> Iterator[tuple[str, ast.expr]]:
        """Yield options that statements set: ``config.max_steps = 10``, and the project and name of W&B."""
        for statement, _ in [one for one in self.statements if one[1]]:
            match statement:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name), attr=option)], value=value):
                    if self.assigned.get(name) in [[config] for config in configs]:
                        self.understood.add(id(value))
                        yield option, value
                case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value="WANDB_PROJECT"))], value=value):
                    yield "project", value
                case ast.Expr(value=ast.Call() as call) | ast.Assign(value=ast.Call() as call) if (
                    ast.unparse(call.func) == "wandb.init"
                ):
                    self.understood.add(id(call))
                    yield from ((WANDB[name], part) for name, part in self.arguments(call, ()).items() if name in WANDB)
            if any(node in trainers for node in ast.walk(statement)):
                configs = ()  # which TRL's trainer has read

    def trainer_options(self, trainer: Mapping[str, ast.expr]) -> dict[str, Any]:
        """Return the arguments of GRPOTrainer as options of ``trl grpo``; the others as they are."""
        options: dict[str, Any] = {name: self.read(node) for name, node in trainer.items() if name not in TRAINER}
        if "model" in trainer:
            options |= self._model(trainer["model"])
        if isinstance(options.get("peft_config"), ast.expr):
            options["peft_config"] = self._adapter(options["peft_config"])
        if "processing_class" in trainer:
            options |= self._tokenizer(trainer["processing_class"], options.get("model_name_or_path"))
        if "train_dataset" in trainer:
            options |= self._dataset(trainer["train_dataset"])
        return options

    def _last(self, node: ast.expr, left: dict[str, list[ast.expr]]) -> ast.expr:
        """Return what a name stands for, and take it from what is left of the name's values."""
        while isinstance(node, ast.Name):
            self.watched.add(node.id)
            values = left.setdefault(node.id, [one for one in self.assigned.get(node.id, ()) if one is not UNKNOWN])
            if not values:
                break
            node = values.pop()
        return node

    def _operand(self, call: ast.Call) -> ast.Name | None:
        """Return the object that an unknown function gets and changes; its statement is listed by :meth:`unread`."""
        first = call.args[0] if call.args else None
        return first if isinstance(first, ast.Name) and not _is_plain(self.read(first)) else None

    def _model(self, node: ast.expr) -> dict[str, Any]:
        """Return name, options and adapter of a model that is loaded, followed back from its last assignment."""
        options, left = dict[str, Any](), dict[str, list[ast.expr]]()
        while True:
            node = call = self._last(node, left)
            while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and _effect(call) in HARMLESS:
                call = call.func.value
            if isinstance(call, ast.Name) and call is not node:  # model = model.to("cuda")
                self.understood.add(id(node))
                node = call
                continue
            if not isinstance(call, ast.Call):
                return {"model_name_or_path": self.read(node), **options}
            owner, _, name = ast.unparse(call.func).rpartition(".")
            if name == "from_pretrained" and LOADER.search(owner):
                self.understood.add(id(node))
                return self._loader_options(call, unsloth=bool(UNSLOTH.search(owner))) | options
            if name == "get_peft_model":
                self.understood.add(id(node))
                arguments = self.arguments(call, ("model", "peft_config"))
                inner = arguments.pop("model")
                if UNSLOTH.search(owner):
                    values = UNSLOTH_LORA | {name: self.read(part) for name, part in arguments.items()}
                    adapter = {name: value for name, value in values.items() if name not in FURTHER}
                    options |= {name: value for name, value in values.items() if name in FURTHER}
                else:
                    adapter = self._adapter(arguments.pop("peft_config"))
                    options |= {name: self.read(part) for name, part in arguments.items()}
                options["peft_config"], node = adapter, inner
            elif (inner := self._operand(call)) is not None:
                node = inner
            else:
                return {"model_name_or_path": node, **options}

    def _loader_options(self, call: ast.Call, *, unsloth: bool) -> dict[str, Any]:
        """Return name and options of ``from_pretrained``; those that are no options of TRL are kept for the call."""
        arguments = self.arguments(call, ("model_name",))
        name = arguments.pop("pretrained_model_name_or_path", None) or arguments.pop("model_name", call)
        values = {option: self.read(node) for option, node in arguments.items()}
        values = {option: value for option, value in values.items() if value is not None}
        more = {k: v for k, v in values.items() if not unsloth and k not in (OPTIONS | FURTHER | RENAMED)}
        more = {option: value for option, value in more.items() if not isinstance(value, ast.expr)}
        options = {option: value for option, value in values.items() if option not in more}
        return {"model_name_or_path": self.read(name), **options} | ({"model_init_kwargs": more} if more else {})

    def _adapter(self, node: ast.expr) -> Any:
        """Return the options of a ``LoraConfig``; the node if it is another expression."""
        call = self.follow(node)
        if not isinstance(call, ast.Call) or _name(call.func) != "LoraConfig":
            return node
        return {name: self.read(part) for name, part in self.arguments(call, ()).items()}

    def _tokenizer(self, node: ast.expr, model: Any) -> dict[str, Any]:
        """Return the name of the tokenizer if it is not the model's, and options of the call that loads it."""
        left = dict[str, list[ast.expr]]()
        node = self._last(node, left)
        while isinstance(node, ast.Call) and _name(node.func) != "from_pretrained":
            if (inner := self._operand(node)) is None:
                break
            node = self._last(inner, left)
        if not isinstance(node, ast.Call) or _name(node.func) != "from_pretrained":
            return {"processing_class": self.read(node)}
        self.understood.add(id(node))
        if UNSLOTH.search(ast.unparse(node.func).rpartition(".")[0]):
            return {}
        arguments = self.arguments(node, ("pretrained_model_name_or_path",))
        name = self.read(arguments.pop("pretrained_model_name_or_path", node))
        one, other = (ast.dump(part) if isinstance(part, ast.expr) else part for part in (name, model))
        options = {option: self.read(part) for option, part in arguments.items() if option not in TOKENIZER}
        return options | ({} if one == other else {"processing_class": name})

    def _dataset(self, node: ast.expr) -> dict[str, Any]:
        """Return the options of a data set that ``load_dataset`` returns; one that is changed stays a node."""
        watched, split = {*self.watched}, None
        value = self.follow(node)
        if isinstance(value, ast.Subscript):
            value, split = self.follow(value.value), value.slice
        self.watched = watched  # rows are replaced by --prompts
        if not isinstance(value, ast.Call) or _name(value.func) != "load_dataset":
            return {"dataset_name": node}
        arguments = self.arguments(value, ("path", "name"))
        if split is not None:
            arguments["split"] = split
        names = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
        if {*arguments} - {*names}:
            return {"dataset_name": node}
        return {names[name]: self.read(part) for name, part in arguments.items()}

    # Statements that are not translated.

    def unread(
        self,
        trainers: Sequence[ast.Call],
        configs: Sequence[ast.Call],
        trainer: Mapping[str, ast.expr],
        rewards: frozenset[str],
    ) -> dict[str, SourceLine]:
        """Return the statements that touch what was followed, or the trainer, and were not understood."""
        made = set[str]()  # names of the trainer
        for statement, _ in self.statements:
            if any(node in configs for node in ast.walk(statement)):
                self.watched |= _targets(statement)
            if any(node in trainers for node in ast.walk(statement)):
                made |= _targets(statement)
        plain = {name for name, values in self.assigned.items() if all(_is_plain(self.read(one)) for one in values)}
        watched = (self.watched | made) - plain
        for one in self.definitions:  # a function that touches them is watched like them
            names = {*_read_names(one)} - {argument.arg for argument in ast.walk(one) if isinstance(argument, ast.arg)}
            watched |= {one.name} - rewards if names & watched else set()
        rows = {name for part in ("train_dataset", "eval_dataset") for name in self._sources(trainer.get(part))}
        rows -= self.watched
        lines, trained = dict[str, SourceLine](), False
        for statement, certain in self.statements:
            nodes = [node for part in _header(statement) for node in ast.walk(part)]
            calls = [node for node in nodes if isinstance(node, ast.Call) and _name(node.func) == "train"]
            trains = [call for call in calls if {*_read_names(call.func)} & (made or self.watched)]
            plainly = any(not (call.args or call.keywords) for call in trains)
            read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
            stored = set[str]().union(*map(_targets, _header(statement)))
            touched = (read | stored - ({*dict(_pairs(statement))} if certain else set())) & watched
            known = (certain and any(id(node) in self.understood for node in nodes)) or plainly
            if touched and not known and not (stored and stored <= rows):
                text = ast.unparse(statement).partition("\n")[0][:160]
                where = "" if certain else "in a branch or loop, "
                harmless = trained or (not trains and bool(_effects(statement)) and _effects(statement) <= HARMLESS)
                name = f"line{statement.lineno}"
                lines[f"{name}b" if name in lines else name] = SourceLine(f"{where}not translated: {text}", harmless)
            trained = trained or bool(trains)
        return lines

    def _sources(self, node: ast.expr | None) -> set[str]:
        """Return the names that an expression uses, directly or by what is assigned to them."""
        found, todo = set[str](), _read_names(node) if node else []
        while todo:
            if (name := todo.pop()) not in found:
                found.add(name)
                todo += [more for value in self.assigned.get(name, ()) for more in _read_names(value)]
        return found


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _effects(statement: ast.stmt) -> set[str]:
    """Return the last names of the attributes that a statement sets, or of the function that it calls."""
    match statement:
        case ast.Assign(targets=targets):
            return {_name(target) for target in targets}
        case ast.Expr(value=ast.Call() as call):
            return {_effect(call)}
    return set()


def _effect(call: ast.Call) -> str:
    """Return the name of a called function; the whole call if it sets a precision: ``model.to(torch.float16)``."""
    text = ast.unparse(call)
    return text if "float" in text.rpartition("(")[2] else _name(call.func)


def _header(statement: ast.stmt) -> Sequence[ast.AST]:
    """Return the parts of a statement without those of its body."""
    match statement:
        case ast.For(target=target, iter=values):
            return [target, values]
        case ast.While() | ast.Assert() | ast.Return(value=ast.Name()):
            return []
        case ast.With(items=items):
            return items
    return [statement]


def _pairs(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that an assignment binds, with their values."""
    match statement:
        case ast.Assign(targets=targets, value=value):
            pass
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            targets = [target]
        case _:
            return
    for target in targets:
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            pairs = list(zip(target.elts, parts, strict=False))
        yield from ((one.id, part) for one, part in pairs if isinstance(one, ast.Name))


def _targets(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}


def _name(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return ast.unparse(node).rpartition(".")[2]


def _calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) in names)


def _subclasses(tree: ast.AST, name: str) -> dict[str, ast.ClassDef | None]:
    """Return a class of TRL and the classes of the script that are made from it, by name."""
    found: dict[str, ast.ClassDef | None] = {name: None}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(_name(base) in found for base in node.bases):
            found[node.name] = node
    return found


def _rewards(
    text: str, tree: ast.Module, node: ast.expr, reader: _Reader
) -> tuple[list[str | Function], str, frozenset[str]]:
    """Return the rewards, and the source and names of the statements at the top level that they use."""
    value = reader.follow(node) or node
    rewards = list[str | Function]()
    parts = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    for part in parts:
        literal = reader.read(part)
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
