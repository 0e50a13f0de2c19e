"""The token of a fleet's engines and router: whoever has it may talk to them.

It goes to servers in their environment, never as an argument, which every account of a host can
read, and to clients in theirs. Servers without one answer everybody.
"""

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from models.errors import ConfigurationError

ENGINE_TOKEN = "PERDURE_ENGINE_TOKEN"
_LABEL = b"perdure engines"
RAY_TOKEN = "RAY_AUTH_TOKEN"
_RAY_MODE, _RAY_TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"


def given_token(environment: Mapping[str, str] | None = None) -> str | None:
    """What ``PERDURE_ENGINE_TOKEN`` says; None when it is unset or empty.

    Raises:
        ConfigurationError: it holds what an HTTP header cannot.
    """
    variables = os.environ if environment is None else environment
    token = variables.get(ENGINE_TOKEN)
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigurationError(
            f"{ENGINE_TOKEN} holds a blank or a character that no HTTP header takes; use hex digits"
        )
    return token or None


def engine_token(environment: Mapping[str, str] | None = None) -> str | None:
    """The token of this process's fleet: as given, else made of the Ray cluster's own token.

    Every process that may join the cluster knows that one, so all of them make the same, also
    after a restart. None where Ray asks for no token either.
    """
    variables = os.environ if environment is None else environment
    if (token := given_token(variables)) is not None:
        return token
    secret = _ray_token(variables)
    return None if secret is None else hmac.new(secret.encode(), _LABEL, hashlib.sha256).hexdigest()


def bearer(token: str | None) -> dict[str, str]:
    """The header that brings ``token`` along; none without one."""
    return {} if token is None else {"authorization": f"Bearer {token}"}


def bears(header: bytes, token: str) -> bool:
    """Whether ``header``, of a request, brings ``token``. Takes as long for every wrong one."""
    scheme, _, given = header.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), token.encode())


def _ray_token(variables: Mapping[str, str]) -> str | None:
    """Ray's token, found where Ray itself looks for it."""
    if variables.get(_RAY_MODE, "token").lower() != "token":
        return None
    if variables.get(RAY_TOKEN):
        return variables[RAY_TOKEN].strip()
    named = variables.get(_RAY_TOKEN_PATH)
    path = Path(named) if named else Path(variables.get("HOME", "/nowhere"), ".ray", "auth_token")
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
