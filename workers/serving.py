"""Worker settings that both worker processes share, and serving until a signal asks to end."""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any

import structlog
from temporalio.client import Client
from temporalio.worker import Worker

from models.errors import PerdureError, ServiceUnreachable
from workers.arenas import keep_few_arenas
from workers.connection import connect, ensure_search_attributes
from workers.deployment import deployment
from workers.metrics_address import WORKER_METRICS, metrics_address
from workflows.evaluation import BackgroundEvaluation
from workflows.retraining import Retraining
from workflows.training import Training

ACTIVITY_SLOTS = 100
"""Below about five, pollers hold every slot and eager starts are silently off."""

GRACEFUL_SHUTDOWN = timedelta(seconds=10)
"""Activities get this long to finish after SIGTERM; longer ones are retried on another worker,
which attaches to the same actors. Keep a container's grace period above it."""

STICKY_TIMEOUT = timedelta(seconds=1)
"""How long a run waits for the worker that had it cached before any other takes it over. A false
alarm costs one replay, and histories are short."""

HEARTBEAT_THROTTLE = timedelta(seconds=1)
"""Bounds how late a cancellation reaches an activity."""

CONNECT_PATIENCE_S = 60.0
"""How long a starting worker waits for a Temporal server."""

BLOCKED_LOOP_S = 30
"""A loop that answers nothing for so many checks in a row, one each second, is taken for blocked.
Well above any pause of a loaded machine: a false alarm costs every call of this worker."""

EXIT_BLOCKED = 70
EXIT_UNREACHABLE = 3
EXIT_FAILED = 1

_log = structlog.get_logger(__name__)


def build_worker(
    client: Client, task_queue: str, activities: Sequence[Callable[..., Any]]
) -> Worker:
    """A worker of every workflow and of ``activities`` on ``task_queue``.

    Raises:
        ConfigurationError: the environment names half of a deployment version.
    """
    return Worker(
        client,
        task_queue=task_queue,
        workflows=[Training, BackgroundEvaluation, Retraining],
        activities=activities,
        max_concurrent_activities=ACTIVITY_SLOTS,
        max_concurrent_workflow_tasks=8,  # a mass replay of more trips the deadlock detector
        sticky_queue_schedule_to_start_timeout=STICKY_TIMEOUT,
        graceful_shutdown_timeout=GRACEFUL_SHUTDOWN,
        max_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
        default_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
        deployment_config=deployment(),
    )


async def connect_patiently(patience_s: float = CONNECT_PATIENCE_S) -> Client:
    """A client, waiting for a server that is still starting; search attributes are registered.

    Raises:
        ServiceUnreachable: none answered for ``patience_s`` seconds.
        ConfigurationError: the address for metrics is none, or cannot be had.
    """
    metrics = metrics_address(WORKER_METRICS)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        try:
            client = await connect(metrics_address=metrics)
            break
        except ServiceUnreachable as error:
            if loop.time() > deadline:
                raise
            _log.warning("waiting for Temporal", reason=error.message)
            await asyncio.sleep(0.5)
    await ensure_search_attributes(client)
    return client


async def serve(worker: Worker) -> None:
    """Run ``worker`` until SIGTERM or SIGINT, then let its activities drain.

    Raises:
        RuntimeError: the worker cannot go on, for example because its namespace is gone.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    watch_loop(loop)
    running = asyncio.create_task(worker.run())
    stopping = asyncio.create_task(stop.wait())
    _log.info("serving", task_queue=worker.task_queue, pid=os.getpid())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        _log.info("draining", task_queue=worker.task_queue, grace_s=GRACEFUL_SHUTDOWN.seconds)
        await worker.shutdown()
    stopping.cancel()
    await running


def watch_loop(
    loop: asyncio.AbstractEventLoop,
    *,
    period_s: float = 1.0,
    misses: int = BLOCKED_LOOP_S,
    on_blocked: Callable[[], None] | None = None,
) -> threading.Thread:
    """End the process when ``loop`` is blocked: a worker that polls but never beats eats tasks.

    Missed answers are counted, not seconds: a stopped or suspended process misses none.
    """
    react = on_blocked or _exit_blocked

    def watch() -> None:
        missed = 0
        while not loop.is_closed():
            answered = threading.Event()
            try:
                loop.call_soon_threadsafe(answered.set)
            except RuntimeError:
                return
            missed = 0 if answered.wait(period_s) else missed + 1
            if missed >= misses:
                react()
                return
            if not missed:
                _pause.wait(period_s)

    _pause = threading.Event()
    thread = threading.Thread(target=watch, name="loop-watch", daemon=True)
    thread.start()
    return thread


def run_process(body: Coroutine[Any, Any, None]) -> None:
    """Run a worker process to its end and leave it. Does not return."""
    keep_few_arenas()
    _log_to_stderr()
    asyncio.run(_run_and_leave(body))


async def _run_and_leave(body: Coroutine[Any, Any, None]) -> None:
    """Leave from within the loop: its end would wait for every thread, a hanging one for ever.

    ``os._exit``, because a process that used the Temporal SDK may abort while Python finalizes.
    """
    code = 0
    try:
        await body
    except ServiceUnreachable as error:
        _log.error("a service is unreachable", reason=error.message)
        code = EXIT_UNREACHABLE
    except PerdureError as error:
        _log.error("worker failed", kind=error.type_name(), reason=error.message)
        code = EXIT_FAILED
    except (RuntimeError, OSError):
        _log.exception("worker failed")
        code = EXIT_FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_blocked() -> None:
    sys.stderr.write(f"the event loop was blocked for {BLOCKED_LOOP_S} s: leaving\n")
    sys.stderr.flush()
    os._exit(EXIT_BLOCKED)


def _log_to_stderr() -> None:
    """All logs of a worker process, the SDK's included, go to stderr."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
