"""Starting programs, forks and jobs of several processes on this machine."""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from pytorch_accel_lite.distributed import shutdown

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
SOAK = bool(os.environ.get("SOAK"))  # run the tests that kill and launch processes for much longer
# Seconds after which a child process is considered hung, also on a busy machine.
PATIENCE = 3600.0 if SOAK else 240.0
CAN_SHARD = pytest.mark.skipif(
    not (ROOT / "pytorch_accel_lite/extensions/sharding").exists() or not hasattr(torch.cpu.Stream, "record_event"),
    reason="needs the extension 'sharding'; and sharding on a CPU (FSDP2) records events, which not every torch does",
)
HAS_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
# The launcher notes which of its methods it is in, and for that looks at all imported modules, for two seconds a job.
dynamic_rendezvous.get_method_name = lambda depth=2: "unknown"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


def only_with_soak(test: T) -> T:
    """Leave a test that takes long to ``make soak``; a shorter one of the same kind is always run."""
    skipped = pytest.mark.skipif(not SOAK, reason="takes long: make soak")
    marked: T = pytest.mark.soak(skipped(test))  # type: ignore[type-var]
    return marked


def two_are_enough(test: T) -> T:
    """Run a test of ``ranks`` with 2 processes, as 3 would test nothing more."""
    ranks = pytest.mark.parametrize("ranks", [2, 3] if SOAK else [2], indirect=True)
    marked: T = pytest.mark.soak(ranks(test))  # type: ignore[type-var]
    return marked


def some_of(cases: Iterable[T]) -> list[T]:
    """Every third case, including the last; all of them with SOAK."""
    return [*cases][:: 1 if SOAK else -3][:: 1 if SOAK else -1]


