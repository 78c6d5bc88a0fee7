"""The verb that serves a backbone and its grafts over HTTP."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from graftlm.cli.common import configure_logging, log
from graftlm.cli.exporting import read_mixtures
from graftlm.cli.inputs import Device, DtypeName, Quantization, Quiet, Trust, flag, option
from graftlm.errors import GraftError, MissingExtraError, first_line
from graftlm.files.model_files import find_model

if TYPE_CHECKING:
    from graftlm.serving.vllm.serving import VllmOptions

EngineName = Literal["own", "vllm"]
_VLLM_SIZES = {"context": "--max-model-len", "batch_size": "--max-num-seqs"}
"""vLLM's arguments for options of both engines."""
_SET_BY_GRAFTLM = {"--model", "--served-model-name", "--host", "--port", "--api-key", "--uds", "--lora-modules"}
_VLLM_ENGINE = {"vllm_python", "vllm_args", "mix", "slots"}
"""Parameters that only the engine vllm has."""
_OWN_ENGINE = {"queue", "max_tokens", "prefix_cache", "seconds", "device", "quantize", "pack", "compile_steps"}
"""Parameters that only GraftLM's own engine has."""
_PACKAGES = ("fastapi", "llguidance", "openai", "prometheus_client", "uvicorn")


def serve(
    context_of_command: typer.Context,
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
        option("DIR", "Folder with folders of grafts or runs; new ones are served too."),
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
    engine: Annotated[EngineName, option("NAME", "GraftLM's own engine, or vLLM with the grafts as LoRA.")] = "own",
    vllm_python: Annotated[
        str | None,
        option("PYTHON", "Python with vLLM; by default $GRAFTLM_VLLM_PYTHON, or this one."),
    ] = None,
    vllm_args: Annotated[str, option("ARGS", "Arguments of vLLM, as in '--tensor-parallel-size 2'.")] = "",
    mix: Annotated[list[str] | None, option("NAME=A:X+B:Y", "With vLLM: a sum of grafts. Repeatable.")] = None,
    slots: Annotated[int | None, option("N", "With vLLM: number of different adapters in a batch.", min=1)] = None,
    trust_remote_code: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Serve backbones and their grafts to clients of OpenAI's API."""
    given = _given_options(context_of_command)
    _check_engine(engine, given, len(backbone))
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
    options = None
    if engine == "vllm":
        sizes = {"context": context, "batch_size": batch_size if "batch_size" in given else None}
        arguments = [*_vllm_arguments(sizes, trust_remote_code), *_split_arguments(vllm_args)]
        options = _vllm_options(vllm_python, arguments, slots, mix or [])
        device = "cpu"  # vLLM needs the accelerator
    log(f"loading {', '.join(model for _, model in pairs)}", quiet=quiet)
    with _without_garbage_collection():
        configure_logging()
        from graftlm.serving import server
        from graftlm.serving.backbones import load_backbones, name_models
        from graftlm.serving.protocol import EngineLimits
        from graftlm.serving.service import open_service
        from graftlm.store.stages import chosen_graft

        folders = {graft: chosen_graft(folder) for graft, folder in folders.items()}
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
    if not settings.is_local and not keys:
        log(f"everyone who reaches {host} can use this server: require a key with --api-keys or {KEYS_VARIABLE}.")
    if options is not None:
        from graftlm.serving.vllm.serving import serve_with_vllm

        ((served_name, served),) = backbones.items()
        serve_with_vllm(
            served,
            served_name,
            folders,
            grafts,
            options,
            settings=settings,
            keys=keys,
            on_ready=lambda address: log(f"serving {served_name} and its grafts by vLLM at {address}"),
        )
        return
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
    for member in service.members.values() or [service]:
        if member.tokenizer.describes_tools:
            log(
                f"calls of tools in the chat template of {member.name} have a form that can't be found in answers: "
                "tools are described in a system message instead, unlike in training.",
                quiet=quiet,
            )
    server.serve(service, lambda address: log(f"serving {', '.join(service.engine.names)} at {address}"))


def _given_options(context: typer.Context) -> set[str]:
    """Return the names of the parameters that the command line sets."""
    names = set()
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            names.add(name)
    return names


def _check_engine(engine: EngineName, given: set[str], backbones: int) -> None:
    """Check that the given options belong to the engine.

    Raises:
        GraftError: an option does not, or vLLM was asked for several backbones.
    """
    foreign = _OWN_ENGINE if engine == "vllm" else _VLLM_ENGINE
    misplaced = sorted(given & foreign)
    if misplaced:
        name = f"--{misplaced[0].replace('_', '-')}"
        remedy = "leave it out, or set vLLM's own option (--vllm-args)" if engine == "vllm" else "add --engine vllm"
        raise GraftError(f"{name} was given, which the engine {engine} does not have: {remedy}.")
    if engine == "vllm" and backbones > 1:
        raise GraftError(
            f"--engine vllm was given with {backbones} backbones, but vLLM holds one: start a server for each."
        )


def _vllm_arguments(sizes: Mapping[str, int | None], trust_remote_code: bool) -> list[str]:
    """Return the arguments of vLLM that options of `graft serve` stand for."""
    arguments = []
    for name, value in sizes.items():
        if value is not None:
            arguments += [_VLLM_SIZES[name], str(value)]
    if trust_remote_code:
        arguments.append("--trust-remote-code")
    return arguments


def _split_arguments(text: str) -> list[str]:
    """Return arguments as a shell would split them.

    Raises:
        GraftError: a quotation mark has no partner, or an argument is one that GraftLM sets.
    """
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise GraftError(
            f"--vllm-args can't be split into arguments ({first_line(error)}): quote as in a shell."
        ) from None
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in _SET_BY_GRAFTLM:
            raise GraftError(f"--vllm-args has {name}, which graft serve sets: leave it out.")
    return arguments


def _vllm_options(python: str | None, arguments: list[str], slots: int | None, mix: list[str]) -> VllmOptions:
    """Return how vLLM is started, after a check that it is there."""
    from graftlm.serving.vllm.installation import find_vllm
    from graftlm.serving.vllm.serving import VllmOptions

    mixtures = read_mixtures(mix)
    return VllmOptions(find_vllm(python), slots=slots, mixtures=mixtures, arguments=arguments)


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
