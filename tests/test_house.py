"""The house around the package: its links, its arrows, its declared dependencies, what a wheel holds."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("gtpo_lightning", "callbacks", "datamodules")
# The core's own files; the two links would show files of the other folders a second time.
CORE = [
    path
    for path in sorted((ROOT / "gtpo_lightning").rglob("*.py"))
    if not {"callbacks", "datamodules"} & set(path.relative_to(ROOT / "gtpo_lightning").parts)
]
SOURCES = [*CORE, *sorted((ROOT / "callbacks").rglob("*.py")), *sorted((ROOT / "datamodules").rglob("*.py"))]


def source_id(path):
    return str(path.relative_to(ROOT))


def module_name(path):
    """The import name of a source file, by the links where it lies outside the core."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "gtpo_lightning" else ("gtpo_lightning", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    """Full names of everything a file imports, at any depth, relative imports made absolute."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{start}.{alias.name}" for alias in node.names}
    return found


def reaches(names, *packages):
    """Those of `names` that lie in one of `packages`."""
    return sorted(n for n in names if any(n == p or n.startswith(f"{p}.") for p in packages))


def files():
    """What a commit of the tree as it stands would hold: text of each file by its path."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    paths = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    return {source_id(p): p.read_text(errors="replace") for p in paths if p.is_file() and not p.is_symlink()}


# ---------------------------------------------------------------------------------------------------- links and arrows


@pytest.mark.parametrize("name", ["callbacks", "datamodules"])
def test_link_is_relative_and_gives_the_only_import_name(name):
    link = ROOT / "gtpo_lightning" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name
    module = importlib.import_module(f"gtpo_lightning.{name}")
    assert Path(module.__file__).resolve().parent == ROOT / name
    users = [source_id(path) for path in SOURCES if reaches(imports(path), name)]
    assert users == []


@pytest.mark.parametrize("path", [p for p in CORE if p.name != "cli.py"], ids=source_id)
def test_core_imports_neither_callbacks_nor_datamodules(path):
    assert reaches(imports(path), "gtpo_lightning.callbacks", "gtpo_lightning.datamodules") == []


def test_cli_is_where_the_parts_meet():
    assert reaches(imports(ROOT / "gtpo_lightning" / "cli.py"), "gtpo_lightning.callbacks")
    importers = [source_id(path) for path in SOURCES if reaches(imports(path), "gtpo_lightning.cli")]
    assert importers == []


@pytest.mark.parametrize("folder", ["functional", "rewards"])
def test_arrows_end_in_the_pure_functions(folder):
    """What `functional` and `rewards` import of the package is their own."""
    paths = [path for path in CORE if folder in path.parts]
    assert paths
    for path in paths:
        own = reaches(imports(path), "gtpo_lightning")
        assert own == reaches(own, f"gtpo_lightning.{folder}", "gtpo_lightning.rollout"), source_id(path)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("import gtpo_lightning.callbacks as c", "gtpo_lightning/module.py", {"gtpo_lightning.callbacks"}),
        ("from gtpo_lightning import callbacks", "gtpo_lightning/module.py", {"gtpo_lightning.callbacks"}),
        ("from .callbacks import A", "gtpo_lightning/module.py", {"gtpo_lightning.callbacks.A"}),
        ("from . import callbacks", "gtpo_lightning/__init__.py", {"gtpo_lightning.callbacks"}),
        ("from ..callbacks import A", "gtpo_lightning/engines/local.py", {"gtpo_lightning.callbacks.A"}),
        ("def f():\n    import callbacks.x", "callbacks/a.py", {"callbacks.x"}),
    ],
)
def test_imports_are_found_in_every_form(text, name, expected, tmp_path, monkeypatch):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert imports(path) == expected


# --------------------------------------------------------------------------------------------------------------- files


def test_there_are_sources():
    assert len(SOURCES) > 20
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(FOLDERS)


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.name == "__init__.py" or not p.name.startswith("_")], ids=source_id
)
def test_public_module_says_what_it_exports(path):
    module = importlib.import_module(module_name(path))
    assert isinstance(module.__all__, list)
    assert len(set(module.__all__)) == len(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize("path", SOURCES, ids=source_id)
def test_source_prints_nothing(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"] == []


def test_no_file_is_what_a_run_left_behind():
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    paths = [ROOT / name for name in names.split("\0") if name]
    assert len(paths) > 40
    assert [source_id(p) for p in paths if p.suffix in {".ckpt", ".pt", ".bin", ".safetensors", ".whl"}] == []
    assert [source_id(p) for p in paths if p.is_file() and p.stat().st_size > 300_000] == []


def test_no_file_names_a_machine_path_or_a_registry():
    machine = re.compile(r"(?<![\w.~/-])/(work|tmp|root|home|mnt|opt)(?=[/\s\"'`:),]|$)", re.MULTILINE)
    registry = re.compile(r"pypi\.org|pythonhosted\.org|npmjs\.(org|com)|download\.pytorch\.org|https?://[\w.]*pypi")
    assert machine.search("cd /" + "work/main")
    assert machine.search("'/" + "tmp'")
    assert not machine.search("https://host/home and a/tmp/b, or ~/work")
    assert registry.search("https://download" + ".pytorch.org/whl/cpu")
    texts = files()
    assert len(texts) > 40
    found = [
        f"{name}: {m.group()}" for name, text in texts.items() for r in (machine, registry) if (m := r.search(text))
    ]
    assert found == []


# ------------------------------------------------------------------------------------------------- Makefile and README


def targets():
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_readme_names_only_what_exists():
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"(?:`|^\s*|\$ )make ([a-z][a-z-]*)", readme, re.MULTILINE))
    assert "test" in named
    assert named <= targets()
    paths = set(
        re.findall(r"\b(?:configs|benchmarks|tests|callbacks|datamodules|gtpo_lightning)/[\w./-]+\.\w+", readme)
    )
    assert sorted(p for p in paths if not (ROOT / p).exists()) == []
    local_links = set(re.findall(r"\]\((?!https?:|#)([^)#\s]+)", readme))
    assert sorted(link for link in local_links if not (ROOT / link).exists()) == []


def test_makefile_documents_each_target():
    makefile = (ROOT / "Makefile").read_text()
    documented = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE).group(1).split())
    assert targets() == documented == phony
    assert phony >= {"test", "test-slow", "lint", "quickstart", "bench-step", "clean", "help"}


def test_continuous_integration_runs_the_command_of_the_readme():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    stages = re.findall(r"^stage ([a-z-]+)$", text, re.MULTILINE)
    assert "test" in stages
    assert set(stages) <= targets()


# -------------------------------------------------------------------------------------------------------- dependencies


def declared():
    """Requirements of pyproject.toml by section, each with the line above it.

    Read line by line, since Python 3.10 has no TOML reader and a reader would drop the comments.
    """
    found, section, key = [], "", ""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if header := re.fullmatch(r"\[([\w.-]+)\]", line):
            section, key = header.group(1), ""
        elif opened := re.match(r"([\w-]+) = \[", line):
            key = opened.group(1)
        where = {"build-system": "requires", "project": "dependencies", "project.optional-dependencies": key}
        if section in where and key == where[section]:
            found += [(key, Requirement(text), above.strip()) for text in re.findall(r'"([^"]+)"', line)]
        if line.rstrip().endswith("]") and not line.startswith("["):
            key = ""
    return found


def pins():
    """Pinned versions of constraints.txt by canonical name, in the order of the file."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [re.fullmatch(r"([\w.-]+)==([\w.+!]+)", line) for line in lines if line and not line.startswith("#")]
    assert all(found)
    return {canonicalize_name(pin.group(1)): pin.group(2) for pin in found}


