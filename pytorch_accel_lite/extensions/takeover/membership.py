"""The part of a process in a job whose processes change: its generation, and what it does when that ends."""

from __future__ import annotations

import os
import shutil
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
from pytorch_accel_lite.extending import MACHINERY, ControlGroup, is_about_lost_process, set_timeout
from pytorch_accel_lite.extensions.takeover.connections import open_sockets, opened_since
from pytorch_accel_lite.extensions.takeover.job_store import Generation, JobStore, Key
from pytorch_accel_lite.extensions.takeover.waiting import keep_for_ever, watch_waits
from pytorch_accel_lite.extensions.takeover.watcher import Waker, Watcher

T = TypeVar("T")
MACHINERY.add(__file__)
#: In which the members of a generation connect, or another one follows.
CONNECTING = timedelta(seconds=5)
#: The time limit of a collective, as torch has it.
COLLECTIVE = timedelta(minutes=30)
_SECONDS_TO_FOLLOW = 30.0  # in which the supervisor begins a generation once a connection is lost
_POLLING = 0.001
# The purposes of exchanges: at the end of an action, after a loss, and before a group of the program is made.
_MEETING, _AGREEING, _MAKING_GROUP = 0x5EED, 0x5EEE, 0x5EEF


class RepeatError(RuntimeError):
    """What this process does is to be done again, in another generation."""


class BeginAgain(BaseException):
    """The program of this process is to begin again, in another generation."""


