"""Forward passes of the models on a few rows, by the run's own path and by a model's plain one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from lightning_rl.audit.live import LiveRun
from lightning_rl.audit.parameter_tracer import sample_entries
from lightning_rl.audit.rates import dependencies
from lightning_rl.audit.step_evidence import StepEvidence
from lightning_rl.audit.user_hooks import local
from lightning_rl.corrections import Corrections
from lightning_rl.distributed import ALONE
from lightning_rl.policy import FrozenModel, Microbatch, Outputs, PolicyModel
from lightning_rl.policy.media import items_by_name, plain_placeholders, takes
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.policy.sampling_mask import from_bits
from lightning_rl.rollout import NO_PARENT, SAMPLING_MASK, Rollout
from lightning_rl.samples import PROMPT, Media
from lightning_rl.samples.media import join_items
from lightning_rl.samples.trajectory import branches_of
from lightning_rl.testing.properties.copies import CopyError, copy_state

PLAIN_ROWS, PLAIN_TOKENS, ENTRIES = 2, 48, 16
SILENT_ROWS, SILENT = 4, 8  # rows and parameters to try if no backward pass reached a parameter
CRITIC = ("value_head.", "critic.")
SMALL, FEW_PARAMETERS, END_TOKENS, GRADIENT_TOKENS = 2**16, 3, 8, 2048
"""Size and number of the compared parameters; tokens at each end of a response; limit of all tokens."""
FIXED_ROWS, FIXED_TOKENS = 4, 16
FLOOR = -1e9  # log-probability of masked tokens, since 0 * -inf is NaN


class PlainForward(NamedTuple):
    """Scores of some tokens of a response by a model's own forward, without packing.

    Attributes:
        of: ``"policy"`` or ``"reference"``.
        row: Index in :attr:`Evidence.rows`.
        columns: Positions of the tokens, [N].
        logprobs: Log-probabilities at the run's temperature, float64, [N].
        entropy: Entropy at the run's temperature.
    """

    of: str
    row: int
    columns: Tensor
    logprobs: Tensor
    entropy: Tensor


@torch.no_grad()
def policy_outputs(live: LiveRun, rows: Rollout, *, heat: float = 1.0) -> Outputs | None:
    """Return the outputs of the policy on rows, in one microbatch; None if a callback's context cannot be repeated.

    A collective, also on ranks without rows.

    Args:
        live: The run.
        rows: A few rows.
        heat: Factor of the temperature.
    """
    inside = torch.arange(rows.width, device=rows.groups.device) < rows.response_lengths[:, None]
    rows = rows.replace(valid_tokens=rows.valid_tokens & inside)  # the masks themselves may be wrong
    microbatch = _microbatch_of(live, rows)
    policy, temperature = live.policy, live.policy.temperature
    entered = live.corrections.contributors("forward_context")
    try:
        corrections = Corrections([copy_state(callback) for callback in entered], ALONE)
    except CopyError:
        return None
    policy.temperature = temperature * heat
    try:
        context = corrections.forward_context(microbatch.rows_of(rows))
        with live.trainer.precision_plugin.forward_context(), context:
            outputs = policy(microbatch.layout)
    finally:
        policy.temperature = temperature
    parts = [
        None if part is None else nn.functional.pad(part, (0, rows.width - part.shape[1]))[: len(rows), : rows.width]
        for part in outputs
    ]
    return Outputs(*parts)  # pyrefly: ignore[bad-argument-type]


def value_moves(live: LiveRun, rows: Rollout, outputs: Outputs | None) -> Tensor | None:
    """Return by how much values change after a change of one token of each row, [b, T]; None without a critic.

    The changed token, the first one that two others follow, is in column 0, the token after it in column 1. Columns
    without a valid token, and rows without such a token, are 0. A collective, also on ranks without rows.

    Args:
        live: The run.
        rows: A few rows.
        outputs: Outputs of the policy on them.
    """
    if outputs is None or outputs.values is None:
        return None
    valid, vocabulary = rows.valid_tokens, live.policy.vocabulary
    followed = valid & nn.functional.pad(valid, (0, 2))[:, 1:-1] & nn.functional.pad(valid, (0, 2))[:, 2:]
    changed = followed & (followed.cumsum(-1) == 1)
    ids = torch.where(changed, (rows.response_ids + 1) % vocabulary, rows.response_ids)
    others = policy_outputs(live, rows.replace(response_ids=ids))
    if others is None or others.values is None:
        return None
    moves = torch.where(valid & changed.any(-1, keepdim=True), (others.values - outputs.values).abs(), 0.0)
    behind = changed.int().argmax(-1, keepdim=True) + torch.arange(rows.width, device=valid.device)
    return nn.functional.pad(moves, (0, rows.width)).gather(1, behind).double()


def _microbatch_of(live: LiveRun, rows: Rollout) -> Microbatch:
    """Return rows in one microbatch."""
    plan = plan_of_rows(rows.to("cpu"), [[list(range(len(rows)))]], packed=live.models.options.packing)
    return plan.to(rows.groups.device).step(0)[0]


@torch.no_grad()
def silent_parameters(live: LiveRun, step: StepEvidence) -> list[str]:
    """Return the names of parameters without a backward pass, and of a critic whose whole gradient is 0.

    Only those on which trained outputs depend.
    """
    names = [name for name, one in step.parameters.items() if not one.passes and one.gradient is None]
    critic = [name for name in step.parameters if name.startswith(CRITIC) and name not in names]
    if not any(bool(step.parameters[name].summed.any()) for name in critic):
        names += critic[::-1]  # the value head first, since a critic behind one of 0 has no effect
    if not names or step.recomputed is None:
        return []
    further = step.recomputed.further
    trained = {
        "logprobs": bool(step.recomputed.gradient.any()),
        "entropy": "entropy" in further and bool(further["entropy"].any()),
        "values": "current_values" in further and bool(further["current_values"].any()),
    }
    alive = (step.recomputed.gradient != 0).any(-1) | (further.get("current_values", step.gradient) != 0).any(-1)
    rows = step.rows.select(alive.nonzero()[:SILENT_ROWS, 0])
    if not len(rows):
        return []
    layout, policy = _microbatch_of(live, rows).layout, live.policy

    def outputs_with(moved: Mapping[str, Tensor]) -> Tensor:
        outputs = functional_call(policy, dict(moved), (layout,))._asdict()
        return torch.cat([outputs[name].double().flatten() for name, here in trained.items() if here])

    few = names[:: max(len(names) // SILENT, 1)][:SILENT]
    with _eval_mode(policy), live.trainer.precision_plugin.forward_context():
        return list(dependencies(policy, few, outputs_with))


@contextmanager
def _eval_mode(policy: nn.Module) -> Iterator[None]:
    """Run without activation checkpoints inside, whose selective ones allow a single backward."""
    modes = [(part, part.training) for part in policy.modules()]
    policy.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def token_gradients(live: LiveRun, rows: Rollout) -> tuple[Tensor, ...]:
    """Return gradients of log-probabilities by the run's forward, by the model's plain one, and of their scores.

    If a correction trains the entropy, each log-probability counts with the entropy of its token.

    Each is [N] float64, of a sum with alternating signs over both ends of two responses, with respect to copies of the
    last small trained parameters. Rounding scales with the gradient of the scores before the softmax. Empty if there is
    no plain forward, no small trained parameter, or if the rows are too long.
    """
    rows = rows.select(torch.arange(min(PLAIN_ROWS, len(rows)), device=rows.groups.device))
    policy, temperature = live.policy, live.sampling.temperature
    trained = [
        (name, weight)
        for name, weight in policy.named_parameters()
        if name.startswith("model.") and weight.requires_grad and weight.numel() <= SMALL
    ][-FEW_PARAMETERS:]
    tokens = int((rows.prompt_lengths + rows.response_lengths).sum())
    order = rows.valid_tokens.cumsum(-1)
    ends = rows.valid_tokens & ((order <= END_TOKENS) | (order > order[:, -1:] - END_TOKENS))
    if not forwards_plainly(live) or not trained or not ends.any() or tokens > GRADIENT_TOKENS or _has_replies(rows):
        return ()
    signs = torch.where(ends, 1.0 - 2.0 * (order % 2), 0.0)
    layout, contexts = _microbatch_of(live, rows).layout, contexts_of(rows)
    entropies = live.algorithm.trains_entropy

    def by_the_run(weights: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        outputs = functional_call(policy, dict(weights), (layout,))
        total = outputs.logprobs + outputs.entropy if entropies else outputs.logprobs
        return ((total * signs[:, : total.shape[1]]).sum(),)

    def plainly(weights: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        named, totals = {name.removeprefix("model."): weight for name, weight in weights.items()}, torch.zeros(2)
        with _plain_inputs(policy.model, rows, contexts) as inputs:
            logits = functional_call(policy.model, named, (), inputs).logits
        for number, one in enumerate(contexts):
            scores = logits[number, one.read - 1 : len(one.ids) - 1].float() / temperature
            scores = _keep_tokens(rows, one.row, one.columns, scores)
            before = scores.gather(1, one.ids[one.read :, None])[:, 0]
            weight = torch.where(one.first, signs[one.row, one.columns], 0.0)
            chosen = before - scores.logsumexp(-1)
            if entropies:
                normal = scores.log_softmax(-1).clamp(min=FLOOR)
                chosen = chosen - (normal.exp() * normal).sum(-1)
            parts = [torch.where(weight != 0, part, 0.0) for part in (chosen, before)]
            totals = totals.to(before.device) + torch.stack([(parts[0] * weight).sum(), parts[1].sum()])
        return tuple(totals)

    gradients = list[Tensor]()
    with _eval_mode(policy), torch.enable_grad(), live.trainer.precision_plugin.forward_context():
        for forward in (by_the_run, plainly):
            leaves = {name: weight.detach().clone().requires_grad_() for name, weight in trained}
            for total in forward(leaves):
                parts = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, materialize_grads=True)
                gradients.append(torch.cat([part.double().flatten().cpu() for part in parts]))
    return tuple(gradients)


def _has_replies(rows: Rollout) -> bool:
    """Return True if there are pictures among the replies of an environment, whose contexts are not told apart."""
    return any(int(value.counts.sum()) for value in rows.response_items.values())


@contextmanager
def _plain_inputs(model: PreTrainedModel, rows: Rollout, contexts: Sequence["_Context"]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a model's own forward for contexts, padded on the right, with the pictures of prompts."""
    ids = nn.utils.rnn.pad_sequence([one.ids for one in contexts], batch_first=True)
    whole = [one for one in contexts if one.whole]
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if not any(int(value.counts.sum()) for value in rows.prompt_items.values()):
        yield arguments
        return
    items = {name: torch.cat([value.of_row(one.row) for one in whole]) for name, value in rows.prompt_items.items()}
    for name, values in rows.prompt_types.items():
        lines = torch.zeros_like(ids)
        for line, one in enumerate(contexts):
            if one.whole:
                lines[line, : one.read] = values[one.row, : one.read]
        arguments |= {name: lines} if takes(model.base_model, name) else {}
    places = torch.arange(ids.shape[1], device=ids.device)
    drawn = torch.stack([places >= one.read for one in contexts])
    with plain_placeholders(model, ids, drawn) as plain:
        named = {name: value.to(ids.device) for name, value in items_by_name(items).items()}
        yield {**arguments, "input_ids": plain, **named}


