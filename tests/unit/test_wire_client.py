"""The engine client: what it refuses to send, what it refuses to believe, how it fails."""

import asyncio
import gc
import json

import httpx
import pytest

from activities.wire.client import EngineClient
from activities.wire.contract import GenerateRequest, SamplingParams
from activities.wire.engine_pool import EnginePool
from models.errors import ContractViolation, GenerationFault, ServiceUnreachable

URL = "http://engine:30000"
RID = "0123456789abcdef0123456789abcdef"


LIMITS = {"vocab_size": 100, "context_length": 200}


def client(handler):
    return EngineClient(URL, transport=httpx.MockTransport(handler), **LIMITS)


def request(**changes):
    fields = {"rid": RID, "input_ids": [1, 2, 3], "sampling_params": SamplingParams()}
    return GenerateRequest(**{**fields, **changes})


def answer(**meta):
    return {
        "text": "ab",
        "output_ids": [10, 11],
        "meta_info": {
            "id": RID,
            "finish_reason": {"type": "stop", "matched": 11},
            "weight_version": "4",
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "output_token_logprobs": [[-0.5, 10, None], [-0.25, 11, None]],
            "a_field_of_the_future": True,
            **meta,
        },
    }


def fixed(status, body):
    def handle(_request):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.Response(status, content=content)

    return handle


async def test_a_good_answer():
    asked = []

    def handle(http_request):
        asked.append(http_request)
        return httpx.Response(200, json=answer())

    engine = client(handle)
    got = await engine.generate(request(), timeout_s=5)
    await engine.aclose()
    assert got.output_ids == [10, 11]
    assert got.meta_info.weight_version == "4"
    (sent,) = asked
    assert (sent.method, sent.url.path) == ("POST", "/generate")
    assert sent.headers["x-perdure-request-id"] == RID
    body = json.loads(sent.content)
    assert body["rid"] == RID
    assert body["input_ids"] == [1, 2, 3]
    assert body["return_logprob"] is True
    assert "sampling_seed" not in body["sampling_params"]  # unset fields are not sent


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [1, 100]}, r"outside \[0, 100\): lowest 1, highest 100"),
        ({"input_ids": [-1, 5]}, r"outside \[0, 100\): lowest -1"),
        ({"sampling_params": SamplingParams(max_new_tokens=0)}, "max_new_tokens is 0"),
        ({"input_ids": [1] * 73}, "73 prompt tokens and max_new_tokens 128 exceed"),
    ],
)
async def test_a_bad_request_is_never_sent(changes, message):
    def handle(_request):
        raise AssertionError("sent")

    engine = client(handle)
    with pytest.raises(ContractViolation, match=message) as caught:
        await engine.generate(request(**changes), timeout_s=5)
    assert RID in str(caught.value)


BAD_ANSWERS = [
    (b"", "body"),
    (b"[1]", "body"),
    (b'{"text": "cut off', "body"),
    ({"text": "", "meta_info": answer()["meta_info"]}, "output_ids"),
    ({**answer(), "output_ids": [10, "x"]}, r"output_ids\.1"),
    ({**answer(), "output_ids": [10, 12]}, r"output_token_logprobs\[1\] is of token 11"),
    ({**answer(), "output_ids": [10]}, "2 long for 1 output_ids"),
    ({**answer(output_token_logprobs=[]), "output_ids": []}, "output_ids is empty"),
    (answer(output_token_logprobs=None), "output_token_logprobs is missing"),
    (answer(output_token_logprobs=[[None, 10, None], [-1, 11, None]]), "output_token_logprobs"),
    (answer(output_token_logprobs=[[float("nan"), 10, None], [-1, 11, None]]), r"\[0\] is nan"),
    (answer(output_token_logprobs=[[-1, 10, None], [-float("inf"), 11, None]]), r"\[1\] is -inf"),
    (answer(finish_reason={"type": "exhausted"}), "finish_reason.type is 'exhausted'"),
    (answer(finish_reason={}), "finish_reason.type is None"),
    (answer(finish_reason=None), "finish_reason"),
    (answer(weight_version=""), "weight_version is empty"),
    (answer(weight_version=None), "weight_version"),
    (answer(id="another"), "id is another"),
]


@pytest.mark.parametrize(("body", "message"), BAD_ANSWERS)
async def test_a_bad_answer_is_a_violation_that_names_the_field(body, message):
    engine = client(fixed(200, body))
    with pytest.raises(ContractViolation, match=message) as caught:
        await engine.generate(request(), timeout_s=5)
    assert RID in str(caught.value)
    assert URL in str(caught.value)


async def test_more_tokens_than_asked_for():
    engine = client(fixed(200, answer()))
    with pytest.raises(ContractViolation, match="more than max_new_tokens"):
        await engine.generate(
            request(sampling_params=SamplingParams(max_new_tokens=1)), timeout_s=5
        )


