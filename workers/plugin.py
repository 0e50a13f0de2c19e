"""One Temporal plugin for client, worker and replayer: converter, sandbox, failure types."""

import dataclasses

from pydantic import ValidationError
from temporalio.plugin import SimplePlugin
from temporalio.worker import WorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions
from temporalio.workflow import SandboxImportNotificationPolicy

from models.errors import PerdureError
from workers.converter import data_converter
from workers.payload_keys import payload_keys

PASSED_THROUGH = (
    "models",  # types shared with activities; twins of them would not compare equal
    "configs",
    "activities.queues",
    "workflows.background",  # pure, and re-importing them for each run costs time
    "workflows.calls",
    "workflows.details",
    "workflows.indexing",
    "workflows.loop",
    "workflows.options",
    "workflows.recovery",
    "workflows.request",
    "workflows.stages",
    "pydantic_core",
    "annotated_types",
)
"""Modules that workflow code shares with the worker. Anything else makes the worker refuse to
start, so an import of torch, httpx or fsspec in workflow code never gets as far as a run."""


def perdure_plugin() -> SimplePlugin:
    """The plugin. Pass it to ``Client.connect``; workers and replayers take it from there.

    Raises:
        ConfigurationError: the keys for payloads are malformed or cannot be read.
    """
    return SimplePlugin(
        "perdure",
        data_converter=data_converter(payload_keys()),
        workflow_runner=_runner,
        workflow_failure_exception_types=[ValidationError, PerdureError],
    )


def _runner(existing: WorkflowRunner | None) -> WorkflowRunner:
    """The sandbox with our modules passed through and any other import refused."""
    restrictions = SandboxRestrictions.default.with_passthrough_modules(
        *PASSED_THROUGH
    ).with_import_notification_policy(
        SandboxImportNotificationPolicy.WARN_ON_DYNAMIC_IMPORT
        | SandboxImportNotificationPolicy.RAISE_ON_UNINTENTIONAL_PASSTHROUGH
    )
    if isinstance(existing, SandboxedWorkflowRunner):
        return dataclasses.replace(existing, restrictions=restrictions)
    return SandboxedWorkflowRunner(restrictions=restrictions)
