"""The token of engines and router: where it comes from, who is let through."""

import hashlib
import hmac
from pathlib import Path
from typing import Any

import pytest

from activities.wire.token import bearer, bears, engine_token, given_token
from models.errors import ConfigurationError
from models.ids import RunRef
from tests.support.sglang_server import run_file
from workers.actors.order import ActorOrder, environment, fleet_token
from workers.engines.token_gate import TokenGate, guarded, take_token

RAY = "a" * 64
DERIVED = hmac.new(RAY.encode(), b"perdure engines", hashlib.sha256).hexdigest()


def test_a_given_token_wins_over_one_made_of_rays() -> None:
    assert engine_token({"PERDURE_ENGINE_TOKEN": "t", "RAY_AUTH_TOKEN": RAY}) == "t"


@pytest.mark.parametrize("where", ["variable", "named file", "home"])
def test_every_process_that_may_join_the_cluster_makes_the_same(tmp_path: Path, where: str) -> None:
    told = {"HOME": str(tmp_path)}
    if where == "variable":
        told["RAY_AUTH_TOKEN"] = RAY
    elif where == "named file":
        (tmp_path / "secret").write_text(RAY + "\n")
        told["RAY_AUTH_TOKEN_PATH"] = str(tmp_path / "secret")
    else:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text(RAY)

    assert engine_token(told) == DERIVED


def test_there_is_none_where_ray_asks_for_none(tmp_path: Path) -> None:
    assert engine_token({"HOME": str(tmp_path)}) is None
    assert engine_token({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": RAY}) is None


@pytest.mark.parametrize("bad", ["two words", "line\nbreak", "schlüssel"])
def test_what_no_header_takes_is_refused(bad: str) -> None:
    with pytest.raises(ConfigurationError, match="PERDURE_ENGINE_TOKEN"):
        given_token({"PERDURE_ENGINE_TOKEN": bad})


def test_only_the_very_token_is_borne() -> None:
    header = bearer("secret")["authorization"].encode()
    assert bears(header, "secret")
    assert bears(b"bearer secret", "secret")
    for wrong in (b"", b"secret", b"Bearer", b"Bearer secre", b"Basic secret", b"Bearer \xff"):
        assert not bears(wrong, "secret")
    assert bearer(None) == {}


def test_comparison_takes_as_long_for_every_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    assert not bears(b"Bearer x", "secret")
    assert compared == [(b"x", b"secret")]


def test_a_server_keeps_its_token_from_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_ENGINE_TOKEN", "t")
    assert take_token() == "t"
    assert take_token() is None


def test_actors_are_told_in_their_environment_and_nothing_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_ENGINE_TOKEN", "canary")
    run = RunRef(run_id="train/x", root=str(tmp_path), spec_sha256="s")
    order = ActorOrder(run=run, role="engine", scratch=str(tmp_path), engine_token=fleet_token())

    told = environment(order, run_file(on_gpu=False), threads=1)

    assert told["PERDURE_ENGINE_TOKEN"] == "canary"
    assert "canary" not in f"{order!r} {order} {order.model_dump_json()}"


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/generate", [], 401),
        ("/abort_request", [(b"authorization", b"Bearer wrong")], 401),
        ("/abort_request", [(b"authorization", b"Bearer right")], 200),
        ("/health", [], 200),
        ("/health_generate", [], 200),
        ("/metrics", [], 200),
        ("//health", [], 401),
    ],
)
async def test_the_gate(path: str, headers: list[tuple[bytes, bytes]], status: int) -> None:
    sent: list[dict[str, Any]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("a refused request is not read")

    gate = TokenGate(application, "right")
    await gate({"type": "http", "path": path, "headers": headers}, receive, send)

    assert sent[0]["status"] == status
    assert guarded(application, None) is application
