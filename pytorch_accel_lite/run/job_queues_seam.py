"""The seam for queues of clusters, to which an interrupted job returns."""

from __future__ import annotations

from typing import Protocol


class JobQueue(Protocol):
    """The queue of a cluster, for ``SaveTrainingStateCallback(requeue=True)``. Only the first process of a job uses it.

    Outside such a cluster, its methods do nothing.
    """

    def check(self) -> None:
        """Check before training that this job could return to the queue.

        Raises:
            RuntimeError: if the job could not return
        """

    def was_requeued(self) -> bool:
        """Whether this job has returned to the queue before."""

    def requeue_after(self, interruption: Exception) -> str:
        """Return this job to the queue if its run was interrupted in a way that requires that.

        Args:
            interruption: the error that has paused the run, for example a ``RunInterruptedError``

        Returns:
            a sentence to print that says what was done; empty if nothing was done
        """


#: The known queues, by the name of the cluster's scheduler. An extension adds its own.
JOB_QUEUES: dict[str, JobQueue] = {}
