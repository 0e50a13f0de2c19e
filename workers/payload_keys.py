"""Keys that encrypt what Temporal stores, from the environment or a file that it names.

``ID:64 hexadecimal digits``, several separated by commas or line ends. The first key encrypts; all
decrypt, so a new key goes in front and the old one stays until no history needs it any more.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from models.errors import ConfigurationError

KEYS = "PERDURE_PAYLOAD_KEYS"
KEYS_FILE = "PERDURE_PAYLOAD_KEYS_FILE"
ENCRYPT_FAILURES = "PERDURE_PAYLOAD_ENCRYPT_FAILURES"
"""``1``: messages and stack traces of failures are encrypted as well."""

_ENTRY = re.compile(r"([A-Za-z0-9._-]{1,64}):([0-9a-fA-F]{64})")
_FORM = "write ID:KEY, KEY being 64 hexadecimal digits as `openssl rand -hex 32` prints them"


class PayloadKeys(NamedTuple):
    """What this process encrypts and decrypts with; no keys: it does neither."""

    keys: Mapping[str, bytes]
    """Id -> 32 bytes; the first one encrypts."""
    encrypt_failures: bool = False

    def __repr__(self) -> str:
        return f"PayloadKeys(ids={list(self.keys)}, encrypt_failures={self.encrypt_failures})"

    @property
    def current(self) -> str | None:
        """Id of the key that encrypts."""
        return next(iter(self.keys), None)


def payload_keys(environment: Mapping[str, str] | None = None) -> PayloadKeys:
    """The keys of this process.

    Raises:
        ConfigurationError: they are malformed, cannot be read, or are given twice. The message
            shows no key.
    """
    variables = os.environ if environment is None else environment
    told, path = variables.get(KEYS), variables.get(KEYS_FILE)
    wish = variables.get(ENCRYPT_FAILURES, "0")
    if wish not in ("", "0", "1"):
        raise ConfigurationError(f"{ENCRYPT_FAILURES}={wish!r} is neither 0 nor 1")
    if told and path:
        raise ConfigurationError(f"{KEYS} and {KEYS_FILE} are both set; keep one")
    keys = _parsed(told, KEYS) if told else _parsed(_read(path), path) if path else {}
    if wish == "1" and not keys:
        raise ConfigurationError(f"{ENCRYPT_FAILURES}=1 needs keys: set {KEYS_FILE} or {KEYS}")
    return PayloadKeys(keys, wish == "1")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise ConfigurationError(f"{KEYS_FILE}={path} cannot be read: {reason}") from error


def _parsed(text: str, where: str) -> dict[str, bytes]:
    entries = [entry.strip() for entry in re.split(r"[,\n]", text)]
    keys: dict[str, bytes] = {}
    for number, entry in enumerate((e for e in entries if e and not e.startswith("#")), start=1):
        found = _ENTRY.fullmatch(entry)
        if found is None:
            raise ConfigurationError(f"{where}: entry {number} is no payload key; {_FORM}")
        if found[1] in keys:
            raise ConfigurationError(f"{where}: the key id {found[1]!r} is there twice")
        keys[found[1]] = bytes.fromhex(found[2])
    if not keys:
        raise ConfigurationError(f"{where} holds no payload key; {_FORM}")
    return keys
