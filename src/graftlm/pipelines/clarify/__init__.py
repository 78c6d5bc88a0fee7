"""Ask the one question that changes the answer, then write once (see README.md in this folder)."""

from graftlm.pipelines.clarify.chain import Chain, Meter, baseline
from graftlm.pipelines.clarify.conversation import Conversation
from graftlm.pipelines.clarify.endpoint import Endpoint, EndpointConfig
from graftlm.pipelines.clarify.local import Local
from graftlm.pipelines.clarify.needed import information_gain
from graftlm.pipelines.clarify.opening import ModelChoice, Shown, begin, document, first_pass, tale, typed, user_of
from graftlm.pipelines.clarify.roles import Person, Recorded, Reply, Simulated, User, Writer
from graftlm.pipelines.clarify.templates import Template, load_template, template_names
from graftlm.pipelines.clarify.turns import Answered, Asked, Cost, Gain, Question, Refused, Skipped, Written

__all__ = [
    "Answered",
    "Asked",
    "Chain",
    "Conversation",
    "Cost",
    "Endpoint",
    "EndpointConfig",
    "Gain",
    "Local",
    "Meter",
    "ModelChoice",
    "Person",
    "Question",
    "Recorded",
    "Refused",
    "Reply",
    "Shown",
    "Simulated",
    "Skipped",
    "Template",
    "User",
    "Writer",
    "Written",
    "baseline",
    "begin",
    "document",
    "first_pass",
    "information_gain",
    "load_template",
    "tale",
    "template_names",
    "typed",
    "user_of",
]
