"""What is on disk under the state folder: ports, the Ray token, process identities."""

import hashlib
import os
import secrets
import stat
from pathlib import Path

from models.base import Carried
from models.errors import ConfigurationError

SERVICES = ("temporal", "ray", "control", "gpu")
"""Start order of the supervised services."""


def state_dir() -> Path:
    """``PERDURE_STATE_DIR``, else ``$XDG_STATE_HOME/perdure`` or ``~/.local/state/perdure``."""
    named = os.environ.get("PERDURE_STATE_DIR")
    if named:
        return Path(named).expanduser().resolve()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "perdure"


class StackInfo(Carried):
    """How to reach the stack."""

    temporal_address: str
    temporal_ui: str
    ray_address: str
    state_dir: str
    own_ray: bool = True
    """The stack runs Ray itself; else ``ray_address`` is a cluster that ``RAY_ADDRESS`` named."""
    payload_key_ids: tuple[str, ...] = ()
    """Ids of the keys that its workers encrypt and decrypt payloads with."""

    @property
    def log_dir(self) -> Path:
        """One log file a service."""
        return Path(self.state_dir) / "logs"


class ProcessStatus(Carried):
    """One supervised process. ``create_time`` tells a reused pid apart."""

    name: str
    pid: int
    create_time: float
    restarts: int = 0
    last_exit: str = ""
    alive: bool = True


class StackStatus(Carried):
    """``stack.json``: written by the supervisor on every change."""

    info: StackInfo
    supervisor_pid: int
    supervisor_create_time: float
    ready: bool = False
    """Every service has been ready since the supervisor started."""
    num_ends: int = 0
    """Ends of services since the supervisor started."""
    failing: str = ""
    """The service that keeps ending, with its last log lines; empty when all is well."""
    processes: tuple[ProcessStatus, ...] = ()


def status_path(folder: Path) -> Path:
    """Where the supervisor writes its status."""
    return folder / "stack.json"


def read_status(folder: Path) -> StackStatus | None:
    """The last written status, or None when there never was a stack here."""
    try:
        return StackStatus.model_validate_json(status_path(folder).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigurationError(
            f"{status_path(folder)} cannot be read ({error.strerror}); set PERDURE_STATE_DIR to a "
            "folder of your own"
        ) from error
    except ValueError as error:
        raise ConfigurationError(
            f"{status_path(folder)} is not readable ({error}); run `perdure down`, or remove it"
        ) from error


def write_status(folder: Path, status: StackStatus) -> None:
    """Replace the status file in one step."""
    target = status_path(folder)
    staging = target.with_suffix(f".{os.getpid()}.tmp")
    staging.write_text(status.model_dump_json(indent=2))
    os.replace(staging, target)


def token_path(folder: Path) -> Path:
    """Where the cluster's secret lies."""
    return folder / "ray.token"


def ray_token(folder: Path) -> str:
    """The cluster's shared secret: made once, readable by its owner only."""
    path = token_path(folder)
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        token = secrets.token_hex(32)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(token)
        return token


def ray_temp_dir(folder: Path) -> Path:
    """A short path for Ray's sockets: a Unix socket's address holds 107 bytes at most.

    Ray opens its folders to every user, so this one lies in a private one.
    """
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:10]
    return Path("/tmp") / f"perdure-{os.getuid()}-{digest}" / "ray"


def make_private(path: Path) -> None:
    """Make ``path`` a folder that only its owner, this user, may enter.

    Raises:
        ConfigurationError: somebody else was there first.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigurationError(
            f"{path} belongs to user {found.st_uid} or is no folder; remove it, or set "
            "PERDURE_STATE_DIR to another folder"
        )
    path.chmod(0o700)
