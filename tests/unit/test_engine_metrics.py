"""Reading an engine's gauges: the text format, and real HTTP with its faults."""

import asyncio

import pytest

from activities.wire.engine_metrics import KEPT, EngineMetricsClient, EngineSeries, kept_series
from models.errors import ContractViolation, ServiceUnreachable
from tests.support.metrics_server import serving
from workers.engines.native.gauges import metrics_text

DEADLINE_S = 10.0
TEXT = r"""
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="a/b",tp_rank="0"} 12.0
sglang:num_running_reqs{engine_type="unified",model_name="a/b",tp_rank="1"} 3.0
sglang:num_queue_reqs{model_name="a/b"} 4
sglang:token_usage{model_name="quote \" comma , brace } back \\ line \n end"} 0.25 1700000000000
sglang:cache_hit_rate{} NaN
sglang:gen_throughput +Inf
sglang:utilization -1.0
sglang:num_running_reqs_offline_batch 9
sglang:prompt_tokens_total{model_name="a/b"} 100.0
python_gc_objects_collected_total{generation="0"} 350.0
num_running_reqs 5
"""


def test_the_kept_names_are_those_of_the_table() -> None:
    assert {
        "num_running_reqs", "num_queue_reqs", "token_usage", "full_token_usage", "mamba_usage",
        "gen_throughput", "cache_hit_rate", "utilization", "fwd_occupancy",
    } == KEPT  # fmt: skip


def test_labelled_series_stand_side_by_side_and_unknown_values_are_none() -> None:
    rank = {"engine_type": "unified", "model_name": "a/b"}
    escaped = 'quote " comma , brace } back \\ line \n end'
    assert kept_series(TEXT) == [
        EngineSeries(name="num_running_reqs", labels={**rank, "tp_rank": "0"}, value=12.0),
        EngineSeries(name="num_running_reqs", labels={**rank, "tp_rank": "1"}, value=3.0),
        EngineSeries(name="num_queue_reqs", labels={"model_name": "a/b"}, value=4.0),
        EngineSeries(name="token_usage", labels={"model_name": escaped}, value=0.25),
        EngineSeries(name="cache_hit_rate", labels={}, value=None),
        EngineSeries(name="gen_throughput", labels={}, value=None),
        EngineSeries(name="utilization", labels={}, value=-1.0),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "sglang:token_usage",
        "sglang:token_usage many",
        'sglang:token_usage{model_name="a" 0.5',
        'sglang:token_usage{model_name=a} 0.5',
        'sglang:token_usage{model_name="a"} 0.5 0.5 0.5',
    ],
)  # fmt: skip
def test_a_kept_line_that_cannot_be_read_is_named(line: str) -> None:
    with pytest.raises(ContractViolation, match="sglang:token_usage"):
        kept_series(line)


def test_what_the_native_engine_serves_is_read_back() -> None:
    loads = {
        "num_running_reqs": 3, "num_waiting_reqs": 2, "num_used_tokens": 70, "token_usage": 0.5,
        "gen_throughput": 41.5, "cache_hit_rate": 0.75, "generated_tokens": 900, "paused": False,
    }  # fmt: skip
    series = kept_series(metrics_text(loads, 'folder "x"', "4"))
    assert {each.name: each.value for each in series} == {
        "num_running_reqs": 3, "num_queue_reqs": 2, "token_usage": 0.5, "gen_throughput": 41.5,
        "cache_hit_rate": 0.75,
    }  # fmt: skip
    assert series[0].labels == {"model_name": 'folder "x"'}


async def test_gauges_arrive_over_http() -> None:
    client = EngineMetricsClient()
    async with asyncio.timeout(DEADLINE_S), serving("200 OK", TEXT) as url:
        for _ in range(2):
            series = await client.series(url + "/", timeout_s=5.0)
            assert len(series) == 7
        await client.aclose()


async def test_a_refusal_tells_its_status() -> None:
    client = EngineMetricsClient()
    async with asyncio.timeout(DEADLINE_S), serving("404 Not Found", "") as url:
        with pytest.raises(ContractViolation, match=f"{url}.*404"):
            await client.series(url, timeout_s=5.0)
        await client.aclose()


async def test_a_silent_engine_costs_its_limit_only() -> None:
    client, hold = EngineMetricsClient(), asyncio.Event()
    async with asyncio.timeout(DEADLINE_S), serving("200 OK", TEXT, hold) as url:
        with pytest.raises(ServiceUnreachable, match=r"within 0\.05 s"):
            await client.series(url, timeout_s=0.05)
        hold.set()
        await client.aclose()


async def test_nobody_there() -> None:
    client = EngineMetricsClient()
    async with asyncio.timeout(DEADLINE_S), serving("200 OK", TEXT) as url:
        pass
    with pytest.raises(ServiceUnreachable, match=url):
        await client.series(url, timeout_s=5.0)
    await client.aclose()
