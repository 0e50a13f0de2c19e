"""``status --verify``: the server's word, the files of the root, and the export, check by check."""

import json
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from activities.analysis.completion import Check, Flaw
from activities.analysis.completion_checks import verify
from activities.storage import layout
from activities.storage.local_copy import local_folder
from activities.storage.store import Store
from activities.wire.digest import weights_digest
from configs.load import Loaded
from models.errors import ConfigurationError, ContractViolation, PerdureError

_PROBE = (0, 1, 2, 3)
"""Token ids that every vocabulary has."""


class _Published(NamedTuple):
    """The newest weights of the engines."""

    version: int
    digest: str
    dtype: str


def verify_run(
    run_id: str,
    root: str,
    loaded: Loaded | None,
    run: dict[str, Any] | None,
    unasked: str | None,
) -> dict[str, Any]:
    """Every check as plain JSON, and whether all hold.

    Args:
        run_id: whose completion is to be proved.
        root: its output root; empty when nobody knows it.
        loaded: the run file at hand, if there is one.
        run: what the server says, with details; none when it knows no such run.
        unasked: why no server was asked; an empty text: on purpose.
    """
    checks = [] if unasked == "" else [_workflow_check(run_id, root, run, unasked)]
    if root:
        checks += _root_checks(run_id, root, loaded)
    return {
        "complete": all(check.holds for check in checks) and bool(root),
        "checks": [asdict(check) | {"holds": check.holds} for check in checks],
    }


def show_verification(console: Console, name: str, verification: dict[str, Any]) -> None:
    """A row a check, then what speaks against completion and what to do, then the verdict."""
    table = Table("check", "holds", box=None)
    table.add_column("evidence", overflow="fold")
    checks = verification["checks"]
    for check in checks:
        holds = Text("yes") if check["holds"] else Text("NO", style="bold red")
        table.add_row(Text(check["name"]), holds, Text(check["evidence"]))
    console.print(table)
    for check in checks:
        for flaw in check["flaws"]:
            for text in (f"{flaw['path']}: {flaw['problem']}", f"  {flaw['remedy']}"):
                console.print(text, markup=False, soft_wrap=True)
    bad = [check["name"] for check in checks if not check["holds"]]
    verdict = f"{name}: complete, {len(checks)} checks hold"
    if not verification["complete"]:
        verdict = f"{name}: not proved complete ({', '.join(bad) or 'its root is unknown'})"
    style = "green" if verification["complete"] else "red"
    console.print(verdict, style=style, markup=False, soft_wrap=True)


def _workflow_check(
    run_id: str, root: str, run: dict[str, Any] | None, unasked: str | None
) -> Check:
    """Whether Temporal says complete, and the files say the same."""
    alone = f"; for its files alone: perdure status {root or 'ROOT'} --verify"
    if run is None:
        problem = unasked or "the server knows no such run"
        remedy = f"ask its own server: --address or TEMPORAL_ADDRESS{alone}"
        return Check("workflow", "none", (Flaw(run_id, problem, remedy),))
    flaws = [
        Flaw(run_id, text, "trust Temporal; a killed job leaves the file as it was before")
        for text in run["warnings"]
    ]
    if run["state"] != "complete":
        problem = f"Temporal says {run['state']}" + (f": {run['error']}" if run["error"] else "")
        flaws.append(Flaw(run_id, problem, "wait for it (`perdure wait`), or run it again"))
    evidence = f"Temporal: {run['state']}, update {run['update']}, version {run['policy_version']}"
    return Check("workflow", evidence, tuple(flaws))


def _root_checks(run_id: str, root: str, loaded: Loaded | None) -> list[Check]:
    try:
        found = verify(root, run_id=run_id or None, loaded=loaded)
    except ConfigurationError as error:
        remedy = "name the run file that was run, or the root that its output.root meant"
        return [Check("root", "none", (Flaw(root, error.message, remedy),))]
    checks = list(found.checks)
    if found.export is not None:
        checks.append(check_reload(root, found.export))
    return checks


def check_reload(root: str, folder: str) -> Check:
    """Whether the export loads, with exactly the tensors of its files, and computes numbers."""
    name, where = "export loads", f"{root.rstrip('/')}/{folder}"
    remedy = "remove the folder and export again, or restore it from a copy"
    # torch takes seconds to import; only an export needs it.
    from safetensors import SafetensorError

    try:
        return Check(name, _reload(root, folder))
    except (PerdureError, OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        text = str(error).splitlines()
        problem = f"does not load: {text[0] if text else type(error).__name__}"
        if isinstance(error, PerdureError):
            problem = error.message
        return Check(name, "none", (Flaw(where, problem, remedy),))


def _reload(root: str, folder: str) -> str:
    """Evidence that the folder loads; ``ContractViolation`` when it is not what it should be."""
    import torch
    import transformers
    from safetensors import safe_open

    from workers.sources.expert_names import file_weights
    from workers.sources.tensor_file import tensor_checksums
    from workers.trainers.load import load_model
    from workers.trainers.weights import named_weights

    store = Store(root)
    path = local_folder(store, folder)
    model = load_model(path)
    held: set[str] = set()
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            held |= set(weights.keys())
    config = json.loads((path / "config.json").read_text())
    weights_by_name = file_weights(named_weights(model), config["model_type"])
    if held != weights_by_name.keys():
        raise ContractViolation(
            f"tensors differ: {', '.join(sorted(held ^ weights_by_name.keys())[:3])}"
        )
    same = ""
    if (published := _published(store, str(config.get("dtype")))) is not None:
        dtype: torch.dtype = getattr(torch, published.dtype)
        found = weights_digest(tensor_checksums(weights_by_name.items(), dtype))
        if found != published.digest:
            raise ContractViolation(f"holds weights {found}, published were {published.digest}")
        same = f", the weights that were published as version {published.version}"
    transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([_PROBE]), use_cache=False).logits
    if not bool(torch.isfinite(logits).all()):
        raise ContractViolation("logits are not finite")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{len(held)} tensors, {parameters} parameters, tokenizer, finite logits{same}"


def _published(store: Store, dtype: str) -> _Published | None:
    """What engines confirmed last; none where an export in ``dtype`` cannot be compared with it.

    Weights that went by another transport than files are known by another kind of checksum, and a
    coarser type than the engines' has lost what would be compared.
    """
    row = store.last_jsonl(layout.PUBLICATION) or {}
    inference = store.read_json(layout.RESOLVED_CONFIG).get("inference") or {}
    wanted = str(inference.get("dtype"))
    if row.get("transport") != "disk" or dtype not in ("float32", wanted):
        return None
    return _Published(int(row["version"]), str(row["digest"]), wanted)
