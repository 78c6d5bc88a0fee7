"""The verb that serves a backbone and its grafts over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graftlm.cli.common import Device, Quiet, Trust, configure_logging, log
from graftlm.errors import GraftError, MissingExtraError
from graftlm.io import check_model_folder


def serve(
    backbone: Annotated[str, typer.Option(metavar="NAME", help="A model's name or folder.", show_default=False)],
    graft: Annotated[
        list[str] | None, typer.Option(metavar="NAME=DIR", help="A graft's folder, by the name that requests use.")
    ] = None,
    grafts: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder of grafts' folders: all of them, and what comes there.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What requests call the backbone; by default its own name.")
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="0 takes a free one.")] = 8000,
    api_keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="One NAME:KEY a line; by default what GRAFTLM_API_KEYS holds, if anything."),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A name that requests may call the server by.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A site whose pages may use the server from a browser.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Jinja template of chats, instead of the tokenizer's own.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Continuations that are written at a time.")] = 16,
    queue: Annotated[int, typer.Option(min=0, metavar="N", help="Further ones that may wait.")] = 64,
    context: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of a prompt and its answer; by default the model's.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of an answer, at most.")] = 1024,
    seconds: Annotated[float, typer.Option(min=0.1, metavar="S", help="That one request may take.")] = 300.0,
    max_body: Annotated[int, typer.Option(min=1024, metavar="BYTES", help="The largest request.")] = 2**20,
    grace: Annotated[float, typer.Option(min=0, metavar="S", help="To finish what runs when the server stops.")] = 30.0,
    reload_every: Annotated[
        float, typer.Option(min=0, metavar="S", help="Look for changed grafts; 0: when a SIGHUP comes.")
    ] = 2.0,
    device: Device = None,
    trust_remote_code: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Serve a backbone and its grafts to clients of OpenAI's API."""
    check_model_folder(backbone)
    given = named_folders(graft or [])
    chat_template_text = _read(chat_template)
    configure_logging()
    try:
        from graftlm.serving import server
        from graftlm.serving.service import EngineLimits, open_service
        from graftlm.serving.settings import KEYS_VARIABLE, LOOPBACK, ServerSettings, read_keys
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "fastapi", "serve", "A server") from None
    from graftlm.backbone import default_device, load_backbone

    settings = ServerSettings(
        host=host,
        port=port,
        hosts=[*LOOPBACK, *allow_host] if allow_host else None,
        origins=allow_origin or [],
        body_bytes=max_body,
        grace=grace,
        reload_seconds=reload_every,
        chat_template=chat_template_text,
    )
    limits = EngineLimits(batch_size=batch_size, queue=queue, context=context, max_tokens=max_tokens, seconds=seconds)
    keys = read_keys(api_keys)
    server.log_to_stderr(quiet)
    loaded = load_backbone(backbone, device=device or default_device(), trust_remote_code=trust_remote_code)
    service = open_service(loaded, given, grafts, name=name, settings=settings, limits=limits, keys=keys)
    if not settings.is_local and not keys:
        log(f"whoever reaches {host} can use this server: --api-keys (or {KEYS_VARIABLE}) asks for a key.")
    server.serve(service, lambda address: log(f"serving {', '.join(service.engine.names)} at {address}"))


def named_folders(pairs: list[str]) -> dict[str, Path]:
    """Folders by name, from `NAME=DIR` pairs.

    Raises:
        GraftError: a pair has another form, or a name is not unique.
    """
    folders: dict[str, Path] = {}
    for pair in pairs:
        name, equals, folder = pair.partition("=")
        if not equals or not name or not folder:
            raise GraftError(f"--graft takes NAME=DIR, such as danish=runs/danish/graft, but {pair!r} was given.")
        if name in folders:
            raise GraftError(f"--graft gives the name {name} twice: give each graft one of its own.")
        folders[name] = Path(folder)
    return folders


def _read(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GraftError(f"The chat template {file} can't be read ({error}): name a text file with Jinja.") from None
