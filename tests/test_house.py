"""The house as a whole: which file imports which, how deep packages stand, and that a name means one thing."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "memkit"
DEEPEST = 8
# A name that several of these files define is the same thing, once for each: a command, a way to compute, a framework.
FAMILIES = (
    PACKAGE.glob("cli/*.py"),
    [PACKAGE / "points/compiled.py", PACKAGE / "points/passes.py"],
    PACKAGE.glob("integrations/*.py"),
)


def name_of(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def sources_in(folder):
    return {name_of(path): path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}


SOURCES = sources_in(PACKAGE)
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
PUBLIC = {name for name, path in ((name_of(each), each) for each in PACKAGE.rglob("__init__.py"))}


def imported_by(name, tree, modules):
    """Those of the modules that one imports anywhere: in functions, and for type checkers alone, too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & {*modules} - {name}


# What a package's own file lists are names that are loaded later; the graph is that of the files which define them.
GRAPH = {name: imported_by(name, tree, TREES) for name, tree in TREES.items() if "load_lazily(" not in SOURCES[name]}


def cycle_in(graph):
    """A cycle of imports; empty if there is none."""
    done = set()

    def visit(node, path):
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        found = next((each for other in sorted(graph.get(node, ())) if (each := visit(other, [*path, node]))), [])
        done.add(node)
        return found

    return next((each for node in sorted(graph) if (each := visit(node, []))), [])


def room_of(module):
    return module.split(".")[1] if "." in module else module


def rooms():
    """By package, those that its files import."""
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    graph = {room: set() for room in packages}
    for name, others in GRAPH.items():
        if room_of(name) in packages:
            graph[room_of(name)] |= {room_of(each) for each in others} & packages - {room_of(name)}
    return graph


def test_no_import_cycles_even_for_type_checkers():
    assert cycle_in(GRAPH) == []
    benchmarks = {name: ast.parse(text) for name, text in sources_in(PACKAGE.with_name("benchmarks")).items()}
    assert cycle_in({name: imported_by(name, tree, benchmarks) for name, tree in benchmarks.items()}) == []


def test_packages_stand_no_deeper_than_eight():
    graph = rooms()
    assert cycle_in(graph) == []

    @cache
    def depth(room):
        return 1 + max(map(depth, graph.get(room, ())), default=0)

    deepest = max(graph, key=depth)
    assert depth(deepest) <= DEEPEST, deepest


def test_the_law_of_circles_sees_one():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    tree = ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from memkit._core.units import KIB")
    assert imported_by("x", tree, TREES) == {"memkit._core.units"}


def defined_in(tree):
    """Public classes, functions and type aliases that a file defines."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id[:1].isupper() and not target.id.isupper():
                yield target.id


def meanings(trees):
    """By name, the files that give it a meaning of their own."""
    found = {}
    for name, tree in trees.items():
        for each in defined_in(tree):
            if not each.startswith("_"):
                found.setdefault(each, set()).add(name)
    return found


def test_each_name_means_one_thing():
    families = [{name_of(path) for path in family} for family in FAMILIES]
    several = {
        name: sorted(files)
        for name, files in meanings(TREES).items()
        if len(files) > 1 and not any(files <= family for family in families)
    }
    assert several == {}


def test_the_law_of_names_sees_two_meanings():
    trees = {"a": ast.parse("class Place: ...\n_Place = int"), "b": ast.parse("Place: TypeAlias = str\nPLACE = 1")}
    assert meanings(trees) == {"Place": {"a", "b"}}


@pytest.mark.parametrize("name", sorted(GRAPH))
def test_no_import_of_lazily_loaded_names(name):
    """Inside the house a name is imported from the file that defines it: the way is then seen, and short."""
    assert not imported_by(name, TREES[name], TREES) & (PUBLIC - set(GRAPH))


def changes():
    """The rows of CONTRIBUTING's table: what is to be changed, and the files that it names."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text("utf-8").partition("## Ten changes")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    return {change: re.findall(r"`(memkit/[\w./]*)`", files) for change, files in rows}


def test_ten_changes_need_three_existing_files_at_most():
    assert len(changes()) == 10
    for change, files in changes().items():
        assert 1 <= len(files) <= 3, change
        for file in files:
            assert (PACKAGE.parent / file).exists(), file


def test_nobody_is_told_to_install_a_stranger():
    """On the package index the name is another project's: extras are installed from a clone, or by their own names."""
    root = PACKAGE.parent
    texts = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.json"), *(root / "docs").rglob("*.md"), root / "README.md"]
    told = re.compile(r"pip install(?: -\w+)* [\"']?memkit\b")
    assert [str(path) for path in texts if told.search(path.read_text("utf-8"))] == []
    assert told.search('run `pip install "memkit[numba]"`')
    assert told.search("pip install -U memkit")
