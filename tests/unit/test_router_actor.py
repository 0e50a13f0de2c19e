"""What the router actor runs."""

from pathlib import Path

from fleet_rig import tiny_document

from configs.load import resolve_document
from models.ids import RunRef
from workers.actors.order import ActorOrder
from workers.actors.router import router_command
from workers.engines.router.options import parse_options


def test_the_command_follows_the_run_file_and_the_multiplier(tmp_path: Path) -> None:
    document = tiny_document(
        tmp_path,
        "r",
        **{"async": {"fully_async": True}},
        inference={
            "router_max_queued_requests": 77,
            "drain_timeout_s": 10,
            "update_timeout_s": 20,
            "request_timeout_s": 40,
        },
        launch={"env": {"MARK": "1"}},
    )
    spec = resolve_document(document, origin="test").spec
    run = RunRef(run_id="train/r", root=str(tmp_path), spec_sha256="s")
    scratch = str(tmp_path / "scratch")
    order = ActorOrder(run=run, role="router", incarnation=2, scratch=scratch, timeout_factor=2.0)

    command = router_command(order, spec)

    assert command.argv[1:3] == ("-m", "workers.engines.router")
    options = parse_options(list(command.argv[3:]))
    assert (options.host, options.port) == ("127.0.0.1", 0)
    assert options.ready_file == command.ready_file == Path(scratch) / "router.2.ready.json"
    assert options.max_queued_requests == 77
    assert options.queue_timeout_s == 60.0
    assert options.group_expiry_s == 80.0
    assert options.health_timeout_s == 10.0
    assert options.keep_alive_s == 60.0
    assert command.log_path == tmp_path / "logs" / "router.log"
    assert command.env["MARK"] == "1"
