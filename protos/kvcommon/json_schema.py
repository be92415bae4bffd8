"""Walks through JSON Schemas."""

from collections.abc import Callable
from typing import Any

# Keywords whose values are not schemas, and keywords whose values are schemas by name.
_VALUES = frozenset({"const", "enum", "default", "examples"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Returns a schema with `change` applied to each schema in it, including itself, innermost first."""
    if isinstance(schema, list):
        return [rewritten(item, change) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _BY_NAME and isinstance(value, dict):
            made[keyword] = {name: rewritten(item, change) for name, item in value.items()}
        else:
            made[keyword] = value if keyword in _VALUES else rewritten(value, change)
    return change(made)
