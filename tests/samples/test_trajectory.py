"""Trajectories: the tree of their segments, and rows of a rollout with the bits of `lay_out`."""

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.collate import ConversationRow, Turn, lay_out

from lightning_rl import FinishReason, Rollout, SamplingParams
from lightning_rl.generation import Completion, Request
from lightning_rl.rollout import ROUTES, SAMPLING_MASK
from lightning_rl.samples import PROMPT, Failure, Media, Prompt, Segment, Trajectory
from lightning_rl.samples.trajectory_state import state_of_trajectories, trajectories_of_state

Written = tuple[Sequence[int], Sequence[int], bool, float | None]
"""Sampled ids of a turn, the reply, True if it is a new context, and the reward."""
SAMPLING = SamplingParams(eos_token_ids=[1], max_new_tokens=50)
ONE: list[Written] = [((5, 6, 1), (), False, None)]
REPLIES: list[Written] = [
    ((5, 1), (8, 9), False, 0.5), ((6,), (), False, None), ((7, 7, 1), (2,), False, -0.0), ((3,), (), False, 2.0),
]  # fmt: skip
CONTEXTS: list[Written] = [
    ((5, 1), (2, 3, 4), True, 1.0), ((6, 6), (8,), False, None), ((7,), (2, 3), True, 0.1), ((9, 1), (), False, 0.2),
]  # fmt: skip
PENDING: list[Written] = [((5, 1), (8, 9), False, 0.5)]
PENDING_CONTEXT: list[Written] = [((5, 1), (8, 9), True, None)]
SILENT: list[Written] = [((), (), False, 3.0)]


def request_of(prefix: Sequence[int], sample: int, turn: int) -> Request:
    return Request(prefix_ids=tuple(prefix), sample_id=sample, seed=sample + turn, sampling=SAMPLING, turn=turn)


def routes(number: int) -> torch.Tensor:
    return torch.randint(9, (number, 2, 2), dtype=torch.uint8)


def conversation_of(
    prompt: Sequence[int], written: Sequence[Written], sample: int, finish: FinishReason, *, logprobs: bool, mixed: bool
) -> tuple[ConversationRow, Trajectory]:
    """A conversation with random values of every kind, as turns and as segments."""
    row = Prompt(7 + sample, tuple(prompt), "", {})
    turns, made = list[Turn](), Trajectory(prompt=row, request=request_of(prompt, sample, 0))
    prefix, parent, read = tuple(prompt), PROMPT, ()
    for number, (ids, reply, rewrites, reward) in enumerate(written):
        extras = {ROUTES: routes(len(ids)), SAMPLING_MASK: torch.randint(9, (len(ids), 3))}
        completion = Completion(
            token_ids=tuple(ids), logprobs=-torch.rand(len(ids)) if logprobs else None, finish=FinishReason.STOP,
            version=4 + number, versions=tuple(range(len(ids))) if mixed and number else None, token_extras=extras,
            prompt_extras={ROUTES: routes(len(prefix))},
        )  # fmt: skip
        request = request_of(prefix, sample, number)
        turns.append(Turn(request=request, completion=completion, reply=tuple(reply), rewrites=rewrites, reward=reward))
        *before, answer = made.extend(parent, read, completion).segments
        last = replace(answer, reward=reward)
        made = replace(made.extend(parent, read, completion), segments=(*before, last))
        prefix = tuple(reply) if rewrites else (*prefix, *ids, *reply)
        parent, read = None if rewrites else len(before), tuple(reply)
    rest = (Segment(token_ids=read, parent=parent),) if read else ()
    made = replace(made, segments=(*made.segments, *rest), finish=finish)
    return ConversationRow(prompt_ids=tuple(prompt), turns=tuple(turns)), made


