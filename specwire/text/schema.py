"""Which JSON schemas an output can be constrained by: those whose every keyword is held exactly.

xgrammar ignores keywords that it does not know, and some combinations of those that it knows. An output would
then not validate, so such a schema is refused here, naming the place. `tests/exactness/test_schemas.py`
generates random ones of what is left, and validates the outputs.

`oneOf` and `allOf` are held in another form, where they have one (`schema_unions`).

What is left is held as it stands, or more strictly: an object has no properties but those that are named, in
the order of their names in the schema.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NoReturn

from specwire.errors import InvalidRequestError, UnsupportedError
from specwire.text.schema_unions import NotExactError, Unions

_ANNOTATIONS = {
    *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples"),
    *("deprecated", "readOnly", "writeOnly"),
}
_STRING = {"minLength", "maxLength", "pattern", "format"}
_INTEGER = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_KEYWORDS = {
    "string": _STRING,
    "integer": _INTEGER,
    "number": _INTEGER - {"multipleOf"},
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "boolean": set[str](),
    "null": set[str](),
}
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
    "boolean": (bool,),
    "null": (type(None),),
}
_ALONE = ("$ref", "anyOf", "oneOf", "enum", "const")
"""Keywords beside which others would be ignored."""
_REF = re.compile(r"#(/(\$defs|definitions|properties)/[^/~%]+|/(items|additionalProperties))*")
"""To where a schema is, which is checked there."""
_FORMATS = {
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference"),
    "uuid",
}
_PATTERN = re.compile(r"""\^ (?: [^\\"$^\x00-\x1f] | \[\^ | \\[dDwWS.()\[\]{}*+?|^$/-] )* \$""", re.VERBOSE)
"""Anchored, and of characters that stand for themselves in a JSON string."""
_LOOKAROUND = re.compile(r"\(\?(?!:|<\w)")
"""xgrammar leaves out what looks ahead or behind, with a warning."""
_CLASS = re.compile(r"\[[^]]*(?:\]|\Z)")
"""Of characters; one without an end, which xgrammar refuses, is read once."""
_PAST_ASCII = re.compile(r"[ -\\]-[^\x00-\x7f]")
"""Ranges of characters with quotes or backslashes among them, which xgrammar does not leave out of these."""
_MAX_SPAN, _MAX_MULTIPLE = 10_000, 1024
"""Up to which xgrammar holds `multipleOf`: values between the bounds, and the multiple."""
_DECIMALS = 6
"""Places of the numbers that it writes between bounds."""
_INT64 = range(-(2**63), 2**63)
"""Whole numbers that it writes as they are; others become floats."""


def check_schema(name: str, schema: Any) -> Any:
    """The same schema without `oneOf` and `allOf`, where an output can be held to all of it.

    Args:
        name: of the field that the schema was given in.

    Raises:
        InvalidRequestError: not a schema.
        UnsupportedError: a keyword, or a combination, that is not held exactly.
    """
    try:
        return _Checker(name, schema).held()
    except RecursionError:
        raise UnsupportedError(name, "schema", "is nested too deeply") from None


class _Checker:
    def __init__(self, name: str, root: Any) -> None:
        self._name, self._root = name, root
        self._unions = Unions(root, _ANNOTATIONS)
        self._found: list[tuple[Mapping[str, Any], str]] = []

    def held(self) -> Any:
        """The schema in its other form, if all of it has one."""
        self.check(self._root, "#")
        for schema, where in self._found:
            if "allOf" in schema:
                self._in_other_form(self._unions.merged, schema, where)
            elif not self._in_other_form(self._unions.are_disjoint, schema["oneOf"], where):
                problem = (
                    "is only supported of objects that a required property with another const tells apart"
                )
                self._refuse(where, "oneOf", problem)
        return self._in_other_form(self._unions.rewritten, self._root, "#") if self._found else self._root

    def _in_other_form(self, form: Callable[[Any], Any], of: Any, where: str) -> Any:
        try:
            return form(of)
        except NotExactError as error:
            return self._refuse(where, "allOf", str(error))

    def check(self, schema: Any, where: str) -> None:
        """One schema, and those in it."""
        if schema is True:
            return
        if not isinstance(schema, dict):
            raise InvalidRequestError(f"{self._name} at {where}", schema, "must be a schema")
        for defined in ("$defs", "definitions"):
            self._check_each(schema.get(defined, {}), f"{where}/{defined}")
        given = schema.keys() - _ANNOTATIONS - ({"discriminator"} if "oneOf" in schema else set())
        if "allOf" in schema:
            self._check_all(schema, given - {"allOf"}, where)
            return
        alone = next((keyword for keyword in _ALONE if keyword in schema), None)
        if alone is None:
            self._check_typed(schema, given, where)
            return
        others = given - {alone, *(("type",) if alone in ("enum", "const") else ())}
        if others:
            self._refuse(where, min(others), f"is not supported beside {alone}")
        self._check_alone(alone, schema, where)

    def _check_all(self, schema: Mapping[str, Any], beside: set[str], where: str) -> None:
        self._check_each(dict(enumerate(self._list(schema["allOf"], where, "allOf"))), f"{where}/allOf")
        if beside:
            self.check({"type": "object"} | {keyword: schema[keyword] for keyword in beside}, where)
        self._found.append((schema, where))

    def _check_alone(self, keyword: str, schema: Mapping[str, Any], where: str) -> None:
        value = schema[keyword]
        if keyword == "$ref":
            self._check_ref(value, where)
        elif keyword in ("anyOf", "oneOf"):
            if not self._list(value, where, keyword):
                self._refuse(where, keyword, "is empty")
            self._check_each(dict(enumerate(value)), f"{where}/{keyword}")
            if keyword == "oneOf":
                self._found.append((schema, where))
        else:
            values = [value] if keyword == "const" else self._list(value, where, keyword)
            if not values:
                self._refuse(where, keyword, "is empty")
            for number in _whole_numbers(values):
                if number not in _INT64:
                    self._refuse(where, keyword, f"has {number}, which is over 64 bits")
            types = self._types(schema, where) if "type" in schema else [*_TYPES]
            for each in values:
                if not any(_is_of(each, kind) for kind in types):
                    self._refuse(where, keyword, f"has {each!r}, which is not of type {schema['type']!r}")

    def _check_ref(self, ref: object, where: str) -> None:
        found = self._root
        if not isinstance(ref, str) or not _REF.fullmatch(ref):
            self._refuse(
                where, "$ref", f"{ref!r} is not supported: it must be in the schema, as #/$defs/NAME"
            )
        for part in str(ref).split("/")[1:]:
            found = found.get(part) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            self._refuse(where, "$ref", f"{ref!r} is not in the schema")

    def _check_typed(self, schema: Mapping[str, Any], given: set[str], where: str) -> None:
        types = self._types(schema, where) if "type" in schema else []
        known = {"type"}.union(*(_KEYWORDS[kind] for kind in types))
        if others := given - known:
            needed = [kind for kind, keywords in _KEYWORDS.items() if min(others) in keywords]
            problem = f"needs type {' or '.join(needed)}" if needed else "is not supported"
            self._refuse(where, min(others), problem)
        if "string" in types:
            self._check_string(schema, where)
        if "object" in types:
            self._check_object(schema, where)
        if "array" in types:
            self._check_array(schema, where)
        if "number" in types and "multipleOf" in schema:
            self._refuse(where, "multipleOf", "is not supported for type number")
        if "multipleOf" in schema:
            self._check_multiple(schema, where)
        elif "number" in types:
            self._check_interval(schema, where)

    def _check_multiple(self, schema: Mapping[str, Any], where: str) -> None:
        multiple, bounds = schema["multipleOf"], schema.keys() & (_INTEGER - {"multipleOf"})
        if type(multiple) is not int or multiple < 1:
            self._refuse(where, "multipleOf", f"{multiple!r} is not supported: it must be whole, and over 0")
        least, most = _bounds(schema, 1)
        is_open = bounds and (least is None or most is None or most - least >= _MAX_SPAN)
        if multiple > 1 and (multiple > _MAX_MULTIPLE or is_open):
            problem = f"up to {_MAX_MULTIPLE}, without bounds or with two, of {_MAX_SPAN} values"
            self._refuse(where, "multipleOf", f"is only supported {problem}")

    def _check_interval(self, schema: Mapping[str, Any], where: str) -> None:
        least, most = _bounds(schema, 10**_DECIMALS)
        if least is not None and most is not None and least > most:
            named = min(schema.keys() & (_INTEGER - {"multipleOf"}))
            self._refuse(where, named, f"leaves no number of {_DECIMALS} decimal places")

    def _check_string(self, schema: Mapping[str, Any], where: str) -> None:
        kinds = [
            names for names in ({"pattern"}, {"format"}, {"minLength", "maxLength"}) if names & {*schema}
        ]
        if len(kinds) > 1:
            others = sorted(kinds[1] & {*schema})
            self._refuse(where, min(kinds[0]), f"is not supported beside {others[0]}")
        pattern, form = schema.get("pattern"), schema.get("format")
        if pattern is not None and not (isinstance(pattern, str) and _PATTERN.fullmatch(pattern)):
            problem = (
                f"{pattern!r} is not supported: it must be ^...$, without quotes, backslashes and spaces"
            )
            self._refuse(where, "pattern", f"{problem} by name")
        if isinstance(pattern, str):
            bare = re.sub(r"\\.", "__", pattern)
            if _LOOKAROUND.search(_CLASS.sub("_", bare)):
                self._refuse(where, "pattern", f"{pattern!r} looks ahead or behind, which is not supported")
            if any(_PAST_ASCII.search(each) for each in _CLASS.findall(bare)):
                self._refuse(where, "pattern", f"{pattern!r} has a range from ASCII to beyond")
        if form is not None and not (isinstance(form, str) and form in _FORMATS):
            self._refuse(where, "format", f"{form!r} is not supported")

    def _check_object(self, schema: Mapping[str, Any], where: str) -> None:
        properties = self._check_each(schema.get("properties", {}), f"{where}/properties")
        more = schema.get("additionalProperties", False)
        if more is not False:
            self.check(more, f"{where}/additionalProperties")
            if properties:
                self._refuse(where, "additionalProperties", "is not supported beside properties")
        for name in self._list(schema.get("required", []), where, "required"):
            if not isinstance(name, str) or name not in properties:
                self._refuse(where, "required", f"{name!r} is not in properties")

    def _check_array(self, schema: Mapping[str, Any], where: str) -> None:
        first = self._list(schema.get("prefixItems", []), where, "prefixItems")
        self._check_each(dict(enumerate(first)), f"{where}/prefixItems")
        if schema.get("uniqueItems", False) is not False and schema.get("maxItems") not in (0, 1):
            self._refuse(where, "uniqueItems", "is only supported with maxItems of 0 or 1")
        if schema.get("items", False) is not False:
            self.check(schema["items"], f"{where}/items")

    def _check_each(self, schemas: Any, where: str) -> Mapping[Any, Any]:
        if not isinstance(schemas, dict):
            raise InvalidRequestError(f"{self._name} at {where}", schemas, "must be an object")
        for key, schema in schemas.items():
            self.check(schema, f"{where}/{key}")
        return schemas

    def _list(self, value: Any, where: str, keyword: str) -> list[Any]:
        if not isinstance(value, list):
            raise InvalidRequestError(f"{self._name} at {where}/{keyword}", value, "must be an array")
        return value

    def _types(self, schema: Mapping[str, Any], where: str) -> list[str]:
        given = schema["type"]
        types = given if isinstance(given, list) else [given]
        if not types:
            self._refuse(where, "type", "is empty")
        for kind in types:
            if kind not in [*_TYPES]:
                self._refuse(where, "type", f"{kind!r} is no type")
        return types

    def _refuse(self, where: str, keyword: str, problem: str) -> NoReturn:
        raise UnsupportedError(f"{self._name} at {where}", keyword, problem)


def _whole_numbers(value: Any) -> Iterator[int]:
    """All in a JSON value."""
    if isinstance(value, int):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _whole_numbers(each)


def _bounds(schema: Mapping[str, Any], parts: int) -> tuple[int | None, int | None]:
    """The least and the most whole number of `1 / parts` within the bounds; None without a bound."""

    def units(keyword: str) -> Decimal | None:
        value = schema.get(keyword)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        found = Decimal(repr(value)) * parts if is_number else None
        return found if found is not None and found.is_finite() else None

    least = [math.ceil(each) for each in [units("minimum")] if each is not None]
    least += [math.floor(each) + 1 for each in [units("exclusiveMinimum")] if each is not None]
    most = [math.floor(each) for each in [units("maximum")] if each is not None]
    most += [math.ceil(each) - 1 for each in [units("exclusiveMaximum")] if each is not None]
    return max(least, default=None), min(most, default=None)


def _is_of(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])
