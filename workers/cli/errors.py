"""From errors to exit codes and one clear line on standard error.

=====  ==============================================================================
code   meaning
=====  ==============================================================================
0      done
1      the run failed or ended before its horizon; a request was refused
2      usage or configuration: the user can fix it
3      a service did not answer
130    interrupted (Ctrl-C); a run that was followed goes on
=====  ==============================================================================
"""

import sys
import traceback

from models.errors import ConfigurationError, PerdureError, ServiceUnreachable

DONE = 0
FAILED = 1
USAGE = 2
UNREACHABLE = 3
INTERRUPTED = 130


def exit_code(error: BaseException) -> int:
    """The exit code that ``error`` stands for."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, ConfigurationError):
        return USAGE
    if isinstance(error, ServiceUnreachable):
        return UNREACHABLE
    return FAILED


def exit_code_of(error_type: str | None) -> int:
    """The exit code of a run that ended with a failure of this Temporal type."""
    fixable = ("ConfigurationError", "OwnershipError", "ValidationError")
    return USAGE if error_type in fixable else FAILED


def report(error: BaseException, *, debug: bool) -> int:
    """Write ``error`` to standard error, a line a problem, and return its exit code."""
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write("perdure: interrupted\n")
    elif debug:
        sys.stderr.write("".join(traceback.format_exception(error)))
    elif isinstance(error, PerdureError):
        for line in error.message.splitlines():
            sys.stderr.write(f"perdure: {line}\n")
    else:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        sys.stderr.write(
            f"perdure: unexpected {type(error).__name__}: {error}{where}; "
            "--debug shows the traceback\n"
        )
    return exit_code(error)
