"""Queues of clusters, to which a job returns to be started again."""

from __future__ import annotations

from typing import Protocol


class JobQueue(Protocol):
    """The queue of a cluster, for ``SaveTrainingStateCallback(requeue=True)``. Only the first process of a job uses it.

    Outside such a cluster, its methods do nothing.
    """

    def check(self) -> None:
        """Check before training that this job could return to the queue.

        Raises:
            RuntimeError: if it could not
        """

    def was_requeued(self) -> bool:
        """Whether this job has returned to the queue before."""

    def requeue_after(self, interruption: Exception) -> str:
        """Return this job to the queue if an interruption of its run asks for that.

        Args:
            interruption: what has paused the run, for example a ``RunInterruptedError``

        Returns:
            what has been done, in a sentence to be printed; empty if nothing
        """


#: The known queues, by the name of the cluster's scheduler. An extension adds its own.
JOB_QUEUES: dict[str, JobQueue] = {}
