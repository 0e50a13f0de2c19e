"""An SGLang scheduler gives memory back when nothing is computed in it any more."""

from types import SimpleNamespace

import pytest
import torch

from workers.engines.sglang.scheduler import idle_first


def test_the_device_is_waited_for_before_memory_is_unmapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[object] = []
    device = SimpleNamespace(synchronize=lambda: order.append("computed"))
    monkeypatch.setattr(torch, "get_device_module", lambda: device)

    def release(updater: object, request: object) -> str:
        order.append(("unmapped", updater, request))
        return "answer"

    assert idle_first(release)("updater", "request") == "answer"
    assert order == ["computed", ("unmapped", "updater", "request")]
