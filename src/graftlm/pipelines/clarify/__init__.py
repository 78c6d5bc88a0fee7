"""Ask the question whose answer changes the output, then write the output (see docs/methods/clarify.md)."""

from graftlm.pipelines.clarify.ambiguity import find_ambiguities
from graftlm.pipelines.clarify.batches import in_order
from graftlm.pipelines.clarify.bill import Bill
from graftlm.pipelines.clarify.chain import Chain, HumanUser, RecordedUser, SimulatedUser, User
from graftlm.pipelines.clarify.conversation import Conversation, Gain, Question
from graftlm.pipelines.clarify.costs import Cost, Prices
from graftlm.pipelines.clarify.endpoint import Endpoint, EndpointConfig
from graftlm.pipelines.clarify.gain import GainEstimator
from graftlm.pipelines.clarify.journal import Journal
from graftlm.pipelines.clarify.models import ChatModel, LocalModel, Reply
from graftlm.pipelines.clarify.opening import ModelOptions, choose_user, open_conversation, open_model, open_user_model
from graftlm.pipelines.clarify.templates import Template, load_template, template_names
from graftlm.pipelines.clarify.terminal import TerminalPrinter, ask_terminal, summary_lines