def row_of(trajectory: Trajectory) -> ConversationRow:
    """The conversation that a trajectory was made of."""
    turns, prefix, read = list[Turn](), trajectory.request.prefix_ids, dict(trajectory.prompt_extras)
    for segment in trajectory.segments:
        if segment.sampled:
            each_token = len(segment.versions) == len(segment.token_ids)
            completion = Completion(
                token_ids=segment.token_ids, logprobs=segment.logprobs, finish=segment.finish or FinishReason.STOP,
                version=segment.versions[0], versions=segment.versions if each_token else None,
                token_extras=segment.extras, prompt_extras=read,
            )  # fmt: skip
            request = request_of(prefix, trajectory.request.sample_id, len(turns))
            turns.append(Turn(request=request, completion=completion, reward=segment.reward))
        else:
            turns[-1] = replace(turns[-1], reply=segment.token_ids, rewrites=segment.parent is None)
        if segment.parent is None:
            prefix, read = segment.token_ids, dict(segment.extras)
        else:
            prefix = (*prefix, *segment.token_ids)
            read = {name: torch.cat([read[name], segment.extras[name]]) for name in read.keys() & segment.extras.keys()}
    return ConversationRow(prompt_ids=trajectory.request.prefix_ids, turns=tuple(turns))


def bits_of(rollout: Rollout) -> dict[str, Any]:
    return {name: (value.dtype, value.shape, value.numpy().tobytes()) for name, value in rollout.state().items()}


STOP, ABORT, FAILED, TURNS = FinishReason.STOP, FinishReason.ABORT, FinishReason.FAILED, FinishReason.TURNS


@pytest.mark.parametrize("recorded", [frozenset[str](), frozenset({ROUTES, SAMPLING_MASK})], ids=["plain", "extras"])
@pytest.mark.parametrize("logprobs", [False, True], ids=["no log-probabilities", "log-probabilities"])
@pytest.mark.parametrize(
    ("conversations", "turns", "mixed"),
    [
        pytest.param([(ONE, STOP), (ONE, STOP)], False, False, id="single turns"),
        pytest.param([(ONE, STOP), (SILENT, ABORT)], False, False, id="an aborted row"),
        pytest.param([(REPLIES, STOP), (ONE, TURNS)], True, False, id="tokens of environments"),
        pytest.param([(REPLIES, STOP), (CONTEXTS, STOP)], True, True, id="versions per token"),
        pytest.param([(CONTEXTS, STOP), (REPLIES, STOP)], True, False, id="rewritten contexts"),
        pytest.param([([], FAILED), (CONTEXTS, FAILED), (SILENT, ABORT)], True, False, id="failed and aborted rows"),
        pytest.param([(PENDING, ABORT), (PENDING_CONTEXT, ABORT)], True, False, id="replies without an answer"),
        pytest.param([([], FAILED)], True, False, id="failed rows alone"),
        pytest.param([], True, False, id="no rows"),
    ],
)
def test_rows_of_trajectories_are_those_of_conversations(
    conversations: Any, turns: bool, mixed: bool, logprobs: bool, recorded: frozenset[str]
) -> None:
    torch.manual_seed(0)
    options: Any = {"dtype": torch.float32, "recorded": recorded, "logprobs": logprobs, "turns": turns}
    made = [
        conversation_of((3, 4, 5)[: 1 + place], written, place, finish, logprobs=logprobs, mixed=mixed)
        for place, (written, finish) in enumerate(conversations)
    ]
    trajectories = [trajectory for _, trajectory in made]

    def laid_out(rows: Sequence[ConversationRow]) -> dict[str, Any]:
        groups, finishes = [7 + place for place in range(len(rows))], [each.finish for each in trajectories]
        return bits_of(lay_out(rows, groups=groups, sample_ids=range(len(rows)), finish=finishes, **options))

    expected = laid_out([row for row, _ in made])
    assert bits_of(Rollout.of(trajectories, **options)) == expected
    assert laid_out([row_of(each) for each in trajectories]) == expected


@pytest.mark.parametrize(
    ("written", "parents", "branches"),
    [
        (ONE, [PROMPT], [(0,)]),
        (REPLIES, [PROMPT, 0, 1, 2, 3, 4], [(0, 1, 2, 3, 4, 5)]),
        (CONTEXTS, [PROMPT, None, 1, 2, 3, None, 5], [(0,), (1, 2, 3, 4), (5, 6)]),
    ],
    ids=["one turn", "replies", "contexts"],
)
def test_branches_run_from_a_root_to_a_leaf(written: list[Written], parents: Any, branches: Any) -> None:
    _, trajectory = conversation_of((3, 4), written, 30, FinishReason.STOP, logprobs=False, mixed=False)
    assert [segment.parent for segment in trajectory.segments] == parents
    assert trajectory.branches() == branches


