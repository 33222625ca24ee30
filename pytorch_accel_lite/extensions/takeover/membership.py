"""The membership of a process in a job: its generation, and how it moves to the next one after a loss."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState

from pytorch_accel_lite.callbacks import StopTrainingError
from pytorch_accel_lite.extension_tools.processes import MACHINERY, ControlGroup, names_connection, set_timeout
from pytorch_accel_lite.extensions.takeover.connection_closer import ConnectionCloser, Waker
from pytorch_accel_lite.extensions.takeover.gloo_waits import never_delete, watch_waits
from pytorch_accel_lite.extensions.takeover.group_sockets import open_sockets, opened_since
from pytorch_accel_lite.extensions.takeover.job_store import Generation, JobStore, Key
from pytorch_accel_lite.extensions.takeover.restart import ProgramRestart, Restart

T = TypeVar("T")
MACHINERY.add(__file__)
#: The time limit for the members of a generation to connect.
CONNECTING = timedelta(seconds=5)
#: The time limit of a collective: torch's default.
COLLECTIVE = timedelta(minutes=30)
_SECONDS_TO_FOLLOW = 30.0  # to wait for a new generation after a connection is lost
_POLLING = 0.001
# Tags of exchanges: the barrier after an action, the agreement after a loss, the barrier before a new group.
_BARRIER, _AGREEMENT, _NEW_GROUP = 0x5EED, 0x5EEE, 0x5EEF


class RepeatError(RuntimeError):
    """The current action has to be repeated in a new generation."""


class Change(NamedTuple):
    """A change of the processes of a job.

    Args:
        left: the former ranks of the processes that were lost
        came: the ranks of the processes that joined
        seconds: how long the change took, including the work that was repeated
    """

    left: list[int]
    came: list[int]
    seconds: float


class Shards(Protocol):
    """The shards of a run."""

    @property
    def has_ended(self) -> bool:
        """Whether the training of the run is over."""

    def are_held(self, members: Sequence[int], machines: Sequence[int]) -> bool:
        """Whether these processes together hold every shard.

        Args:
            machines: the machine of each of the processes
        """

    def bypass_meshes(self, members: Sequence[int]) -> None:
        """Make these processes exchange shards without the device meshes."""

    def save(self) -> None:
        """Save the state for a restart of the program, together with the other processes."""


class Membership:
    """The membership of this process in a job.

    The processes carry out a sequence of actions together. Each action ends in a collective that no process leaves
    before all have entered it, so the survivors of a loss are at most one action apart. If some have left that
    collective, the action is complete, and those still in it continue. Otherwise, all repeat the action.

    Args:
        number: the number of this process, the same in all generations
        waker: wakes the closer when a generation begins

    Attributes:
        generation: the current generation; ``None`` before this process has joined the job
        joins: for a newcomer, the number of the generation whose state it has received
        completed: number of completed actions
        outcome: the result of the last collective, kept for processes that have missed it
        trainings: number of trainings that the program has begun
        is_open: whether other processes may join
        fetched: for a newcomer, the temporary folder of the state from which it has resumed
        begun_at: when the current action began
        is_in_action: whether an action is under way; all communication is then part of it
        is_in_update: whether the current action is an update of the weights
        restart: the restart of the program, if the weights are sharded
        states_of_others: the training states that existed before this job saved any
        states: returns the training states that exist now
        shards: the shards of a sharded run, once its training has begun
        bypasses_meshes: whether shards are exchanged without the device meshes, which have lost a process
        holds_shards: returns whether a trainer is sharded, so that a loss may lose weights
        redivide: called in each new generation, before anything is repeated
        announce: called with the ``Change`` after the processes have agreed on what to repeat
    """

    def __init__(self, number: int, host: str, port: int, waker: Waker) -> None:
        self.number = number
        self.store = JobStore.connect(host, port)
        self.generation: Generation | None = None
        self.joins: int | None = None
        self.rank = self.local_rank = 0
        self.world_size = self.local_world_size = 1
        self.completed = self.trainings = 0
        self.outcome: torch.Tensor | None = None
        self.begun_at = 0.0
        self.is_in_action = self.is_in_update = False
        self.redivide: Callable[[], None] = _do_nothing
        self.announce: Callable[[Change], None] = _do_nothing
        self.restart = Restart()
        self.shards: Shards | None = None
        self.bypasses_meshes = False
        self.states_of_others: dict[str, float] | None = None
        self.states: Callable[[], dict[str, float]] = dict
        self.holds_shards: Callable[[], bool] = bool
        self.closer = ConnectionCloser(number, host, port, waker)
        self.is_open = self.store.get(Key.OPEN) is not None
        self.fetched: tempfile.TemporaryDirectory[str] | None = None
        self._tried = 0  # the latest generation that failed to connect
        self._announced: list[int] = []
        self._has_outcome = True  # of the latest completed action
        self._lacks_shards = False  # whether shards were lost with a process
        self._lacks_group = False  # whether creating a process group of the program has failed
        self._former: set[int] = set()  # the members of the previous generation

    # ------------------------------------------------------------------------------------- generations

    def join(self, only: int | None = None) -> bool:
        """Enter the latest generation together with all of its members, and agree on which actions are complete.

        If another process is lost meanwhile, do so again. Every generation begins with this agreement, also that of the
        start: a process that could not connect enters the next generation, in which the others recover from this.

        Args:
            only: for a newcomer, the number of the generation whose state it has

        Returns:
            whether others have completed the action of this process

        Raises:
            SystemExit: if this process is not a member
        """
        while True:
            self.disconnect()
            self._move(only)
            only = None
            try:
                return self._agree()
            except RuntimeError as error:
                if not self._has_lost_one(error):
                    raise

    def _move(self, only: int | None) -> None:
        """Connect with the members of the latest generation, and redivide the work."""
        if self.generation is None:
            self.store.wait_for_first()
        while (generation := self._enter(only)) is None:
            pass
        before, self.generation = self.generation, generation
        self._former = set() if before is None else set(before.members)
        self._find_place(generation)
        self._change_environment()
        self.joins = None
        if before is None:
            self._announced = [member for member in generation.members if member not in generation.came]
            self.closer.begin(lambda: self.completed)
            watch_waits(self.closer.is_cut_off)
        self.redivide()

    def _find_place(self, generation: Generation) -> None:
        self.rank, self.world_size = generation.members.index(self.number), len(generation.members)
        machine = generation.machines[self.rank]
        self.local_rank = generation.machines[: self.rank].count(machine)
        self.local_world_size = generation.machines.count(machine)

    def _enter(self, only: int | None) -> Generation | None:
        """Connect with the members of the latest generation, and return it; ``None`` if it failed or is outdated."""
        generation = self.store.latest()
        number = generation.number
        if number <= (self._tried if self.generation is None else max(self._tried, self.generation.number)):
            time.sleep(_POLLING)
            return None
        if only not in (None, number):
            self._end()
        self._end_if_left_out(generation)
        self.store.arrive(generation, self.number)
        while not self.store.have_arrived(generation):
            if self.store.latest().number > number:
                return None
            if self.store.get(Key.ENDING) is not None:
                raise RuntimeError("The other processes have reached the end of the program.")
            time.sleep(_POLLING)
        try:
            self._connect(generation)
        except (RuntimeError, dist.DistError):
            self._tried = number
            self.disconnect()
            self.store.put(Key.LOST_CONNECTIONS, "", number)
            return None
        return generation

    def check(self) -> None:
        """Fence writes: exit if the others have continued without this process.

        Its machine may have been suspended or disconnected for a long time without noticing.
        """
        if self.generation is not None:
            self._end_if_left_out(self.store.latest())

    def _end_if_left_out(self, latest: Generation) -> None:
        if self.number not in latest.members:
            self._end()

    def _end(self) -> NoReturn:
        raise SystemExit(f"Process {self.number} ends: the others have gone on without it.")

    def _connect(self, generation: Generation) -> None:
        before = open_sockets()
        store = dist.PrefixStore(f"generation/{generation.number}", self.store.store)  # type: ignore[attr-defined]
        rank, size = generation.members.index(self.number), len(generation.members)
        _forget_groups()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=CONNECTING)
        self.closer.watch(generation, opened_since(before))
        world = dist.group.WORLD
        assert world is not None
        never_delete(world)
        set_timeout(world, COLLECTIVE)
        self.control = ControlGroup(world, range(size))

    def disconnect(self) -> None:
        """Leave the process group, and close its connections even if it is still referenced."""
        self.closer.end_connections()
        with suppress(Exception):
            if dist.is_initialized():
                dist.destroy_process_group()

    def _change_environment(self) -> None:
        """Update the ranks and world size in the environment and in Accelerate."""
        names = {"RANK": self.rank, "LOCAL_RANK": self.local_rank}
        names |= {"WORLD_SIZE": self.world_size, "LOCAL_WORLD_SIZE": self.local_world_size}
        os.environ.update({name: str(value) for name, value in names.items()})
        for state in (vars(PartialState)["_shared_state"], vars(AcceleratorState)["_shared_state"]):
            state = getattr(state, "_storage", state)
            if state:
                self.change_state(state)

    def change_state(self, state: dict[str, Any]) -> None:
        """Update the ranks and world size in a state of Accelerate."""
        change_state(state, self.rank, self.local_rank, self.world_size)

    # ----------------------------------------------------------------------------------------- actions

    def do(self, action: Callable[[], T], keep: Callable[[], Callable[[], object]] | None = None) -> T:
        """Carry out an action and return its result, repeating it if a process is lost meanwhile.

        Args:
            keep: called before each attempt; returns a function that undoes the attempt
        """
        if self.restart.is_due:
            raise ProgramRestart
        if self.is_in_action:
            return action()
        while True:
            undo = _do_nothing if keep is None else keep()
            self.is_in_action, self.begun_at = True, time.monotonic()
            try:
                result, stop = _attempt(action)
                self._wait_for_all()
                self.complete()
            except RuntimeError as error:
                if not self.recover(error):
                    undo()
                    continue
            finally:
                self.is_in_action = False
            if stop is not None:
                raise stop
            return result[0]

    def _wait_for_all(self) -> None:
        """Barrier at the end of an action."""
        if self.world_size > 1:
            self.control.begin(torch.empty(0, dtype=torch.int64), _BARRIER)()

    @contextmanager
    def making_group(self) -> Iterator[None]:
        """Barrier before the block creates a process group; note if the block fails."""
        self._lacks_group = True
        if self.world_size > 1:
            self.control.begin(torch.empty(0, dtype=torch.int64), _NEW_GROUP)()
        yield
        self._lacks_group = False

    def complete(self, outcome: torch.Tensor | None = None) -> None:
        """Mark the action as complete: this process has left its last collective, so all have entered it."""
        if self.generation is None:
            return
        if self.is_in_update:
            self.drop_state()  # all processes have resumed from it
        self.completed += 1
        self.outcome, self._has_outcome = outcome, True

    def drop_state(self) -> None:
        """Remove the state from which all processes have resumed."""
        self.restart.drop_state()
        if self.fetched is not None:
            self.fetched.cleanup()
        self.fetched = None

    def drop_outcome(self) -> None:
        """Free the outcome of the latest action, once all processes have completed that action."""
        self.outcome, self._has_outcome = None, False

    def gather(self, sent: torch.Tensor) -> torch.Tensor:
        """All-gather a tensor of bytes, of the same length on all processes, in rows."""
        received = sent.new_empty(self.world_size, len(sent))
        dist.all_gather_into_tensor(received.view(-1), sent)
        return received

    def leave(self) -> None:
        """Leave the job together with the other processes. After that, this process is on its own."""
        if self.generation is None:  # it has never joined
            return
        with suppress(RuntimeError, ProgramRestart):  # the others have exited
            self.do(_do_nothing)
        self.drop_state()
        self.store.put(Key.ENDING)  # before closing connections that others may still use
        self.closer.stop()
        self.disconnect()
        self.rank = self.local_rank = 0
        self.world_size = self.local_world_size = 1

    # ---------------------------------------------------------------------------------------- recovery

    def recover(self, error: Exception) -> bool:
        """Continue in a new generation after the loss of a process.

        Args:
            error: the error by which this process noticed the loss

        Returns:
            whether others have completed the action, so that this process is done with it; otherwise, repeat it

        Raises:
            Exception: the given error, if no process is lost
            ProgramRestart: if shards of the weights are lost, or the training of a sharded run is over
        """
        noticed_at = time.monotonic()
        if not self._has_lost_one(error):
            raise error
        is_done = self.join()
        if self._lacks_shards:
            self.check_is_first_training(error)
            self._raise_restart()
        self.announce_change(noticed_at if is_done else self.begun_at)
        has_ended = self.shards is not None and self.shards.has_ended
        if self.bypasses_meshes and has_ended and not self.restart.saves_first:  # what follows may need the meshes
            self.check_is_first_training(error)
            self.restart.saves_first = True
            self._raise_restart()
        return is_done

    def _raise_restart(self) -> NoReturn:
        self.is_in_action = True
        self.restart.request(has_entered=True)
        raise ProgramRestart

    def check_is_first_training(self, error: Exception | None = None) -> None:
        """Check that the program can restart.

        Raises:
            RuntimeError: if it cannot
        """
        if self.trainings > 1:
            self.restart.is_impossible = True
            raise RuntimeError(
                "A process was lost, and with it shards of the weights. A program continues without them only in its "
                "first training. Start the job again with resume_from='latest'."
            ) from error

    def lost_shards(self, error: Exception) -> bool:
        """Whether an error of the program is due to a process that was lost while a sharded run restarted."""
        if not (self.bypasses_meshes or isinstance(error, RuntimeError)):
            return False
        is_sharded = self._lacks_group or self.store.get(Key.SHARDED) is not None
        can_restart = is_sharded and not self.restart.is_impossible
        return can_restart and self.generation is not None and self._has_lost_one(error)

    def reset(self) -> None:
        """Reset to the state before the program starts."""
        self.restart.begin()
        self.is_in_action = self.is_in_update = False
        self.shards = None
        self.bypasses_meshes = self._lacks_group = False
        self.completed = self.trainings = 0
        self.outcome = None

    def _agree(self) -> bool:
        """Agree on which actions are complete; return whether others have completed the action of this process.

        If a process lacks the outcome of the latest action, it is broadcast. If the weights are sharded, and the
        remaining processes hold every shard, they exchange shards without the meshes from now on.
        """
        is_sharded = self.holds_shards() or self.restart.is_before_training
        own_state = torch.tensor([self.completed, self.is_in_action, self._has_outcome, is_sharded, self._holds_all()])
        rows = self.control.begin(own_state, _AGREEMENT)() if self.world_size > 1 else own_state[None]
        counts: list[int]
        counts, are_in_action, have_outcome, are_sharded, hold_all = rows.T.tolist()
        self._lacks_shards = any(are_sharded) and not all(hold_all)
        if self._lacks_shards:
            return False
        if any(are_sharded) and self.shards is not None:
            self.shards.bypass_meshes(self._members)
            self.bypasses_meshes = True
        latest, own = max(counts), self.completed
        if min(counts) == latest:
            return False
        lacks = any(count < latest and acts for count, acts in zip(counts, are_in_action, strict=True))
        if lacks:
            holders = zip(counts, have_outcome, strict=True)
            source = next(rank for rank, (count, has) in enumerate(holders) if has and count == latest)
            outcome = [self.outcome]
            dist.broadcast_object_list(outcome, source)
        if own < latest:
            if self.is_in_update:
                self.drop_state()
            self.completed = latest
            self.outcome, self._has_outcome = (outcome[0], True) if lacks else (None, False)
        return own < latest

    @property
    def _members(self) -> list[int]:
        return [] if self.generation is None else self.generation.members

    def _holds_all(self) -> bool:
        """Whether the members can exchange every shard. If they already do, and fail without a loss, they cannot."""
        assert self.generation is not None
        if self.shards is None or (self.bypasses_meshes and set(self._members) == self._former):
            return False
        return self.shards.are_held(self._members, self.generation.machines)

    def announce_change(self, since: float) -> None:
        """Announce how the members have changed since the last announcement.

        Args:
            since: when the change, or the action that is repeated, began
        """
        assert self.generation is not None
        before, now = self._announced, self.generation.members
        self._announced = now
        if before == now:  # reconnected, or a newcomer was lost before it joined
            return
        self.announce(
            Change(
                [rank for rank, member in enumerate(before) if member not in now],
                [rank for rank, member in enumerate(now) if member not in before],
                time.monotonic() - since,
            )
        )

    def _has_lost_one(self, error: Exception) -> bool:
        """Whether the supervisor begins a generation without a lost member, waiting for it after a connection error."""
        assert self.generation is not None
        # While the meshes are bypassed, any error may come from an operation that needs them.
        is_of_connection = self.bypasses_meshes or names_connection(error)
        deadline = time.monotonic() + (_SECONDS_TO_FOLLOW if is_of_connection else 0.0)
        if is_of_connection:
            self.disconnect()  # so that all other processes notice, too
            self.store.put(Key.LOST_CONNECTIONS, "", self.generation.number)
        while True:
            latest = self.store.latest()
            if latest.number > self.generation.number and (
                is_of_connection or not set(self.generation.members) <= set(latest.members)
            ):
                if latest.came:  # they wait for a state from the generation that this process has left
                    self.store.put(Key.LOST_CONNECTIONS, "", latest.number)
                return True
            if time.monotonic() >= deadline or self.store.get(Key.ENDING) is not None:
                return False
            time.sleep(_POLLING)


def change_state(state: dict[str, Any], rank: int, local_rank: int, world_size: int) -> None:
    """Update the ranks and world size in a state of Accelerate."""
    state.update(process_index=rank, local_process_index=local_rank, num_processes=world_size)
    if world_size > 1:
        state.update(distributed_type=DistributedType.MULTI_CPU, backend="gloo")


def _attempt(action: Callable[[], T]) -> tuple[list[T], StopTrainingError | None]:
    """Return the result of an action, or the request to stop that it has raised on all processes."""
    try:
        return [action()], None
    except StopTrainingError as stop:
        return [], stop


def _do_nothing(*_: Any) -> None:
    return None


def _forget_groups() -> None:
    """Reset torch's count of process groups, so that old and new members give the next group the same name.

    The name is part of its keys in the store. A group that failed to connect has raised the count. Torch has no public
    name for it.
    """
    constants: Any = dist.distributed_c10d
    constants._world.group_count = 0
