"""``perdure report``: what it shows, that hostile text stays text, and that it stays small."""

import json
from pathlib import Path

import pytest
from report_material import START, Page, make_run
from synthetic_run import SyntheticRun

from activities.storage import layout
from workers.cli.app import run_command
from workers.report.page import MOST_ROWS, render, visible, write_report
from workers.report.redaction import HIDDEN

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style></title></svg><script>alert(1)</script>",
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% include 'page.html.j2' %}",
    "<!-- <a href='javascript:alert(1)'>",
    "&lt;b&gt; &#60;script&#62;",
    "]]><svg/onload=alert(1)>",
]


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "root")


def test_a_run_is_told(root: str) -> None:
    run = make_run(root)
    run.store.append_jsonl(
        layout.DRIVER_TIMING,
        {
            "stage": "training",
            "rollout_id": 6,
            "started_unix": START + 60,
            "seconds": 2.0,
            "passed": False,
        },
    )
    text = Page(render(root, 8)).text
    assert "train/made" in text
    assert "6 of 8" not in text  # no plan.json: the number that was planned is not known
    assert "do not say that this run ended" in text
    assert "accounted for: 24 prompts drawn, none missing, none doubled" in text
    assert "stage failed" in text
    assert "training, update 6" in text
    assert "epoch 2" in text
    assert "rollout_0000002.e1u3a1" in text
    assert "verifier failures6" in text.replace("\n", "")
    assert "0 → 0.5" in text  # a tenth of six updates is one
    assert "prompts trained24" in text.replace("\n", "")
    for title in ("Reward", "Policy lag", "Entropy"):
        assert title in text


def test_collect_of_the_next_update_is_seen_to_overlap_training(root: str) -> None:
    run = SyntheticRun(root)
    for stage, start, seconds in (("training", 0, 10), ("generation_wait", 4, 12)):
        row = {"stage": stage, "rollout_id": 0, "passed": True, "seconds": seconds}
        run.store.append_jsonl(layout.DRIVER_TIMING, {**row, "started_unix": START + start})
    text = Page(render(root, 0)).text
    assert "generation_wait1012" in text.replace("\n", "")  # once, none failed, 12 seconds
    assert "75.0 %50.0 %" in text.replace("\n", "")  # 12 of 16 s; 6 of them while training


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_run_says_stays_text(root: str, text: str) -> None:
    run = make_run(root, text)
    state = {"run_id": text, "status": text, "error": text, "started_unix": text}
    run.store.write_json(layout.WORKFLOW_JSON, state)
    run.store.write_json(layout.PLAN_JSON, {"allocation": {text: text}, "loop": {text: [text]}})
    run.store.write_json(layout.MANIFEST_JSON, {"inputs": {text: text}})
    run.store.append_jsonl(layout.PUBLICATION, dict.fromkeys(("version", "digest", "mode"), text))
    run.store.append_jsonl(layout.ROLLOUT_ERRORS, {"fatal": text, "time_unix": text})
    run.store.append_jsonl(layout.METRICS, {"eval/step": 1, f"eval/{text}": 0.5})
    run.store.append_jsonl(
        layout.METRICS, {"rollout/step": 1, f"rollout/dynamic_filter/{text}": 2.0}
    )
    row = {"stage": text, "rollout_id": text, "started_unix": START, "seconds": 1.0, "passed": True}
    run.store.append_jsonl(layout.DRIVER_TIMING, row)
    page = Page(render(root, 8))
    assert page.text.count(text) >= 10


def test_text_that_changes_its_neighbors_is_spelled_out() -> None:
    assert visible("a\u202eb\x00\ud800\u200b\n\tc") == (
        "a⟨RIGHT-TO-LEFT OVERRIDE⟩b⟨U+0000⟩\ufffd⟨ZERO WIDTH SPACE⟩\n\tc"
    )


