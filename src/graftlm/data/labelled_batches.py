"""Labelled rows as tokens and batches, and the endless mixture of tasks that training draws batches from.

A batch may mix rows of all tasks. It is padded on the right and starts with its longest rows, so that micro-batches
need less padding. Losses and predictions are computed per row, so they depend neither on the order nor on padding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from graftlm.backbone import padding_id
from graftlm.data.encoding import EncodedRow, EncodedTask, RowEncoder
from graftlm.data.labelled import TaskRows
from graftlm.data.samplers import Pick, SamplerConfig, TaskSampler
from graftlm.errors import DataError
from graftlm.grafts.heads import IGNORED, TaskSpec
