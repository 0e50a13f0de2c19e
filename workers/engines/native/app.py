"""The routes. ``Gate``, ``Generation``, ``Control`` and ``ModelThread`` do the work."""

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from activities.wire import contract
from workers.engines.native.answers import PayloadError, ServerError, json_response
from workers.engines.native.control import Control
from workers.engines.native.generation import CLIENT_GONE, Generation
from workers.engines.native.model_thread import ModelThread

Handler = Callable[[Request], Awaitable[Response]]


def build_app(generation: Generation, control: Control, model: ModelThread) -> Starlette:
    """The ASGI application of one engine."""

    async def generate(http: Request) -> Response:
        return await generation.handle(http, model)

    def ready(handler: Handler) -> Handler:
        """Answer 503 instead of waiting for a model that is not there."""

        async def guarded(http: Request) -> Response:
            if not model.loaded.done() or model.ended.done():
                raise ServerError("The model is not loaded.", 503)
            return await handler(http)

        return guarded

    posts: dict[str, Handler] = {
        contract.ABORT_REQUEST: control.abort_request,
        contract.PAUSE_GENERATION: control.pause,
        contract.CONTINUE_GENERATION: control.resume,
        contract.UPDATE_WEIGHTS_FROM_DISK: control.update_weights_from_disk,
        contract.UPDATE_WEIGHTS_FROM_TENSOR: control.update_weights_from_tensor,
        contract.RELEASE_MEMORY_OCCUPATION: control.release_memory_occupation,
        contract.RESUME_MEMORY_OCCUPATION: control.resume_memory_occupation,
        contract.WEIGHTS_CHECKER: control.weights_checker,
        "/update_weight_version": control.update_weight_version,
    }
    gets: dict[str, Handler] = {
        contract.MODEL_INFO: control.model_info,
        "/get_model_info": control.model_info,
        contract.SERVER_INFO: control.server_info,
        "/get_server_info": control.server_info,
        contract.LOADS: control.loads,
        contract.METRICS: control.metrics,
    }
    routes = [
        Route(contract.GENERATE, generate, methods=["POST"]),
        Route(contract.FLUSH_CACHE, ready(control.flush_cache), methods=["GET", "POST"]),
        Route(contract.HEALTH, control.health),
        Route("/health_generate", control.health),
        Route("/ping", control.ping),
        *(Route(path, ready(handler), methods=["POST"]) for path, handler in posts.items()),
        *(Route(path, ready(handler)) for path, handler in gets.items()),
    ]
    return Starlette(
        routes=routes,
        exception_handlers={
            PayloadError: _payload_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
        },
    )


async def _payload_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, PayloadError)
    return error.response()


async def _client_gone(_: Request, error: Exception) -> Response:
    """The client hung up while it was still sending; nobody reads this."""
    return Response(status_code=CLIENT_GONE)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return json_response({"detail": error.detail}, error.status_code)
