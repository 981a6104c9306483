"""What the JSON schemas of tools say of arguments: their types, and which nulls are values.

Tables that are exported as JSON give every object the keys of all others, as null: in the arguments
of calls, and in the schemas themselves. Such a null is a value only where the schema has it.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_JOINED = ("anyOf", "oneOf", "allOf")
# Keywords that hold schemas by name, and those that hold values.
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
VALUES = ("default", "const", "enum", "examples")
# Other names of JSON's types, of which vLLM reads these as well.
_NAMES = {
    **dict.fromkeys(("str", "text", "char", "varchar", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "long", "short"), "integer"),
    **dict.fromkeys(("unsigned", "uint", "uint32", "uint64"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    **{"bool": "boolean", "dict": "object"},
    **dict.fromkeys(("list", "arr", "sequence"), "array"),
}
_TYPES = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string",
    dict: "object", list: "array",
}  # fmt: skip


def types_of(schema: Any, root: Any) -> set[str]:
    """JSON's names of the types that a schema allows; none if it does not say.

    Args:
        root: the whole schema, in which `$ref` are looked up.
    """
    types = set()
    for each in _alternatives(schema, root):
        values, names = each.get("enum"), each.get("type")
        values = [each.get("const")] if "const" in each else values
        if isinstance(values, list) and values:
            types |= {_TYPES[type(value)] for value in values if type(value) in _TYPES}
        else:
            names = names if isinstance(names, list) else [names]
            lower = [name.strip().lower() for name in names if isinstance(name, str)]
            types |= {_NAMES.get(name, name) for name in lower}
        # As OpenAPI writes it.
        types |= {"null"} if each.get("nullable") is True else set()
    return types


def property_schema(schema: Any, name: str, root: Any) -> dict[str, Any]:
    """The schema of a property of an object, joined of all that name it; see `types_of`."""
    found = []
    for each in _alternatives(schema, root):
        named, others = each.get("properties"), each.get("additionalProperties")
        if isinstance(named, Mapping) and name in named:
            found.append(named[name])
        elif isinstance(others, Mapping) and others:
            found.append(others)
    return {"anyOf": found}


def without_nulls(value: Any, schema: Any, root: Any) -> Any:
    """A value without the nulls of objects that its schema does not have as values.

    Args:
        root: see `types_of`.
    """
    if isinstance(value, Mapping):
        schemas = {key: property_schema(schema, key, root) for key in value}
        return {
            key: without_nulls(each, schemas[key], root)
            for key, each in value.items()
            if each is not None or (schemas[key]["anyOf"] and _has_null(schemas[key], root))
        }
    if isinstance(value, list):
        found = []
        for each in _alternatives(schema, root):
            for items in (each.get("items"), each.get("prefixItems")):
                found += items if isinstance(items, list) else [items]
        return [without_nulls(each, {"anyOf": found}, root) for each in value]
    return value


def schema_without_nulls(schema: Any, root: Any) -> Any:
    """A schema without keywords and properties of null; values of `enum` and the like stay."""
    if isinstance(schema, list):
        return [schema_without_nulls(each, root) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    stated = {key: each for key, each in schema.items() if each is not None}
    # "default": null is a value where null is one.
    real = ("default", "const") if _has_null(stated, root) else ()
    found = {}
    for key, each in schema.items():
        if key in VALUES and (each is not None or key in real):
            shape = {"items": stated} if key in ("enum", "examples") else stated
            found[key] = without_nulls(each, shape, root)
        elif key in SCHEMAS_BY_NAME and isinstance(each, Mapping):
            named = {name: one for name, one in each.items() if one is not None}
            found[key] = {name: schema_without_nulls(one, root) for name, one in named.items()}
        elif each is not None:
            found[key] = schema_without_nulls(each, root)
    return found


def _has_null(schema: Mapping[str, Any], root: Any) -> bool:
    """Whether null is a value of a schema, as it is where it states no types."""
    types = types_of(schema, root)
    return not types or "null" in types


def _alternatives(schema: Any, root: Any) -> Iterator[Mapping[str, Any]]:
    """A schema, and those that it refers to or is joined of."""
    seen, left = set(), [schema]
    while left:
        each = left.pop()
        if not isinstance(each, Mapping) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += [_referred(each.get("$ref"), root)]
        for key in _JOINED:
            left += each[key] if isinstance(each.get(key), list) else []


def _referred(name: Any, root: Any) -> Any:
    """The schema at a JSON pointer; None if there is none."""
    if not isinstance(name, str) or not (name + "/").startswith("#/"):
        return None
    for key in unquote(name[1:]).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        each = {str(i): one for i, one in enumerate(root)} if isinstance(root, list) else root
        root = each.get(key) if isinstance(each, Mapping) else None
    return root
