"""Worker Deployment Versioning: which version of Perdure a worker says it is, on request."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from temporalio.common import VersioningBehavior, WorkerDeploymentVersion

from models.errors import ConfigurationError

if TYPE_CHECKING:
    from temporalio.worker import WorkerDeploymentConfig

DEPLOYMENT = "PERDURE_DEPLOYMENT"
"""Name of the deployment; one for the control and the GPU workers of a fleet."""
BUILD_ID = "PERDURE_BUILD_ID"
"""Version of the workers, for example the tag of their image."""


def deployment(environment: Mapping[str, str] | None = None) -> "WorkerDeploymentConfig | None":
    """The version of this worker; None without the two variables: any worker takes any task.

    Runs move to the current version with their next workflow task: the workflow code replays the
    histories of earlier ones.

    Raises:
        ConfigurationError: one of the two variables is set without the other.
    """
    variables = os.environ if environment is None else environment
    name, build_id = variables.get(DEPLOYMENT, ""), variables.get(BUILD_ID, "")
    if not name and not build_id:
        return None
    if not name or not build_id:
        raise ConfigurationError(
            f"{DEPLOYMENT} is {name!r} and {BUILD_ID} is {build_id!r}; set both or neither"
        )
    from temporalio.worker import WorkerDeploymentConfig  # slow; who launches needs the name alone

    return WorkerDeploymentConfig(
        version=WorkerDeploymentVersion(deployment_name=name, build_id=build_id),
        use_worker_versioning=True,
        default_versioning_behavior=VersioningBehavior.AUTO_UPGRADE,
    )
