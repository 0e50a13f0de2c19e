"""``codec-server``: what Temporal stores encrypted, in the clear for its Web UI and CLI."""

import contextlib
import os
import secrets
from typing import Annotated
from urllib.parse import urlsplit

import typer

from models.errors import ConfigurationError
from workers.cli.output import notice, out

TOKEN_VARIABLE = "PERDURE_CODEC_TOKEN"
DEFAULT_ORIGIN = "http://127.0.0.1:8233"
DEFAULT_PORT = 8234


def codec_server(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="On loopback; 0 takes a free one.")
    ] = DEFAULT_PORT,
    ui_origin: Annotated[
        list[str] | None,
        typer.Option(help=f"Web UI that may ask; may be repeated. Default: {DEFAULT_ORIGIN}."),
    ] = None,
) -> None:
    """Decrypt payloads for Temporal's Web UI and CLI, until Ctrl-C.

    Uses the keys of the workers (PERDURE_PAYLOAD_KEYS_FILE or PERDURE_PAYLOAD_KEYS). The token that
    it asks for is PERDURE_CODEC_TOKEN, or else made anew at each start and shown.
    """
    # Temporal's client and protobuf are slow to import.
    from workers.codec_server import CodecServer
    from workers.payload_codec import EncryptionCodec
    from workers.payload_keys import KEYS, KEYS_FILE, payload_keys

    keys = payload_keys()
    if keys.current is None:
        raise ConfigurationError(f"there is nothing to decrypt with: set {KEYS_FILE} or {KEYS}")
    origins = [_origin(text) for text in ui_origin or [DEFAULT_ORIGIN]]
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
    if not token.isalnum():
        raise ConfigurationError(f"{TOKEN_VARIABLE} may hold letters and digits only")
    with CodecServer(EncryptionCodec(keys), token, origins, port) as server:
        out().print(f"Web UI   codec server {server.url}/{token}", markup=False, soft_wrap=True)
        out().print(
            f"CLI      --codec-endpoint {server.url} --codec-auth 'Bearer {token}'",
            markup=False,
            soft_wrap=True,
        )
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    notice("the codec server has ended")


def _origin(text: str) -> str:
    """``scheme://host[:port]`` as browsers write it.

    Raises:
        ConfigurationError: it is something else.
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/"):
        raise ConfigurationError(f"--ui-origin {text!r}: write http://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}"