def _keep_tokens(rows: Rollout, row: int, columns: Tensor, scores: Tensor) -> Tensor:
    """Return the scores of some tokens without the entries that a filter of the engine left out."""
    if SAMPLING_MASK not in rows.token_extras:
        return scores
    mask = from_bits(rows.token_extras[SAMPLING_MASK][row, columns], scores.shape[-1])
    return scores.masked_fill(~mask, -torch.inf)


class _Context(NamedTuple):
    """Tokens of a row that a model reads in one sequence: those from a root of its segments to a leaf.

    Attributes:
        row: Index of the row.
        ids: Token ids.
        read: Number of leading tokens without a prediction: the prompt, or the first token of a new context.
        columns: Positions of the other tokens in the response.
        first: True for those of them that no context before has.
        whole: True if it begins with the prompt.
    """

    row: int
    ids: Tensor
    read: int
    columns: Tensor
    first: Tensor
    whole: bool


def contexts_of(rows: Rollout) -> list[_Context]:
    """Return the contexts of each row, in the order of their ends; the first one of a row without segments is whole."""
    found = list[_Context]()
    lengths = zip(rows.prompt_lengths.tolist(), rows.response_lengths.tolist(), strict=True)
    for row, (prompt, length) in enumerate(lengths):
        tree = [(0, PROMPT)] if rows.segments is None else rows.segments.of_row(row)[:, :2].tolist()
        parents = [None if parent == NO_PARENT else parent for _, parent in tree]
        places = torch.arange(length, device=rows.response_ids.device)
        parts = places.tensor_split([begin for begin, _ in tree])[1:]
        new = torch.ones_like(places, dtype=torch.bool)
        paths = branches_of(parents)
        for path in paths if PROMPT in parents else [(), *paths]:
            columns = torch.cat([places[:0], *(parts[segment] for segment in path)])
            whole = not path or parents[path[0]] is not None
            ids = torch.cat([rows.prompt_ids[row, : prompt * whole], rows.response_ids[row, columns]])
            columns = columns if whole else columns[1:]
            found.append(_Context(row, ids, prompt if whole else 1, columns, new[columns], whole))
            new[columns] = False
    return found