def test_credentials_do_not_leave_with_the_report(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "process-own-4711")
    run = make_run(root, "it says process-own-4711 and env-value-0815")
    spec = run.store.read_json(layout.RESOLVED_CONFIG)
    spec["launch"] = {"env": {"MY_NOTE": "env-value-0815"}}
    spec["data"]["prompt_data"] = "s3://user:pass-word-1@host/data.jsonl"
    run.store.write_json(layout.RESOLVED_CONFIG, spec)
    error = "x" * 1495 + "process-own-4711"  # cut within the credential
    run.store.write_json(layout.WORKFLOW_JSON, {"status": "failed", "error": error})
    html = render(root, 8)
    for secret in ("process-own", "env-value", "pass-word"):
        assert secret not in html
    text = Page(html).text
    assert f"s3://{HIDDEN}@host/data.jsonl" in text
    assert "launch" in text
    assert "env.MY_NOTE" in text
    assert "holds what looks like a credential" in text


def test_every_token_has_the_color_of_the_version_that_sampled_it(root: str) -> None:
    make_run(root)
    page = Page(render(root, 100))
    # Update 5, mixed samples: token 5 of version 4, tokens 6, 7 and 8 of version 5.
    assert page.tokens.count(("t v4", "5 ")) >= 1
    start = page.tokens.index(("t v4", "5 "), page.tokens.index(("t v5", "6 ")) - 1)
    assert page.tokens[start : start + 4] == [
        ("t v4", "5 "), ("t v5", "6 "), ("t v5", "7 "), ("t v5", "8 "),
    ]  # fmt: skip
    assert "v4" in page.text


def test_damage_becomes_a_note(root: str) -> None:
    run = make_run(root)
    for path in (layout.METRICS, layout.DRIVER_TIMING, layout.PUBLICATION):
        run.store.write_bytes(path, b'{"torn\n[1]\n{"stage": 3, "rollout/step": "x"}\n')
    for path in (layout.WORKFLOW_JSON, layout.PLAN_JSON, layout.RESOLVED_CONFIG):
        run.store.write_bytes(path, b"{")
    run.store.write_bytes(layout.collection_parquet(5, 2), b"no parquet")
    text = Page(render(root, 8)).text
    assert f"{layout.METRICS}: 2 torn lines passed over" in text
    assert f"{layout.PLAN_JSON} cannot be read" in text
    assert f"{layout.collection_parquet(5, 2)} cannot be read" in text


def test_a_long_run_is_cut_to_a_size(root: str) -> None:
    run = make_run(root)
    path = Path(run.store.root)
    rows = [{"version": each, "engines": [], "total_seconds": 1.0} for each in range(5000)]
    stages = [
        {
            "stage": "training",
            "rollout_id": each,
            "started_unix": START + each,
            "seconds": 0.5,
            "passed": each % 2 == 0,
        }
        for each in range(20_000)
    ]
    metrics = [{"rollout/step": each, "rollout/reward": each % 7} for each in range(20_000)]
    for name, content in (
        (layout.PUBLICATION, rows),
        (layout.DRIVER_TIMING, stages),
        (layout.METRICS, metrics),
    ):
        (path / name).write_text("\n".join(map(json.dumps, content)) + "\n")
    html = render(root, 8)
    assert len(html) < 400_000
    text = Page(html).text
    assert f"{10_000 + 1 - MOST_ROWS} earlier ones are not shown" in text  # with the rebuild
    assert "The first, the slowest and the last are shown" in text


def test_the_verb_writes_beside_the_run_or_where_it_is_told(
    root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(root)
    assert run_command(["report", root, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "path": f"{root}/report.html",
        "bytes": Path(root, "report.html").stat().st_size,
    }
    target = tmp_path / "elsewhere" / "mine.html"
    assert run_command(["report", root, "--output", str(target)]) == 0
    assert f"file://{target}" in capsys.readouterr().out
    assert target.read_text().startswith("<!doctype html>")


def test_what_is_no_run_is_refused(
    root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    make_run(root)
    assert run_command(["report", root, "--output", str(tmp_path)]) == 2
    assert "is a folder; name a file" in capsys.readouterr().err


def test_a_root_that_is_no_folder_is_reported_too(tmp_path: Path) -> None:
    make_run("memory://report-root")
    path, num_bytes = write_report("memory://report-root", None, 2)
    assert path == "memory://report-root/report.html"
    target = str(tmp_path / "page.html")
    assert write_report("memory://report-root", target, 2)[0] == target
    assert abs(Path(target).stat().st_size - num_bytes) < 100  # another time of making
