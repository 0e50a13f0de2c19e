"""Rules of safety that the source shows: what is read cannot run code, nothing listens outside.

Read from the syntax trees, so that a rule also holds for code that no test runs.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("models", "configs", "activities", "workflows", "workers", "scripts", "benchmarks")

RUNS_CODE = frozenset(
    ("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "yaml")
)
"""Modules whose readers may run what the file says."""
MAY_IMPORT = {
    "workers/engines/native/tensor_handles.py": "an unpickler that makes eleven names only",
    "workers/trainers/handles.py": "writes what SGLang reads; reads nothing",
}
PICKLED_METADATA = frozenset(("FileSystemReader", "FileSystemWriter"))
"""Of PyTorch's distributed checkpoint: their ``.metadata`` is a pickle."""
READERS = frozenset(("load", "loads", "read_pickle", "Unpickler"))
UNPACKERS = frozenset(("extractall", "unpack_archive", "extract"))
ANY_ADDRESS = frozenset(("0.0.0.0", "::", "[::]"))


def parsed() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def imported(node: ast.AST) -> list[str]:
    """Top-level names of the modules that ``node`` imports."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [(node.module or "").partition(".")[0]]
    return []


def keyword(call: ast.Call, name: str) -> object:
    """The literal given for ``name``; Ellipsis for another expression, None when it is not."""
    for each in call.keywords:
        if each.arg == name:
            return each.value.value if isinstance(each.value, ast.Constant) else ...
    return None


def owner_and_name(call: ast.Call) -> tuple[str, str]:
    """``("torch", "load")`` for ``torch.load(...)``, ``("", "eval")`` for ``eval(...)``."""
    function = call.func
    if isinstance(function, ast.Name):
        return "", function.id
    if isinstance(function, ast.Attribute):
        owner = function.value
        return owner.id if isinstance(owner, ast.Name) else "?", function.attr
    return "?", "?"


def faults(call: ast.Call) -> Iterator[str]:
    """Why ``call`` may run or unpack what a file says."""
    owner, name = owner_and_name(call)
    if not owner and name in ("eval", "exec", "compile", "__import__"):
        yield f"{name}()"
    if owner in RUNS_CODE and name in READERS:
        yield f"{owner}.{name} makes whatever the file names"
    if (owner, name) == ("torch", "load") and keyword(call, "weights_only") is not True:
        yield "torch.load without weights_only=True"
    if owner == "os" and name in ("system", "popen"):
        yield f"os.{name}"
    if name in UNPACKERS:
        yield f"{name} follows the names in an archive"
    if keyword(call, "allow_pickle") not in (None, False):
        yield "allow_pickle"
    if keyword(call, "weights_only") not in (None, True):
        yield "weights_only is not True"
    if keyword(call, "trust_remote_code") not in (None, False):
        yield "trust_remote_code"
    if name == "from_pretrained" and owner == "?" and keyword(call, "use_safetensors") is not True:
        function = call.func
        assert isinstance(function, ast.Attribute)
        if "Model" in ast.unparse(function.value):
            yield "a model is read without use_safetensors=True"
    if keyword(call, "shell") not in (None, False):
        yield "shell"


def test_nothing_that_is_read_can_run_code() -> None:
    found = [
        f"{path}:{node.lineno}: {why}"
        for path, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for why in faults(node)
    ]
    assert not found, "\n".join(found)


def test_modules_that_run_what_they_read_are_imported_where_it_is_known_why() -> None:
    found = {
        path
        for path, tree in parsed()
        for node in ast.walk(tree)
        if RUNS_CODE.intersection(imported(node))
    }
    assert found <= set(MAY_IMPORT), found - set(MAY_IMPORT)


def test_distributed_checkpoints_have_no_pickled_metadata() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and PICKLED_METADATA.intersection(alias.name for alias in node.names)
    ]
    assert not found, found


def test_the_one_reader_of_pickles_makes_known_names_only() -> None:
    tree = ast.parse((ROOT / "workers/engines/native/tensor_handles.py").read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "pickle"
    }
    assert used == {"Unpickler", "UnpicklingError"}
    (reader,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert [method.name for method in reader.body if isinstance(method, ast.FunctionDef)] == [
        "find_class"
    ]


def test_no_address_means_every_interface() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in ANY_ADDRESS
    ]
    assert not found, found


@pytest.mark.parametrize(
    "text",
    [
        "eval(text)",
        "pickle.load(stream)",
        "yaml.load(stream)",
        "joblib.load(path)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "numpy.load(path, allow_pickle=True)",
        "subprocess.run(line, shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "transformers.AutoModelForCausalLM.from_pretrained(path)",
        "archive.extractall(folder)",
        "shutil.unpack_archive(path)",
    ],
)
def test_the_rules_see_what_they_are_about(text: str) -> None:
    call = ast.parse(text).body[0]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    assert list(faults(call.value))
