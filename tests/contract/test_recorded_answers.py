"""What the client makes of answers that were recorded from real SGLang servers of two releases."""

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from activities.wire.client import EngineClient
from activities.wire.contract import GenerateRequest, GenerateResponse, SamplingParams
from activities.wire.faults import OVERLOAD, TIMEOUT
from models.errors import ContractViolation, GenerationFault

FOLDER = Path(__file__).parent / "recorded"
RECORDED = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
RID = "0123456789abcdef" * 2
PROMPT_LENGTH = 12
TIMEOUT_S = 5.0
Record = dict[str, Any]


def of_group(group: str) -> list[Any]:
    return [
        pytest.param(record, id=f"{release}-{name}")
        for release, groups in RECORDED.items()
        for name, record in groups[group].items()
    ]


def client_of(*records: Record) -> EngineClient:
    """A client whose calls are answered with ``records`` in order."""
    left = list(records)

    def answer(_: httpx.Request) -> httpx.Response:
        record = left.pop(0)
        body = record["body"]
        content = body if isinstance(body, str) else json.dumps(body)
        return httpx.Response(record["status"], content=content)

    transport = httpx.MockTransport(answer)
    return EngineClient(
        "http://engine", vocab_size=49_152, context_length=8192, transport=transport
    )


def request(**told: Any) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=4000)
    ids = list(range(PROMPT_LENGTH))
    return GenerateRequest(rid=RID, input_ids=ids, sampling_params=sampling, **told)


@pytest.mark.parametrize("record", of_group("generate"))
async def test_answers_are_read_field_by_field(record: Record) -> None:
    body = record["body"]
    meta = body["meta_info"]
    answer = await generated(body, with_logprobs="output_token_logprobs" in meta)
    assert answer.output_ids == body["output_ids"]
    assert answer.meta_info.finish_reason == meta["finish_reason"]
    assert answer.meta_info.weight_version == meta["weight_version"]
    assert answer.meta_info.num_retractions == meta.get("num_retractions")
    assert answer.meta_info.cached_tokens == meta.get("cached_tokens")
    told = answer.meta_info.output_token_logprobs or []
    assert [list(entry) for entry in told] == meta.get("output_token_logprobs", [])


async def generated(body: dict[str, Any], *, with_logprobs: bool) -> GenerateResponse:
    """The answer as the client gives it, or as its model when the client refuses no tokens."""
    body = body | {"meta_info": body["meta_info"] | {"id": RID}}
    reason = body["meta_info"]["finish_reason"]["type"]
    if not body["output_ids"] and reason != "abort":
        # A scoring call, which the client never makes.
        return GenerateResponse.model_validate(body)
    client = client_of({"status": 200, "body": body})
    return await client.generate(request(return_logprob=with_logprobs), timeout_s=TIMEOUT_S)


def test_recorded_routes_have_one_row_a_fed_token() -> None:
    """12 + 3 - 1 tokens, 2 layers, 2 of 4 experts, int32."""
    meta = RECORDED["sglang-0.5.18-cpu"]["generate"]["routed experts"]["body"]["meta_info"]
    experts = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    assert experts.size == (meta["prompt_tokens"] + meta["completion_tokens"] - 1) * 2 * 2
    assert set(experts.tolist()) <= {0, 1, 2, 3}


FAULTS = {"queue full": OVERLOAD, "ran too long": TIMEOUT, "waited too long": TIMEOUT}


@pytest.mark.parametrize("record", of_group("refused"))
async def test_refusals_are_faults_or_end_the_run(record: Record, request_name: str) -> None:
    with pytest.raises((GenerationFault, ContractViolation)) as caught:
        await client_of(record).generate(request(), timeout_s=TIMEOUT_S)
    category = FAULTS.get(request_name)
    if category is None:
        assert isinstance(caught.value, ContractViolation)
        assert f"status {record['status']}" in caught.value.message
        assert record["status"] in (400, 500)
    else:
        assert isinstance(caught.value, GenerationFault)
        assert caught.value.category == category


@pytest.fixture
def request_name(request: pytest.FixtureRequest) -> str:
    """Name of the recorded case, without its release."""
    name: str = request.node.callspec.id
    for release in RECORDED:
        name = name.removeprefix(f"{release}-")
    return name


async def update(client: EngineClient) -> object:
    await client.pause("abort")
    return await client.update_weights_from_disk("/models/v1", 1, TIMEOUT_S)


@pytest.mark.parametrize("release", RECORDED)
async def test_control_answers_are_understood(release: str) -> None:
    control: dict[str, Record] = RECORDED[release]["control"]
    info = control["model_info"]
    assert (await client_of(info).model_info())["weight_version"] == info["body"]["weight_version"]
    await client_of(control["pause"]).pause("abort")
    await client_of(info, control["continue"]).resume()
    await client_of(control["flush"]).flush_cache()
    await client_of(control["abort"]).abort_all()
    await client_of(info, control["rename"]).set_weight_version(9)
    at_rest = (control["pause"], info, control["flush"])
    await update(client_of(*at_rest, control["update"]))
    with pytest.raises(ContractViolation, match="Failed to get weights iterator"):
        await update(client_of(*at_rest, control["update of nothing"]))


async def test_checksums_of_a_gpu_are_read_and_of_a_cpu_refused() -> None:
    on_gpu = RECORDED["sglang-0.5.17"]["control"]["checksums"]
    assert await client_of(on_gpu).checksums() == on_gpu["body"]["ranks"][0]["checksums"]
    on_cpu = RECORDED["sglang-0.5.18-cpu"]["control"]["checksums without a GPU"]
    with pytest.raises(ContractViolation, match="not compiled with CUDA"):
        await client_of(on_cpu).checksums()


async def test_a_server_tells_what_the_guards_ask_for() -> None:
    recorded = RECORDED["sglang-0.5.18-cpu"]["control"]["server_info"]
    info = await client_of(recorded).server_info()
    assert info["tp_size"] == 1
    assert info["enable_memory_saver"] is False
    # Six positions less than its context of 4096.
    assert info["max_req_input_len"] == 4090
