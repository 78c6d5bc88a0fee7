"""Training with torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from graftlm.backbone import guard_hooks
from graftlm.errors import TrainingError, first_line


@contextmanager
def compiled(model: nn.Module, *, wanted: bool) -> Iterator[None]:
    """Compile the module in a model's attribute `body`, or all of a model without one, until the end of the block.

    The loss of hidden states stays outside, since it takes its gradients in the forward pass.

    Args:
        model: the model to train, on its device.
        wanted: False compiles nothing.

    Raises:
        TrainingError: torch.compile fails, for example without a compiler.
    """
    if not wanted:
        yield
        return
    from torch._dynamo.exc import TorchDynamoException

    guard_hooks()
    body = getattr(model, "body", model)
    body.compile()
    try:
        yield
    except TorchDynamoException as error:
        raise TrainingError(
            f"torch.compile can't compile this model here ({first_line(error)}): set training.compile to false."
        ) from error
    finally:
        body._compiled_call_impl = None
