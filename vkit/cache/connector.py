"""How cache entries come from, and go to, somewhere else: the two halves of a connector. No torch.

The scheduler's half decides, the worker's half moves bytes; both live in one process and are called from the engine's
threads, never at the same time as themselves. A connector that has only the first half would make the model attend to
garbage, so it is refused when it is built. Several optional methods do nothing unless overridden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from vkit.cache.events import CacheEvent
from vkit.cache.groups import CacheGroup, CacheKind, LayerCacheSpec
from vkit.errors import UsageError
from vkit.kv_transfer import KVTransferConfig
from vkit.sequence import Plan, Sequence

if TYPE_CHECKING:
    from torch import Tensor


class LoadFailed(Exception):
    """What was promised is not there. The message says what and where; the policy says what becomes of the request."""


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """What a connector is told when it is built."""

    config: KVTransferConfig
    groups: tuple[CacheGroup, ...]
    block_size: int
    identity: Mapping[str, str]
    """Everything that determines what the bytes of a block mean; entries of another identity must never be served."""
    model_name: str
    dtype: str
    """How keys and values are kept, by torch's name."""
    specs: tuple[LayerCacheSpec | None, ...] = ()
    """What each layer keeps."""
    notify: Callable[[], None] = lambda: None
    """To be called, from any thread, when an answer or a transfer that the scheduler waits for is ready."""


@dataclass(slots=True)
class ConnectorStats:
    """Bytes moved and time taken since the connector was built. Times are in seconds."""

    load_bytes: int = 0
    store_bytes: int = 0
    load_time: float = 0.0
    store_time: float = 0.0


@dataclass(slots=True)
class TransferReport:
    """What the worker's half has to say after a step, or between steps."""

    sent: set[str] = field(default_factory=set)
    """Sequences whose delayed blocks may be freed."""
    received: set[str] = field(default_factory=set)
    """Sequences whose asynchronous load has ended, well or badly."""
    bad_blocks: set[int] = field(default_factory=set)
    """Blocks that should have been loaded and were not."""


class SchedulerSide:
    """The half that decides. Called from whichever thread schedules, one call at a time."""

    def get_num_new_matched_tokens(self, sequence: Sequence, num_computed: int) -> tuple[int | None, bool]:
        """(tokens available beyond the first `num_computed`, whether they load asynchronously).

        A multiple of the block size, and at least one token of the sequence must be left to compute. None: ask again
        next step; the sequence keeps its place.

        Raises:
            LoadFailed: tokens that were promised to this request are not to be had.
        """
        return 0, False

    def update_state_after_alloc(self, sequence: Sequence, block_ids: list[list[int]], num_external: int) -> None:
        """Blocks exist (a table per group) to load `num_external` tokens into."""

    def build_connector_meta(self, plan: Plan) -> Any:
        """What the worker must load and store with this step; forgets what it says. The plan may be empty."""
        return None

    def request_finished(self, sequence: Sequence, block_ids: list[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """(whether the blocks must stay until the worker reports the sequence as sent, parameters for the client).

        An asynchronous load that was ordered stays ordered: its blocks are held until the worker reports it.
        """
        return False, None

    def request_preempted(self, sequence: Sequence) -> None:
        """The sequence gave up its blocks and will begin again."""

    def on_schedule_end(self) -> None:
        """A scheduling pass is over."""

    def take_events(self) -> list[CacheEvent]:
        """What became or ceased to be available since the last call."""
        return []

    def reset_cache(self) -> bool:
        """Forget everything stored; False if that is not possible."""
        return False

    def source_of(self, sequence: Sequence) -> str:
        """The tier that the sequence's external tokens came from, one of metrics.CACHED_SOURCES."""
        return "external_unspecified"

    def stats(self) -> ConnectorStats | None:
        """What has been moved; None for a connector that does not count."""
        return None


class WorkerSide:
    """The half that moves bytes. Called around each forward pass, on the thread that runs it."""

    def register_kv_caches(self, caches: Mapping[str, Tensor]) -> None:
        """The cache memory: "layers.<i>" -> (num_blocks, page_bytes) uint8. Called again if it moves."""

    def start_load_kv(self, meta: Any) -> None:
        """Begin what this step's meta asks for."""

    def wait_for_layer_load(self, name: str) -> None:
        """Return once that layer's synchronous loads are in its pages."""

    def save_kv_layer(self, name: str, kv: Tensor) -> None:
        """The step has written this layer's pages."""

    def wait_for_save(self) -> None:
        """Return once pages may be overwritten by the next step."""

    def get_finished(self) -> tuple[set[str], set[str]]:
        """(sequences whose delayed blocks were sent, sequences whose asynchronous load ended) since the last call."""
        return set(), set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed since the last call."""
        return set()

    def shutdown(self) -> None:
        """Finish what must not be lost, stop threads, close files and connections."""


@dataclass(frozen=True, slots=True)
class KVConnector:
    """Both halves."""

    scheduler: SchedulerSide
    worker: WorkerSide | None
    handles_sliding: bool = False
    """Whether layers with a window are moved too, not only those of full attention."""

    def checked(self, name: str, groups: tuple[CacheGroup, ...]) -> KVConnector:
        """This connector, if it can serve a model with these groups.

        Raises:
            UsageError: it has no worker half, or the model keeps what it does not move.
        """
        if self.worker is None:
            raise UsageError(
                f"--kv-transfer-config: {name} has only a scheduler half here: nothing would fill what it promises"
            )
        kinds = {group.kind for group in groups}
        if CacheKind.STATE in kinds:
            raise UsageError(
                f"--kv-transfer-config: {name} cannot be used with this model: recurrent states are not moved"
            )
        if CacheKind.SLIDING in kinds and not self.handles_sliding:
            raise UsageError(
                f"--kv-transfer-config: {name} moves layers of full attention only, and this model has others"
            )
        return self


class ConnectorFactory(Protocol):
    """What is registered under a name."""

    def __call__(self, context: ConnectorContext, /) -> KVConnector:
        """A connector.

        Raises:
            UsageError: settings that cannot be.
        """
