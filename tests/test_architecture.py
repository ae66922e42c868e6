"""The shape of the package: what imports what, what is public, what lies where."""

import pkgutil
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

import raymm

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {"pyproject.toml", "raymm", "tests", "examples", "scripts", "README.md"}

# Written so that the patterns do not match themselves.
FOREIGN = re.compile(
    r"(?<![\w.])/(?:work|root)/|\b(?:py(?:pi|thonhosted)|npm(?:js)|debian)\.(?:org|com)\b"
)


def repository_files():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    # A test run may have a HOME of its own, without the user's list of safe directories.
    listing = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others"]
    found = subprocess.run(
        [*listing, "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [name for name in found.stdout.split("\0") if (ROOT / name).is_file()]


def in_new_process(code):
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return found.stdout.split()


def is_own_module(value):
    return isinstance(value, ModuleType) and value.__name__.startswith("raymm.")


def test_import_contracts_hold():
    lint_imports = Path(sysconfig.get_path("scripts")) / "lint-imports"
    found = subprocess.run(
        [lint_imports, "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_import_is_light():
    heavy = "{'ray', 'torch', 'pyarrow'} & set(sys.modules)"
    assert in_new_process(f"import sys, raymm; dir(raymm); print(*sorted({heavy}))") == []


def test_all_is_sorted_and_without_doubles():
    assert list(raymm.__all__) == sorted(set(raymm.__all__))


@pytest.mark.parametrize("name", raymm.__all__)
def test_public_name_resolves(name):
    value = getattr(raymm, name)
    assert not is_own_module(value)
    assert getattr(raymm, name) is value


def test_nothing_else_is_public():
    found = {
        name
        for name in dir(raymm)
        if not name.startswith("_") and not is_own_module(getattr(raymm, name))
    }
    assert found == {name for name in raymm.__all__ if not name.startswith("_")}


def test_names_stay_what_they_are_once_every_module_is_loaded():
    # Loading raymm.x binds the module as an attribute of raymm, over a public name x.
    modules = {module.name for module in pkgutil.iter_modules(raymm.__path__)}
    assert modules.isdisjoint(raymm.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = raymm.no_such_name


def test_top_level_holds_only_what_it_may():
    entries = {name.split("/")[0] for name in repository_files()}
    assert {entry for entry in entries if not entry.startswith(".")} <= TOP_LEVEL


def test_no_file_names_the_machine_it_was_written_on():
    named = []
    for name in repository_files():
        text = (ROOT / name).read_text(encoding="utf-8", errors="ignore")
        named += [f"{name}: {match.group()}" for match in FOREIGN.finditer(text)]
    assert named == []
