"""Running processes on this machine for a supervisor on another one: ``launch --join``."""

from __future__ import annotations

import signal
import socket
import sys
import time

from pytorch_accel_lite.extensions.takeover import fork_server
from pytorch_accel_lite.extensions.takeover.json_channel import Channel

_PAUSE = 0.5
_SECONDS_TO_CONNECT = 10.0


def join(address: tuple[str, int], processes: int, seconds: float) -> int:
    """Run processes of a job on this machine, and return the exit code of the job.

    If the connection is lost, the processes are killed, and as many rejoin once the job can be reached again.

    Args:
        address: the host and the port on which the supervisor listens
        seconds: how long to try to reach it
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the processes die with this one
    fork_server.prepare()
    while (connection := _connect(address, seconds)) is not None:
        channel = Channel(connection)
        channel.send(processes=processes, name=socket.gethostname())
        try:
            order = fork_server.ForkServer(channel).serve()
        except fork_server.LostSupervisorError:
            channel.close()
            print("launch: lost the connection to the job. Its processes here have been killed.", file=sys.stderr)
            continue
        if isinstance(order, int):
            return order
        fork_server.begin(order)
        return 0
    print(f"launch: there is no job at {address[0]}:{address[1]}.", file=sys.stderr)
    return 1


def _connect(address: tuple[str, int], seconds: float) -> socket.socket | None:
    """Connect to a supervisor, retrying as it may not have started yet; return ``None`` if it cannot be reached."""
    end = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection(address, _SECONDS_TO_CONNECT)
        except OSError:
            if time.monotonic() > end:
                return None
            time.sleep(_PAUSE)
            continue
        connection.settimeout(None)
        return connection
