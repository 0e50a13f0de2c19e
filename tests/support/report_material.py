"""A run for the report's tests, and a strict reader of the page that is made of it."""

from html.parser import HTMLParser

from synthetic_run import SyntheticRun

from activities.rollout.collection_file import read_samples, write_collection
from activities.storage import layout
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan, Verdict, VerdictOutcome

START = 1_700_000_000.0
VOID = {"meta"}
TAGS = {
    "a", "b", "body", "circle", "code", "details", "div", "figcaption", "figure", "g", "h1", "h2",
    "h3", "head", "header", "html", "i", "main", "meta", "nav", "p", "path", "rect", "span",
    "style", "summary", "svg", "table", "td", "text", "th", "title", "tr",
}  # fmt: skip
"""All that a report is made of. None of them loads or runs anything."""


class Page(HTMLParser):
    """Refuses what a report may not contain, and remembers what it does."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tokens: list[tuple[str, str]] = []
        """(classes, text) of every token of a response."""
        self._token = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        for name, value in attrs:
            assert not name.startswith("on"), name
            assert name not in {"src", "srcset", "action", "formaction", "xlink:href"}, name
            assert name != "href" or (value or "").startswith("#"), value
            assert name != "style" or (value or "").startswith("width: "), value
        if tag not in VOID:
            self.open.append(tag)
        classes = dict(attrs).get("class") or ""
        if tag == "span" and "title" in dict(attrs):
            self._token = classes

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, (tag, self.getpos())
        self._token = ""

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            assert "url(" not in data
            assert "@import" not in data
            return
        self.words.append(data)
        if self._token:
            self.tokens.append((self._token, data))

    @property
    def text(self) -> str:
        """Everything that a person reads."""
        return "".join(self.words)


def make_run(root: str, text: str = "a plain answer") -> SyntheticRun:
    """Six updates with a checkpoint after the third and a rebuild; ``text`` is what models say."""
    run = SyntheticRun(root)
    for update in range(3):
        add_update(run, update, text)
    run.checkpoint()
    run.lose_trainer()
    for update in range(3, 6):
        add_update(run, update, text)
    return run


def add_update(run: SyntheticRun, update: int, text: str) -> None:
    """Collect, train, and append the rows of one update."""
    manifest = run.collect(update)
    collection = manifest.collection
    groups = [
        mixed_group(group.group_index, group.prepared_sample_id, update, text)
        for group in read_samples(run.store, collection.uri)
    ]
    sha256 = write_collection(run.store, collection.uri, groups)
    changed = collection.model_copy(update={"sha256": sha256})
    manifest = manifest.model_copy(update={"collection": changed})
    run.write_manifest(manifest)
    run.train(manifest)
    start = START + 10 * update
    timings = (
        ("generation_wait", start, 6.0),
        ("training", start + 4, 4.0),
        ("publication", start + 8, 1.0),
    )
    for stage, begin, seconds in timings:
        row = {"stage": stage, "rollout_id": update, "started_unix": begin, "seconds": seconds}
        run.store.append_jsonl(layout.DRIVER_TIMING, {**row, "passed": True})
    rollout = {"rollout/step": update, "rollout/reward": update / 10, "rollout/error_verdicts": 1}
    run.store.append_jsonl(layout.METRICS, {**rollout, "kind": "rollout"})
    train = {"train/rollout_id": update, "train/entropy_loss": 1.0, "train/lag": 1.0}
    run.store.append_jsonl(layout.METRICS, {**train, "train/completed_steps": update + 1})


def mixed_group(index: int, prompt: str, version: int, text: str) -> SampleGroup:
    """One group of two samples; the second began under the version before."""
    tokens = [5, 6, 7, 8]
    older = max(0, version - 1)
    spans = [TokenSpan(version, 0, 4)]
    mixed = [TokenSpan(older, 0, 1), TokenSpan(version, 1, 4)] if older < version else spans
    samples = [
        Sample(
            sample_index=2 * index + each,
            group_index=index,
            prompt_token_ids=[1],
            response_token_ids=tokens,
            logprobs=[-1.0, -0.5, -0.25, -0.125],
            spans=(spans, mixed)[each],
            finish_reason=FinishReason.STOP,
            text=text,
            reward=float(each),
            verdicts=[Verdict("exact", VerdictOutcome.SCORE, float(each), detail=text)],
        )
        for each in range(2)
    ]
    return SampleGroup(index, prompt, 0, samples)
