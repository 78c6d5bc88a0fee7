"""The verb that serves a backbone and its grafts over HTTP."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from graftlm.cli.common import configure_logging, log
from graftlm.cli.inputs import Device, DtypeName, Quantization, Quiet, Trust, flag, option
from graftlm.errors import GraftError, MissingExtraError
from graftlm.files.model_files import find_model

_PACKAGES = ("fastapi", "llguidance", "openai", "prometheus_client", "uvicorn")


def serve(
    backbone: Annotated[
        list[str],
        option("[NAME=]MODEL", "Name or folder of a model; may be repeated.", show_default=False),
    ],
    graft: Annotated[
        list[str] | None,
        option("NAME=DIR", "Folder of a graft, and its name in requests; may be repeated."),
    ] = None,
    grafts: Annotated[
        Path | None,
        option("DIR", "Folder with grafts' folders; new ones are served too."),
    ] = None,
    name: Annotated[str | None, option("NAME", "Name of a single backbone in requests.")] = None,
    host: Annotated[str, option("ADDRESS", "Address to listen on; 0.0.0.0 listens on all networks.")] = "127.0.0.1",
    port: Annotated[int, option("N", "Port to listen on; 0 selects a free one.", min=0, max=65535)] = 8000,
    api_keys: Annotated[
        Path | None,
        option("FILE", "File with lines of NAME:KEY; by default $GRAFTLM_API_KEYS."),
    ] = None,
    allow_host: Annotated[list[str] | None, option("NAME", "Further allowed value of the Host header.")] = None,
    allow_origin: Annotated[list[str] | None, option("URL", "Site whose pages may use the server.")] = None,
    chat_template: Annotated[
        Path | None,
        option("FILE", "Jinja chat template that replaces the tokenizer's own."),
    ] = None,
    batch_size: Annotated[
        int,
        option("N", "Maximum number of continuations generated at the same time.", min=1),
    ] = 16,
    queue: Annotated[int, option("N", "Maximum number of further continuations that wait.", min=0)] = 64,
    context: Annotated[
        int | None,
        option("N", "Maximum tokens of a prompt and its answer; by default the model's limit.", min=1),
    ] = None,
    max_tokens: Annotated[int, option("N", "Maximum tokens of an answer.", min=1)] = 1024,
    prefix_cache: Annotated[int, option("N", "Tokens in the prefix cache; 0 disables it.", min=0)] = 8192,
    seconds: Annotated[float, option("S", "Maximum duration of a request.", min=0.1)] = 300.0,
    max_body: Annotated[int, option("BYTES", "Maximum size of a request.", min=1024)] = 2**20,
    grace: Annotated[float, option("S", "Time for running requests to finish at shutdown.", min=0)] = 30.0,
    reload_every: Annotated[
        float,
        option("S", "Interval of checks for changed grafts; 0 checks only at SIGHUP.", min=0),
    ] = 2.0,
    device: Device = None,
    dtype: Annotated[DtypeName, option("DTYPE", "Precision of the backbone; by default its own.")] = "auto",
    quantize: Annotated[
        Quantization | None,
        option("KIND", "Quantize weights to int8 or int4: less memory, slower."),
    ] = None,
    pack: Annotated[
        bool,
        flag("--pack/--no-pack", "Prepack bfloat16 weights for faster CPU inference."),
    ] = True,
    compile_steps: Annotated[
        bool | None,
        flag("--compile/--no-compile", "Compile decode steps; by default on GPUs only."),
    ] = None,
    trust_remote_code: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Serve backbones and their grafts to clients of OpenAI's API."""
    from graftlm.serving.settings import KEYS_VARIABLE, LOOPBACK, ServerSettings, read_keys

    pairs = [split_model(text) for text in backbone]
    _check_backbones(pairs, name, chat_template)
    folders = named_folders(graft or [])
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
    settings.check_address()  # before the models are loaded, which takes long
    keys = read_keys(api_keys)
    _check_packages()
    log(f"loading {', '.join(model for _, model in pairs)}", quiet=quiet)
    with _without_garbage_collection():
        configure_logging()
        from graftlm.serving import server
        from graftlm.serving.backbones import load_backbones, name_models
        from graftlm.serving.protocol import EngineLimits
        from graftlm.serving.service import open_service

        models = name_models((name or own_name, model) for own_name, model in pairs)
        backbones = load_backbones(
            models,
            folders,
            grafts,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            quantize=quantize,
        )
    server.log_to_stderr(quiet)
    limits = EngineLimits(
        batch_size=batch_size,
        queue=queue,
        context=context,
        max_tokens=max_tokens,
        seconds=seconds,
        prefix_tokens=prefix_cache,
        pack=pack,
        compile=compile_steps,
    )
    service = open_service(backbones, folders, grafts, settings=settings, limits=limits, keys=keys)
    if not settings.is_local and not keys:
        log(f"everyone who reaches {host} can use this server: require a key with --api-keys or {KEYS_VARIABLE}.")
    for member in service.members.values() or [service]:
        if member.tokenizer.describes_tools:
            log(
                f"calls of tools in the chat template of {member.name} have a form that can't be found in answers: "
                "tools are described in a system message instead, unlike in training.",
                quiet=quiet,
            )
    server.serve(service, lambda address: log(f"serving {', '.join(service.engine.names)} at {address}"))