async def test_an_abort_without_tokens_is_a_valid_answer():
    body = {**answer(finish_reason={"type": "abort", "message": "Aborted"}), "output_ids": []}
    body["meta_info"]["output_token_logprobs"] = []
    engine = client(fixed(200, body))
    assert (await engine.generate(request(), timeout_s=5)).output_ids == []


async def test_a_known_fault_keeps_at_most_512_characters_of_the_body():
    body = {"message": "The request queue is full.", "padding": "x" * 5000}
    engine = client(fixed(503, body))
    with pytest.raises(GenerationFault, match="status 503") as caught:
        await engine.generate(request(), timeout_s=5)
    assert caught.value.category == "overload"
    assert len(str(caught.value)) < 700


async def test_an_unknown_status_is_a_violation():
    engine = client(fixed(500, b"Internal Server Error"))
    with pytest.raises(ContractViolation, match="status 500: Internal Server Error"):
        await engine.generate(request(), timeout_s=5)


async def test_the_deadline_covers_the_whole_call():
    async def handle(_request):
        await asyncio.Event().wait()

    engine = client(handle)
    with pytest.raises(GenerationFault, match=r"after 0\.05 s") as caught:
        await engine.generate(request(), timeout_s=0.05)
    assert caught.value.category == "timeout"


async def test_one_call_is_one_request():
    count = 0

    def handle(_request):
        nonlocal count
        count += 1
        raise httpx.ReadError("reset")

    engine = client(handle)
    with pytest.raises(GenerationFault):
        await engine.generate(request(), timeout_s=5)
    assert count == 1