def environment(**changes: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")}
    return env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | changes


def run_python(script: str, *arguments: str) -> str:
    """Run code in a fresh interpreter, and return its output."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=env, text=True, capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _await_all_ranks(begun: Any) -> None:
    """In a rank forked by torch's launcher, wait until all ranks have been forked.

    A thread of the launcher serves the ranks and looks up their host names, holding a lock of libc. A rank forked while
    it is held could never connect to anything.

    Args:
        begun: the last attempt that each rank has begun, in shared memory
    """
    attempt, launcher = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1, os.getppid()
    begun[int(os.environ["LOCAL_RANK"])] = attempt
    while min(begun) < attempt:
        if os.getppid() != launcher:  # the launcher was killed
            os._exit(1)
        time.sleep(0.001)


class WarmPython(subprocess.Popen[str]):
    """A Python command run in a fork of this process, which saves the time of imports.

    Its own Python children, such as the ranks of torchrun, are forks, too. Each has its own environment, pipes, signal
    handlers, children and exit.

    Attributes:
        children: the class with which it starts its own children
        begun: the argument of ``_await_all_ranks()`` for each job in which this process is the launcher or a rank
    """

    children: type[subprocess.Popen[str]]
    begun: ClassVar[dict[str, Any]] = {}

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):  # type: ignore
        if args[0] != sys.executable:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others)  # type: ignore
            return
        pipes, starts_session = others[3:9], others[14]
        job = (env or {}).get("TORCHELASTIC_RUN_ID")
        if job is not None and job not in self.begun:
            self.begun[job] = RawArray("i", int(env["LOCAL_WORLD_SIZE"]))
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._prepare(cwd, env, pipes, starts_session)
                if job is not None:
                    _await_all_ranks(self.begun[job])
                self._run(list(args[1:]))
            finally:
                os._exit(1)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _prepare(self, cwd: Any, env: dict[str, str] | None, pipes: tuple[int, ...], starts_session: bool) -> None:
        _begin_copy()
        for source, target in ((pipes[0], 0), (pipes[3], 1), (pipes[5], 2)):
            if source not in (-1, target):
                os.dup2(source, target)
        for target, name in enumerate(("stdin", "stdout", "stderr")):
            setattr(sys, name, open(target, "w" if target else "r", buffering=1, closefd=False))  # noqa: SIM115
        if starts_session:
            os.setsid()
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        os.chdir(cwd or os.getcwd())
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()  # handlers of the parent
        atexit.register(shutdown._close_all)
        shutdown.record_end(failed=False)  # runs of earlier tests
        for trainer in shutdown.open_trainers():  # of earlier tests
            shutdown.unregister(trainer)
        vars(sys).pop("last_type", None)
        use_filters(warnings.filters)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        subprocess.Popen = subprocess_handler.Popen = self.children  # type: ignore[misc]

    def _run(self, arguments: list[str]) -> None:
        """Run a module, code or a script as the interpreter does, and exit."""
        if arguments[0] == "-u":
            del arguments[0]
        code = 0
        try:
            if arguments[0] in ("-m", "-c"):
                how, what, *sys.argv[1:] = arguments
                sys.path.insert(0, os.getcwd())
                if how == "-m":
                    if not hasattr(sys.modules.get(what), "__path__"):
                        sys.modules.pop(what, None)
                    sys.modules.pop(f"{what}.__main__", None)
                    runpy.run_module(what, run_name="__main__", alter_sys=True)
                else:
                    exec(compile(what, "<code>", "exec"), {"__name__": "__main__"})
            else:
                sys.argv[:] = arguments
                sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
                runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else end.code is not None
        except BaseException:
            sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            code = 1
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


WarmPython.children = WarmPython


class WarmLauncher(WarmPython):
    """A ``WarmPython`` whose own children are fresh interpreters, as users have them."""

    children = subprocess.Popen


def launch(
    command: list[str], timeout: float = PATIENCE, warm: bool | Literal["launcher"] = False
) -> subprocess.CompletedProcess[str]:
    """Run a program, and return its output.

    Args:
        warm: whether to fork this process for the program and its Python children; ``"launcher"``: for the program only
    """
    (done,) = launch_together([command], timeout, warm)
    return done


def launch_together(
    commands: list[list[str]], timeout: float = PATIENCE, warm: bool | Literal["launcher"] = False
) -> list[subprocess.CompletedProcess[str]]:
    """Run several programs at the same time, as ``launch()`` does one. They must print little, as pipes may fill up."""
    kind = {False: subprocess.Popen, True: WarmPython, "launcher": WarmLauncher}[warm]
    pipe = subprocess.PIPE
    done = []
    with ExitStack() as stack:
        processes = []
        for command in commands:
            process = kind(command, env=environment(), cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        for command, process in zip(commands, processes, strict=True):
            try:
                output, errors = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired as expired:
                printed = (expired.stdout or b"") + (expired.stderr or b"")
                pytest.fail(f"{' '.join(command)} has not ended after {timeout} seconds:\n{printed.decode()}")
            done.append(subprocess.CompletedProcess(command, process.returncode, output, errors))
    return done


def use_filters(filters: Iterable[Any]) -> None:
    """In a fork, use the warning filters of the test, and print warnings, which pytest would collect.

    Args:
        filters: the filters of the test
    """
    kept = [*filters]
    warnings.resetwarnings()  # also forgets which warnings were shown
    warnings.filters[:] = kept  # type: ignore[index]
    warnings.showwarning = _print_warning


def _print_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=file or sys.stderr)


def _begin_copy() -> None:
    """Prepare a fork: use one thread, as OpenMP's threads are not forked and waiting for them would hang.

    Freeze existing objects, as a garbage collection of all of them takes seconds.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    gc.freeze()


class Fork:
    """A fork of this process that runs an action and exits, without the time of imports.

    Args:
        action: called in the fork
        output: the file for the output of the fork

    Attributes:
        returncode: the exit status, or minus the number of the signal that killed the fork; ``None`` while it runs
        pid: the process id of the fork; 0 in the fork
    """

    def __init__(self, action: Callable[[], Any], output: Path) -> None:
        self.output = output
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run(action)

    def _run(self, action: Callable[[], Any]) -> None:
        code = 1
        _begin_copy()
        try:
            file = os.open(self.output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            sys.stdout = sys.stderr = open(file, "w", buffering=1, closefd=False)  # noqa: SIM115
            faulthandler.enable(file)
            use_filters(warnings.filters)
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()
            action()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else end.code is not None
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # without the exit handlers of the parent

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._reap()
        return self.returncode

    def _reap(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = PATIENCE) -> int:
        """Return its exit status. After the timeout, abort it and fail with the stacks of its threads."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGABRT)
                while self.poll() is None:
                    time.sleep(0.002)
                raise AssertionError(f"not done within {timeout} seconds:\n{self.output.read_text()}")
            time.sleep(0.002)
        return code


class EarlyCopy:
    """A fork server: a copy of this process before the first test, from which later forks are made.

    They do not inherit what tests leave behind, such as patches, threads and held locks.
    """

    def __init__(self) -> None:
        self._here, there = Pipe()
        self._process = Fork(partial(self._serve, there), Path(os.devnull))
        there.close()

    def _serve(self, requests: Connection) -> None:
        """Answer requests: fork an action and return its process id, poll a process, or import a module."""
        self._here.close()
        forks: dict[int, Fork] = {}
        with suppress(EOFError):
            while True:
                request = requests.recv()
                if isinstance(request, int):
                    requests.send(forks[request].poll())
                elif isinstance(request, str):
                    importlib.import_module(request)
                    requests.send(None)
                else:
                    fork = Fork(*request)
                    forks[fork.pid] = fork
                    requests.send(fork.pid)

    def ask(self, request: int | str | tuple[Callable[[], Any], Path]) -> Any:
        """Request a fork of an action, the exit status of a process, or the import of a module for later forks."""
        self._here.send(request)
        assert self._here.poll(PATIENCE), "the fork server does not answer"
        return self._here.recv()

    def close(self) -> None:
        self._here.close()
        self._process.wait()


def _with_filters(filters: list[Any], action: Callable[[], Any]) -> None:
    use_filters(filters)
    action()


class EarlyFork(Fork):
    """A fork of the ``EarlyCopy`` rather than of this process; preferred if the action can be pickled.

    A fork of this process may deadlock on a lock that another thread held at the time.
    """

    copy: EarlyCopy  # set by conftest.py before the first test

    def __init__(self, action: Callable[[], Any], output: Path) -> None:
        self.output = output
        self.returncode = None
        self.pid = self.copy.ask((partial(_with_filters, [*warnings.filters], action), output))

    def _reap(self) -> int | None:
        code: int | None = self.copy.ask(self.pid)
        return code


def _as_program(action: Callable[[], Any], arguments: tuple[str, ...], env: dict[str, str]) -> None:
    sys.argv[1:] = arguments
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    action()


def run_forked(action: Callable[[], Any], *arguments: str, kind: type[Fork] = Fork) -> subprocess.CompletedProcess[str]:
    """Run an action in a fork, with command-line arguments, and return its output."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        process = kind(partial(_as_program, action, arguments, env), Path(folder, "output"))
        code = process.wait(PATIENCE + 40)
        return subprocess.CompletedProcess([*arguments], code, process.output.read_text())


def _execute(code: str) -> None:
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


def run_code(code: str, *arguments: str) -> str:
    """Run Python code in a fork, and return its output."""
    done = run_forked(partial(_execute, code), *arguments, kind=EarlyFork)
    assert done.returncode == 0, done.stdout
    return done.stdout


def forget(*packages: str, installed: bool = True) -> None:
    """In a fork, make the next import of packages a first one, or fail as if they were not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]
    if not installed:
        sys.modules |= dict.fromkeys(packages)  # type: ignore[arg-type]


def _execute_module(name: str) -> None:
    for known in (name, f"{name}.__main__"):  # as in a fresh interpreter
        sys.modules.pop(known, None)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module as ``python -m name arguments`` does, in a fork."""
    return run_forked(partial(_execute_module, name), *arguments, kind=EarlyFork)


def _execute_script(path: Path) -> None:
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def run_script(path: str, *arguments: str) -> str:
    """Run a script as ``python path arguments`` does, in a fork, and return its output."""
    done = run_forked(partial(_execute_script, ROOT / path), *arguments, kind=EarlyFork)
    assert done.returncode == 0, done.stdout
    return done.stdout


@contextmanager
def keeping_handlers() -> Iterator[None]:
    """Restore the handlers of all signals after a block that installs others, as torch's launcher does."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in signal.valid_signals()} if is_main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def run_elastic(processes: int, function: Callable[..., Any], *arguments: Any, max_restarts: int = 0) -> None:
    """Run a function on the ranks of a job, as torchrun does, but in forks of this process.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: if a rank fails after all restarts
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        start_method="fork",
    )
    with keeping_handlers():
        elastic_launch(config, _run_as_rank)(RawArray("i", processes), function, *arguments)


def _run_as_rank(begun: Any, function: Callable[..., Any], *arguments: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the fork has the launcher's handlers
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Torch replaces the thread pool, which a fork lacks, at the first call. If several threads of autograd make that
    # call at once, one of them may find no pool, and abort.
    torch.set_num_threads(1)
    _await_all_ranks(begun)
    function(*arguments)


def run_elastic_script(
    processes: int, path: str, *arguments: str, max_restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a script as ``torchrun path arguments`` does, in forks."""
    script = str(ROOT / path), None, "__main__"
    run = partial(run_elastic, processes, runpy.run_path, *script, max_restarts=max_restarts)
    return run_forked(run, *arguments, kind=EarlyFork)


FILE_OPERATIONS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "open")


def die_at_file_operation(number: int) -> None:
    """Kill this process right before its n-th file operation."""
    count = 0

    def counted(operation: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return call

    for name in FILE_OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    builtins.open = counted(builtins.open)  # type: ignore[assignment]


def in_forks(action: Any, output: Path, processes: int = 1) -> list[int]:
    """Run an action in forks of this process, as the ranks of a job.

    Returns their exit statuses, or minus the signals that killed them.
    """
    # A store that already listens, as with torchrun: a free port that is only looked up may be taken by another test.
    one = partial(torch.distributed.TCPStore, "127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = one() if processes > 1 else None

    def run_as(rank: int) -> None:
        if store is not None:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        action(rank)

    return [fork.wait() for fork in [Fork(partial(run_as, rank), output) for rank in range(processes)]]