def _check_backbones(
    pairs: list[tuple[str | None, str]],
    name: str | None,
    chat_template: Path | None,
) -> None:
    """Check the models' files, and that the options for a single backbone are not used with several.

    Raises:
        BackboneError: a local path is not a model.
        GraftError: an option does not fit the backbones.
    """
    for _, model in pairs:
        find_model(model)
    if name and len(pairs) > 1:
        raise GraftError(
            f"--name {name} was given with {len(pairs)} backbones, but it names a single one: write --backbone "
            "NAME=MODEL for each, and leave --name out."
        )
    if name and pairs[0][0]:
        raise GraftError(
            f"The backbone has two names, {pairs[0][0]} (--backbone) and {name} (--name), but one is expected: leave "
            "--name out."
        )
    if chat_template and len(pairs) > 1:
        raise GraftError(
            f"--chat-template was given for {len(pairs)} backbones, but it is for a single one: put "
            "chat_template.jinja into the model's folder instead."
        )


def _check_packages() -> None:
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise MissingExtraError(package, "serve", "A server")


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, which would visit the objects of all imported modules again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def split_model(text: str) -> tuple[str | None, str]:
    """Return the name and the model of `[NAME=]MODEL`.

    A text that is an existing path is taken as a model without a name, even if it contains `=`.

    Returns:
        The name, which is None if there is none, and the model.

    Raises:
        GraftError: the name or the model is empty.
    """
    name, equals, model = text.partition("=")
    if not equals:
        return None, text
    if not (name and model):
        raise GraftError(
            f"--backbone is {text!r}, but MODEL or NAME=MODEL is expected, such as reader=bert-base-uncased: add the "
            "missing part."
        )
    if Path(text).exists():
        return None, text
    return name, model


def named_folders(pairs: list[str]) -> dict[str, Path]:
    """Return folders by name, from `NAME=DIR` pairs.

    Raises:
        GraftError: a pair has another form, or a name is not unique.
    """
    folders: dict[str, Path] = {}
    for pair in pairs:
        name, _, folder = pair.partition("=")
        if not name or not folder:
            raise GraftError(
                f"--graft is {pair!r}, but NAME=DIR is expected, such as danish=runs/danish/graft: add the missing "
                "part."
            )
        if name in folders:
            raise GraftError(f"--graft has the name {name} twice: give the grafts different names.")
        folders[name] = Path(folder)
    return folders


def read_template(file: Path) -> str:
    """Return the text of a file with a chat template. Its Jinja is not checked.

    Raises:
        GraftError: the file can't be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise GraftError(f"The chat template {file} can't be read ({error.strerror}): name a Jinja file.") from None
    except UnicodeDecodeError as error:
        raise GraftError(
            f"The chat template {file} is not UTF-8 text (byte {error.start}): name a Jinja file in UTF-8."
        ) from None
