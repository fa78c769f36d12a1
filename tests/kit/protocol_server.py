"""ProtocolServer: answers HTTP requests in the protocols of the gateway with an answer of the test."""

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from lightning_rl.environments.gateway import AnthropicMessages, Call, CallAnswer, ChatCompletions, Responses
from lightning_rl.environments.gateway.anthropic_messages import COUNT
from lightning_rl.environments.gateway.calls import MODELS, WireProtocol, encode_event, key_of, models
from lightning_rl.utils.event_loop import EventLoop

KEY, MODEL, TOKENS = "secret", "policy", 7
PROTOCOLS = (ChatCompletions(), Responses(), AnthropicMessages())
LOOP = EventLoop("protocols")


class ProtocolServer:
    """One server on loopback.

    Attributes:
        url: Base URL.
        answer: Answer to every call.
        calls: Calls in order.
    """

    def __init__(self) -> None:
        self.url, self.calls = "", list[Call]()
        self.answer = CallAnswer(
            text="",
            reasoning=None,
            tool_calls=(),
            finish="stop",
            prompt_tokens=3,
            completion_tokens=2,
            model=MODEL,
            id="1",
        )
        self._runner = web.AppRunner(web.Application(), access_log=None)
        self._runner.app.router.add_get(MODELS, _models)
        for protocol in PROTOCOLS:
            self._runner.app.router.add_post(protocol.route, self._handler(protocol))
        self._runner.app.router.add_post(COUNT, self._handler(AnthropicMessages()))

    def _handler(self, protocol: WireProtocol):
        async def handle(request: web.Request) -> web.StreamResponse:
            if key_of(request.headers) != KEY:
                return web.json_response(protocol.error(401, "expected the key of a sample"), status=401)
            try:
                call = protocol.read(await request.json())
            except ValueError as error:
                return web.json_response(protocol.error(400, str(error)), status=400)
            self.calls.append(call)
            if request.path == COUNT:
                return web.json_response({"input_tokens": TOKENS})
            if not call.stream:
                return web.json_response(protocol.body(call, self.answer))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for event in protocol.events(call, self.answer):
                await response.write(encode_event(event))
            await response.write_eof()
            return response

        return handle

    async def start(self) -> None:
        """Starts to listen."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Ends the server."""
        await self._runner.cleanup()


async def _models(request: web.Request) -> web.Response:
    return web.json_response(models(MODEL))


@contextmanager
def protocol_server() -> Iterator[ProtocolServer]:
    """A running server."""
    server = ProtocolServer()
    LOOP.run(server.start())
    try:
        yield server
    finally:
        LOOP.run(server.close())
