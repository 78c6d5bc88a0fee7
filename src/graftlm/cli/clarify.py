"""The verb that asks before it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graftlm.cli.common import AsJson, Device, Quiet, Trust, configure_logging, log, print_result


def clarify(
    text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="What to write anew; - reads stdin.", show_default=False)
    ] = None,
    to: Annotated[str | None, typer.Option(metavar="LANG", help="Language to write in: es, fr, de or ja.")] = None,
    endpoint: Annotated[str | None, typer.Option(metavar="URL", help="A server of OpenAI's protocol.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The server's model.")] = None,
    backbone: Annotated[
        str | None, typer.Option(metavar="DIR", help="Instead of a server: a model on this machine, or a graft.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(metavar="NAME", help="What to do, as rewrite, or a YAML file; by default translate.")
    ] = None,
    budget: Annotated[int | None, typer.Option(min=0, metavar="N", help="Questions, at most; by default 1.")] = None,
    ask_above: Annotated[
        float | None, typer.Option(min=0, metavar="BITS", help="Ask only what is expected to bring more than this.")
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="Ask only where rules find something ambiguous.")] = False,
    answer: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Answers, in order, instead of asking you.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model knows that answers instead of you.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the conversation there, and go on with what is there.")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="S", help="Seconds without a word from the server.")] = 60.0,
    retries: Annotated[int, typer.Option(min=0, metavar="N", help="After what may pass.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Of a reply.")] = 256,
    key_variable: Annotated[
        str, typer.Option(metavar="NAME", help="The environment variable with the server's key.")
    ] = "OPENAI_API_KEY",
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Ask what a text leaves open, then translate or rewrite it."""
    configure_logging()
    from graftlm.generation.generate import read_prompt
    from graftlm.pipelines import pipeline

    room = pipeline("clarify")
    query = None if text is None else read_prompt(text)
    conversation = room.begin(query, resume, template=template, target=to, budget=budget, threshold=ask_above)
    served = {"endpoint": endpoint, "model": model, "timeout": timeout, "retries": retries}
    local = {"backbone": backbone, "device": device, "trust_remote_code": trust_remote_code}
    more = {"max_new_tokens": max_new_tokens, "key_variable": key_variable}
    writer = room.ModelChoice.parse(served | local | more, where="graft clarify").open()
    user = room.user_of(answer, context, writer, None if as_json else room.typed)
    detector = room.first_pass if rules else None
    with room.Shown(conversation, lambda piece: typer.echo(piece, nl=False)) as shown:
        chain = room.Chain(writer, user, detector=detector, on_text=None if as_json else shown)
        found = chain.run(conversation, keep=resume)
        print_result(room.document(found), as_json, lambda: shown.end(found.written.output if found.written else ""))
    if not quiet and not as_json:
        for line in room.tale(found):
            log(line)