def test_declared_reads_every_section():
    count = {}
    for key, _, _ in declared():
        count[key] = count.get(key, 0) + 1
    assert count["requires"] >= 1
    assert count["dependencies"] >= 9
    assert set(count) == {"requires", "dependencies", "test", "smollm2", "peft", "qlora", "bench", "deepspeed", "vllm"}


def test_every_bound_has_its_reason_on_the_line_above():
    bare = [str(requirement) for _, requirement, above in declared() if not above.startswith("# ")]
    assert bare == []
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r"^# .+\nrequires-python = ", text, re.MULTILINE)


def test_constraints_pin_each_requirement_within_its_bound():
    pinned = pins()
    for key, requirement, _ in declared():
        if key in ("bench", "deepspeed", "qlora", "vllm"):  # not part of the environment that the tests run in
            continue
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, requirement
        assert requirement.specifier.contains(version), (str(requirement), version)


def test_constraints_begin_with_torch_and_fit_any_build_of_it():
    text = (ROOT / "constraints.txt").read_text()
    assert text.startswith("# ")
    assert next(iter(pins())) == "torch"
    assert [version for version in pins().values() if "+" in version] == []
    assert "llama-cpp-python" not in pins()


# --------------------------------------------------------------------------------------------------------------- wheel


def packaged():
    """What has to be in a wheel: every source of the package, through the links."""
    names = {f"gtpo_lightning/{path.relative_to(ROOT / 'gtpo_lightning')}" for path in CORE}
    names |= {f"gtpo_lightning/{source_id(path)}" for path in SOURCES if path not in CORE}
    return {*names, "gtpo_lightning/py.typed", "gtpo_lightning/report/page.html.jinja"}


def test_pyproject_lists_every_package():
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^packages = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL).group(1)
    present = {str(Path(name).parent).replace("/", ".") for name in packaged() if name.endswith("__init__.py")}
    assert set(re.findall(r'"([^"]+)"', listed)) == present


def run(*args, cwd):
    done = subprocess.run([sys.executable, *map(str, args)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def build(source, target):
    run("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", target, ".", cwd=source)
    (wheel,) = target.glob("*.whl")
    return wheel


def check_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next(archive.read(n).decode() for n in names if n.endswith(".dist-info/entry_points.txt"))
    assert {n for n in names if ".dist-info/" not in n} == packaged()
    assert "gtpo = gtpo_lightning.cli:run" in entry_points
    assert any(n.endswith("licenses/LICENSE") for n in names)


@pytest.mark.slow
def test_wheel_holds_the_links_as_folders_from_checkout_and_sdist(tmp_path):
    copy = tmp_path / "checkout"
    for name in files():  # a copy, since setuptools builds in the tree and would reuse what lies there
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    for name in ("callbacks", "datamodules"):
        (copy / "gtpo_lightning" / name).symlink_to(f"../{name}")

    run("-c", f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})", cwd=copy)
    (sdist,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()

    check_wheel(build(copy, tmp_path / "from_checkout"))
    check_wheel(build(unpacked, tmp_path / "from_sdist"))