@pytest.fixture
async def closing_server():
    """A real server that reads a request and closes the connection without an answer."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()


async def test_a_connection_closed_in_the_middle_is_a_transport_fault(closing_server):
    engine = EngineClient(closing_server, **LIMITS)
    with pytest.raises(GenerationFault) as caught:
        await engine.generate(request(), timeout_s=5)
    assert caught.value.category == "transport"
    with pytest.raises(ServiceUnreachable):
        await engine.model_info()
    assert not await engine.health()
    await engine.aclose()


async def test_nobody_listens(unused_tcp_port):
    engine = EngineClient(f"http://127.0.0.1:{unused_tcp_port}", **LIMITS)
    with pytest.raises(GenerationFault) as caught:
        await engine.generate(request(), timeout_s=5)
    assert caught.value.category == "transport"
    assert not await engine.health()
    await engine.aclose()


async def test_control_calls():
    asked = []
    answers = {
        "/health": b"",
        "/model_info": {"weight_version": "3", "model_path": "/m"},
        "/pause_generation": {"status": "ok"},
        "/continue_generation": {"status": "ok"},
        "/flush_cache": b"Cache flushed.\n",
        "/abort_request": b"",
        "/update_weights_from_disk": {"success": True, "message": "ok"},
        "/weights_checker": {
            "success": True,
            "message": "",
            "ranks": [{"checksums": {"a": "1" * 16}}, {"checksums": {"b": "2" * 16}}],
        },
    }

    def handle(http_request):
        body = json.loads(http_request.content) if http_request.content else None
        asked.append((http_request.method, http_request.url.path, body))
        return fixed(200, answers[http_request.url.path])(http_request)

    engine = client(handle)
    assert await engine.health()
    assert (await engine.model_info())["weight_version"] == "3"
    await engine.pause("abort")
    await engine.update_weights_from_disk("/dev/shm/w", 4, timeout_s=5)
    await engine.resume()
    await engine.flush_cache(timeout_s=3)
    await engine.abort(RID)
    await engine.abort_all()
    assert await engine.checksums() == {"a": "1" * 16, "b": "2" * 16}
    bodies = {path: body for _, path, body in asked}
    assert bodies["/pause_generation"] == {"mode": "abort"}
    assert bodies["/update_weights_from_disk"] == {
        "model_path": "/dev/shm/w",
        "weight_version": "4",
        "flush_cache": True,
        "abort_all_requests": False,
    }
    assert bodies["/weights_checker"] == {"action": "checksum"}
    aborts = [body for _, path, body in asked if path == "/abort_request"]
    assert aborts == [{"rid": RID}, {"abort_all": True}]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, {"success": False, "message": "no such folder"}, "400.*no such folder"),
        (200, {"success": False, "message": "no such folder"}, "failed: no such folder"),
        (200, b"ok", "not a JSON object"),
        (503, b"", "answered 503"),
    ],
)
async def test_a_refused_update_is_a_violation(status, body, message):
    def handle(http_request):
        if http_request.url.path == "/update_weights_from_disk":
            return fixed(status, body)(http_request)
        return fixed(200, {"weight_version": "1"})(http_request)

    engine = client(handle)
    await engine.pause("abort")
    with pytest.raises(ContractViolation, match=message):
        await engine.update_weights_from_disk("/nowhere", 2, timeout_s=5)


async def test_ranks_that_disagree_on_a_tensor():
    ranks = [{"checksums": {"a": "1" * 16}}, {"checksums": {"a": "2" * 16}}]
    engine = client(fixed(200, {"success": True, "message": "", "ranks": ranks}))
    with pytest.raises(ContractViolation, match="ranks disagree on the bytes of a"):
        await engine.checksums()


async def test_a_control_call_has_a_deadline():
    async def handle(_request):
        await asyncio.Event().wait()

    engine = client(handle)
    with pytest.raises(ServiceUnreachable, match=r"/pause_generation .* 0\.05 s"):
        await engine.pause("abort", timeout_s=0.05)
    assert not await engine.health(timeout_s=0.05)


def pool_of(handlers, clock=None):
    options = {} if clock is None else {"clock": clock}
    return EnginePool(
        lambda url: EngineClient(url, transport=httpx.MockTransport(handlers[url]), **LIMITS),
        **options,
    )


async def test_groups_go_to_the_least_reserved_engine():
    pool = pool_of({"http://a": fixed(200, answer()), "http://b": fixed(200, answer())})
    await pool.set_engines(("http://a", "http://b"))
    async with (
        pool.reserve(8, timeout_s=1) as first,
        pool.reserve(2, timeout_s=1) as second,
        pool.reserve(2, timeout_s=1) as third,
        pool.reserve(2, timeout_s=1) as fourth,
    ):
        urls = [route.url for route in (first, second, third, fourth)]
    assert urls == ["http://a", "http://b", "http://b", "http://b"]
    await pool.aclose()


async def test_an_engine_that_broke_is_chosen_last_for_two_seconds():
    now = 100.0

    def breaking(_request):
        raise httpx.ReadError("reset")

    pool = pool_of({"http://a": breaking, "http://b": fixed(200, answer())}, lambda: now)
    await pool.set_engines(("http://a", "http://b"))
    async with pool.reserve(1, timeout_s=1) as route:
        assert route.url == "http://a"
        with pytest.raises(GenerationFault):
            await route.generate(request(), timeout_s=1)
    async with pool.reserve(9, timeout_s=1) as route:
        assert route.url == "http://b"
        async with pool.reserve(1, timeout_s=1) as other:
            assert other.url == "http://b"
        now = 102.0
        async with pool.reserve(1, timeout_s=1) as other:
            assert other.url == "http://a"
    await pool.aclose()


async def test_a_pool_without_engines_waits_and_then_gives_up():
    pool = pool_of({"http://a": fixed(200, answer())})
    with pytest.raises(ServiceUnreachable, match="no engine"):
        await pool.wait_ready(0.02)
    waiter = asyncio.ensure_future(pool.wait_ready(5))
    await asyncio.sleep(0)
    await pool.set_engines(("http://a",))
    await asyncio.wait_for(waiter, 5)
    assert pool.urls == ("http://a",)
    await pool.aclose()
    with pytest.raises(ServiceUnreachable):
        await pool.wait_ready(0.02)


async def test_cancelling_a_call_is_not_mistaken_for_a_removed_engine():
    async def handle(_request):
        await asyncio.Event().wait()

    pool = pool_of({"http://a": handle})
    await pool.set_engines(("http://a",))

    async def call():
        async with pool.reserve(1, timeout_s=1) as route:
            await route.generate(request(), timeout_s=5)

    calling = asyncio.ensure_future(call())
    await asyncio.sleep(0.01)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await pool.aclose()


async def test_a_kept_engine_keeps_its_calls_when_others_change():
    gate = asyncio.Event()

    async def handle(_request):
        await gate.wait()
        return httpx.Response(200, json=answer())

    pool = pool_of({"http://a": handle, "http://b": handle})
    await pool.set_engines(("http://a",))
    async with pool.reserve(1, timeout_s=1) as route:
        call = asyncio.ensure_future(route.generate(request(), timeout_s=5))
        await asyncio.sleep(0.01)
        await pool.set_engines(("http://b", "http://a"))
        gate.set()
        assert (await call).output_ids == [10, 11]
    await pool.set_engines(("http://b",))
    with pytest.raises(GenerationFault, match="removed"):
        await route.generate(request(), timeout_s=5)
    await pool.aclose()


async def test_groups_that_a_router_refuses_to_release_harm_nobody():
    unheard = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    released = []

    def handler(request):
        if request.url.path == "/router/release":
            released.append(json.loads(request.content)["groups"])
            return httpx.Response(404 if len(released) == 1 else 200, json={"detail": "stopping"})
        return httpx.Response(503, json={"detail": "No healthy rollout workers available"})

    pool = EnginePool(
        lambda url: EngineClient(url, transport=httpx.MockTransport(handler), **LIMITS), routed=True
    )
    await pool.set_engines((URL,))
    for count in (1, 2):
        async with pool.reserve(1, timeout_s=1) as route:
            with pytest.raises(GenerationFault):
                await route.generate(request(), timeout_s=1)
        async with asyncio.timeout(5):
            while len(released) < count:
                await asyncio.sleep(0.001)
    await pool.aclose()
    gc.collect()
    assert len(released[1]) == 2  # what was refused goes with the next ones
    assert unheard == []
