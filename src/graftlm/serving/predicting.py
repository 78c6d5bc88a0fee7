"""An engine for encoders: predictions of heads for rows of several tasks and requests in one pass, and embeddings."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from pydantic import Field
from torch.nn.utils.rnn import pad_sequence

from graftlm.backbone import padding_id
from graftlm.config import Config
from graftlm.data.labelled import TaskRows
from graftlm.data.labelled_batches import batches_by_length
from graftlm.errors import EvaluationError
from graftlm.evaluation.label_metrics import decode_prediction
from graftlm.generation.predict import TaskGraft, read_question
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft
from graftlm.grafts.heads import pooled
from graftlm.runs.task_run import tasks_of
from graftlm.serving.engine import ScheduledRequest, ThreadedEngine
from graftlm.serving.protocol import Finish, GenerationRequest, RequestStream, ServingError, check_model
from graftlm.serving.store import StoredGraft


class PredictRow(Config):
    """One row: the name of its task; its text, a pair of texts, or the words to tag."""

    task: str = Field(min_length=1, max_length=500)
    text: str | list[str]


class PredictBody(Config):
    """Rows of any tasks of a graft with heads, `model`; they are answered in their order."""

    model: str = Field(min_length=1, max_length=500)
    rows: list[PredictRow] = Field(min_length=1, max_length=4096)


class PredictionEngine(ThreadedEngine):
    """An `Engine` of `protocol.py` for encoders; a `Finish` holds a graft's prediction of one row, or an embedding.

    Each step takes waiting rows, at most `batch_size`, and makes one pass for the rows of each graft. Arguments and
    errors as those of `ThreadedEngine`; the backbone is loaded as an encoder.
    """

    kind = "encoder"
    _model: GraftedModel | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tokenizing = threading.Lock()
        self._thread.start()

    def check(self, request: GenerationRequest) -> dict[str, Graft]:
        if request.row is None and not request.embed:
            to = "send rows to /v1/graftlm/predict, or texts to /v1/embeddings"
            raise ServingError(f"The encoder {self.name} writes no text: {to}.", "model")
        grafts = super().check(request)
        if request.row is None:
            if grafts:
                why = f"{request.model!r} acts by the tasks of rows, and a text for /v1/embeddings has none"
                raise ServingError(f"{why}: name the encoder {self.name}.", "model")
        elif [request.row[0] in tasks_of(graft) for graft in grafts.values()] != [True]:
            raise ServingError(f"{request.model!r} has no task {request.row[0]!r}: name one graft that has.", "model")
        return grafts

    def requests(self, body: PredictBody, entries: Mapping[str, StoredGraft], user: str) -> Iterator[GenerationRequest]:
        """The rows of a body as requests. Raises UnknownModelError, and DataError if a row does not fit its task."""
        check_model(self.names, body.model)
        if body.model not in entries:
            instead = f"name one of {', '.join(self.names[1:])}" if self.names[1:] else "serve a graft that has"
            raise ServingError(f"{body.model!r} has no heads: {instead}.", "model")
        task_graft = TaskGraft.of(entries[body.model].manifest, self._grafts[body.model], self._backbone)
        with self._tokenizing:
            encoder = task_graft.encoder
            for number, row in enumerate(body.rows):
                spec, config = task_graft.task(row.task), task_graft.config(row.task)
                texts = [row.text] if isinstance(row.text, str) or spec.type == "tagging" else row.text
                question = read_question(config, texts, config.texts, f"Row {number}")
                (encoded,) = encoder.encode(TaskRows(spec, [question])).rows
                prompt, own = tuple(encoded.ids.tolist()), (row.task, question, encoded)
                yield GenerationRequest(prompt, body.model, max_tokens=0, embed=True, row=own, user=user)

    def _end_all(self) -> None:
        super()._end_all()
        self._attach(None)

    def _attach(self, graft: Graft | None) -> None:
        """Attach this graft alone to the backbone."""
        if self._model is not None:
            if self._model.grafts["graft"] is graft:
                return
            self._model.detach()
        self._model = None if graft is None else GraftedModel(self._backbone, {"graft": graft}).eval()

    @torch.inference_mode()
    def _step(self) -> None:
        self._drop_waiting()
        by_graft: dict[Graft | None, list[ScheduledRequest]] = {}
        for request in self._admit(self.limits.batch_size):
            by_graft.setdefault(dict(request.graft_set.grafts).get(request.request.model), []).append(request)
        for graft, requests in by_graft.items():
            self._attach(graft)
            if graft is None:
                self._embed(requests)
                continue
            tasks, own = tasks_of(graft), [request.request.row for request in requests]
            rows = [(encoded, tasks[name], list(tasks).index(name)) for name, _, encoded in own]
            ((order, batch),) = batches_by_length(rows, len(rows), padding_id(self._tokenizer))
            assert self._model is not None, "it is attached"
            outputs = self._model.predict(**batch.to(self._backbone.device).prediction_inputs())
            for i, output in zip(order, outputs, strict=True):
                name, row, encoded = own[i]
                try:
                    prediction = decode_prediction(tasks[name], row, encoded, output).to_json(tasks[name], row)
                except EvaluationError as error:  # of this row alone
                    prediction = {"error": str(error)}
                self._finish(requests[i], replace(requests[i].finish("stop"), prediction={"task": name} | prediction))

    def _embed(self, requests: list[ScheduledRequest]) -> None:
        """Answer requests for embeddings, in passes of texts of like length."""
        requests.sort(key=lambda request: len(request.request.prompt))
        for _, texts in groupby(requests, lambda request: len(request.request.prompt).bit_length()):
            each = list(texts)
            ids, device = [torch.tensor(request.request.prompt) for request in each], self._backbone.device
            ids_BT = pad_sequence(ids, batch_first=True, padding_value=padding_id(self._tokenizer)).to(device)
            mask_BT = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True).to(device)
            hidden_BTD = self._backbone.model.base_model(input_ids=ids_BT, attention_mask=mask_BT)[0]
            means = pooled(hidden_BTD.float(), mask_BT, "mean")
            for request, vector in zip(each, means.tolist(), strict=True):
                self._finish(request, replace(request.finish("stop"), embedding=tuple(vector)))


async def predictions(stream: RequestStream) -> list[dict[str, Any]]:
    """The predictions of all rows of a stream in their order; ServingError if one was not answered."""
    ends = sorted([item async for item in stream if isinstance(item, Finish)], key=lambda end: end.index)
    if late := [end.reason for end in ends if end.prediction is None]:
        raise ServingError(f"{len(late)} rows were not answered ({late[0]}): send fewer, or try later.", status=503)
    return [end.prediction or {} for end in ends]
