"""What ``claim`` needs to know of the Temporal server that runs it."""

import asyncio
from dataclasses import dataclass

from temporalio import activity
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import GetClusterInfoRequest
from temporalio.client import Client
from temporalio.service import RPCError

from models.errors import ServiceUnreachable

RPC_TIMEOUT_S = 10.0

SEARCH_ATTRIBUTES: dict[str, IndexedValueType.ValueType] = {
    "RunState": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    "PolicyVersion": IndexedValueType.INDEXED_VALUE_TYPE_INT,
    "UpdateIndex": IndexedValueType.INDEXED_VALUE_TYPE_INT,
    "ModelName": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    "RecipeName": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
}
"""Names and types that runs are listed by."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A Temporal server as an owner of output roots."""

    namespace: str
    cluster_id: str
    address: str
    search_attributes: bool
    """All of ``SEARCH_ATTRIBUTES`` are registered; upserting an unknown one wedges a run."""


async def server_facts() -> ServerFacts:
    """Ask the server of the running activity; ``ServiceUnreachable`` when it does not answer."""
    client = activity.client()
    try:
        async with asyncio.timeout(RPC_TIMEOUT_S):
            info = await client.workflow_service.get_cluster_info(GetClusterInfoRequest())
            missing = await missing_search_attributes(client)
    except (RPCError, TimeoutError) as error:
        raise ServiceUnreachable(f"Temporal did not describe itself: {error}") from error
    return ServerFacts(
        namespace=client.namespace,
        cluster_id=info.cluster_id,
        address=client.service_client.config.target_host,
        search_attributes=not missing,
    )


async def missing_search_attributes(client: Client) -> list[str]:
    """Names of ``SEARCH_ATTRIBUTES`` that the namespace lacks or has with another type."""
    answer = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=client.namespace)
    )
    known = answer.custom_attributes
    return [name for name, kind in SEARCH_ATTRIBUTES.items() if known.get(name) != kind]
