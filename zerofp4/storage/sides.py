"""A quantized matrix as up to two copies: the sides of a record, and the names of their buffers."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from zerofp4.format import SCALE_LAYOUTS

SIDES = ("rowwise", "columnwise")


def scale_name(side: str, layout: str) -> str:
    """What operators, files and messages call the scales of a side in a layout."""
    return f"{side}_scale" if layout == "compact" else f"{side}_scale_{layout}"


def side_names(layouts: Sequence[str]) -> tuple[str, ...]:
    """The names of both sides' buffers with scales in these layouts, without amaxes."""
    return tuple(
        name for side in SIDES for name in (f"{side}_data", *(scale_name(side, layout) for layout in layouts))
    )


BUFFERS = (*side_names(SCALE_LAYOUTS), "amax", "columnwise_amax")
"""The names of all buffers that NVFP4 can have, in the order in which operators take them."""

_SCALES = {scale_name(side, layout): (side, layout) for side in SIDES for layout in SCALE_LAYOUTS}


def side_and_layout(name: str) -> tuple[str, str | None]:
    """The side and layout of a buffer in side_names(); the layout of elements is None."""
    return _SCALES.get(name) or (name.removesuffix("_data"), None)


class Gate:
    """Holds up reads of arriving elements: from close(wait) to open() each read calls wait() first."""

    __slots__ = ("_wait",)

    def __init__(self) -> None:
        self._wait: Callable[[], None] | None = None

    def close(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def open(self) -> None:
        self._wait = None

    def wait(self) -> None:
        wait = self._wait  # once: another thread may open it
        if wait is not None:
            wait()


class Side:
    """One copy of a quantized matrix.

    data: its elements; None if no whole copy of them exists. scales: by layout, "compact" among them unless
    only a kernel reads them. amax: float32, NVFP4's second level, or None. gate: what a read of `data` waits
    for, on a GPU in the current stream only, and who keeps it or its address before each use; None if nothing
    ever travels. scale_gate: the same for `scales`. (Amaxes never travel: every rank computes them.)
    place, scale_places: data and scales without waiting; use them only for addresses and shapes.
    """

    __slots__ = ("amax", "gate", "place", "scale_gate", "scale_places")

    def __init__(
        self,
        data: torch.Tensor | None,
        scales: dict[str, torch.Tensor],
        amax: torch.Tensor | None = None,
        gate: Gate | None = None,
        scale_gate: Gate | None = None,
    ):
        self.place, self.scale_places, self.amax = data, scales, amax
        self.gate, self.scale_gate = gate, scale_gate

    @property
    def data(self) -> torch.Tensor | None:
        if self.gate is not None:
            self.gate.wait()
        return self.place

    @data.setter
    def data(self, value: torch.Tensor | None) -> None:
        self.place = value

    @property
    def scales(self) -> dict[str, torch.Tensor]:
        if self.scale_gate is not None:
            self.scale_gate.wait()
        return self.scale_places


def _buffer(name: str) -> property:
    return property(lambda sides: sides.buffer(name), doc="None if it does not exist.")


@dataclasses.dataclass(eq=False, kw_only=True)
class Sides:
    """A rowwise and a columnwise copy; None for one that does not exist."""

    rowwise: Side | None = None
    columnwise: Side | None = None

    rowwise_data = _buffer("rowwise_data")
    rowwise_scale = _buffer("rowwise_scale")
    rowwise_scale_expanded = _buffer("rowwise_scale_expanded")
    rowwise_scale_swizzled = _buffer("rowwise_scale_swizzled")
    columnwise_data = _buffer("columnwise_data")
    columnwise_scale = _buffer("columnwise_scale")
    columnwise_scale_expanded = _buffer("columnwise_scale_expanded")
    columnwise_scale_swizzled = _buffer("columnwise_scale_swizzled")

    def sides(self) -> Iterator[tuple[str, Side]]:
        """Existing sides by name."""
        for name in SIDES:
            side = getattr(self, name)
            if side is not None:
                yield name, side

    @property
    def amax(self) -> torch.Tensor | None:
        """The rowwise copy's, or that of the only one."""
        side = self.rowwise or self.columnwise
        return None if side is None else side.amax

    @property
    def columnwise_amax(self) -> torch.Tensor | None:
        return None if self.columnwise is None else self.columnwise.amax

    def buffer(self, name: str) -> torch.Tensor | None:
        """A buffer by its name in BUFFERS; None if it does not exist."""
        if name in ("amax", "columnwise_amax"):
            return getattr(self, name)
        side, layout = side_and_layout(name)
        copy: Side | None = getattr(self, side)
        if copy is None:
            return None
        return copy.data if layout is None else copy.scales.get(layout)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Existing buffers by name, each once: columnwise_amax is left out where it is amax itself."""
        for _, side in self.sides():
            if side.gate is not None:
                side.gate.wait()
        yield from self.places()

    def places(self) -> Iterator[tuple[str, torch.Tensor]]:
        """buffers() without waiting at a gate: use them only for addresses and shapes."""
        for name, side in self.sides():
            if side.place is not None:
                yield f"{name}_data", side.place
            for layout in SCALE_LAYOUTS:
                if layout in side.scale_places:
                    yield scale_name(name, layout), side.scale_places[layout]
        if self.amax is not None:
            yield "amax", self.amax
        if self.columnwise_amax is not self.amax and self.columnwise_amax is not None:
            yield "columnwise_amax", self.columnwise_amax


def unstack(sides: Sides, count: int, first: int = 0) -> list[Sides]:
    """The sides of `count` matrices of a stack, from `first` on, as views. What shares an amax still does."""

    def chosen(buffer: torch.Tensor) -> torch.Tensor:
        return buffer.narrow(0, first, count)

    matrices = [Sides() for _ in range(count)]
    amaxes = {id(side.amax): chosen(side.amax).split(1) for _, side in sides.sides() if side.amax is not None}
    for name, side in sides.sides():
        data = [None] * count if side.place is None else chosen(side.place).unbind()
        scales = {layout: chosen(scale).unbind() for layout, scale in side.scale_places.items()}
        for e, matrix in enumerate(matrices):
            amax = None if side.amax is None else amaxes[id(side.amax)][e]
            own = {layout: each[e] for layout, each in scales.items()}
            setattr(matrix, name, Side(data[e], own, amax, side.gate, side.scale_gate))
    return matrices


def sides_of(buffers: dict[str, torch.Tensor]) -> dict[str, Side]:
    """The inverse of buffers(): sides by name, to build a record of."""
    sides = {}
    for side in SIDES:
        scales = {
            layout: buffers[scale_name(side, layout)]
            for layout in SCALE_LAYOUTS
            if scale_name(side, layout) in buffers
        }
        if f"{side}_data" in buffers or scales:
            sides[side] = Side(buffers.get(f"{side}_data"), scales, buffers.get("amax"))
    if "columnwise" in sides and "columnwise_amax" in buffers:
        sides["columnwise"].amax = buffers["columnwise_amax"]
    return sides
