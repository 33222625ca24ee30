"""Queues of clusters, to which a job returns to be started again."""

from __future__ import annotations

from typing import Protocol


class JobQueue(Protocol):
    """The queue of a cluster, for ``SaveTrainingStateCallback(requeue=True)``. Only the first process of a job asks it.

    Outside of such a cluster, nothing of it does anything.
    """

    def check(self) -> None:
        """Check before training that this job could return to the queue.

        :raises RuntimeError: if it could not
        """

    def was_requeued(self) -> bool:
        """Whether this job has returned to the queue before."""

    def requeue_after(self, interruption: Exception) -> str:
        """Return this job to the queue if that is what an interruption of its run asks for.

        :param interruption: what has paused the run, for example a ``RunInterruptedError``
        :return: what has been done, in a sentence to be printed; empty if nothing
        """


#: The queues that are known, by the name of what runs the cluster. An extension adds its own.
JOB_QUEUES: dict[str, JobQueue] = {}