def reference_weights(live: LiveRun) -> Tensor:
    """Return a few local weights of every frozen parameter of the reference, [N] float64."""
    if live.models.reference is None:
        return torch.zeros(0)
    weights = live.models.reference.model.named_parameters()
    held = {name: local(weight.detach()) for name, weight in weights if not weight.requires_grad}
    return torch.cat([few.double() for few in sample_entries(held, ENTRIES).values()])


@torch.no_grad()
def fixed_scores(live: LiveRun, scorer: PolicyModel | FrozenModel) -> Tensor:
    """Return log-probabilities of tokens that are the same in every audit, [N] float64. A collective."""
    generator, vocabulary = torch.Generator().manual_seed(0), live.policy.vocabulary
    ids = torch.randint(vocabulary, (FIXED_ROWS, FIXED_TOKENS), generator=generator).tolist()
    rows = Rollout.of_samples([row[:1] for row in ids], [row[1:] for row in ids], groups=range(FIXED_ROWS))
    layout = _microbatch_of(live, rows.to(live.device)).layout
    with live.trainer.precision_plugin.forward_context():
        logprobs = scorer.logprobs(layout) if isinstance(scorer, FrozenModel) else scorer(layout).logprobs
    return logprobs.double().flatten().cpu()


def plain_logits(live: LiveRun, token_ids: Sequence[Sequence[int]], media: Sequence[Media | None]) -> Tensor | None:
    """Return the logits after each token, [B, T, V], by the policy's own forward; None if weights are sharded."""
    if not forwards_plainly(live):
        return None
    model = live.policy.model
    ids = [torch.tensor(one, device=next(model.parameters()).device) for one in token_ids]
    with live.trainer.precision_plugin.forward_context():
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        shown = [one for one in media if one is not None]
        drawn, arguments = (
            torch.ones_like(padded, dtype=torch.bool),
            items_by_name(join_items(one.items for one in shown)),
        )
        for line, one in enumerate(media):
            for name, values in {} if one is None else one.types.items():
                arguments.setdefault(name, torch.zeros_like(padded))[line, : len(values)] = values.to(padded)
            if one is not None:
                drawn[line, : len(one.drawn)] = one.drawn.to(drawn.device)
        given = {name: value.to(padded.device) for name, value in arguments.items() if takes(model.base_model, name)}
        with plain_placeholders(model, padded, drawn) if shown else nullcontext(padded) as plain:
            return model(input_ids=plain, use_cache=False, **given).logits


