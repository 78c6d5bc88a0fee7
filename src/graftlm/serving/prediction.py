"""The engine for encoders: predictions of heads for rows of several tasks in one pass, and embeddings."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from pydantic import Field
from torch.nn.utils.rnn import pad_sequence

from graftlm.backbone import Backbone, padding_id
from graftlm.config import Config
from graftlm.data.labelled import TaskRows
from graftlm.data.labelled_batches import batches_by_length
from graftlm.data.row_encoder import RowEncoder
from graftlm.errors import EvaluationError, GraftError
from graftlm.evaluation.label_predictions import decode_prediction
from graftlm.generation.predict import TaskGraft, read_question
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft
from graftlm.grafts.heads import TaskSpec, pooled
from graftlm.runs.task_run import tasks_of
from graftlm.serving.engine import ThreadedEngine
from graftlm.serving.protocol import (
    EngineLimits,
    Finish,
    GenerationRequest,
    HeadInput,
    RequestStream,
    ServingError,
    ShuttingDownError,
    check_model,
)
from graftlm.serving.scheduler import ScheduledRequest
from graftlm.serving.store import StoredGraft


class PredictRow(Config):
    """One row to predict.

    Args:
        task: name of its task.
        text: a text, a pair of texts, or the words to tag; texts may be followed by choices or marked texts.
    """

    task: str = Field(min_length=1, max_length=500)
    text: str | list[str]


class PredictBody(Config):
    """Rows of any tasks of a graft with heads.

    Args:
        model: name of the graft.
        rows: the rows; the predictions have the same order.
    """

    model: str = Field(min_length=1, max_length=500)
    rows: list[PredictRow] = Field(min_length=1, max_length=4096)


class PredictionEngine(ThreadedEngine):
    """An `Engine` for encoders. A `Finish` has the prediction of a graft for one row, or an embedding.

    Each step takes waiting requests, at most `batch_size`, and makes one pass for the rows of each graft.

    Args:
        backbone: an encoder with a tokenizer and without attached grafts.
        grafts: grafts for this backbone, by name.
        name: name of the backbone in requests; None uses `backbone.name`.
        limits: the limits of the engine; None uses the defaults of `EngineLimits`.

    Raises:
        BackboneError: the backbone is not an encoder, or has no tokenizer.
        GraftError: a name can't be used, or `limits.compile` is true, though no tokens are generated.
    """

    kind = "encoder"

    def __init__(
        self,
        backbone: Backbone,
        grafts: Mapping[str, Graft] | None = None,
        name: str | None = None,
        limits: EngineLimits | None = None,
    ) -> None:
        super().__init__(backbone, grafts, name, limits)
        if self.limits.compile:
            raise GraftError(
                f"Decode steps are to be compiled (--compile), but the encoder {self.name} generates no tokens: leave "
                "--compile out."
            )
        self._model: GraftedModel | None = None
        self._tokenizing = threading.Lock()
        self._thread.start()

    def check(self, request: GenerationRequest) -> dict[str, Graft]:
        """Return the grafts of a request by name; none for an embedding.

        Raises:
            ServingError: the request does not fit the models or the limits, or needs text generation.
        """
        if request.row is None and not request.embed:
            raise ServingError(
                f"The encoder {self.name} can't generate text: send rows to /v1/graftlm/predict, or texts to "
                "/v1/embeddings.",
                "model",
            )
        grafts = super().check(request)
        if request.row is None:
            if grafts:
                raise ServingError(
                    f"The graft {request.model!r} needs rows with tasks, which a text for /v1/embeddings does not "
                    f"have: set model to {self.name}.",
                    "model",
                )
            return grafts
        has_task = [request.row.task in tasks_of(graft) for graft in grafts.values()]
        if has_task != [True]:
            raise ServingError(
                f"{request.model!r} has no task {request.row.task!r}: name a single graft with this task.", "model"
            )
        return grafts

    def requests(self, body: PredictBody, entries: Mapping[str, StoredGraft], user: str) -> Iterator[GenerationRequest]:
        """Yield the rows of a body as requests. Errors are raised during the iteration.

        Args:
            body: the rows.
            entries: the grafts in service.
            user: name of the API key or address of the client.

        Raises:
            UnknownModelError: the model is unknown.
            ServingError: the model is the encoder or a mixture, which have no heads.
            DataError: the graft has no task of that name, or a row does not fit its task.
        """
        check_model(self.names, body.model)
        if body.model not in entries:
            grafts = ", ".join(self.names[1:])
            remedy = f"name one of {grafts}" if grafts else "serve a graft with heads"
            raise ServingError(f"The model {body.model!r} is not a graft with heads: {remedy}.", "model")
        task_graft = TaskGraft.of(entries[body.model].manifest, self._grafts[body.model], self._backbone)
        with self._tokenizing:
            encoder = task_graft.encoder
            for number, row in enumerate(body.rows):
                head_input = _head_input(task_graft, encoder, row, number)
                yield GenerationRequest(
                    prompt=tuple(head_input.encoded.ids.tolist()),
                    model=body.model,
                    max_tokens=0,
                    embed=True,
                    row=head_input,
                    user=user,
                )

    # The methods below run on the engine's thread.

    def _end_all(self) -> None:
        super()._end_all()
        self._detach()

    def _detach(self) -> None:
        if self._model is not None:
            self._model.detach()
            self._model = None

    def _attached(self, graft: Graft) -> GraftedModel:
        """Return the backbone with this graft alone."""
        if self._model is None or self._model.grafts["graft"] is not graft:
            self._detach()
            self._model = GraftedModel(self._backbone, {"graft": graft}).eval()
        return self._model

    @torch.inference_mode()
    def _step(self) -> None:
        self._drop_waiting()
        by_graft: dict[Graft | None, list[ScheduledRequest]] = {}
        for request in self._admit(self.limits.batch_size):
            graft = dict(request.graft_set.grafts).get(request.request.model)
            by_graft.setdefault(graft, []).append(request)
        for graft, requests in by_graft.items():
            if graft is None:
                self._detach()
                self._embed(requests)
            else:
                self._predict(self._attached(graft), tasks_of(graft), requests)

    def _predict(self, model: GraftedModel, tasks: Mapping[str, TaskSpec], requests: list[ScheduledRequest]) -> None:
        """Answer requests for predictions in one pass, or in several if rows have many choices or windows."""
        names = list(tasks)
        inputs = [_input_of(request) for request in requests]
        rows = []
        for head_input in inputs:
            task = head_input.task
            rows.append((head_input.encoded, tasks[task], names.index(task)))
        outputs: dict[int, torch.Tensor] = {}
        size = max(len(rows), self.limits.batch_size)
        for order, batch in batches_by_length(rows, size, padding_id(self._tokenizer)):
            predicted = model.predict(**batch.to(self._backbone.device).prediction_inputs())
            outputs.update(zip(order, predicted, strict=True))
        for index, output in outputs.items():
            head_input = inputs[index]
            spec = tasks[head_input.task]
            values: dict[str, object] = {"task": head_input.task}
            try:
                prediction = decode_prediction(spec, head_input.row, head_input.encoded, output)
                values.update(prediction.to_json(spec, head_input.row))
            except EvaluationError as error:  # an error of this row only
                values["error"] = str(error)
            request = requests[index]
            self._finish(request, replace(request.finish("stop"), prediction=values))

    def _embed(self, requests: list[ScheduledRequest]) -> None:
        """Answer requests for embeddings, in passes of texts with similar lengths."""
        requests.sort(key=_length)
        for _, group in groupby(requests, lambda request: _length(request).bit_length()):
            similar = list(group)
            vectors = self._mean_hidden_states([request.request.prompt for request in similar])
            for request, vector in zip(similar, vectors.tolist(), strict=True):
                self._finish(request, replace(request.finish("stop"), embedding=tuple(vector)))

    def _mean_hidden_states(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return (B, D) the mean of the last hidden states of each prompt."""
        device = self._backbone.device
        ids = [torch.tensor(prompt) for prompt in prompts]
        ones = [torch.ones_like(row) for row in ids]
        ids_BT = pad_sequence(ids, batch_first=True, padding_value=padding_id(self._tokenizer)).to(device)
        mask_BT = pad_sequence(ones, batch_first=True).to(device)
        hidden_BTD = self._backbone.model.base_model(input_ids=ids_BT, attention_mask=mask_BT)[0]
        return pooled(hidden_BTD.float(), mask_BT, "mean")


