"""Refuses requests without the server's token. Wraps any ASGI application."""

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from activities.wire.token import ENGINE_TOKEN, bears, given_token

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN = ("/health", "/metrics")
"""What begins so is answered to everybody, as SGLang does: probes and Prometheus have no token."""
_BODY = b'{"error":"Unauthorized"}'
_HEADERS = [
    (b"content-type", b"application/json"),
    (b"content-length", b"%d" % len(_BODY)),
    (b"www-authenticate", b"Bearer"),
]


class TokenGate:
    """ASGI 3 callable: ``application`` for those who bring ``token``, else 401."""

    def __init__(self, application: Application, token: str) -> None:
        self._application = application
        self._token = token

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request, or let it through."""
        if scope["type"] != "http" or self._admits(scope):
            await self._application(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": _BODY})

    def _admits(self, scope: Message) -> bool:
        if scope["path"].startswith(OPEN):
            return True
        return any(
            bears(value, self._token)
            for name, value in scope["headers"]
            if name == b"authorization"
        )


def take_token() -> str | None:
    """This server's token, which its children shall not inherit; None: it answers everybody.

    Raises:
        ConfigurationError: no HTTP header could hold it.
    """
    token = given_token()
    os.environ.pop(ENGINE_TOKEN, None)
    return token


def guarded(application: Application, token: str | None) -> Application:
    """``application`` behind a gate, where there is a token."""
    return application if token is None else TokenGate(application, token)
