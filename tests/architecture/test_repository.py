"""What is tracked: documents that match the code, no traces of one machine, recipes that load."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from activities.storage import layout
from configs.load import load_run, resolve_document
from workers.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_BYTES = 500_000
REGISTRY_HOSTS = ("pypi" + ".org", "python" + "hosted.org", "download." + "pytorch.org")
MACHINE_PATHS = re.compile(r"(?<![\w.~-])/(work|tmp|root|home)/[\w.-]+")
ALLOWED_PATHS = re.compile(r"/home/(user|someone|perdure)\b")
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.toml"))


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def tracked_text() -> dict[str, str]:
    texts = {}
    for path in tracked_files():
        data = path.read_bytes()
        if b"\0" not in data:
            texts[path.relative_to(ROOT).as_posix()] = data.decode()
    return texts


def artifact_paths() -> dict[str, str]:
    return {
        name: value
        for name, value in vars(layout).items()
        if name.isupper() and not name.startswith("_") and isinstance(value, str)
    }


@pytest.mark.parametrize(("name", "path"), sorted(artifact_paths().items()))
def test_operations_guide_names_every_artifact(name: str, path: str) -> None:
    guide = (ROOT / "docs" / "operations.md").read_text()
    assert path in guide, f"docs/operations.md does not mention {path} (layout.{name})"


def test_no_registry_is_named() -> None:
    found = [
        (name, host)
        for name, text in tracked_text().items()
        for host in REGISTRY_HOSTS
        if host in text
    ]
    assert not found


def test_no_machine_path_is_left_behind() -> None:
    found = [
        f"{name}: {match.group()}"
        for name, text in tracked_text().items()
        for match in MACHINE_PATHS.finditer(text)
        if not ALLOWED_PATHS.match(match.group())
    ]
    assert not found


def test_files_are_small() -> None:
    large = {path.name: path.stat().st_size for path in tracked_files()}
    assert not {name: size for name, size in large.items() if size > MAX_FILE_BYTES}


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{name}: {target}"
        for name, text in tracked_text().items()
        if name.endswith(".md")
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
        if "://" not in target and not ((ROOT / name).parent / target).exists()
    ]
    assert not broken


def test_there_are_recipes() -> None:
    assert {"quickstart", "tiny"} <= {recipe.stem for recipe in RECIPES}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_is_a_valid_run_file(recipe: Path) -> None:
    assert load_run(recipe).spec.name == recipe.stem


def test_run_files_in_the_documents_are_valid(tmp_path: Path) -> None:
    blocks = [
        block
        for name, text in tracked_text().items()
        if name.endswith(".md")
        for block in re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]
    assert blocks
    for block in blocks:
        resolve_document(tomllib.loads(block), origin="document", folder=tmp_path)


def test_commands_in_the_documents_exist() -> None:
    """Every ``perdure VERB`` that a document tells people to type."""
    known = {
        command.name or getattr(command.callback, "__name__", "").replace("_", "-")
        for command in app.registered_commands
    }
    known |= {group.name or "" for group in app.registered_groups}
    told = {
        verb
        for name, text in tracked_text().items()
        if name.endswith(".md")
        for verb in re.findall(r"(?:^\$ |`)perdure ([a-z-]+)", text, re.MULTILINE)
    }
    assert told
    assert told <= known


@pytest.mark.parametrize("script", ["quickstart", "test", "pin", "gpu_smoke.sh", "gpu_scale.sh"])
def test_script_is_executable_and_parses(script: str) -> None:
    path = ROOT / "scripts" / script
    assert path.stat().st_mode & 0o111
    for file in (path, ROOT / "scripts" / "environment"):
        subprocess.run(["bash", "-n", file], check=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"PERDURE_PYTHON": "/bin/false"}, "needs Python 3.11 or newer"),
        ({"PERDURE_SYSTEM_SITE": "1", "PERDURE_PYTHON": "python-without-torch"}, "no torch 2.11"),
    ],
)
def test_environment_refuses_what_cannot_work(
    tmp_path: Path, settings: dict[str, str], message: str
) -> None:
    """On a copy without ``.venv``, so that nothing of this checkout can be changed."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    fake = tmp_path / "python-without-torch"
    fake.write_text(
        '#!/bin/sh\ncase "$*" in *_base_executable*) echo "$0";; *torch*) exit 1;; esac\n'
    )
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", ". scripts/environment; perdure_environment run"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **settings},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_constraints_pin_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"]]
    wanted += [line for extra in ("train", "cpu", "local", "gym", "dev") for line in extras[extra]]
    names = {_normalized(re.split(r"[\[<>=!~; ]", line)[0]) for line in wanted}
    pins = re.findall(r"^([\w.-]+)==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert names - {_normalized(pin) for pin in pins} == set()


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