def forwards_plainly(live: LiveRun) -> bool:
    """Return True if the policy's forward is that of its model and this rank holds all weights."""
    return not live.parallel.sharded and not live.corrections.contributors("forward_context")


@torch.no_grad()
def plain_forwards(live: LiveRun, rows: Rollout) -> list[PlainForward]:
    """Return scores of a few rows by the own forwards of policy and reference.

    Empty if weights are sharded, or if a correction wraps every forward in a context.
    """
    if not forwards_plainly(live) or not len(rows) or _has_replies(rows):
        return []
    reference, temperature = live.models.reference, live.sampling.temperature
    few = rows.select(torch.arange(min(PLAIN_ROWS, len(rows)), device=rows.groups.device))
    with live.trainer.precision_plugin.forward_context():
        scores = _stretches("policy", live.policy.model, few, temperature)
        if reference is not None:
            with reference.reading():  # the policy may be its own reference
                scores += _stretches("reference", reference.model, few, temperature)
    return scores


def _stretches(name: str, model: nn.Module, rows: Rollout, temperature: float) -> list[PlainForward]:
    contexts = {one.row: one for one in contexts_of(rows)[::-1]}  # the first one of each row
    contexts |= {one.row: one for one in contexts_of(rows) if one.row % 2}  # or the last one, to check both ends
    few = [contexts[row] for row in range(len(rows))]
    with _plain_inputs(cast(PreTrainedModel, model), rows, few) as inputs:
        logits = model(**inputs).logits
    stretches = []
    for row, one in enumerate(few):
        begin = max(len(one.columns) - PLAIN_TOKENS, 0) if row % 2 else 0
        columns = one.columns[begin : begin + PLAIN_TOKENS]
        place = one.read + begin
        targets = one.ids[place : place + len(columns), None]
        scores = _keep_tokens(rows, row, columns, logits[row, place - 1 : place - 1 + len(columns)].double())
        normal = (scores / temperature).log_softmax(-1)
        entropy = -(normal.exp() * normal.clamp(min=FLOOR)).sum(-1)
        stretches.append(PlainForward(name, row, columns, normal.gather(1, targets)[:, 0], entropy))
    return stretches
