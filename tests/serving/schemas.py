"""JSON schemas drawn at random from what llguidance follows, whose values a random model ends in time."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

Schema = dict[str, Any]
_NAMES = ("a", "b c", 'q"', "é", "", "long_name", "a.b", "$x", "\\")
_FORMATS = ("date", "ipv4", "uuid", "duration")  # of email and time llguidance knows the letters, not all limits
_PATTERNS = ("^[a-f]{1,4}$", "^(ab|cd)+$", r"^\d{3}-\d{2}$", "^[A-Z][a-z]?$", "^x.?y$")
_CONSTANTS: tuple[Any, ...] = (None, True, 0, -1, 2.5, "", "é\n", '"', [], [1, [2]], {"x": [None]}, {"b c": "d"})


def generated_schemas(count: int) -> list[Schema]:
    """This many different schemas."""
    schemas = dict[str, Schema]()
    for seed in itertools.count():
        if len(schemas) == count:
            return list(schemas.values())
        schema = SchemaDraw(random.Random(seed)).whole()
        schemas[json.dumps(schema)] = schema
    raise AssertionError


class SchemaDraw:
    """Draws one schema; parts that are used twice are its `$defs`."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.shared = draw, dict[str, Schema]()

    def whole(self) -> Schema:
        """The schema; some have a part that refers to itself."""
        schema = self.any(depth=self.draw.choice([0, 1, 2, 2, 3]))
        if self.draw.random() < 0.1:
            ends: Schema = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/link"}]}
            self.shared["link"] = self.closed({"value": self.scalar(), "next": ends})
            schema = self.closed({"first": {"$ref": "#/$defs/link"}, "rest": schema})
        return schema | ({"$defs": self.shared} if self.shared else {})

    def any(self, depth: int) -> Schema:
        if depth == 0:
            return self.scalar()
        kinds = [self.object, self.object, self.array, self.tuple, self.either, self.both, self.reference, self.table]
        return self.draw.choice([*kinds, self.open])(depth - 1)

    def scalar(self) -> Schema:
        kinds = [self.integer, self.number, self.string, self.string, self.pattern, self.format, self.fixed, self.types]
        return self.draw.choice(kinds)()

    def integer(self) -> Schema:
        low = self.draw.randint(-1000, 1000)
        high = low + self.draw.randint(20, 5000)
        schema: Schema = {"type": "integer"} | self.draw.choice(
            [
                {"minimum": low, "maximum": high},
                {"exclusiveMinimum": low, "exclusiveMaximum": high},
                {"minimum": 0, "maximum": high + 2000},
            ]
        )
        return schema | self.draw.choice([{}, {}, {"multipleOf": self.draw.choice([2, 5, 7, 10])}])

    def number(self) -> Schema:
        low = round(self.draw.uniform(-50, 50), 2)
        steps = self.draw.choice([0.5, 0.25, 0.1, 1])
        return {"type": "number", "minimum": low, "maximum": low + self.draw.randint(2, 300), "multipleOf": steps}

    def string(self) -> Schema:
        shortest = self.draw.choice([0, 0, 1, 3])
        longest = shortest + self.draw.randint(0, 6)
        return {"type": "string", "maxLength": longest} | ({"minLength": shortest} if shortest else {})

    def pattern(self) -> Schema:
        return {"type": "string", "pattern": self.draw.choice(_PATTERNS)} | self.draw.choice([{}, {"maxLength": 6}])

    def format(self) -> Schema:
        return {"type": "string", "format": self.draw.choice(_FORMATS)}

    def fixed(self) -> Schema:
        values = self.draw.sample(_CONSTANTS, self.draw.randint(1, 4))
        return {"const": values[0]} if len(values) == 1 else {"enum": values}

    def types(self) -> Schema:
        return {"type": self.draw.sample(["boolean", "null", "integer"], 2), "maximum": 99, "minimum": 0}

    def closed(self, properties: Schema, optional: int = 0) -> Schema:
        """An object of these properties alone, of which the last ones are optional."""
        required = list(properties)[: len(properties) - optional]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def object(self, depth: int) -> Schema:
        names = self.draw.sample(_NAMES, self.draw.randint(0, 4))
        optional = self.draw.choice([0, 0, min(1, len(names)), len(names)])
        return self.closed({name: self.any(depth) for name in names}, optional)

    def open(self, depth: int) -> Schema:
        """An object with further names."""
        fixed = self.closed({name: self.any(depth) for name in self.draw.sample(_NAMES, 2)})
        return fixed | {"additionalProperties": self.draw.choice([self.fixed(), {"type": "boolean"}])}

    def table(self, depth: int) -> Schema:
        """An object with names of a pattern."""
        inner = self.any(depth)
        return {"type": "object", "patternProperties": {"^x[0-9]{1,2}$": inner}, "additionalProperties": False}

    def array(self, depth: int) -> Schema:
        shortest = self.draw.choice([0, 0, 1, 2])
        schema: Schema = {"type": "array", "items": self.any(depth), "maxItems": shortest + self.draw.randint(0, 2)}
        return schema | ({"minItems": shortest} if shortest else {})

    def tuple(self, depth: int) -> Schema:
        items = [self.any(depth) for _ in range(self.draw.randint(1, 3))]
        schema: Schema = {"type": "array", "prefixItems": items, "minItems": self.draw.randint(0, len(items))}
        return schema | self.draw.choice([{"items": False}, {"items": self.scalar(), "maxItems": len(items) + 1}])

    def either(self, depth: int) -> Schema:
        return {"anyOf": [self.any(depth) for _ in range(self.draw.randint(2, 3))]}

    def both(self, depth: int) -> Schema:
        """A value that two schemas describe."""
        low = self.draw.randint(-20, 0)
        least = {"minimum": low, "maximum": low + 200}
        return {"allOf": [{"type": "integer", "minimum": low - 10}, {"type": ["integer", "null"], **least}]}

    def reference(self, depth: int) -> Schema:
        name = self.draw.choice(["one", "Two Words", "three"])
        if name not in self.shared:
            self.shared[name] = self.array(0) if depth else self.scalar()
        quoted = name.replace(" ", "%20")
        return {"$ref": f"#/$defs/{quoted}"}
