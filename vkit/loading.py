"""From `EngineArgs` to a running engine: open the files, check that all fits, build the model, put the parts together.

The one place that knows every part. Nothing is read twice, and no weight byte before every check has passed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vkit.batch import Batch
from vkit.cache.groups import CacheKind, LayerCacheSpec, group_layers
from vkit.config import CacheGroupFacts, DeviceFacts, EngineArgs, EngineConfig, ModelFacts
from vkit.device import Device, find_device
from vkit.engine import Engine, EngineSettings
from vkit.errors import InvalidRequest, UsageError
from vkit.inputs import InputProcessor
from vkit.loaders import open_checkpoint
from vkit.loaders.checkpoint import Checkpoint
from vkit.logits import BatchLogitsProcessor
from vkit.models import HFConfig, build_model, create_model
from vkit.models.base import CausalLM
from vkit.runner import Runner
from vkit.scheduler import SchedulerLimits
from vkit.sequence import Plan
from vkit.text.template import ChatTemplate
from vkit.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("vkit")

ProgressCallback = Callable[[int, int], None]
"""(bytes loaded, bytes in all)"""

PROCESSOR_GROUP = "vkit.logits_processors"