def test_two_answers_to_one_segment_are_two_branches() -> None:
    _, trajectory = conversation_of((3, 4), REPLIES[:2], 30, FinishReason.STOP, logprobs=False, mixed=False)
    forked = trajectory.extend(1, (), Completion(token_ids=(8,), logprobs=None, finish=FinishReason.LENGTH, version=1))
    assert (forked.branches(), forked.finish) == ([(0, 1, 2), (0, 1, 3)], FinishReason.LENGTH)


def test_of_equal_answers_each_continuation_follows_one_that_no_other_answer_continues() -> None:
    first = Trajectory(prompt=Prompt(0, (2,), "", {}), request=request_of((2,), 0, 0))
    answer = Completion(token_ids=(5, 1), logprobs=None, finish=FinishReason.STOP, version=1)
    made = first.extend(PROMPT, (), answer).extend(PROMPT, (), answer)
    for parent in (1, 0):
        assert made.find((2, 5, 1, 8)) == (parent, (8,))
        made = made.extend(*made.find((2, 5, 1, 8)), answer)
    assert made.branches() == [(1, 2, 3), (0, 4, 5)] and made.find((2, 5, 1, 8)) == (4, ())


def test_a_segment_without_the_extras_of_its_engine_is_refused() -> None:
    answer = Completion(token_ids=(8, 1), logprobs=None, finish=FinishReason.STOP, version=1)
    trajectory = Trajectory(prompt=Prompt(7, (3,), "", {}), request=request_of((3,), 1, 0)).extend(PROMPT, (), answer)
    with pytest.raises(ValueError, match="expected sampling_mask for each of 2 tokens from the engine, got nothing"):
        Rollout.of([trajectory], recorded={SAMPLING_MASK})
    with pytest.raises(ValueError, match="expected a value for each of 2 sampled tokens from the engine, got 0"):
        Rollout.of([trajectory], logprobs=True)


def test_trajectories_are_restored_from_flat_tensors_and_one_text() -> None:
    written = [REPLIES, CONTEXTS, [], SILENT, ONE]
    ended = {"metrics": {"turns": 2.0}, "seconds": 0.125, "environment": "shop", "opening": 1, "baseline": True}
    made = [
        replace(
            conversation_of((3, 4, 5), turns, place, TURNS, logprobs=place != 4, mixed=True)[1],
            messages=({"role": "user", "content": [{"type": "text"}]},), environment_reward=0.1 + 0.2,
            failure=Failure((), "OSError: gone", "in step", "OSError") if place == 2 else None, **ended,
        )
        for place, turns in enumerate(written)
    ]  # fmt: skip
    state = state_of_trajectories(made)
    assert len(state) < 10 and isinstance(state["text"], str)
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    found = trajectories_of_state(torch.load(saved, weights_only=True), [each.prompt for each in made])
    assert list(map(repr, found)) == list(map(repr, made))
    options: Any = {"recorded": {ROUTES, SAMPLING_MASK}, "turns": True}
    assert bits_of(Rollout.of(found, **options)) == bits_of(Rollout.of(made, **options))


def test_pictures_of_a_row_are_read_again_and_others_are_stored() -> None:
    color = torch.full((2, 3, 3), 9, dtype=torch.uint8)
    red, blue = (Media((2, 3), (each,), {}, {}, torch.zeros(2, dtype=torch.bool)) for each in (color, color + 1))
    row = Prompt(7, (2, 3), "", {}, media=red)
    made = [
        Trajectory(prompt=row, request=replace(request_of((2, 3), place, 0), media=media))
        for place, media in enumerate((red, blue, None))
    ]
    state = state_of_trajectories(made)
    own, opening, none = (each.request.media for each in trajectories_of_state(state, [row]))
    assert own is red and opening is not None and opening.key == blue.key and none is None
    for media, got in ((blue, "others"), (None, "none")):
        with pytest.raises(ValueError, match=f"the pictures of the checkpoint's samples in prompt 7, got {got}"):
            trajectories_of_state(state, [replace(row, media=media)])
