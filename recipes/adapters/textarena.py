"""TextArenaEnvironment: games of TextArena for one player.

Source: Guertler et al., TextArena, arXiv:2504.11442.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from adapters.foreign import check_name, check_options, load
from lightning_rl.environments.adapters.gym import begin
from lightning_rl.environments.environment import Action, Environment, StepResult
from lightning_rl.environments.generators import OwnGenerators
from lightning_rl.samples import Message

PLAYER = 0
NOTHING_NEW = "It is your turn."
SINGLE: set[str] = set()  # names of games that one player was seen to play


class TextArenaEnvironment(Environment):
    """A game of textarena by its name.

    Its first messages take the place of the row's prompt, of which the system messages stay. In each turn the policy
    reads what the game has said since: what was said before is in the conversation, so wrappers that repeat it are left
    out, and those of actions stay. The reward comes at the end of the game. An answer that was truncated is no action,
    and ends the conversation. The global generators that games seed and draw from are the environment's own.

    Args:
        env_id: the name of the game, such as ``"GuessTheNumber-v0"``.
        options: of the game, which take the place of those that belong to the name.

    Raises:
        ImportError: if textarena is missing; the message says how to install it.
        ValueError: if there is no such game, or one player cannot play it.
        GeneratorError: in a thread; see :class:`~lightning_rl.environments.generators.OwnGenerators`.
    """

    def __init__(self, env_id: str, options: Mapping[str, Any] | None = None) -> None:
        check_options(options=options)
        self._library = textarena = load("textarena", extra="textarena")
        games = load("textarena.envs.registration", extra="textarena").ENV_REGISTRY
        check_name(env_id, games, option="env_id", library="textarena")
        self._generators = OwnGenerators(type(self).__name__)
        with self._generators.in_place():
            self._outer = self._game = textarena.make(env_id, **(options or {}))
            while isinstance(self._game, textarena.Wrapper):
                self._game = self._game.env
            if env_id not in SINGLE:
                self._check_players(env_id)

    def _check_players(self, env_id: str) -> None:
        """Has one player begin a game, since no game says before how many it is for."""
        reason: Exception | None = None
        try:
            self._game.reset(num_players=1, seed=0)
        except (AssertionError, ValueError) as error:  # what games say to a wrong number
            reason = error
        if reason is None and isinstance(self._game.state, self._library.SinglePlayerState):
            SINGLE.add(env_id)
            return
        why = f"{type(self._game.state).__name__} has turns of several" if reason is None else str(reason)
        raise ValueError(
            f"expected a game for one player, got {env_id!r} ({why}): a conversation has one policy, so take one of "
            "textarena's single-player games"
        ) from reason

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        with self._generators.in_place():
            self._outer.reset(num_players=1, seed=seed)
            return begin(row, self._news())

    @override
    def step(self, answer: Action) -> StepResult:
        if answer.truncated:
            return StepResult(done=True)
        with self._generators.in_place():
            done, _ = self._outer.step(action=answer.text)
            if not done:
                return StepResult(messages=[{"role": "user", "content": self._news()}])
            rewards, information = self._game.close()
        invalid = bool(information.get(PLAYER, {}).get("invalid_move"))
        reward = (rewards or {}).get(PLAYER)
        return StepResult(
            done=True, reward=None if reward is None else float(reward), metrics={"invalid_moves": float(invalid)}
        )

    def _news(self) -> str:
        """Return the messages of the game since the last turn, without those of the player."""
        _, observations = self._game.get_observation()
        echo = self._library.ObservationType.PLAYER_ACTION
        said = [text for player, text, kind in observations if not (player == PLAYER and kind == echo)]
        return "\n".join(said) or NOTHING_NEW
