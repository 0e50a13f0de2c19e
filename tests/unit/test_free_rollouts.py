"""Fully async collections: whole batches in order of completion, fenced, nothing lost on the way."""

import asyncio

import pytest

from activities.rollout.collection_file import read_collection
from activities.storage.layout import ROLLOUT_FLOW, collection_manifest
from models.errors import ContractViolation, StaleFence
from models.ids import FenceToken
from models.rollout import CollectionManifest, CollectRequest

ROUTER = ("http://one",)


def token(epoch=1, update=0, attempt=1):
    return FenceToken(epoch=epoch, update=update, attempt=attempt)


async def start(producer, version=0, epoch=1):
    await producer.set_engines(token(epoch), ROUTER)
    await publish(producer, version, epoch)


async def publish(producer, version, epoch=1):
    await producer.begin_publication(token(epoch, version), version)
    await producer.end_publication(token(epoch, version), version)


def request(rig, update=0, epoch=1, version=0, consumed=None):
    through = update - 1 if consumed is None else consumed
    return CollectRequest(
        run=rig.run, epoch=epoch, update=update, policy_version=version, consumed_through=through
    )


async def collect(rig, producer, update=0, epoch=1, **options):
    async with asyncio.timeout(20):
        return await producer.collect(token(epoch, update), request(rig, update, epoch, **options))


async def test_collections_follow_without_being_asked_ahead(rig):
    producer = rig.producer(rig.async_spec())
    await start(producer)
    seen = []
    for update in range(4):
        collection = await collect(rig, producer, update)
        seen += [group.group_index for group in read_collection(rig.store, collection)]
        assert collection.counts.groups == 2
        assert collection.metrics["rollout/fully_async/completed_queue/delivered_samples"] == 4
    assert len(set(seen)) == len(seen) == 8
