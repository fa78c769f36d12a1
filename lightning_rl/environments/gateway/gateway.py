"""HTTP server of this process that answers calls of programs as a model API, one key for each sample."""

import secrets
from collections.abc import Mapping
from typing import Any, Protocol

from aiohttp import web

from lightning_rl.environments.gateway.anthropic_messages import COUNT, AnthropicMessages
from lightning_rl.environments.gateway.calls import MODELS, Call, CallAnswer, WireProtocol, encode_event, key_of, models
from lightning_rl.environments.gateway.chat_completions import ChatCompletions
from lightning_rl.environments.gateway.responses import Responses
from lightning_rl.samples import POLICY
from lightning_rl.utils.strict_json import parse_json

OPPONENT = "opponent"
"""Name under which the policy answers calls that do not train."""

MAX_BODY = 2**26  # bytes of a request
LOOPBACK = "127.0.0.1"
BACKLOG = 1024  # connections that wait to be accepted
PROTOCOLS: Mapping[str, WireProtocol] = {
    protocol.route: protocol for protocol in (ChatCompletions(), Responses(), AnthropicMessages())
}


def answer_id(response_id: str) -> str:
    """Return the id of the answer in a response, :attr:`CallAnswer.id`."""
    prefix = next((each.prefix for each in PROTOCOLS.values() if response_id.startswith(each.prefix)), "")
    return response_id.removeprefix(prefix)


class RefusedCall(Exception):  # noqa: N818
    """Call that gets an error instead of an answer.

    Args:
        status: Status of HTTP.
        message: Description and advice.
        code: Name of the error in the APIs of OpenAI, or None.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class CallHandler(Protocol):
    """Sample whose program calls the policy. Its methods run in the event loop of requests."""

    async def answer(self, call: Call) -> CallAnswer:
        """Return the answer to a call.

        Raises:
            RefusedCall: If it cannot be answered.
        """
        ...

    def count(self, call: Call) -> int:
        """Return the number of tokens of a call."""
        ...


class Gateway:
    """HTTP server at a free port, until the process ends."""

    def __init__(self) -> None:
        self._handlers: dict[str, CallHandler] = {}
        self._urls: dict[str, str] = {}

    async def open(self, handler: CallHandler, address: str = LOOPBACK) -> tuple[str, str]:
        """Return the base URL, and a key with which calls go to ``handler``; the first call starts the server.

        Args:
            handler: Handler of the calls.
            address: Address of this machine at which programs call.
        """
        if address not in self._urls:
            application = web.Application(client_max_size=MAX_BODY)
            application.router.add_route("*", "/{path:.*}", self._serve)
            runner = web.AppRunner(application, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, address, 0, backlog=BACKLOG).start()
            self._urls[address] = f"http://{f'[{address}]' if ':' in address else address}:{runner.addresses[0][1]}"
        key = secrets.token_urlsafe(32)
        self._handlers[key] = handler
        return self._urls[address], key

    def close(self, key: str) -> None:
        """Refuse all further calls with a key."""
        self._handlers.pop(key, None)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        key, path = key_of(request.headers), request.path
        first, _, rest = path.removeprefix("/").partition("/")
        if first in self._handlers:  # for clients without a key
            key, path = first, f"/{rest}"
        protocol = PROTOCOLS.get(path.removesuffix("/count_tokens"), PROTOCOLS[ChatCompletions.route])
        try:
            return await self._reply(request, path, self._handlers.get(key), protocol)
        except (RefusedCall, web.HTTPException) as refused:
            body = protocol.error(refused.status, str(refused), getattr(refused, "code", None))
            return web.json_response(body, status=refused.status)
        except ConnectionError:  # the client has left
            return web.Response()

    async def _reply(
        self, request: web.Request, path: str, handler: CallHandler | None, protocol: WireProtocol
    ) -> web.StreamResponse:
        if handler is None:
            raise RefusedCall(401, "expected the key of a sample that is open: use the key that the program got")
        if (request.method, path) == ("GET", MODELS):
            return web.json_response(models(POLICY, OPPONENT))
        if request.method != "POST" or path not in (*PROTOCOLS, COUNT):
            routes = ", ".join((*PROTOCOLS, COUNT, MODELS))
            raise RefusedCall(404, f"expected one of {routes}, got {request.method} {path}: use one of these")
        try:
            call = protocol.read(_mapping(await request.read()))
        except ValueError as error:
            raise RefusedCall(400, str(error)) from error
        if path == COUNT:
            return web.json_response({"input_tokens": handler.count(call)})
        answer = await handler.answer(call)
        if not call.stream:
            return web.json_response(protocol.body(call, answer))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in protocol.events(call, answer):
            await response.write(encode_event(event))
        await response.write_eof()
        return response


def _mapping(body: bytes) -> Mapping[str, Any]:
    value = parse_json(body)
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}: send one")
    return value


GATEWAY = Gateway()
"""Gateway of this process."""
