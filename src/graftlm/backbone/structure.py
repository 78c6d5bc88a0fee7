"""The structure of a model without a proven family: found or checked in a pass on tensors without storage."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from graftlm.backbone.families import Family
from graftlm.backbone.family_finder import find_family
from graftlm.backbone.module_trace import MisfitError, ModuleTrace
from graftlm.backbone.modules import architecture, has_module
from graftlm.backbone.row_checks import check_paths, check_values
from graftlm.errors import UnknownFamilyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_REMEDY = (
    "with graftlm.backbone.register_family or with the key backbone.family of a recipe, from the paths that "
    "print(model.base_model) shows."
)


class Structure:
    """The structure of one architecture.

    Args:
        trace: the recorded pass of a model of this architecture.
    """

    def __init__(self, trace: ModuleTrace) -> None:
        self._trace = trace

    def family(self, registered: Family | None) -> Family:
        """Return the module paths of the architecture as a `Family`.

        Args:
            registered: a registered `Family` to validate; None to infer one.

        Raises:
            UnknownFamilyError: the family does not fit the model, or none was found.
        """
        if registered is not None and self._trace.error is not None:
            return registered  # Widths and activation are checked in the live model.
        try:
            return self._checked(registered)
        except MisfitError as error:
            model = self._trace.model
            kind = f"the model type {model.config.model_type!r} ({type(model).__name__})"
            if registered is None:
                problem = f"GraftLM has no family for {kind}, and found no structure: {error}. Describe it"
            else:
                problem = f"The family of {kind} does not fit: {error}. Register a corrected family"
            raise UnknownFamilyError(f"{problem} {_REMEDY}") from None

    def _checked(self, registered: Family | None) -> Family:
        """Return the given or found family after all checks."""
        trace = self._trace
        if trace.error is not None:
            raise MisfitError(f"its pass without weights fails ({trace.error})")
        family = registered or find_family(trace)
        layers = check_paths(trace, family)
        if registered is not None:
            check_values(trace, registered, layers)
        all_attend = all(has_module(layer, family.attention.entry) for layer in layers)
        separates_documents = family.separates_documents and trace.separates_documents and all_attend
        return replace(family, separates_documents=separates_documents)


_STRUCTURES: dict[tuple[type, str], Structure] = {}


def structure_of(model: PreTrainedModel) -> Structure:
    """Return the structure of a live model, which is computed once for each architecture."""
    key = (type(model), architecture(model.config))
    if key not in _STRUCTURES:
        _STRUCTURES[key] = Structure(ModuleTrace(type(model), model.config))
    return _STRUCTURES[key]
