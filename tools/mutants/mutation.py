"""A mutant: one mistake, as edits of the syntax trees of named functions in a copy of the source tree.

A function is found by its name, in whatever module it is, and what is replaced by its structure: formatting, comments, names of local
variables and other lines of the function do not matter. A mutant whose function or structure is gone is an error (EditError).
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: What a copy of the source tree needs to run a stage.
COPIED = ("pipeline", "conf")


class EditError(Exception):
    """A function or structure that a mutation changes is not there exactly once: the source has changed, and the mutant must follow."""


@dataclass(frozen=True)
class Edit:
    """A change of one function.

    Attributes:
        function: its qualified name, "Class.method", with as much of its module before as makes it the only one ("samples.Class.method").
        old: Python code that occurs exactly once in the function: an expression, or consecutive statements. A name of one capital letter
            stands for any expression, the same wherever it occurs; `...` as an argument of a call for all further arguments. Empty for the
            whole body.
        new: the code that takes its place, with these letters; BODY as a statement is the old body, if `old` is empty.
    """

    function: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """One mistake and the job in which it matters.

    Attributes:
        name: of the mutant.
        bug: number of the public report that it repeats (tools/mutants/README.md).
        what: what is wrong, a sentence.
        words: overrides of the job, added to those of trial.COMMON, separated by spaces.
        edits: the mutation.
        ranks: of the job.
        resumed: overrides of the second half of the job if it is interrupted after half of its steps; None for an uninterrupted job.
        exact: whether it is the reported mistake; False for the nearest form that exists here.
    """

    name: str
    bug: int
    what: str
    words: str
    edits: tuple[Edit, ...]
    ranks: int = 2
    resumed: str | None = None
    exact: bool = False

    @property
    def digest(self) -> str:
        """A short text that is equal for equal mutants: a row of another one is not kept."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]

    def sources(self) -> dict[Path, str]:
        """Return the changed modules: path below the root -> source.

        Raises:
            EditError: a function or a structure does not occur exactly once, or the new code has a name that its module has not.
        """
        trees: dict[Path, ast.Module] = {}
        for edit in self.edits:
            try:
                path = _module_of(edit.function)
                tree = trees.setdefault(path, ast.parse((ROOT / path).read_text(encoding="utf-8")))
                _change(_functions(tree)[_qualified(edit.function, path)], edit, tree)
            except EditError as error:
                raise EditError(f"mutant {self.name}: {error}") from None
        return {path: ast.unparse(ast.fix_missing_locations(tree)) for path, tree in trees.items()}


def mutant(
    bug: int, words: str, *, ranks: int = 2, resumed: str | None = None, exact: bool = False
) -> Callable[[Callable[[], Iterator[Edit]]], Mutant]:
    """Make a mutant of a function that yields its edits, with its name and docstring. Arguments as in Mutant."""

    def of(edits: Callable[[], Iterator[Edit]]) -> Mutant:
        return Mutant(edits.__name__, bug, edits.__doc__ or "", words, tuple(edits()), ranks, resumed, exact)

    return of


def copy_tree(folder: Path, mutant: Mutant | None = None) -> Path:
    """Return a copy of the source tree, with a mutant.

    Raises:
        EditError: as Mutant.sources.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name)  # with the times of the files, so that compiled files stay valid
    for path, source in (mutant.sources() if mutant else {}).items():
        (folder / path).write_text(source, encoding="utf-8")
    return folder


@functools.cache
def _sources() -> dict[Path, str]:
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sorted((ROOT / "pipeline").rglob("*.py"))}


def _module_of(function: str) -> Path:
    """The module that has a function."""
    found = [path for path, text in _sources().items() if f"def {function.rpartition('.')[2]}(" in text]
    found = [path for path in found if _qualified(function, path) in _functions(ast.parse(_sources()[path]))]
    if len(found) != 1:
        raise EditError(f"function {function} is in {len(found)} modules of pipeline/, not in one: {', '.join(map(str, found))}")
    return found[0]


def _qualified(function: str, path: Path) -> str:
    """The name of a function in its module."""
    return function.removeprefix(f"{path.stem}.")


def _functions(tree: ast.AST, prefix: str = "") -> dict[str, ast.FunctionDef]:
    """Qualified name -> function or method. Functions within functions belong to the outer one."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            found |= _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            found[prefix + node.name] = node
    return found