def _head_input(task_graft: TaskGraft, encoder: RowEncoder, row: PredictRow, number: int) -> HeadInput:
    """Return a row with its tokens."""
    spec = task_graft.task(row.task)
    config = task_graft.config(row.task)
    if isinstance(row.text, str) or spec.type == "tagging":
        values = [row.text]
    else:
        values = list(row.text)
    names = [*config.texts, *config.part_columns]
    question = read_question(config, values, names, f"Row {number}")
    (encoded,) = encoder.encode(TaskRows(spec, [question], stride=config.stride)).rows
    return HeadInput(row.task, question, encoded)


def _input_of(request: ScheduledRequest) -> HeadInput:
    row = request.request.row
    assert row is not None, "`check` accepts a graft for rows only"
    return row


def _length(request: ScheduledRequest) -> int:
    return len(request.request.prompt)


async def predictions(stream: RequestStream) -> list[dict[str, object]]:
    """Return the predictions of all rows of a stream in their order, as JSON values.

    Raises:
        ShuttingDownError: a row was cancelled, because the server ends.
        ServingError: a row was not answered within the time limit.
    """
    ends = [item async for item in stream if isinstance(item, Finish)]
    ends.sort(key=lambda end: end.index)
    answered = [end.prediction for end in ends if end.prediction is not None]
    if len(answered) < len(ends):
        if any(end.reason == "cancelled" for end in ends):
            raise ShuttingDownError
        raise ServingError(
            f"Only {len(answered)} of {len(ends)} rows were answered within the server's time limit: send fewer rows, "
            "or try again later.",
            status=503,
            code="timed_out",
        )
    return answered
