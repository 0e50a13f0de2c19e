"""The books of a run for people and for programs."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from activities.analysis.audit import Audit
from activities.analysis.lives import Fate, PromptLife


def as_json(books: Audit) -> dict[str, Any]:
    """The books as one JSON object, without the prompts' lives."""
    return {
        "run_id": books.run_id,
        "updates": books.updates,
        "updates_doubled": books.updates_doubled,
        "updates_lost": books.updates_lost,
        "updates_redone": books.updates_redone,
        "updates_unrecorded": books.updates_unrecorded,
        "updates_unreadable": books.updates_unreadable,
        "prompts_drawn": len(books.lives),
        "prompts_trained": books.count(Fate.TRAINED),
        "prompts_pending": books.count(Fate.PENDING),
        "prompts_dropped": books.prompts_dropped,
        "prompts_missing": books.count(Fate.MISSING),
        "prompts_doubled": books.prompts_doubled,
        "prompts_mixed_up": books.prompts_mixed_up,
        "prompts_wrong_in_checkpoint": books.prompts_wrong_in_checkpoint,
        "groups_incomplete": books.groups_incomplete,
        "prompts_requeued": _count(books, "requeues"),
        "prompts_stale": _count(books, "stale"),
        "prompts_overtaken": books.overtaken,
        "cursor": books.cursor,
        "notes": list(books.notes),
        "verdict": books.verdict,
    }


def _count(books: Audit, counter: str) -> int:
    """Prompts whose ``requeues`` or ``stale`` is above 0."""
    return sum(getattr(life, counter) > 0 for life in books.lives)


def show(console: Console, books: Audit) -> None:
    """Fates with counts, notes, and the verdict as the last line."""
    fates = Table("fate", box=None)
    fates.add_column("prompts", justify="right")
    fates.add_column("", overflow="fold")
    fates.add_row("drawn", str(len(books.lives)), f"by {books.cursor}")
    fates.add_row("trained", str(books.count(Fate.TRAINED)), _trained(books))
    for reason, count in books.prompts_dropped.items():
        fates.add_row("dropped", str(count), Text(reason))
    for reason, count in _pending(books).items():
        fates.add_row("pending", str(count), reason)
    fates.add_row("missing", str(books.count(Fate.MISSING)), "")
    fates.add_row("doubled", str(books.prompts_doubled), "")
    for counter, why in (("requeues", "an attempt failed"), ("stale", "they were too old")):
        if count := _count(books, counter):
            fates.add_row("sampled again", str(count), why)
    if books.run_id:
        console.print(books.run_id, markup=False)
    console.print(fates)
    for note in books.notes:
        console.print(f"note: {note}", style="dim", markup=False, soft_wrap=True)
    style = "green" if books.is_clean else "red"
    console.print(books.verdict, style=style, markup=False, soft_wrap=True)


def _trained(books: Audit) -> str:
    text = f"in {books.updates} updates"
    if books.updates_redone:
        text += f", {books.updates_redone} redone after a rebuild"
    if books.overtaken:
        text += f"; {books.overtaken} before others that were drawn earlier"
    return text


def _pending(books: Audit) -> dict[str, int]:
    counts: dict[str, int] = {}
    for life in books.lives:
        if life.fate is Fate.PENDING:
            counts[life.reason] = counts.get(life.reason, 0) + 1
    return counts


def chosen(books: Audit, limit: int) -> list[PromptLife]:
    """At most ``limit`` lives; those that are missing or doubled come first."""
    return sorted(books.lives, key=lambda life: not life.is_wrong)[:limit]


def show_lives(console: Console, books: Audit, shown: list[PromptLife]) -> None:
    """A row a prompt, and how many are not shown."""
    table = Table("group", "sample", "pass", "fate", "reached", box=None)
    table.add_column("", overflow="fold")
    for life in shown:
        sample = life.prepared_sample_id or "?"
        epoch = "?" if life.epoch_id is None else str(life.epoch_id)
        # As text: in markup ":train:" is an emoji.
        cells = (str(life.group_index), sample, epoch, life.fate.value, life.reached.value)
        table.add_row(*map(Text, (*cells, _story(life))))
    console.print(table)
    left = len(books.lives) - len(shown)
    if left:
        console.print(f"{left} more: raise --limit", style="dim")


def _story(life: PromptLife) -> str:
    parts = [
        f"update {update}" + ("" if version is None else f", version {version}")
        for update, version in life.trained
    ]
    parts += [life.reason] if life.reason else []
    if life.scored < life.samples:
        parts.append(f"{life.samples - life.scored} of {life.samples} samples without a reward")
    if life.doubled:
        parts.append(f"DOUBLED: in collections {life.consumed}")
    parts += ["MIXED UP: files name another prompt too"] if life.mixed_up else []
    parts += [f"INCOMPLETE: {life.samples} samples"] if life.incomplete else []
    parts += [f"undone in update {update} of epoch {epoch}" for update, epoch in life.abandoned]
    parts += [f"sampled again after {life.requeues} failures"] if life.requeues else []
    parts += [f"sampled again {life.stale} times for age"] if life.stale else []
    return "; ".join(parts)


def life_json(life: PromptLife) -> dict[str, Any]:
    """One prompt's life as JSON."""
    return {
        "group_index": life.group_index,
        "prepared_sample_id": life.prepared_sample_id,
        "epoch_id": life.epoch_id,
        "fate": life.fate.value,
        "reason": life.reason,
        "trained": [{"update": u, "policy_version": version} for u, version in life.trained],
        "undone": [{"update": u, "epoch": epoch} for u, epoch in life.abandoned],
        "reached": life.reached.value,
        "samples": life.samples,
        "scored": life.scored,
        "consumed_by": life.consumed,
        "doubled": life.doubled,
        "mixed_up": life.mixed_up,
        "incomplete": life.incomplete,
        "requeues": life.requeues,
        "stale": life.stale,
    }
