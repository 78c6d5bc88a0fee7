"""The verb that serves a backbone and its grafts over HTTP."""

from __future__ import annotations

import gc
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from graftlm.cli.common import configure_logging, log
from graftlm.cli.inputs import Device, DtypeName, Quantization, Quiet, Trust, flag, option
from graftlm.errors import GraftError, MissingExtraError
from graftlm.files.model_files import find_model


def serve(
    backbone: Annotated[list[str], option("[NAME=]MODEL", "A model's name or folder; or several.", show_default=False)],
    graft: Annotated[list[str] | None, option("NAME=DIR", "Folder of a graft, and its name in requests.")] = None,
    grafts: Annotated[Path | None, option("DIR", "A folder of grafts' folders; new ones are served too.")] = None,
    name: Annotated[str | None, option("NAME", "Name of a single backbone in requests.")] = None,
    host: Annotated[str, option("ADDRESS", "Address; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, option("N", "Port; 0 selects a free one.", min=0, max=65535)] = 8000,
    api_keys: Annotated[Path | None, option("FILE", "Lines of NAME:KEY; by default $GRAFTLM_API_KEYS.")] = None,
    allow_host: Annotated[list[str] | None, option("NAME", "A name that the Host header may have.")] = None,
    allow_origin: Annotated[list[str] | None, option("URL", "A site whose pages may use the server.")] = None,
    chat_template: Annotated[Path | None, option("FILE", "Jinja chat template in place of the tokenizer's.")] = None,
    batch_size: Annotated[int, option("N", "Continuations generated at the same time.", min=1)] = 16,
    queue: Annotated[int, option("N", "Further continuations that may wait.", min=0)] = 64,
    context: Annotated[
        int | None, option("N", "Tokens of prompt and answer; by default the model's limit.", min=1)
    ] = None,
    max_tokens: Annotated[int, option("N", "Maximum tokens of an answer.", min=1)] = 1024,
    prefix_cache: Annotated[int, option("N", "Tokens kept of read texts; 0 keeps none.", min=0)] = 8192,
    seconds: Annotated[float, option("S", "Maximum time of a request.", min=0.1)] = 300.0,
    max_body: Annotated[int, option("BYTES", "Maximum size of a request.", min=1024)] = 2**20,
    grace: Annotated[float, option("S", "For running requests at the end.", min=0)] = 30.0,
    reload_every: Annotated[
        float, option("S", "Interval of checks for changed grafts; 0: only at SIGHUP.", min=0)
    ] = 2.0,
    device: Device = None,
    dtype: Annotated[DtypeName, option("DTYPE", "Precision of the backbone; by default its own.")] = "auto",
    quantize: Annotated[Quantization | None, option("KIND", "Weights in int8 or int4: less memory, slower.")] = None,
    pack: Annotated[
        bool, flag("--pack/--no-pack", "Copy bfloat16 weights for the CPU: prompts, batches faster.")
    ] = True,
    trust_remote_code: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Serve backbones and their grafts to clients of OpenAI's API."""
    from graftlm.serving.settings import KEYS_VARIABLE, LOOPBACK, ServerSettings, read_keys

    pairs = [split_model(text) for text in backbone]
    for _, model in pairs:
        find_model(model)
    if name and (len(pairs) > 1 or pairs[0][0]):
        raise GraftError("--name is for a single backbone without a name: give each one's by --backbone NAME=MODEL.")
    if chat_template and len(pairs) > 1:
        raise GraftError("--chat-template is for a single backbone: put chat_template.jinja into the one's folder.")
    given = named_folders(graft or [])
    settings = ServerSettings(
        host=host,
        port=port,
        hosts=[*LOOPBACK, *allow_host] if allow_host else None,
        origins=allow_origin or [],
        body_bytes=max_body,
        grace=grace,
        reload_seconds=reload_every,
        chat_template=None if chat_template is None else read_template(chat_template),
    )
    settings.check_address()  # now, as loading takes long
    keys = read_keys(api_keys)
    for package in ("fastapi", "llguidance", "openai", "prometheus_client", "uvicorn"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "serve", "A server")
    log(f"loading {', '.join(model for _, model in pairs)}", quiet=quiet)
    gc.disable()  # a million objects are imported to stay, and each full collection would visit all so far
    configure_logging()
    from graftlm.serving import server
    from graftlm.serving.protocol import EngineLimits
    from graftlm.serving.service import load_backbones, name_models, open_service

    models = name_models((name or own, model) for own, model in pairs)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "quantize": quantize}
    loaded = load_backbones(models, given, grafts, device=device, **options)
    gc.enable()
    server.log_to_stderr(quiet)
    sizes = {"batch_size": batch_size, "queue": queue, "max_tokens": max_tokens, "prefix_tokens": prefix_cache}
    limits = EngineLimits(**sizes, context=context, seconds=seconds, pack=pack)
    service = open_service(loaded, given, grafts, settings=settings, limits=limits, keys=keys)
    if not settings.is_local and not keys:
        log(f"whoever reaches {host} can use this server: --api-keys (or {KEYS_VARIABLE}) asks for a key.")
    server.serve(service, lambda address: log(f"serving {', '.join(service.engine.names)} at {address}"))


def split_model(text: str) -> tuple[str | None, str]:
    """The name, if there is one, and the model of `[NAME=]MODEL`."""
    name, equals, model = text.partition("=")
    if equals and not (name and model):
        raise GraftError(f"--backbone takes MODEL or NAME=MODEL, such as reader=bert-base-uncased, but found {text!r}.")
    return (name, model) if equals and not Path(text).exists() else (None, text)


def named_folders(pairs: list[str]) -> dict[str, Path]:
    """Folders by name, from `NAME=DIR` pairs. Raises GraftError if a pair has another form, or a name is not unique."""
    folders: dict[str, Path] = {}
    for pair in pairs:
        name, _, folder = pair.partition("=")
        if not name or not folder:
            raise GraftError(f"--graft takes NAME=DIR, such as danish=runs/danish/graft, but {pair!r} was given.")
        if name in folders:
            raise GraftError(f"--graft gives the name {name} twice: give each graft one of its own.")
        folders[name] = Path(folder)
    return folders


def read_template(file: Path) -> str:
    """The text of a chat template."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GraftError(f"The chat template {file} can't be read ({error}): name a text file with Jinja.") from None
