"""ScriptedServer: answers VLLMServerEngine as a vLLM server would, from a script, with faults and kills.

Its worker joins groups and receives weights by the code that runs in a real one.
"""

import json
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import override

from lightning_rl.generation.vllm.worker_extension import WeightLoader
from lightning_rl.generation.weights.weight_folder import read_weights
from lightning_rl.generation.weights.weight_stream import Weights

KEY, VOCABULARY, MODEL = "secret", 16, "/a/model"
Answer = dict[str, Any] | bytes | int
HOLDS: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "vocabulary": VOCABULARY,
    "max_length": 64,
    "dtype": "float32",
    "device": "cpu",
    "has_tokenizer": False,
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",
    "max_lora_rank": 0,
    "max_pictures": 0,
}


class ScriptedServer:
    """One server on loopback, in threads of this process.

    Args:
        script: from a request and the answer that a healthy server would give to the answer that is given: JSON, raw
            bytes, or a status. It runs in a thread for each request, so it may wait.
        holds: what the server says of itself, where it differs from :data:`HOLDS`.
        release: of vLLM.
        port: to listen at; 0 for any that is free.
        context: for https; None for http.

    Attributes:
        label: of the weights.
        weights: that were loaded last.
        loads: folders that were loaded, in order.
        adapters: tensors of each LoRA adapter that was loaded, by its name.
        receptions: groups that weights were received in, in order.
        on_tensor: called with the name of each tensor that is received; what it raises is what the load raises.
        requests: bodies of the requests that were answered or are being answered.
        calls: every call, by its path without query.
        error: what a load says instead of loading.
        key: that every call has to bring.
        worker: the process that joins groups.
        cut: how many clients hung up before their answer.
        connections: how many there have been.
    """

    def __init__(
        self,
        script: Callable[[dict[str, Any], Answer], Answer] = lambda _, answer: answer,
        *,
        port: int = 0,
        release: str = "0.32.0",
        context: ssl.SSLContext | None = None,
        **holds: Any,
    ) -> None:
        self.script, self.release, self.holds = script, release, {**HOLDS, **holds}
        self.label, self.error, self.cut, self.healthy = "default", "", 0, True
        self.key, self.connections = KEY, 0
        self.weights: dict[str, Tensor] = {}
        self.loads: list[str] = []
        self.adapters: dict[str, dict[str, Tensor]] = {}
        self.receptions: list[str] = []
        self.on_tensor: Callable[[str], None] = lambda _: None
        self.worker = _Worker(self)
        self.requests: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.open: set[socket.socket] = set()
        self.asked = threading.Condition()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self), bind_and_activate=False)
        self._http.daemon_threads, self._http.block_on_close = True, False
        self._http.request_queue_size = 1024
        self._http.server_bind()
        self._http.server_activate()
        self.port = self._http.server_address[1]
        if context is not None:
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.url = f"http{'s' if context else ''}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def kill(self) -> None:
        """End like a killed process: no further request is answered."""
        self.worker.lightning_rl_leave()
        if self._thread.is_alive():
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()
        for connection in list(self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def until(self, condition: Callable[["ScriptedServer"], bool]) -> None:
        """Waits for something to be true of this server."""
        with self.asked:
            assert self.asked.wait_for(lambda: condition(self), 100), "the condition did not come true"

    def noted(self, path: str) -> None:
        """Store a call, just before its answer is sent."""
        with self.asked:
            self.calls.append(path)
            self.asked.notify_all()

    def answer(self, path: str, body: Any) -> Answer:
        """Return the answer of a healthy server."""
        if path == "/version":
            return {"version": self.release}
        if path == "/weight_info":
            return {"weight_version": self.label}
        if path == "/update_weight_version":
            self.label = body["new_version"]
        if path == "/collective_rpc":
            return {"results": [self._rpc(body["method"], body["args"])]}
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.adapters:
                return 400
            self.adapters[body["lora_name"]] = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
            return b"Success: it has no JSON"
        if path == "/inference/v1/generate":
            if body.get("model", MODEL) not in (MODEL, *self.adapters):
                return 404
            with self.asked:
                self.requests.append(body)
                self.asked.notify_all()
            return self.script(body, self._generated(body))
        return {"success": True} if self.healthy else 503

    def _rpc(self, method: str, arguments: list[Any]) -> dict[str, Any]:
        if method == "lightning_rl_describe":
            return self.holds
        if self.error:
            return {"error": self.error}
        if method == "lightning_rl_load":
            self.weights = dict(read_weights(Path(arguments[0])))
            self.loads.append(arguments[0])
        if method.removeprefix("lightning_rl_") in ("join", "member", "receive", "leave"):
            return getattr(self.worker, method)(*arguments)
        return {}

    def _generated(self, body: dict[str, Any]) -> dict[str, Any]:
        asked, ids = body["sampling_params"], body["token_ids"]
        tokens = [(asked.get("seed", 0) + place) % VOCABULARY for place in range(asked["max_tokens"])]
        ends = [place for place, token in enumerate(tokens) if token in asked.get("stop_token_ids", ())]
        number = ends[0] + 1 if ends else len(tokens)
        tokens = tokens[:number]
        top = [{"token_id": token, "logprob": -0.5 - token} for token in range(asked.get("logprobs") or 1)]
        content = [{"token_id": token, "logprob": -1.0 - token / 100, "top_logprobs": top} for token in tokens]
        return {
            "model": body.get("model", MODEL),
            "choices": [
                {
                    "token_ids": tokens,
                    "finish_reason": "stop" if ends else "length",
                    "stop_reason": tokens[-1] if ends else None,
                    "logprobs": None if asked.get("logprobs") is None else {"content": content},
                    "weight_versions": [{"version": self.label, "start": 0, "end": number}],
                }
            ],
            "prompt_logprobs": [None, *({str(token): {"logprob": -token / 10}} for token in ids[1:])],
        }


class _Worker(WeightLoader):
    """The one process of a scripted server, with weights as they came."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server

    @override
    def lightning_rl_receive(self, name: str) -> dict[str, str]:
        self._server.receptions.append(name)
        return super().lightning_rl_receive(name)

    @override
    def _lightning_rl_reload(self, weights: Weights) -> dict[str, str]:
        try:
            self._server.weights = {}
            for name, weight in weights:
                self._server.on_tensor(name)
                self._server.weights[name] = weight
        except (RuntimeError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {}


def _handler(server: ScriptedServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept
        disable_nagle_algorithm = True

        @override
        def setup(self) -> None:
            super().setup()
            server.open.add(self.connection)
            server.connections += 1

        @override
        def handle(self) -> None:
            with suppress(ConnectionError):  # of a client that was killed
                super().handle()

        @override
        def finish(self) -> None:
            with server.asked:
                server.open.discard(self.connection)
                server.asked.notify_all()
            with suppress(OSError):
                super().finish()

        @override
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer(json.loads(body) if body else None)

        def _answer(self, body: Any) -> None:
            path = self.path if "include_dp" in self.path else urlsplit(self.path).path
            allowed = self.headers.get("Authorization") == f"Bearer {server.key}"
            answer = server.answer(path, body) if allowed else 401
            status, text = (answer, b"refused") if isinstance(answer, int) else (200, answer)
            coming = select.poll()
            coming.register(self.connection, select.POLLIN)
            if coming.poll(0):  # a client that waits sends nothing, one that left an end
                server.cut += 1
            server.noted(self.path)
            content = text if isinstance(text, bytes) else json.dumps(text).encode()
            with suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

    return Handler


@contextmanager
def servers(*scripted: ScriptedServer) -> Iterator[None]:
    """End servers, also after an exception."""
    try:
        yield
    finally:
        for server in scripted:
            server.kill()
