"""The verb `clarify`: ask what a text leaves open, then write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graftlm.cli.common import configure_logging, log, print_result
from graftlm.cli.inputs import AsJson, Device, Quiet, Trust, argument, flag, option


def clarify(
    text: Annotated[str | None, argument("[TEXT]", "Text to rewrite; - reads stdin.")] = None,
    to: Annotated[str | None, option("LANG", "Target language: es, fr, de or ja.")] = None,
    endpoint: Annotated[str | None, option("URL", "An OpenAI-compatible server.")] = None,
    model: Annotated[str | None, option("NAME", "The server's model.")] = None,
    backbone: Annotated[str | None, option("DIR", "Local model or graft, folder or name, instead of a server.")] = None,
    template: Annotated[str | None, option("NAME", "Task, as in rewrite, or YAML file; translate by default.")] = None,
    budget: Annotated[int | None, option("N", "Maximum questions; 1 by default.", min=0)] = None,
    ask_above: Annotated[
        float | None, option("BITS", "Minimum expected information gain of a question.", min=0)
    ] = None,
    rules: Annotated[bool, flag("--rules", "Ask only where rules detect an ambiguity.")] = False,
    answer: Annotated[list[str] | None, option("TEXT", "Answer to the next question. Repeatable.")] = None,
    context: Annotated[str | None, option("TEXT", "Context from which the model answers the questions.")] = None,
    resume: Annotated[Path | None, option("FILE", "Save the conversation to a file, or resume the one in it.")] = None,
    timeout: Annotated[float, option("S", "Seconds to wait for data from the server.")] = 60.0,
    retries: Annotated[int, option("N", "Retries after temporary errors.", min=0)] = 3,
    max_new_tokens: Annotated[int, option("N", "Maximum new tokens per reply.", min=1)] = 256,
    key_variable: Annotated[str, option("NAME", "Environment variable with the server's API key.")] = "OPENAI_API_KEY",
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Ask what a text leaves open, then translate or rewrite it."""
    configure_logging()
    from graftlm.generation.generate import read_prompt
    from graftlm.pipelines import pipeline

    package = pipeline("clarify")
    query = None if text is None else read_prompt(text)
    conversation = package.open_conversation(
        query, resume, template=template, target=to, budget=budget, threshold=ask_above, answers=answer
    )
    translator = package.open_model(
        endpoint=endpoint,
        model=model,
        backbone=backbone,
        device=device,
        trust_remote_code=trust_remote_code,
        max_new_tokens=max_new_tokens,
        key_variable=key_variable,
        timeout=timeout,
        retries=retries,
    )
    user = package.choose_user(answer, context, translator, None if as_json else package.ask_terminal)
    detector = package.find_ambiguities if rules else None
    with package.TerminalPrinter(conversation, lambda part: typer.echo(part, nl=False)) as printer:
        chain = package.Chain(translator, user, detector=detector, on_text=None if as_json else printer)
        conversation = chain.run(conversation, keep=resume)
        output = conversation.written.output if conversation.written else ""
        print_result(conversation.to_json(), as_json, lambda: printer.finish(output))
    if not quiet and not as_json:
        for line in package.summary_lines(conversation):
            log(line)
