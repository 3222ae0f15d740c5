"""Conditions on the fields of a record in Python's syntax, such as `int_score >= 3 and lang in ['de', 'fr']`."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

_ALLOWED = (
    *(ast.Expression, ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Subscript, ast.Load),
    *(ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.USub),
)


class Condition:
    """A condition on the fields of a record.

    Args:
        text: comparisons of fields and values, `in`, `and`, `or`, `not`; `quality['score']` is a field in a field.

    Attributes:
        names: the fields that it reads.

    Raises:
        ValueError: it is none; the text says why.
    """

    def __init__(self, text: str) -> None:
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"is no condition: {getattr(error, 'msg', error)}") from None
        for node in ast.walk(tree):
            if not isinstance(node, _ALLOWED):
                raise ValueError(f"has {ast.unparse(node)}, and a condition has fields, values, comparisons, in, and, or, not")
        self.names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
        self._comparisons = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
        if not self.names:
            raise ValueError("reads no field")
        if not self._comparisons:
            raise ValueError("compares nothing")
        self._code = compile(tree, "<condition>", "eval")

    def compared_with(self, name: str) -> list[str]:
        """Return the texts that a field is compared with."""
        nodes = [list(ast.walk(comparison)) for comparison in self._comparisons]
        reading = [parts for parts in nodes if any(isinstance(part, ast.Name) and part.id == name for part in parts)]
        return [part.value for parts in reading for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]

    def fault(self, fields: Mapping[str, Any]) -> str:
        """Return why a record does not meet the condition; empty if it does. One without a field that is compared does not."""
        try:
            met = eval(self._code, {"__builtins__": {}}, fields)
        except NameError as error:
            return f"no field {error.name}"
        except (TypeError, LookupError):
            return "a field of another kind"
        return "" if met else "condition not met"
