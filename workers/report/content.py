"""Everything that a report shows, read from a run's files and cut to a size."""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from activities.analysis.audit import Audit, audit
from activities.analysis.lives import PromptLife
from activities.storage import layout
from activities.storage.store import Store
from models.errors import ContractViolation
from models.run import RunState
from workers.cli.audit_report import chosen
from workers.report.charts import Chart
from workers.report.curves import Curves
from workers.report.files import Row, RunFiles, index, number, part
from workers.report.records import (
    Checkpoint,
    Fault,
    Publications,
    checkpoints_of,
    faults_of,
    publications_of,
    serving_errors,
)
from workers.report.redaction import Redactor, redactor_of
from workers.report.responses import Decode, Response, sampled_responses
from workers.report.timeline import Timeline, read_sampling, read_stages, timeline_of

MOST_LIVES = 40
MOST_NOTES = 100
FLEET_JSON = "fleet.json"

Facts = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Content:
    """See the module. Strings are as found: escaping and redaction are the page's work."""

    root: str
    made_unix: float
    workflow: Row
    ended: bool
    updates: int
    planned: int | None
    curves: Curves
    charts: list[Chart]
    timeline: Timeline | None
    faults: list[Fault]
    serving: dict[str, float]
    checkpoints: list[Checkpoint]
    checkpoints_written: int
    publications: Publications
    books: Audit
    lives: list[PromptLife]
    responses: list[Response]
    readable: bool
    """Whether responses are decoded, not shown as token ids."""
    config: list[tuple[str, Facts]]
    """(section, keys with values)."""
    provenance: list[tuple[str, Facts]]
    notes: list[str]


def read_content(root: str, most_responses: int) -> tuple[Content, Redactor]:
    """Read the run under ``root``, a folder or a URL.

    Raises:
        ConfigurationError: ``root`` holds no run.
    """
    store = Store(root)
    files = RunFiles(store)
    books = audit(store.root)  # refuses what is no run
    workflow = files.document(layout.WORKFLOW_JSON)
    spec, plan = files.document(layout.RESOLVED_CONFIG), files.document(layout.PLAN_JSON)
    redactor = redactor_of(spec)
    stages = read_stages(files)
    curves = Curves(files.rows(layout.METRICS))
    decode = _decoder(files)
    content = Content(
        root=store.root,
        made_unix=time.time(),
        workflow=workflow,
        ended=workflow.get("status") in {state.value for state in RunState if state.is_terminal},
        updates=books.updates,
        planned=index(part(plan, "loop"), "num_rollouts"),
        curves=curves,
        charts=curves.charts(),
        timeline=timeline_of(stages, read_sampling(files)),
        faults=faults_of(files, stages, workflow),
        serving=serving_errors(files, curves),
        checkpoints=checkpoints_of(files),
        checkpoints_written=sum(stage.name == "checkpoint" and stage.passed for stage in stages),
        publications=publications_of(files),
        books=books,
        lives=chosen(books, MOST_LIVES),
        responses=sampled_responses(files, curves, redactor, decode, most_responses),
        readable=decode is not None,
        config=_sections(redactor.document(spec)),
        provenance=_provenance(files, redactor),
        notes=[*books.notes, *files.notes][:MOST_NOTES],
    )
    return content, redactor


def flat(value: Any, key: str = "") -> Facts:
    """A JSON document as (dotted key, value as text) pairs."""
    if isinstance(value, Mapping) and value:
        return [
            fact
            for name, inner in value.items()
            for fact in flat(inner, f"{key}.{name}" if key else str(name))
        ]
    if isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value):
        return [fact for at, inner in enumerate(value) for fact in flat(inner, f"{key}[{at}]")]
    if isinstance(value, list):
        return [(key, ", ".join(map(_text, value)) or "[]")]
    return [(key, _text(value))]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "—" if value is None else str(value)


def _sections(spec: Row) -> list[tuple[str, Facts]]:
    """Scalars of the top first, then a section each."""
    top = {key: value for key, value in spec.items() if not isinstance(value, dict)}
    rest = [(key, flat(value)) for key, value in spec.items() if isinstance(value, dict) and value]
    return ([("run", flat(top))] if top else []) + rest


def _provenance(files: RunFiles, redactor: Redactor) -> list[tuple[str, Facts]]:
    """Who ran what from which inputs: identities and digests."""
    workflow = files.document(layout.WORKFLOW_JSON)
    plan = files.document(layout.PLAN_JSON)
    identity = {
        "run_id": workflow.get("run_id"),
        "workflow_run_id": workflow.get("workflow_run_id"),
        "spec_sha256": workflow.get("spec_sha256"),
        "identity_sha256": plan.get("identity_sha256"),
        "config_path": plan.get("config_path"),
        "exported": part(workflow, "result").get("export_hf"),
    }
    manifest = files.document(layout.MANIFEST_JSON)
    data = {key: manifest.get(key) for key in ("inputs", "outputs", "rows", "provenance")}
    found = [
        ("identity", identity),
        ("owner of the root", part(files.document(layout.OWNER_JSON), "owner")),
        ("code", {"source digests": _code_digests(files)}),
        ("prepared model", files.document(layout.PREPARED_REPORT)),
        ("prepared data", data if manifest else {}),
        ("tokenizer", part(part(manifest, "contract"), "tokenizer_files")),
        ("allocation", part(plan, "allocation")),
    ]
    return [(name, flat(redactor.document(value))) for name, value in found if value]


def _code_digests(files: RunFiles) -> list[str]:
    try:
        fleet = files.store.read_json(FLEET_JSON)
    except (OSError, ValueError, ContractViolation):
        return []
    actors = fleet.get("actors", ()) if isinstance(fleet, dict) else fleet
    digests = {str(actor.get("code_digest")) for actor in actors or () if isinstance(actor, dict)}
    return sorted(digests)


def _decoder(files: RunFiles) -> Decode | None:
    """Turns token ids into text; none without the tokenizer that made the prepared data."""
    instead = "responses are shown as token ids"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        files.notes.append(f"{instead}: the package tokenizers is not installed")
        return None
    contract = part(files.document(layout.MANIFEST_JSON), "contract")
    expected = part(contract, "tokenizer_files").get("tokenizer.json")
    try:
        data = files.store.read_bytes(f"{layout.PREPARED_MODEL}/tokenizer.json")
    except FileNotFoundError:
        data = b""
    if hashlib.sha256(data).hexdigest() != expected:  # and might not load
        files.notes.append(f"{instead}: tokenizer.json is not the one of {layout.MANIFEST_JSON}")
        return None
    tokenizer = Tokenizer.from_str(data.decode())
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def first_and_last(content: Content) -> tuple[float, float] | None:
    """Mean reward over the first and the last tenth of the updates."""
    values = [value for _, value in content.curves.of("rollout/reward")]
    if not values:
        return None
    tenth = max(1, round(len(values) / 10))
    return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth


def policy_version(content: Content) -> int | None:
    """After the last update."""
    steps = content.curves.of("train/completed_steps")
    return int(steps[-1][1]) if steps else None


def running_seconds(content: Content) -> float | None:
    """From the start of the run to its end, or to the last thing that it wrote."""
    start = number(content.workflow, "started_unix")
    end = number(content.workflow, "finished_unix")
    if end is None and content.timeline is not None:
        end = content.timeline.newest
    return None if start is None or end is None else max(0.0, end - start)
