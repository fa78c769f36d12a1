"""Ranks that do not find each other: the error names the variable to set."""

import socket

import pytest
import torch
from kit.ranks import STRATEGIES
from kit.support import fit, tiny_module, tiny_prompts

from lightning_rl.distributed import cure_of

REFUSED = "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: Connection refused"


def begin(monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    """Return the output of rank 0 of two under torchrun with some variables."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "tests"}
    for name, value in {**rank, "MASTER_ADDR": "127.0.0.1", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError) as failed:
        fit(
            tiny_module(),
            data=tiny_prompts(),
            strategy=STRATEGIES["ddp"](),
            devices=int(variables.get("WORLD_SIZE", 2)),
        )
    assert not torch.distributed.is_initialized()
    return "\n".join(failed.value.__notes__)


def test_a_port_that_is_taken_is_said_to_be_chosen_by_master_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said = begin(monkeypatch, MASTER_PORT=str(taken.getsockname()[1]))
    assert said.startswith("set MASTER_PORT to a free port")


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = begin(monkeypatch, MASTER_PORT="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", GLOO_SOCKET_IFNAME="nowhere0")
    assert said == "set GLOO_SOCKET_IFNAME to the interface that reaches the other nodes, got 'nowhere0'"


def test_the_address_on_which_gloo_listens_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def address_of(_: str) -> str:
        if not addresses:
            raise OSError("no such host")
        return addresses.pop()

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", address_of)
    addresses = ["10.0.0.7"]
    for address in ("10.0.0.7", "127.0.0.1"):  # gloo falls back to loopback
        cure = cure_of(RuntimeError(REFUSED))
        assert cure.startswith("set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface")
        assert cure.endswith(f"for {socket.gethostname()} {address}")


@pytest.mark.parametrize(
    ("restarts", "shared", "named"), [("1", "True", True), ("0", "True", False), ("1", "False", False)]
)
def test_a_restart_that_reads_old_addresses_is_told_of_the_store(
    restarts: str, shared: str, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    cure = cure_of(RuntimeError(REFUSED))
    assert cure.startswith("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == named


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (RuntimeError("The client socket has timed out after 60000ms while trying to connect"), "set MASTER_ADDR and"),
        (RuntimeError("Timed out after 61 seconds waiting for clients. 1/2 clients joined."), "set MASTER_ADDR and"),
        (RuntimeError("Ping failed, invalid value returned from server. Expected: 1807"), "set MASTER_ADDR and"),
        (
            ValueError("invalid literal for int() with base 10: '29500;'"),
            "set MASTER_PORT to the number of a free port",
        ),
    ],
    ids=["no-listener", "no-peer", "other-listener", "no-number"],
)
def test_an_address_that_leads_nowhere_is_named(error: Exception, cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500;")
    assert cure_of(error).startswith(cure)


def test_any_other_error_is_left_alone() -> None:
    assert cure_of(ValueError("expected rewards")) == ""
