"""The driver's side of a group of ranks: the caches' bookkeeping, the steps, and the ranks' health."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from specwire.config.services import ModelServiceConfig
from specwire.engine.batch import Batch, Feed, Packer
from specwire.engine.cache.kv_cache import PagePool
from specwire.engine.device import Decide, DeviceLostError, DraftQuery, Runner
from specwire.engine.group import control, placement
from specwire.engine.group.control import DriverConnections
from specwire.engine.group.instance import first_line
from specwire.engine.group.placement import Placement
from specwire.engine.group.rank import Assignment, Loaded, Rank, RankLocation, StepAnswer, StepCommand
from specwire.errors import ModelLoadError, ServiceUnavailableError, SpecwireError

log = logging.getLogger(__name__)

_STARTS = 2
"""Attempts to restart a group: the cause of the loss may still affect the first one."""
_POLL_S = 0.2
_REASON_WAIT_S = 2.0
"""How long to wait for Ray to report which rank died, after a connection broke."""


class GroupRunner(Runner):
    """Takes the place of a `ModelRunner` for a model on several devices.

    Args:
        config: of the service; `tensor_parallel_size` ranks.
        source: directory or hub id of the model.
        dtype: of the weights, see `loading.load_model`.

    Raises:
        ModelLoadError: naming rank, device and reason.
        ConfigError, ServiceUnavailableError: no devices; see `Placement`.

    Attributes:
        description: see `loading.describe`.
    """

    def __init__(self, config: ModelServiceConfig, source: str, dtype: str) -> None:
        self._config, self._source, self._dtype = config, source, dtype
        self.longest_pause_s = config.step_timeout_s  # after that a hung rank counts as lost
        self._num_groups = 0
        self._placement = Placement(config)
        try:
            self._store = control.open_store(self._placement.host)
            self._group = self._start(lambda: True)
        except BaseException:
            self._placement.close()
            raise
        loaded = self._group.loaded
        # A restarted group must have as many pages as this one.
        self._config = replace(
            config,
            num_kv_tokens=loaded.num_pages * config.page_len,
            kv_cache_memory=0.0,
            gpu_memory_utilization=0.0,
        )
        self.pool = PagePool(loaded.num_pages, config.page_len)
        self._packer = Packer(
            self.pool, loaded.num_embeddings, loaded.context_len, batch_invariant=config.batch_invariant
        )
        self.vocab_size, self.context_len = loaded.vocab_size, loaded.context_len
        self.draft_shape = loaded.draft_shape
        self.description = loaded.description

    def run(self, feeds: Sequence[Feed], question: Any, decide: Decide) -> Any:
        with self._packer.packed(feeds) as batch:
            return self._group.step(batch, question, decide)

    def run_draft(self, feeds: Sequence[Feed], query: DraftQuery, question: Any, decide: Decide) -> Any:
        if not feeds:
            return self._group.step(None, question, decide, query)
        with self._packer.packed(feeds) as batch:
            return self._group.step(batch, question, decide, query)

    @property
    def locations(self) -> list[RankLocation]:
        """Where the ranks run now, in order."""
        return self._group.locations

    def check(self) -> None:
        self._group.check()

    def recover(self, is_wanted: Callable[[], bool]) -> None:
        """See `device.Runner`: all ranks are restarted."""
        self._group.end()
        started_s = time.monotonic()
        for left in reversed(range(_STARTS)):
            try:
                self._group = self._start(is_wanted)
            except SpecwireError as error:
                if not left or not is_wanted():
                    raise
                log.warning("the group did not start: %s", error)
            else:
                log.warning("the group is back after %.1f s", time.monotonic() - started_s)
                return

    def close(self) -> None:
        """End the ranks, and Ray if this process started it."""
        self._group.end()
        self._placement.close()

    def _start(self, is_wanted: Callable[[], bool]) -> _Group:
        self._num_groups += 1
        key = f"group{self._num_groups}"
        group = _Group(self._placement, self._config, is_wanted)
        try:
            group.start(self._store, key, self._source, self._dtype, self._lost)
        except BaseException:
            group.end()
            raise
        return group

    def _lost(self) -> None:
        self.on_loss()  # the engine sets it later


class _Group:
    """One set of ranks, from start to end; none is replaced."""

    def __init__(
        self, placement: Placement, config: ModelServiceConfig, is_wanted: Callable[[], bool]
    ) -> None:
        self._placement, self._config, self._is_wanted = placement, config, is_wanted
        self._number = 0
        self._ended = False
        self._lost = ""
        self._watcher: threading.Thread | None = None
        self._actors = placement.start(Rank)
        self._connections = DriverConnections(placement.host)
        self.locations: list[RankLocation] = []  # by rank, once the ranks are ordered

    def start(self, store: Any, key: str, source: str, dtype: str, on_loss: Callable[[], None]) -> None:
        """Order the ranks, connect them to each other, load the model, and have them wait for steps.

        Raises:
            ModelLoadError: naming rank, device and reason.
            ServiceUnavailableError: it took too long, or is no longer wanted.
        """
        deadline_s = time.monotonic() + self._config.load_timeout_s
        found = self._gather([actor.location.remote() for actor in self._actors], deadline_s)
        # Those on this machine first, then machine by machine.
        nodes, here = [rank.node_id for rank in found], self._placement.node_id
        order = sorted(range(len(found)), key=lambda i: (nodes[i] != here, nodes[i], i))
        self.locations = [found[i] for i in order]
        self._actors = [self._actors[i] for i in order]
        num_ranks = len(order)
        assignment = Assignment(
            rank=0,
            num_ranks=num_ranks,
            host=store.host,
            port=store.port,
            key=key,
            control_port=self._connections.port,
            token=self._connections.token,
            config=self._config,
            source=source,
            dtype=dtype,
        )
        loading = [
            actor.load.remote(assignment._replace(rank=rank)) for rank, actor in enumerate(self._actors)
        ]
        self.loaded: Loaded = self._gather(loading, deadline_s)[0]
        if self.loaded.warning:
            log.warning("%s", self.loaded.warning)
        # They have connected before they loaded.
        self._connections.accept(num_ranks, self._config.load_timeout_s, self._config.step_timeout_s)
        serving = [actor.serve.remote() for actor in self._actors]
        self._watcher = threading.Thread(
            target=self._watch, args=(serving, on_loss), name="group-watcher", daemon=True
        )
        self._watcher.start()

    def step(
        self, batch: Batch | None, question: Any, decide: Decide, query: DraftQuery | None = None
    ) -> Any:
        """One step on all ranks.

        Raises:
            DeviceLostError: a rank was lost before or during the step.
            RuntimeError: `decide` failed; the group can run further steps.
        """
        self.check()
        command = StepCommand(self._number, batch, question, decide, query)
        message = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        try:
            self._connections.send(message)
            answer: StepAnswer = pickle.loads(self._connections.receive_answer())
        except OSError as error:
            if self._watcher is not None:
                self._watcher.join(_REASON_WAIT_S)  # it ends with the first rank that does
            self._lose(f"a rank does not answer: {first_line(error)}")
            raise DeviceLostError(self._lost) from error
        self._number += 1
        if answer.problem:
            raise RuntimeError(answer.problem)
        return answer.answer

    def check(self) -> None:
        """Raises DeviceLostError if a rank was lost."""
        if self._lost:
            raise DeviceLostError(self._lost)

    def end(self) -> None:
        """Ask the ranks to end, and kill those that do not."""
        self._ended = True
        if self._watcher is not None and not self._lost:
            try:
                self._connections.send(pickle.dumps(None))
                self._watcher.join(_REASON_WAIT_S)
            except OSError:
                log.debug("the group was lost while it ended")
        placement.kill(self._actors)
        self._connections.close()

    def _lose(self, reason: str) -> None:
        """Record the first reason, and end all waits for processes of the group, here and in the ranks."""
        if not self._lost:
            self._lost = reason
        placement.kill(self._actors)
        self._connections.abort()

    def _watch(self, serving: list[Any], on_loss: Callable[[], None]) -> None:
        import ray

        done, _ = ray.wait(serving, num_returns=1)
        if self._ended:
            return
        failures = _failures(serving, done)
        rank, problem = next(iter(failures.items()), (0, "ended by itself"))
        self._lose(f"{self._name(rank)} was lost: {problem}")
        on_loss()

    def _gather(self, refs: list[Any], deadline_s: float) -> list[Any]:
        """The results of all ranks; errors as of `start`."""
        import ray

        waiting = list(refs)
        while waiting:
            if not self._is_wanted():
                raise ServiceUnavailableError("the service is shutting down")
            if time.monotonic() > deadline_s:
                late = ", ".join(self._name(refs.index(ref)) for ref in waiting)
                limit = f"--load-timeout-s {self._config.load_timeout_s:g}"
                raise ServiceUnavailableError(f"{late} not ready within {limit}")
            done, waiting = ray.wait(waiting, num_returns=1, timeout=_POLL_S)
            if failures := _failures(refs, done):
                rank, problem = next(iter(_failures_soon(refs, failures).items()))
                raise ModelLoadError(f"{self._name(rank)}: {problem}")
        results: list[Any] = ray.get(refs)
        return results

    def _name(self, rank: int) -> str:
        if rank >= len(self.locations):
            return f"rank {rank}"
        location = self.locations[rank]
        return f"rank {rank} on {location.device} of {location.host}"


def _failures(refs: list[Any], done: list[Any]) -> dict[int, str]:
    """Reasons of the failed calls among those that are done, by rank."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    failures = {}
    for ref in done:
        try:
            ray.get(ref)
        except RayTaskError as error:
            cause = error.cause
            is_specwire = isinstance(cause, SpecwireError)
            failures[refs.index(ref)] = (
                str(cause) if is_specwire else f"{type(cause).__name__}: {first_line(cause)}"
            )
        except RayActorError:
            failures[refs.index(ref)] = "its process died"
    return failures


def _failures_soon(refs: list[Any], failures: dict[int, str]) -> dict[int, str]:
    """All failures so far, likely causes first: a rank that fails makes the others fail too."""
    import ray

    done, _ = ray.wait(refs, num_returns=len(refs), timeout=_POLL_S)
    failures = failures | _failures(refs, done)
    consequences = ("RuntimeError", "Dist")
    return dict(sorted(failures.items(), key=lambda item: item[1].startswith(consequences)))
