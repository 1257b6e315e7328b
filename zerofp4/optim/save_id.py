"""Which save wrote what a load reads.

A save into a folder that holds an older one may be killed before every rank has written its files. The folder
then holds chunks of two saves, and each chunk alone is sound. So everything that an optimizer writes carries
an id, and a load takes the chunks of one id.

An id is a token and the number of steps taken. The ranks agree on a new random token when an optimizer is
built and whenever it loads. While the token and the number of steps stay, so do masters and moments: two
saves of one id have the same bytes, and may mix. docs/checkpoints.md names two exceptions.
"""

import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

ATTRIBUTE = "zerofp4_save"
"""Of a tensor, or another object, in a file: the id of the save that wrote it."""


def draw_token() -> str:
    """A new token. Seeds of torch and Python, which two runs may share, do not determine it."""
    return secrets.token_hex(8)


def make_id(token: str, steps: int) -> str:
    """All ids are equally long, so that they do not change where a chunk lies in its file."""
    return f"{token}-{steps:012d}"


def id_of(value: Any) -> str | None:
    """The id of the save that wrote a tensor or another value; None where it has none."""
    found = getattr(value, "__dict__", {}).get(ATTRIBUTE)
    return None if found is None else str(found)


def stamp(value: Any, save_id: str | None) -> Any:
    """Give a value its id, and return it."""
    if save_id is not None:
        vars(value)[ATTRIBUTE] = save_id
    return value


def the_one(ids: Iterable[str | None]) -> str | None:
    """The id under which what was read of these saves is written again. Raises ValueError for several."""
    found = dict.fromkeys(ids)
    if len(found) > 1:
        raise ValueError(_message({save_id: "a part" for save_id in found}))
    return next(iter(found), None)


class SavesRead(NamedTuple):
    """What a rank has read, by the ids of the saves that wrote it: the name of one entry of each.

    tensors: None is the id of those without one. values: options and the number of steps. Tools that convert
    checkpoints keep their ids and drop those of tensors, so values without an id count for nothing.
    """

    tensors: dict[str | None, str]
    values: dict[str, str]


def saves_read(pieces: Iterable[Any], values: dict[str, Any], present: str) -> SavesRead:
    """pieces: those that were read. values: by name. present: the id of the optimizer that loads, which has
    the values that a partial load leaves out.
    """
    tensors: dict[str | None, str] = {}
    for piece in pieces:
        for save_id in piece.save_ids:
            tensors.setdefault(save_id, piece.label or "a tensor")
    by_name = {id_of(value): name for name, value in values.items()}
    return SavesRead(tensors, {k: name for k, name in by_name.items() if k not in (None, present)})


def check_one_save(by_rank: Sequence[SavesRead]) -> None:
    """Raises ValueError, the same on every rank, where the ranks have read what two saves wrote."""
    found = {save_id: name for rank in by_rank for save_id, name in rank.tensors.items()}
    if found.keys() != {None}:
        found |= {save_id: name for rank in by_rank for save_id, name in rank.values.items()}
    if len(found) > 1:
        raise ValueError(_message(found))


def _message(found: dict[str | None, str]) -> str:
    saves = [f"{name} of {_described(save_id)}" for save_id, name in found.items()]
    return (
        f"state_dict mixes {len(found)} saves: it has {' and '.join(saves[:2])}. A save into a folder that "
        "holds an older one did not finish: load another checkpoint"
    )


def _described(save_id: str | None) -> str:
    if save_id is None:
        return "a save without an id"
    token, _, steps = save_id.partition("-")
    return f"save {token} at step {steps.lstrip('0') or 0}"
