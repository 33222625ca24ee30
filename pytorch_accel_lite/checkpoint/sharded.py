"""Training states in shards: sharded tensors leave the state before it is written, and return when it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.checkpoint.pieces import Piece, read_like, read_whole, shape_of

if TYPE_CHECKING:
    from pytorch_accel_lite.checkpoint.training_state import TrainingState
    from pytorch_accel_lite.trainer import Trainer

_MARK = "in the shards, as"  # the only key of a dict that stands for a sharded tensor
_MODEL = "model"
Find = Callable[[tuple[Any, ...]], Any]


def take_out(value: Any, pieces: dict[str, Any], *path: Any) -> Any:
    """Return nested dicts, lists and tuples with each sharded tensor replaced by a mark, and collect the tensors.

    :param pieces: gets the tensors, by their names in the files
    :param path: the keys that lead to the value
    """
    if hasattr(value, "full_tensor"):
        name = ".".join(map(str, path))
        pieces[name] = value
        return {_MARK: name}
    if isinstance(value, Mapping):
        taken = {key: take_out(item, pieces, *path, key) for key, item in value.items()}
        return value if all(taken[key] is value[key] for key in taken) else taken
    if type(value) in (list, tuple):
        return type(value)(take_out(item, pieces, *path, place) for place, item in enumerate(value))
    return value


def take_out_weights(weights: Mapping[str, Any], pieces: dict[str, Any]) -> dict[str, Any]:
    """Return the weights that are not sharded, and collect those that are."""
    whole = {}
    for name, value in weights.items():
        if hasattr(value, "full_tensor"):
            pieces[f"{_MODEL}.{name}"] = value
        else:
            whole[name] = value
    return whole


def read_weights_like(pieces: Mapping[str, list[Piece]], own: Mapping[str, Any]) -> dict[str, Any]:
    """Read the sharded weights of a state, sharded as a model has them if it has them in that shape; else whole.

    :param own: the weights of the model
    """
    names = {name: name.removeprefix(f"{_MODEL}.") for name in pieces if name.startswith(f"{_MODEL}.")}
    return {short: _read(pieces, name, own.get(short)) for name, short in names.items()}


def put_back(value: Any, pieces: Mapping[str, list[Piece]], find: Find, *path: Any) -> Any:
    """Return nested dicts, lists and tuples with each mark replaced by its tensor.

    :param find: returns the tensor for a path like which its tensor is sharded, if there is one
    """
    if isinstance(value, Mapping):
        if value.keys() == {_MARK}:
            return _read(pieces, value[_MARK], find(path))
        read = {key: put_back(item, pieces, find, *path, key) for key, item in value.items()}
        return value if all(read[key] is value[key] for key in read) else read
    if type(value) in (list, tuple):
        return type(value)(put_back(item, pieces, find, *path, place) for place, item in enumerate(value))
    return value


def put_back_whole(state: TrainingState) -> None:
    """Read the sharded tensors of a state, other than the weights, whole."""
    state.shared = put_back(state.shared, state.pieces, lambda path: None)


def put_back_like(state: TrainingState, trainer: Trainer) -> None:
    """Read the sharded tensors of a state, other than the weights, sharded as the trainer's parameters are."""
    own = dict(_names(trainer))
    groups = getattr(trainer.optimizer, "param_groups", ())
    optimized = dict(enumerate(parameter for group in groups for parameter in group["params"]))

    def find(path: tuple[Any, ...]) -> Any:
        if path[:2] == ("optimizer", "state"):
            return optimized.get(path[2])
        return own.get(path[-1])  # averaged weights, for example

    state.shared = put_back(state.shared, state.pieces, find)


def _names(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    from pytorch_accel_lite.checkpoint.weights import without_compile

    yield from without_compile(trainer.get_model(keep_torch_compile=False).state_dict()).items()


def _read(pieces: Mapping[str, list[Piece]], name: str, like: Any) -> Any:
    of_tensor = pieces[name]
    if like is None or tuple(like.shape) != shape_of(of_tensor):
        return read_whole(of_tensor, name)
    return read_like(of_tensor, like, name)
