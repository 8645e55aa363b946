"""JSON against a schema that somebody else's server gives; needs jsonschema and referencing."""

import json
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import extend, validator_for
from referencing import Registry


def validator(schema: Any) -> Any:
    """Raises jsonschema's SchemaError where it is no schema. No `$ref` is fetched."""
    # Patterns are ECMA's, which Python reads otherwise: they are the server's to check.
    known = extend(validator_for(schema, Draft202012Validator), {"pattern": None})
    known.check_schema(schema, format_checker=None)
    return known(schema, registry=Registry())


def misfit(schema: Any, value: Any) -> str:
    """Where and why the value does not fit, such as ".x: 'two' is not of type 'integer'", or ""."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:  # NaN, which Python's reader lets through
        return f": {error}"
    worst = best_match(validator(schema).iter_errors(value))
    return f"{worst.json_path[1:]}: {worst.message:.300}" if worst else ""
