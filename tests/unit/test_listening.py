"""Where servers of a node listen: what is open to other hosts asks for a token."""

import sys
from types import SimpleNamespace

import pytest
from pydantic import SecretStr

from models.errors import ConfigurationError
from models.ids import RunRef
from workers.actors.listening import LOOPBACK, listen_host
from workers.actors.order import ActorOrder


def order(token: str | None = None) -> ActorOrder:
    return ActorOrder(
        run=RunRef(run_id="train/a", root="/r", spec_sha256="0"),
        role="engine",
        scratch="/s",
        engine_token=None if token is None else SecretStr(token),
    )


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A Ray that this process has joined: its node and all nodes of the cluster."""
    facts = SimpleNamespace(address="10.0.0.2", others=[], joined=True)
    stand_in = SimpleNamespace(
        is_initialized=lambda: facts.joined,
        util=SimpleNamespace(get_node_ip_address=lambda: facts.address),
        nodes=lambda: [
            {"NodeManagerAddress": address, "Alive": alive}
            for address, alive in [(facts.address, True), *facts.others]
        ],
    )
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    return facts


def test_with_a_token_a_server_is_in_reach_of_other_nodes(node: SimpleNamespace) -> None:
    assert listen_host(order("secret")) == "10.0.0.2"
    node.others = [("10.0.0.3", True)]
    assert listen_host(order("secret")) == "10.0.0.2"


def test_without_one_it_is_not(node: SimpleNamespace) -> None:
    assert listen_host(order()) == LOOPBACK
    node.others = [("10.0.0.3", False)]
    assert listen_host(order()) == LOOPBACK, "a dead node is nobody"
    node.others = [("10.0.0.3", True)]
    with pytest.raises(
        ConfigurationError, match=r"would serve 10\.0\.0\.3 without asking who calls"
    ):
        listen_host(order())


@pytest.mark.parametrize("token", [None, "secret"])
def test_a_cluster_on_loopback_stays_there(node: SimpleNamespace, token: str | None) -> None:
    node.address = "127.0.0.1"
    assert listen_host(order(token)) == LOOPBACK
    node.address, node.joined = "10.0.0.2", False
    assert listen_host(order(token)) == LOOPBACK
