"""Connecting to Temporal: standard profiles and ``TEMPORAL_*``, with a short deadline."""

import asyncio
import logging
import re
from datetime import timedelta
from functools import lru_cache
from typing import Any

import structlog
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.client import Client
from temporalio.envconfig import ClientConfig, ClientConnectConfig
from temporalio.runtime import (
    LogForwardingConfig,
    LoggingConfig,
    PrometheusConfig,
    Runtime,
    TelemetryConfig,
    TelemetryFilter,
)
from temporalio.service import RPCError

from activities.server import SEARCH_ATTRIBUTES, missing_search_attributes
from models.errors import ConfigurationError, ServiceUnreachable
from workers.converter import data_converter
from workers.payload_keys import payload_keys

CONNECT_TIMEOUT_S = 5.0
DEFAULT_ADDRESS = "127.0.0.1:7233"

_log = structlog.get_logger(__name__)


async def connect(
    address: str | None = None,
    *,
    configured: bool = True,
    timeout_s: float = CONNECT_TIMEOUT_S,
    metrics_address: str | None = None,
    works: bool = True,
) -> Client:
    """A client that reads and writes payloads as Perdure's workers do.

    Args:
        address: ``host:port``; else the profile's, ``TEMPORAL_ADDRESS`` or the default.
        configured: namespace, keys and TLS come from profile and ``TEMPORAL_*``; off for the
            embedded server, which has none of another server's.
        timeout_s: deadline of the connection, all addresses and handshakes included.
        metrics_address: ``host:port`` where this process answers ``/metrics``; None: nowhere.
        works: workers will use it, and take sandbox and failure types from its plugin. A command
            line that only asks is faster without.

    Raises:
        ServiceUnreachable: no server answered in time.
        ConfigurationError: the profile file is malformed or names an unknown profile, or the
            address for metrics cannot be had.
    """
    config = _configuration() if configured else ClientConnectConfig()
    if address is not None:
        config["target_host"] = address
    config.setdefault("target_host", DEFAULT_ADDRESS)
    where = config["target_host"]
    runtime = _runtime(metrics_address)
    if works:
        from workers.plugin import perdure_plugin  # imports workers and their sandbox

        payloads: dict[str, Any] = {"plugins": [perdure_plugin()]}
    else:
        payloads = {"data_converter": data_converter(payload_keys())}
    try:
        async with asyncio.timeout(timeout_s):
            return await Client.connect(
                **config,
                **payloads,
                runtime=runtime,
                connect_timeout=timedelta(seconds=timeout_s),
            )
    except (RuntimeError, RPCError, OSError, TimeoutError) as error:
        raise ServiceUnreachable(
            f"Temporal at {where} does not answer: {_reason(error) or f'{timeout_s:g} s passed'}. "
            "Start it, or correct TEMPORAL_ADDRESS"
        ) from error


async def ensure_search_attributes(client: Client) -> bool:
    """Register what runs are listed by, if this client may; return whether all are there.

    Best effort: without them runs work and are found by id only.
    """
    try:
        missing = await missing_search_attributes(client)
        if missing:
            await client.operator_service.add_search_attributes(
                AddSearchAttributesRequest(
                    namespace=client.namespace,
                    search_attributes={name: SEARCH_ATTRIBUTES[name] for name in missing},
                )
            )
    except RPCError as error:
        _log.warning("search attributes not registered", reason=error.message)
        return False
    return True


def _configuration() -> ClientConnectConfig:
    try:
        return ClientConfig.load_client_connect_config(config_file_strict=True)
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigurationError(f"Temporal client configuration: {error}") from error


def _reason(error: Exception) -> str:
    """The innermost text of a transport error: the client nests Rust's debug output."""
    text = " ".join(str(error).split())
    quoted: list[str] = re.findall(r'(?:message|error): "([^"]+)"', text)
    return quoted[-1] if quoted else text


@lru_cache(maxsize=1)
def _runtime(metrics_address: str | None) -> Runtime:
    """The process's one runtime. Core logs go through ``logging``: by default they use stdout."""
    metrics = PrometheusConfig(bind_address=metrics_address) if metrics_address else None
    logs = LoggingConfig(
        filter=TelemetryFilter(core_level="WARN", other_level="ERROR"),
        forwarding=LogForwardingConfig(logger=logging.getLogger("temporal")),
    )
    try:
        return Runtime(telemetry=TelemetryConfig(logging=logs, metrics=metrics))
    except ValueError as error:
        raise ConfigurationError(
            f"the worker's metrics cannot be served at {metrics_address}: {error}"
        ) from error
