"""One response across publications, in segments of one policy version each.

    send --> stop | length ------------------------------------------> response
     ^       abort, and a publication began since the call was sent
     |         |
     +-- wait  <-- keep the tokens with their log-probs and version

Pausing an engine hands back what it has of each response. Once the new weights are served, the
prompt and those tokens are sent again with the budget that is left: every token keeps the log-prob
of the policy that sampled it, and the new weights compute the whole prefix (and its routes) anew.

Waits for the release of a publication and for answers, all within one deadline.
"""

import asyncio
import base64
import binascii
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from activities.rollout.policy import ServedPolicy
from activities.rollout.provenance import normalize, parse_version, routes_problem
from activities.wire.contract import GenerateRequest, GenerateResponse, MetaInfo, SamplingParams
from activities.wire.engine_pool import Route
from activities.wire.faults import TIMEOUT
from models.errors import ContractViolation, GenerationFault, RequestGated
from models.sample import FinishReason, PrefixUse, TokenSpan


@dataclass(frozen=True, slots=True)
class ResponseTask:
    """What is to be generated. Lengths in tokens, times in seconds."""

    where: str
    """Names group and sample in errors."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    """Of the whole response: ``max_new_tokens`` is its budget. The seed is set by segment."""
    seed: Callable[[int, int], int]
    """(policy version when sent, response tokens so far) -> sampling seed of a segment."""
    end_token_ids: tuple[int, ...]
    exact: int | None
    """The one legal policy version; None: any up to ``ServedPolicy.newest``."""
    routed_experts: bool
    timeout_s: float
    """Of the whole response: queues, generation and publications."""


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response of T tokens. Fields as in ``models.sample.Sample``."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[TokenSpan]
    finish_reason: FinishReason
    routed_experts: bytes | None
    prefix_use: PrefixUse | None


class SegmentedResponse:
    """The response of one ``ResponseTask`` in the making. Used once."""

    def __init__(self, task: ResponseTask, policy: ServedPolicy) -> None:
        self._task = task
        self._policy = policy
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[TokenSpan] = []
        self._routes: str | None = None
        self._prefix_use: PrefixUse | None = None
        self._deadline = 0.0

    async def generate(self, route: Route) -> Response:
        """Send segments to ``route`` until the response is whole.

        Raises:
            GenerationFault: a known serving fault, the deadline included.
            ContractViolation: an answer breaks the contract, or came back partial although no
                publication began; names group, sample, request and field.
        """
        self._deadline = asyncio.get_running_loop().time() + self._task.timeout_s
        while True:
            await self._policy.released(self._seconds_left())
            generation = self._policy.generation
            request = self._request()
            try:
                answer = await route.generate(request, timeout_s=self._seconds_left())
            except RequestGated as error:
                self._require_publication(generation, request.rid, error.message)
                continue
            except ContractViolation as error:
                raise ContractViolation(f"{self._task.where}: {error.message}") from error
            reason = self._take(answer, generation)
            if reason is not None:
                return self._whole(reason)

    def _request(self) -> GenerateRequest:
        """The prompt and the tokens so far, with the budget that is left, under a fresh id."""
        task, done = self._task, len(self._token_ids)
        version = self._policy.published if task.exact is None else task.exact
        sampling = {
            "max_new_tokens": task.sampling.max_new_tokens - done,
            "sampling_seed": task.seed(version, done),
        }
        return GenerateRequest(
            rid=uuid.uuid4().hex,
            input_ids=[*task.prompt_token_ids, *self._token_ids],
            sampling_params=task.sampling.model_copy(update=sampling),
            return_routed_experts=task.routed_experts,
        )

    def _take(self, answer: GenerateResponse, generation: int) -> FinishReason | None:
        """Keep the answer's tokens; why the response ended, None when it has to go on."""
        meta = answer.meta_info
        reason = FinishReason(meta.finish_reason["type"])
        if reason is FinishReason.ABORT:
            told = f"finish_reason is abort: {meta.finish_reason}"
            self._require_publication(generation, meta.id, told)
            if meta.finish_reason.get("status_code") is not None:
                raise self._violation(meta.id, told)
        if self._lacks_routes(answer, reason):
            return None
        if answer.output_ids:  # a call that was aborted in the queue has none
            self._spans += self._answer_spans(meta, len(answer.output_ids))
            self._token_ids += answer.output_ids
            self._logprobs += [entry[0] for entry in meta.output_token_logprobs or []]
            self._routes = meta.routed_experts
            self._count_prefix(meta)
            if answer.output_ids[-1] in self._task.end_token_ids:
                # Also when an engine says "length" of an end token in the last allowed place.
                return FinishReason.STOP
        if reason is not FinishReason.ABORT:
            return reason
        if len(self._token_ids) == self._task.sampling.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def _lacks_routes(self, answer: GenerateResponse, reason: FinishReason) -> bool:
        """Whether an aborted answer would be the last one and has no routes: it is sampled again.

        Only the last answer's routes are used, and what an engine aborts need not have any.
        """
        ids, task = answer.output_ids, self._task
        aborted = reason is FinishReason.ABORT and answer.meta_info.routed_experts is None
        if not ids or not task.routed_experts or not aborted:
            return False
        is_full = len(self._token_ids) + len(ids) == task.sampling.max_new_tokens
        return is_full or ids[-1] in task.end_token_ids

    def _count_prefix(self, meta: MetaInfo) -> None:
        """Add the input of a call whose tokens are kept, if the engine told what it had of it."""
        if meta.prompt_tokens is None or meta.cached_tokens is None:
            return
        before = self._prefix_use or PrefixUse(0, 0)
        self._prefix_use = PrefixUse(
            before.input_tokens + meta.prompt_tokens, before.cached_tokens + meta.cached_tokens
        )

    def _answer_spans(self, meta: MetaInfo, length: int) -> list[TokenSpan]:
        """Spans of one answer of ``length`` tokens, relative to the whole response."""
        try:
            replay = parse_version(meta.weight_version)
        except ContractViolation as error:
            raise self._violation(meta.id, f"weight_version: {error.message}") from error
        told = meta.weight_versions
        try:
            spans = normalize(
                [TokenSpan(replay, 0, length)] if told is None else told, length, replay
            )
        except ContractViolation as error:
            raise self._violation(meta.id, f"weight_versions: {error.message}") from error
        exact, newest = self._task.exact, self._policy.newest
        if exact is not None and {span.version for span in spans} != {exact}:
            raise self._violation(
                meta.id,
                f"weight_version is {meta.weight_version!r}, expected {exact}: the engine serves "
                "other weights than were published",
            )
        if exact is None and replay > newest:
            raise self._violation(
                meta.id,
                f"weight_version is {meta.weight_version!r}, but the newest version that was "
                f"published or is being published is {newest}",
            )
        offset = len(self._token_ids)
        return [TokenSpan(each.version, offset + each.start, offset + each.end) for each in spans]

    def _whole(self, reason: FinishReason) -> Response:
        """The response, its provenance validated as a whole."""
        where, length = self._task.where, len(self._token_ids)
        try:
            spans = normalize(self._spans, length, self._spans[-1].version)
        except ContractViolation as error:
            raise ContractViolation(f"{where}: {error.message}") from error
        routes = self._decoded_routes() if self._task.routed_experts else None
        return Response(self._token_ids, self._logprobs, spans, reason, routes, self._prefix_use)

    def _decoded_routes(self) -> bytes:
        """The last answer's routes: its request held every earlier token as well."""
        where = self._task.where
        if self._routes is None:
            raise ContractViolation(
                f"{where}: routed_experts is missing: start the engine with "
                "--enable-return-routed-experts"
            )
        try:
            routes = base64.b64decode(self._routes, validate=True)
        except binascii.Error as error:
            raise ContractViolation(f"{where}: routed_experts is no base64: {error}") from error
        problem = routes_problem(routes, len(self._task.prompt_token_ids) + len(self._token_ids))
        if problem is not None:
            raise ContractViolation(f"{where}: {problem}")
        return routes

    def _require_publication(self, generation: int, rid: str, told: str) -> None:
        """A publication must have begun since ``generation``, or be on: it explains the abort."""
        if self._policy.generation == generation and self._policy.publishing is None:
            raise self._violation(rid, f"{told}, but no publication began since it was sent")

    def _seconds_left(self) -> float:
        left = self._deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise GenerationFault(
                f"{self._task.where}: no whole response after {self._task.timeout_s:g} s, "
                f"{len(self._token_ids)} tokens so far",
                TIMEOUT,
            )
        return left

    def _violation(self, rid: str, problem: str) -> ContractViolation:
        return ContractViolation(f"{self._task.where}, request {rid}: {problem}")
