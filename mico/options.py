"""Options that are shared by several commands, and groups of related options.

Imports only lightweight modules, since every command imports this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON with stable names.")]
Database = Annotated[str | None, typer.Option(help="sqlite:///FILE or postgresql://USER@HOST/NAME.")]
Limit = Annotated[int, typer.Option(min=1, max=1_000, help="Maximum number of entries, newest first.")]
AuditReason = Annotated[str, typer.Option(help="The reason, kept by the audit.")]
SiteName = Annotated[str, typer.Argument(help="A site's name, as in mico sites list.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what it would do.")]
KeyId = Annotated[str, typer.Argument(help="A key's id, as in mico keys list.")]


class GatewayOptions(NamedTuple):
    """The gateway that a command sends requests to. Unpack it into the arguments of `Session.client`."""

    base_url: Annotated[
        str | None, typer.Option(help="The gateway's URL, such as http://127.0.0.1:8080/v1.")
    ] = None
    api_key: Annotated[
        str | None, typer.Option(help="The API key; MICO_API_KEY keeps it out of the history.")
    ] = None


class OrderOptions(NamedTuple):
    """Options of an operator's order to a site: its duration, and whether to confirm or only preview it."""

    lasts: Annotated[
        str | None, typer.Option("--for", help="Undo it after a time, such as 90s, 30m, 2h, 1d.")
    ] = None
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it despite warnings.")] = False
    dry_run: DryRun = False


class RequestFile(NamedTuple):
    """A file of requests for a batch, passed as an argument or as an option."""

    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="JSON lines, one request each, in OpenAI's format.")
    ] = None
    source: Annotated[Path | None, typer.Option("--input", "-i", help="The same as FILE.")] = None


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Expand each option group, a parameter whose type is a NamedTuple, into options for its fields.

    Typer derives the options of a command from the function's signature and does not support groups. The
    returned function has the expanded signature, in the same order, and passes one tuple per group to
    `command`. Every field of a group requires a default.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: each.annotation
        for name, each in signature.parameters.items()
        if isinstance(each.annotation, type) and issubclass(each.annotation, tuple)
    }

    @wraps(command)
    def expanded(**options: Any) -> None:
        for name, group in groups.items():
            options[name] = group(*(options.pop(field) for field in group._fields))
        command(**options)

    def parameters() -> Iterator[inspect.Parameter]:
        for name, each in signature.parameters.items():
            if name in groups:
                group = groups[name]
                types = get_type_hints(group, include_extras=True)
                for field, default in group._field_defaults.items():
                    yield inspect.Parameter(
                        field,
                        inspect.Parameter.KEYWORD_ONLY,
                        default=default,
                        annotation=types[field],
                    )
            else:
                yield each.replace(kind=inspect.Parameter.KEYWORD_ONLY)

    vars(expanded)["__signature__"] = signature.replace(parameters=list(parameters()))
    return expanded