class Change(NamedTuple):
    """How the processes of a job have changed.

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
        """Whether these processes hold all shards together.

        Args:
            machines: the machine of each of the processes
        """

    def stand_in(self, members: Sequence[int]) -> None:
        """Let these processes exchange shards in place of the meshes."""

    def save(self) -> None:
        """Save a state from which all begin again, together with the others."""


class Membership:
    """The membership of this process in a job.

    What the processes do together is a sequence of actions. Each ends in a collective that nobody leaves before all
    have entered it, so survivors of a loss differ by one action at most: a process in that collective, which others
    have left, has done its part and goes on. All others repeat the action in which they are.

    Args:
        number: the number of this process, the same in all generations
        waker: wakes the thread that watches, when a generation begins

    Attributes:
        generation: the current generation; ``None`` before this process has joined the others
        joins: the number of the generation for which this process has got the state of the run, if it comes later
        completed: number of actions that are complete
        outcome: the result of the last collective, for a process that has missed it
        trainings: number of trainings that this process has begun
        is_open: whether other processes may come
        fetched: the folder with the state from which this process has resumed, if it joined later
        begun_at: when this process began the current action
        is_in_action: whether an action is under way, to which all communication belongs
        is_in_update: whether the current action is an update of the weights
        begins_again: whether the program is to begin again
        beginnings: how often the program has begun again
        has_begun_again: whether the program has begun again and its first training is yet to come
        resumes_from: the state from which the training resumes when the program begins again, until the next update
        states_of_others: the training states that were there before this job saved any
        states: returns the training states that are there now
        shards: the shards of a sharded run, from the beginning of its training on
        stands_in: whether the processes exchange shards without the meshes, which have lost a process
        saves_first: whether all save a state before the program begins again
        made: the folder of the state from which all begin again, if the state was saved for this
        cannot_begin_again: whether the program has to end, as it has lost shards that it cannot restore
        has_entered: whether this process is in the generation in which the program is to begin again
        holds_shards: returns whether each process has shards that the others may lack
        redivide: called with each generation, before anything is repeated
        announce: called with the ``Change``, once the processes have agreed on what to repeat
    """

    def __init__(self, number: int, host: str, port: int, waker: Waker) -> None:
        self.number = number
        self.store = JobStore.connect(host, port)
        self.generation: Generation | None = None
        self.joins: int | None = None
        self.rank = self.local_rank = 0
        self.world_size = self.local_world_size = 1
        self.completed = self.trainings = self.beginnings = 0
        self.outcome: torch.Tensor | None = None
        self.begun_at = 0.0
        self.is_in_action = self.is_in_update = False
        self.redivide: Callable[[], None] = _do_nothing
        self.announce: Callable[[Change], None] = _do_nothing
        self.begins_again = self.has_begun_again = self.has_entered = False
        self.shards: Shards | None = None
        self.stands_in = self.saves_first = self.cannot_begin_again = False
        self.made: str | None = None
        self.resumes_from: str | None = None
        self.states_of_others: dict[str, float] | None = None
        self.states: Callable[[], dict[str, float]] = dict
        self.holds_shards: Callable[[], bool] = bool
        self.watcher = Watcher(number, host, port, waker)
        self.is_open = self.store.said(Key.OPEN) is not None
        self.fetched: tempfile.TemporaryDirectory[str] | None = None
        self._is_stuck = False  # whether a thread of the process group waits for a lost process
        self._tried = 0  # the latest generation that could not be connected
        self._announced: list[int] = []
        self._has_outcome = True  # of the latest action that is complete
        self._lacks_shards = False  # whether shards were lost with a process
        self._lacks_group = False  # whether a group of the program could not be made
        self._former: set[int] = set()  # the members of the generation before

    # ------------------------------------------------------------------------------------- generations

    def join(self, only: int | None = None) -> None:
        """Enter the latest generation, together with all of its members, and divide the work among these.

        Args:
            only: the number of the generation for which this process has a state, if it comes later

        Raises:
            SystemExit: if this process is not among them
        """
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
            self.watcher.begin(lambda: self.completed)
            watch_waits(self.watcher.is_cut_off, self._note_stuck)
        self.redivide()

    def _find_place(self, generation: Generation) -> None:
        self.rank, self.world_size = generation.members.index(self.number), len(generation.members)
        machine = generation.machines[self.rank]
        self.local_rank = generation.machines[: self.rank].count(machine)
        self.local_world_size = generation.machines.count(machine)

    def _enter(self, only: int | None) -> Generation | None:
        """Connect with the members of the latest generation; return it unless another one has followed meanwhile."""
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
            if self.store.said(Key.ENDING) is not None:
                raise RuntimeError("The other processes have reached the end of the program.")
            time.sleep(_POLLING)
        try:
            self._connect(generation)
        except (RuntimeError, dist.DistError):
            self._tried = number
            self.disconnect()
            self.store.count(Key.LOST_CONNECTIONS, 1)
            return None
        return generation

    def check(self) -> None:
        """Before this process writes, end it if the others have gone on without it.

        Its machine may have stood still or been cut off for long without noticing.
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
        self.watcher.watch(generation, opened_since(before))
        world = dist.group.WORLD
        assert world is not None
        set_timeout(world, COLLECTIVE)
        self.control = ControlGroup(world, range(size))

    def disconnect(self) -> None:
        """Leave the process group, and end its connections, whatever still refers to it."""
        self.watcher.end_connections()
        with suppress(Exception):
            if dist.is_initialized():
                if self._is_stuck:
                    keep_for_ever(dist.group.WORLD)
                dist.destroy_process_group()
        self._is_stuck = False

    def _note_stuck(self) -> None:
        self._is_stuck = True

    def _change_environment(self) -> None:
        """Tell Accelerate, and programs that ask the environment, what the processes are now."""
        names = {"RANK": self.rank, "LOCAL_RANK": self.local_rank}
        names |= {"WORLD_SIZE": self.world_size, "LOCAL_WORLD_SIZE": self.local_world_size}
        os.environ.update({name: str(value) for name, value in names.items()})
        for state in (vars(PartialState)["_shared_state"], vars(AcceleratorState)["_shared_state"]):
            state = getattr(state, "_storage", state)
            if state:
                self.change_state(state)

    def change_state(self, state: dict[str, Any]) -> None:
        """Change what Accelerate knows of this process."""
        change_state(state, self.rank, self.local_rank, self.world_size)

    # ----------------------------------------------------------------------------------------- actions

    def do(self, action: Callable[[], T], keep: Callable[[], Callable[[], object]] | None = None) -> T:
        """Return the result of an action, which is done again if a process is lost meanwhile.

        Args:
            keep: called before each attempt; what it returns undoes that
        """
        if self.begins_again:
            raise BeginAgain
        if self.is_in_action:
            return action()
        while True:
            undo = _do_nothing if keep is None else keep()
            self.is_in_action, self.begun_at = True, time.monotonic()
            try:
                result, stop = _attempt(action)
                self._meet()
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

    def _meet(self) -> None:
        """Wait until all processes have done their part of an action."""
        if self.world_size > 1:
            self.control.begin(torch.empty(0, dtype=torch.int64), _MEETING)()

    @contextmanager
    def making_group(self) -> Iterator[None]:
        """Wait until all processes are about to make a process group, and note if they fail to make it in a block."""
        self._lacks_group = True
        if self.world_size > 1:
            self.control.begin(torch.empty(0, dtype=torch.int64), _MAKING_GROUP)()
        yield
        self._lacks_group = False

    def complete(self, outcome: torch.Tensor | None = None) -> None:
        """Note that an action is complete: all have entered its last collective, and this process has left it."""
        if self.generation is None:
            return
        if self.is_in_update:
            self.drop_state()  # all have resumed from it
        self.completed += 1
        self.outcome, self._has_outcome = outcome, True

    def drop_state(self) -> None:
        """Remove the state that was saved for beginning again: any process does, as whoever has made it may be gone."""
        if self.made is not None:
            shutil.rmtree(self.made, ignore_errors=True)
        if self.fetched is not None:
            self.fetched.cleanup()
        self.resumes_from = self.made = self.fetched = None

    def drop_outcome(self) -> None:
        """Free the outcome of the latest action, as all processes have completed that."""
        self.outcome, self._has_outcome = None, False

    def gather(self, sent: torch.Tensor) -> torch.Tensor:
        """Return what each process sends, in rows: bytes, equally many of each."""
        received = sent.new_empty(self.world_size, len(sent))
        dist.all_gather_into_tensor(received.view(-1), sent)
        return received

    def leave(self) -> None:
        """End together with the others: after that, this process is alone."""
        if self.generation is None:  # it has come too late
            return
        with suppress(RuntimeError, BeginAgain):  # the others have ended
            self.do(_do_nothing)
        self.drop_state()
        self.store.say(Key.ENDING)  # before the connections end, which others may be yet to leave
        self.watcher.stop()
        self.disconnect()
        self.rank = self.local_rank = 0
        self.world_size = self.local_world_size = 1

    # ---------------------------------------------------------------------------------------- recovery

    def recover(self, error: Exception) -> bool:
        """Go on in the generation that follows the loss of a process.

        Args:
            error: what this process has noticed of the loss

        Returns:
            whether this process has done its part of the action, which others have completed; otherwise, it is to be
            repeated

        Raises:
            Exception: the error, if no process is lost
            BeginAgain: if shards of the weights are lost with it, or the training of a sharded run is over
        """
        noticed_at = time.monotonic()
        if not self._has_lost_one(error):
            raise error
        while True:
            self.disconnect()
            self.join()
            with suppress(RuntimeError):  # another one is lost
                is_done = self.agree()
                break
        if self._lacks_shards:
            self.check_is_first_training(error)
            self._raise_to_begin_again()
        self.tell_of_change(noticed_at if is_done else self.begun_at)
        has_ended = self.shards is not None and self.shards.has_ended
        if self.stands_in and has_ended and not self.saves_first:  # what follows may need the meshes
            self.check_is_first_training(error)
            self.saves_first = True
            self._raise_to_begin_again()
        return is_done

    def _raise_to_begin_again(self) -> NoReturn:
        self.is_in_action = self.begins_again = self.has_entered = True
        raise BeginAgain

    def check_is_first_training(self, error: Exception | None = None) -> None:
        """Check that the program can begin again.

        Raises:
            RuntimeError: if it cannot
        """
        if self.trainings > 1:
            self.cannot_begin_again = True
            raise RuntimeError(
                "A process was lost, and with it shards of the weights. A program continues without them only in its "
                "first training. Start the job again with resume_from='latest'."
            ) from error

    def enter_sharded(self, only: int | None = None) -> None:
        """Enter the generation in which the program of a sharded run begins, or begins again.

        Args:
            only: as for ``join()``
        """
        while True:
            self.disconnect()
            self.join(only)
            only = None
            try:
                self.agree()
                return
            except RuntimeError as error:
                if not self._has_lost_one(error):
                    raise

    def lost_shards(self, error: Exception) -> bool:
        """Whether an error of the program is about a process that was lost while a sharded run began again."""
        if not (self.stands_in or isinstance(error, RuntimeError)):
            return False
        is_sharded = self._lacks_group or self.store.said(Key.SHARDED) is not None
        return is_sharded and not self.cannot_begin_again and self.generation is not None and self._has_lost_one(error)

    def forget(self) -> None:
        """Be as a process whose program has yet to begin."""
        self.begins_again = self.is_in_action = self.is_in_update = False
        self.has_begun_again = True
        self.beginnings += 1
        self.shards = None
        self.stands_in = self.saves_first = self._lacks_group = False
        self.completed = self.trainings = 0
        self.outcome = None

    def agree(self) -> bool:
        """Find out how far each process has got; return whether others have completed the action of this one.

        If one of them lacks the outcome of the latest action, all get it from one that has it. If the weights are
        sharded, and those that are left hold all shards, they exchange these without the meshes from now on.
        """
        is_sharded = self.holds_shards() or self.has_begun_again
        told = torch.tensor([self.completed, self.is_in_action, self._has_outcome, is_sharded, self._holds_all()])
        rows = self.control.begin(told, _AGREEING)() if self.world_size > 1 else told[None]
        counts: list[int]
        counts, are_in_action, have_outcome, are_sharded, hold_all = rows.T.tolist()
        self._lacks_shards = any(are_sharded) and not all(hold_all)
        if self._lacks_shards:
            return False
        if any(are_sharded) and self.shards is not None:
            self.shards.stand_in(self._members)
            self.stands_in = True
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
        """Whether those that are left can exchange all shards: not if they have, and failed though none was lost."""
        assert self.generation is not None
        if self.shards is None or (self.stands_in and set(self._members) == self._former):
            return False
        return self.shards.are_held(self._members, self.generation.machines)

    def tell_of_change(self, since: float) -> None:
        """Announce what has changed since the last time.

        Args:
            since: when that has begun, or what is done again
        """
        assert self.generation is not None
        before, now = self._announced, self.generation.members
        self._announced = now
        if before == now:  # connected again, or one that was to come has not
            return
        self.announce(
            Change(
                [rank for rank, member in enumerate(before) if member not in now],
                [rank for rank, member in enumerate(now) if member not in before],
                time.monotonic() - since,
            )
        )

    def _has_lost_one(self, error: Exception) -> bool:
        """Whether a generation follows that lacks a member of this one, as it should once a connection is lost."""
        assert self.generation is not None
        # Without the meshes, an error may be of something that needs them.
        names_connection = "gloo" in str(error).lower() or "Connection" in str(error)
        is_of_connection = self.stands_in or is_about_lost_process(error) or names_connection
        deadline = time.monotonic() + (_SECONDS_TO_FOLLOW if is_of_connection else 0.0)
        if is_of_connection:
            self.disconnect()  # so that all others notice, too
            self.store.count(Key.LOST_CONNECTIONS, 1)
        while True:
            latest = self.store.latest()
            if latest.number > self.generation.number and (
                is_of_connection or not set(self.generation.members) <= set(latest.members)
            ):
                return True
            if time.monotonic() >= deadline or self.store.said(Key.ENDING) is not None:
                return False
            time.sleep(_POLLING)


def change_state(state: dict[str, Any], rank: int, local_rank: int, world_size: int) -> None:
    """Change what Accelerate knows of this process."""
    state.update(process_index=rank, local_process_index=local_rank, num_processes=world_size)
    if world_size > 1:
        state.update(distributed_type=DistributedType.MULTI_CPU, backend="gloo")


def _attempt(action: Callable[[], T]) -> tuple[list[T], StopTrainingError | None]:
    """Return the result of an action, or the request to stop in which it has ended on all processes."""
    try:
        return [action()], None
    except StopTrainingError as stop:
        return [], stop


def _do_nothing(*_: Any) -> None:
    return None


def _forget_groups() -> None:
    """Let the next group have the same name, and so the same keys in the store, on members old and new.

    A group that could not be connected leaves the number of groups raised, for which torch has no public name.
    """
    constants: Any = dist.distributed_c10d
    constants._world.group_count = 0
