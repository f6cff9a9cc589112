"""`/docs`: the routes and their fields on one page that loads nothing from elsewhere."""

from __future__ import annotations

import html
from typing import Any

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h2{margin-top:2rem;font-size:1.1rem}code{background:#f3f3f3;padding:0 .25em}table{border-collapse:collapse;width:100%}
td,th{text-align:left;border-top:1px solid #ddd;padding:.2rem .6rem .2rem 0;vertical-align:top}
.m{color:#06c;font-weight:600}
"""


def render_docs(openapi: dict[str, Any]) -> str:
    """The page for an OpenAPI document."""
    schemas = openapi.get("components", {}).get("schemas", {})
    sections = [
        _section(method, path, operation, schemas)
        for path, methods in openapi["paths"].items()
        for method, operation in methods.items()
    ]
    title, version = html.escape(openapi["info"]["title"]), html.escape(openapi["info"]["version"])
    about = html.escape(openapi["info"].get("description", ""))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title} {version}</h1><p>{about}</p>"
        "<p>The same as JSON: <a href=openapi.json>openapi.json</a></p>" + "".join(sections) + "</html>"
    )


def _section(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    title = f"<h2><span class=m>{method.upper()}</span> <code>{html.escape(path)}</code></h2>"
    text = f"<p>{html.escape(operation.get('description') or operation.get('summary') or '')}</p>"
    content = operation.get("requestBody", {}).get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    schema = schemas.get(reference.rpartition("/")[2])
    return title + text + (_table(schema) if schema else "")


def _table(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(_type(field))}"
        f"<td>{'required' if name in required else ''}"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<table><tr><th>field<th>type<th>{rows}</table>"


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type(option) for option in field["anyOf"])
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    kind = field.get("type", "any")
    if kind == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(kind)
