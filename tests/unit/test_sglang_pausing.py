"""SGLang's pause is answered when the requests that it ends have ended."""

import asyncio
from types import SimpleNamespace

import pytest

from workers.engines.sglang import pausing
from workers.engines.sglang.pausing import prompt_pause

DEADLINE_S = 20.0


class Manager:
    """What the pause uses of SGLang's manager, with one request that has begun."""

    def __init__(self, *, ends: bool = True) -> None:
        self.is_pause = False
        self.is_pause_cond = asyncio.Condition()
        self.model_update_lock = self
        self.told: list[str] = []
        self._ends = ends
        self._ended = False

    def abort_request(self, *, abort_all: bool) -> None:
        assert abort_all
        assert self.is_pause, "a request could begin after the abort"
        self.told.append("abort")
        if self._ends:
            asyncio.get_running_loop().call_soon(self._end)

    async def is_locked(self) -> bool:
        return not self._ended

    def _end(self) -> None:
        self.told.append("ended")
        self._ended = True

    async def pause_generation(self, order: SimpleNamespace) -> None:
        self.told.append(f"pause {order.mode}")


async def pause(manager: Manager, mode: str) -> list[str]:
    async with asyncio.timeout(DEADLINE_S):
        await prompt_pause(Manager.pause_generation)(manager, SimpleNamespace(mode=mode))
    return manager.told


async def test_the_pause_comes_when_the_requests_have_ended() -> None:
    assert await pause(Manager(), "abort") == ["abort", "ended", "pause abort"]


async def test_requests_that_do_not_end_are_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pausing, "LOOKS_AGAIN_S", 0.01)
    assert await pause(Manager(ends=False), "abort") == ["abort", "pause abort"]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_other_pauses_end_nothing(mode: str) -> None:
    manager = Manager()
    assert await pause(manager, mode) == [f"pause {mode}"]
    assert not manager.is_pause
