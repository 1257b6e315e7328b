"""What a kernel cannot be faster than, whatever the memory does: the instructions that it executes."""

INSTRUCTIONS_PER_ELEMENT = {"quantize_1d": 15.8, "quantize_1d_rht": 36.2}
"""Executed per element, all kinds, of all threads, as ncu counted them at 8192 x 8192 for version 3 of
quantize in benchmarks/NOTES.md; later versions were not counted."""

LANES_PER_SECOND = {"NVIDIA H200": 528 * 32 * 1.755e9}
"""By device: each of its schedulers issues one instruction for the 32 lanes of a warp in every cycle."""


def issue_bound(name: str, moved: float, elements: int | None, device: str) -> dict:
    """The "instructions_per_element" of a row of this name and the "issue_bound_gbps" at which its bytes move
    when every scheduler issues in every cycle; nothing where either number is not known.
    """
    instructions = INSTRUCTIONS_PER_ELEMENT.get(name.split("/")[0])
    if instructions is None or elements is None or device not in LANES_PER_SECOND:
        return {}
    seconds = elements * instructions / LANES_PER_SECOND[device]
    return {"instructions_per_element": instructions, "issue_bound_gbps": moved / seconds / 1e9}
