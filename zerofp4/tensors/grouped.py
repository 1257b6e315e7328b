"""quantize_grouped and GroupedNVFP4: groups of consecutive rows, for products with experts."""

import dataclasses
from collections.abc import Sequence

import torch

from zerofp4 import storage
from zerofp4.format import ATOM_COLUMNS, ATOM_ROWS, BLOCK
from zerofp4.layout import ceil_div, columnwise_rows, round_up
from zerofp4.ops import draw_rng_state, grouped_shapes, is_capturing
from zerofp4.tensors.arguments import check_generator, check_values, detached, kernel_input
from zerofp4.tensors.nvfp4 import NVFP4Tensor
from zerofp4.tensors.quantized_tensor import wrap


@dataclasses.dataclass(eq=False, repr=False)
class GroupedNVFP4(storage.Sides):
    """Groups of consecutive rows of a [tokens, K] matrix, each quantized as a tensor of its own.

    quantize_grouped makes one. Blocks are 1x16. Missing buffers are None.

    Examples:
        >>> groups = zerofp4.quantize_grouped(x, [16, 0, 48])
        >>> second = groups.tensors()[1]  # an NVFP4Tensor

    R = round_up(tokens + 15 * groups, 16), S = round_up(tokens + 127 * groups, 128), enough for any splits:

    - rowwise_data uint8 [R, K/2] and rowwise_scale E4M3 [R, ceil(K/16)]: group g begins at row
      data_offsets[g], a multiple of 16.
    - rowwise_scale_expanded, rowwise_scale_swizzled E4M3 [S, round_up(ceil(K/16), 4)]: group g begins at row
      scale_offsets[g], a multiple of 128.
    - columnwise_data uint8 [K * R/2] and columnwise_scale E4M3 [K * R/16]: group g, of m rows, is a matrix
      [K, round_up(m, 16)/2] from K * data_offsets[g]/2 on, with scales [K, ceil(m/16)] from K *
      data_offsets[g]/16 on. Columns past m/2 stand for rows of zeros.
    - columnwise_scale_expanded, columnwise_scale_swizzled E4M3 [round_up(K, 128) * S/16]: group g is a matrix
      [round_up(K, 128), round_up(ceil(m/16), 4)] from round_up(K, 128) * scale_offsets[g]/16 on.
    - amax and columnwise_amax float32 [groups], 0 for an empty group. They are one tensor unless both copies
      exist and the columnwise one is transformed.
    - Padding between groups, and all bytes after the last one, are 0.

    offsets, data_offsets, scale_offsets: int64 [groups + 1], where groups begin in the rows of x, of the data
        and of the padded scales; then the end of the last one.
    splits: int32 or int64 [groups], the rows of each group.
    m_splits: splits as a tuple, or None if the host does not know them.
    error: int32 [1], 1 if a split is negative or their sum is not `tokens`; then all groups are empty.
    """

    shape: torch.Size
    dtype: torch.dtype
    m_splits: tuple[int, ...] | None
    hadamard: bool
    random_signs: bool
    splits: torch.Tensor
    error: torch.Tensor
    offsets: torch.Tensor
    data_offsets: torch.Tensor
    scale_offsets: torch.Tensor

    block = (1, BLOCK)

    @property
    def device(self) -> torch.device:
        return self.error.device

    def __len__(self) -> int:
        return self.splits.shape[0]

    def __repr__(self) -> str:
        fields = [f"shape={tuple(self.shape)}", f"groups={len(self)}", f"dtype={self.dtype}"]
        return f"GroupedNVFP4({', '.join(fields)}, device={self.device})"

    def check(self) -> None:
        """Raises ValueError for invalid splits. Waits for the device."""
        if self.error.item():
            host_sizes(self.splits, self.shape[0])

    def __getitem__(self, group: int) -> NVFP4Tensor:
        """Group g as an NVFP4Tensor [m_splits[g], K] over the same memory. Columnwise data is copied if the
        group has no hadamard and its rows are not a multiple of 16.

        Raises ValueError if the host does not know the splits, and for an odd number of rows with a
        columnwise copy without hadamard, which an NVFP4Tensor cannot have; IndexError past the last group.
        """
        splits = self.m_splits
        if splits is None:
            raise ValueError(
                f"m_splits are known on {self.device} only, and reading them would wait for it: give them as "
                "a list or a CPU tensor to have groups as NVFP4Tensors"
            )
        if not -len(splits) <= group < len(splits):
            raise IndexError(f"group must be below {len(splits)}, got {group}")
        group %= len(splits)
        rows, cols, before = splits[group], self.shape[1], splits[:group]
        data_row = sum(round_up(each, BLOCK) for each in before)
        scale_row = sum(round_up(each, ATOM_ROWS) for each in before)
        if rows % 2 and self.columnwise is not None and not self.hadamard:
            raise ValueError(
                f"group {group} has {rows} rows, but the columnwise copy of an NVFP4Tensor needs an even "
                "number of them"
            )
        options = {"hadamard": self.hadamard, "random_signs": self.random_signs}
        record = storage.NVFP4Storage(torch.Size((rows, cols)), self.dtype, self.block, **options)
        if self.rowwise is not None:
            record.rowwise = self._rowwise(rows, data_row, scale_row)
        if self.columnwise is not None:
            record.columnwise = self._columnwise(rows, data_row, scale_row)
        for name, side in record.sides():
            side.amax = getattr(self, name).amax[group : group + 1]
        if record.rowwise is not None and self.columnwise_amax is self.amax:
            record.columnwise.amax = record.rowwise.amax
        return wrap(NVFP4Tensor, record)

    def tensors(self) -> list[NVFP4Tensor]:
        """All groups as NVFP4Tensors (see `grouped[g]`)."""
        return [self[group] for group in range(len(self))]

    def _rowwise(self, rows: int, data_row: int, scale_row: int) -> storage.Side:
        padded = slice(scale_row, scale_row + round_up(rows, ATOM_ROWS))
        own = slice(data_row, data_row + rows)
        scales = {
            layout: scale[own if layout == "compact" else padded]
            for layout, scale in self.rowwise.scales.items()
        }
        return storage.Side(self.rowwise.data[own], scales)

    def _columnwise(self, rows: int, data_row: int, scale_row: int) -> storage.Side:
        cols, blocks = self.shape[1], ceil_div(rows, BLOCK)
        padded_cols = round_up(cols, ATOM_ROWS)

        def matrix(buffer: torch.Tensor, first: int, shape: tuple[int, int]) -> torch.Tensor:
            return buffer[first : first + shape[0] * shape[1]].view(shape)

        compact = (cols * (data_row // BLOCK), (cols, blocks))
        padded = (padded_cols * (scale_row // BLOCK), (padded_cols, round_up(blocks, ATOM_COLUMNS)))
        scales = {
            layout: matrix(scale, *(compact if layout == "compact" else padded))
            for layout, scale in self.columnwise.scales.items()
        }
        data = matrix(self.columnwise.data, cols * (data_row // 2), (cols, blocks * BLOCK // 2))
        return storage.Side(data[:, : columnwise_rows(rows, self.hadamard) // 2].contiguous(), scales)


def quantize_grouped(
    x: torch.Tensor,
    m_splits: Sequence[int] | torch.Tensor,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    amax: torch.Tensor | None = None,
    columnwise_amax: torch.Tensor | None = None,
    hadamard: bool = False,
    random_signs: bool = True,
    stochastic_rounding: bool = False,
    generator: torch.Generator | None = None,
    scale_layouts: Sequence[str] = ("compact",),
) -> GroupedNVFP4:
    """Quantize groups of consecutive rows, each with its own amax, in blocks of 1x16 and one launch.

    x: [tokens, K] of float32, bfloat16 or float16, K even.
    m_splits: the rows of each group, possibly 0. A sequence of ints or a CPU tensor is checked here, and
        copied to x's device without waiting. On x's device, int32 or int64 [groups], nothing waits, and a
        CUDA graph can capture the call; invalid splits set `error`, and `check()` raises. torch.compile
        treats any tensor so.
    amax, columnwise_amax: float32 [groups] on x's device, instead of each group's own, which take a pass over
        x.
    rowwise, columnwise, hadamard, random_signs, scale_layouts: as in quantize, but a columnwise copy takes
        any number of rows, since groups are padded with rows of zeros to a multiple of 16.
    stochastic_rounding, generator: as in quantize, with a state drawn for each group.

    Returns a GroupedNVFP4 without history, with the bytes of quantize(rows of a group, block=(1, 16), ...).

    Examples:
        >>> groups = zerofp4.quantize_grouped(x, [16, 0, 48])
        >>> first, *others = groups.tensors()

    Raises TypeError for a wrong dtype; ValueError for a wrong shape, option or combination of options, and
    for invalid host splits; RuntimeError for host splits while a CUDA graph is captured.
    """
    check_values(x)
    check_generator(generator, stochastic_rounding)
    copies = {"rowwise": rowwise, "columnwise": columnwise, "scale_layouts": scale_layouts}
    transform = {"hadamard": hadamard, "random_signs": random_signs}
    scheme = storage.Scheme.checked(block=GroupedNVFP4.block, **transform, **copies)
    if x.dim() != 2:
        raise ValueError(f"x must be a matrix [tokens, K], got shape {tuple(x.shape)}")
    sizes = None
    if not isinstance(m_splits, torch.Tensor) or (m_splits.is_cpu and not torch.compiler.is_compiling()):
        sizes = host_sizes(m_splits, x.shape[0])
    splits = m_splits.contiguous() if sizes is None else sizes_on(sizes, x.device)
    groups = _allocate(scheme, grouped_shapes(x.shape[0], splits.shape[0], x.shape[1]), x.device)
    offsets = torch.empty((3, splits.shape[0] + 1), dtype=torch.int64, device=x.device)
    error = torch.empty(1, dtype=torch.int32, device=x.device)
    given = (detached("amax", amax), detached("columnwise_amax", columnwise_amax))
    options = (hadamard, random_signs)
    buffers = dict(groups.buffers())
    outputs = [buffers.get(name) for name in storage.BUFFERS]
    state = draw_rng_state(x.device, generator, splits.shape[0]) if stochastic_rounding else None
    inputs = (kernel_input(x), splits, *given, *options, state)
    torch.ops.zerofp4.quantize_grouped(*inputs, *outputs, offsets, error)
    sides, places = dict(groups.sides()), (splits, error, *offsets.unbind())
    return GroupedNVFP4(x.shape, x.dtype, sizes, *options, *places, **sides)


def _allocate(scheme: storage.Scheme, shapes: dict, device: torch.device) -> storage.Sides:
    names = [f"{side}_data" for side in scheme.sides]
    names += [storage.scale_name(side, layout) for side in scheme.sides for layout in scheme.scale_layouts]
    names += ["amax"] + ["columnwise_amax"] * (scheme.hadamard and len(scheme.sides) == 2)
    buffers = {
        name: storage.empty_buffer(shapes[name], storage.NVFP4Storage.buffer_dtype(name), device)
        for name in names
    }
    return storage.Sides(**storage.sides_of(buffers))


def host_sizes(m_splits: Sequence[int] | torch.Tensor, tokens: int) -> tuple[int, ...]:
    """The rows of each group; waits for a GPU. Raises ValueError, or TypeError for non-integers."""
    if isinstance(m_splits, torch.Tensor):
        if m_splits.dim() != 1 or m_splits.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"m_splits must be a vector of int32 or int64, got {m_splits.dtype} {tuple(m_splits.shape)}"
            )
        m_splits = m_splits.tolist()
    sizes = tuple(m_splits)
    if not all(isinstance(rows, int) for rows in sizes):
        raise TypeError(f"m_splits must be integers, got {list(sizes)}")
    if any(rows < 0 for rows in sizes) or sum(sizes) != tokens:
        raise ValueError(
            f"m_splits must not be negative and must sum to the {tokens} rows of x, got {list(sizes)}"
        )
    return sizes


def sizes_on(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [groups], copied without waiting. Raises RuntimeError while a CUDA graph is captured."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.tensor(sizes, dtype=torch.int64, device=device)
    if is_capturing(device):
        # A replay would read staging memory that has long gone back to the allocator.
        raise RuntimeError(
            "while a CUDA graph is captured m_splits must be on x's device, got them on the host"
        )
    # torch does not reuse pinned memory before the copies from it are done.
    return torch.tensor(sizes, dtype=torch.int64, device="cpu").pin_memory().to(device, non_blocking=True)
