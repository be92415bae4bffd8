"""Walks through JSON Schemas."""

from collections.abc import Callable, Iterator
from typing import Any

# Keywords whose values are not schemas, and keywords whose values are schemas by name.
_VALUES = frozenset({"const", "enum", "default", "examples"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# Keywords on which references of a schema in the document may depend.
_SHARED = ("$defs", "definitions", "$schema", "$id")


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


def place_of_fault(document: Any, is_faulty: Callable[[Any], bool], most: int) -> str:
    """Returns the JSON pointer of the innermost schema with a fault in a faulty document; "#" for the document.

    is_faulty: whether a schema, to which the document's definitions are added, has the fault. After `most` calls of
    is_faulty, the innermost place found so far is returned.
    """
    place, found = "#", document
    shared = {keyword: document[keyword] for keyword in _SHARED if keyword in document}
    while True:
        for part, schema in _inner(found):
            if not most:
                return place
            most -= 1
            if is_faulty(shared | schema):
                place, found = f"{place}/{part}", schema
                break
        else:
            return place


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the schemas directly in a schema with their places. Definitions come before what may refer to them."""
    for keyword, value in sorted(schema.items(), key=lambda item: item[0] not in _SHARED):
        path = _escaped(keyword)
        if keyword in _VALUES:
            continue
        if keyword in _BY_NAME and isinstance(value, dict):
            for name, one in value.items():
                if isinstance(one, dict):
                    yield f"{path}/{_escaped(name)}", one
        elif isinstance(value, dict):
            yield path, value
        elif isinstance(value, list):
            for index, one in enumerate(value):
                if isinstance(one, dict):
                    yield f"{path}/{index}", one


def _escaped(name: str) -> str:
    """Returns a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
