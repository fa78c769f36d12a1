"""Programs for tests: functions that ask an endpoint over HTTP, in a thread, as a harness would."""

import http.client
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import override

from lightning_rl.environments.adapters.completion_server import ROUTE, SESSION, CompletionServer, Line
from lightning_rl.environments.adapters.program import Program, ProgramResult

Ask = Callable[..., tuple[int, dict[str, Any]]]


def post(
    endpoint: CompletionServer,
    body: Any,
    *,
    session: str = "one",
    secret: str | None = None,
    path: str = ROUTE,
    method: str = "POST",
) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer."""
    connection = http.client.HTTPConnection(urlsplit(endpoint.url).netloc, timeout=10)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {endpoint.secret if secret is None else secret}", SESSION: session}
    try:
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


class ScriptedProgram(Program):
    """Runs a function that asks, and reports what it returns.

    Args:
        script: is given a function that asks for the tokens behind a prefix.
        seconds: that it has.
    """

    def __init__(self, script: Callable[[Ask], ProgramResult], seconds: float = 10.0) -> None:
        self.endpoint, self.line, self.script = CompletionServer(), Line(seconds), script
        self.outcome = ProgramResult()
        self.stopped = self.closed = 0

    @override
    def start(self, row: Mapping[str, Any], seed: int) -> Line:
        for session in ("one", "two"):
            self.endpoint.connect(session, self.line)
        threading.Thread(target=self.run, daemon=True).start()
        return self.line

    def run(self) -> None:
        """To its end."""
        try:
            self.outcome = self.script(self.ask)
            self.line.end()
        except BaseException as error:  # noqa: BLE001  as an adapter does
            self.line.end(error)

    def ask(self, *token_ids: int, session: str = "one", stop: Sequence[int] = ()) -> tuple[int, dict[str, Any]]:
        """Asks for what follows a prefix."""
        body = {"token_ids": list(token_ids), "sampling_params": {"stop_token_ids": list(stop), "logprobs": 1}}
        return post(self.endpoint, body, session=session)

    @override
    def result(self, session: str) -> ProgramResult:
        return self.outcome

    @override
    def messages(self, session: str) -> Sequence[Mapping[str, Any]]:
        return ()

    @override
    def stop(self, session: str) -> None:
        self.stopped += 1

    @override
    def close(self) -> None:
        self.closed += 1
        self.endpoint.close()