def _change(function: ast.FunctionDef, edit: Edit, tree: ast.Module) -> None:
    """Apply an edit to the tree of a module."""
    old, new = ast.parse(edit.old).body, ast.parse(edit.new).body
    known = {"BODY", *vars(builtins), *re.findall(r"\w+", ast.unparse(tree)), *re.findall(r"\b[A-Z]\b", edit.old)}
    parts = [node for statement in new for node in ast.walk(statement)]
    known |= {node.id for node in parts if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    known |= {node.arg for node in parts if isinstance(node, ast.arg)} | {node.name for node in parts if isinstance(node, ast.FunctionDef)}
    if missing := {node.id for node in parts if isinstance(node, ast.Name)} - known:
        raise EditError(f"the module of {edit.function} has no name {', '.join(sorted(missing))}")
    if not old:
        body = function.body
        function.body = [part for statement in new for part in (body if ast.unparse(statement) == "BODY" else [statement])]
        return
    expression = all(len(part) == 1 and isinstance(part[0], ast.Expr) for part in (old, new))
    parts_of = (lambda part: [part[0].value]) if expression else list
    replacer = _Replacer(parts_of(old), parts_of(new))
    replacer.visit(function)
    if replacer.count != 1:
        raise EditError(f"in {edit.function}, this occurs {replacer.count} times, not once: {edit.old}")


def _is_letter(name: str) -> bool:
    return len(name) == 1 and name.isupper()


class _Replacer(ast.NodeTransformer):
    """Replaces an expression or consecutive statements; `count` is how many were found."""

    def __init__(self, old: list[ast.AST], new: list[ast.AST]) -> None:
        self.old, self.new, self.count = old, new, 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(self.old[0], ast.expr):
            bound: dict[str, ast.AST] = {}
            if isinstance(node, ast.expr) and _matches(self.old[0], node, bound):
                self.count += 1
                return _filled(self.new[0], bound)
            return node
        for block in (getattr(node, field) for field in ("body", "orelse", "finalbody") if isinstance(getattr(node, field, None), list)):
            for first in range(len(block) - len(self.old), -1, -1):
                bound = {}
                if all(_matches(a, b, bound) for a, b in zip(self.old, block[first:], strict=False)):
                    self.count += 1
                    block[first : first + len(self.old)] = [_filled(statement, bound) for statement in self.new]
        return node


def _matches(pattern: object, node: object, bound: dict[str, ast.AST]) -> bool:
    """Whether a part of a tree has the structure of a pattern; `bound` gets what its letters stand for."""
    if isinstance(pattern, ast.Name) and _is_letter(pattern.id) and isinstance(node, ast.expr):
        return _same(bound.setdefault(pattern.id, node), node)
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call) and any(map(_is_rest, pattern.args)):
        given = [argument for argument in pattern.args if not _is_rest(argument)]
        named = {keyword.arg: keyword for keyword in node.keywords}
        rest = [keyword for keyword in node.keywords if keyword.arg not in {keyword.arg for keyword in pattern.keywords}]
        bound["..."] = ast.Call(func=node.func, args=node.args[len(given) :], keywords=rest)
        return (
            _matches(pattern.func, node.func, bound)
            and len(given) <= len(node.args)
            and all(_matches(a, b, bound) for a, b in zip(given, node.args, strict=False))
            and all(_matches(keyword, named.get(keyword.arg), bound) for keyword in pattern.keywords)
        )
    if isinstance(pattern, list):
        return (
            isinstance(node, list) and len(pattern) == len(node) and all(_matches(a, b, bound) for a, b in zip(pattern, node, strict=True))
        )
    if isinstance(pattern, ast.AST):
        fields = (field for field in pattern._fields if field not in ("ctx", "type_comment"))
        return type(pattern) is type(node) and all(_matches(getattr(pattern, field), getattr(node, field), bound) for field in fields)
    return pattern == node


def _same(one: ast.AST, other: ast.AST) -> bool:
    return ast.unparse(one) == ast.unparse(other)


def _is_rest(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _filled(new: ast.AST, bound: dict[str, ast.AST]) -> ast.AST:
    """A copy of the new code with what its letters stand for."""

    class Filler(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return copy.deepcopy(bound.get(node.id, node))

        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            if any(map(_is_rest, node.args)):
                rest = copy.deepcopy(bound["..."])
                assert isinstance(rest, ast.Call)
                node.args = [*(argument for argument in node.args if not _is_rest(argument)), *rest.args]
                node.keywords = [*node.keywords, *rest.keywords]
            return node

    return Filler().visit(copy.deepcopy(new))
