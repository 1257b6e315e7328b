"""Names of parameters in checkpoints, where ranks hold different ones."""

from collections.abc import Sequence
from typing import NamedTuple

from zerofp4.optim.build import Announcement, Member


class SavedNames(NamedTuple):
    """refusals: by trainable parameter, why no file can have it under its name; None where one can.
    elsewhere: by parameter group, the names of those in it that this rank has not, but others have.
    """

    refusals: list[str | None]
    elsewhere: list[list[str]]


def find_saved_names(by_rank: Sequence[Announcement], rank: int) -> SavedNames:
    holders: dict[str, list[int]] = {}
    for r, announcement in enumerate(by_rank):
        for name in dict.fromkeys(m.name for m in announcement.members if m.name is not None):
            holders.setdefault(name, []).append(r)
    own = by_rank[rank]
    refusals = [_find_refusal(own, member, holders, len(by_rank)) for member in own.trainable()]
    here = {member.name for member in own.members}
    elsewhere = [
        list(
            dict.fromkeys(
                m.name
                for announcement in by_rank
                for m in announcement.members
                if m.group == g and m.name is not None and m.name not in here
            )
        )
        for g in range(len(own.ranks))
    ]
    return SavedNames(refusals, elsewhere)


def _find_refusal(own: Announcement, member: Member, holders: dict[str, list[int]], count: int) -> str | None:
    """The same parameter is on the ranks that it is sharded over, and on those that replicated_over names
    with theirs; another one of that name would be written to the same place.
    """
    ranks, copies = own.ranks[member.group], own.copies[member.group]
    if len(ranks) == count:
        return None
    how = "build the optimizer with names that are those of the whole model, as in [('experts.7.weight', p)]"
    if member.name is None:
        return (
            f"{member.label} is on ranks {list(ranks)} only, and has no name that tells it from what others "
            f"have: {how}, before a checkpoint is written"
        )
    if len(copies) > 1:
        return None
    others = [r for r in holders[member.name] if r not in ranks]
    if not others:
        return None
    return (
        f"{member.label} is one parameter on ranks {list(ranks)} and another on ranks {others}, and a "
        f"checkpoint has one of each name: {how}"
    )
