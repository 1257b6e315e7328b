"""An export for serving engines, of a model with the shape of Llama-3-8B: its time and its memory."""

import argparse

import torch
from torch import nn

import zerofp4
from benchmarks.checkpoints import once, shared_folder
from benchmarks.ranks import MEGABYTES, Timer
from benchmarks.session import Session
from benchmarks.workloads import CONFIGS, causal_model
from zerofp4.launch import World


def export(session: Session, options: argparse.Namespace, world: World) -> None:
    """serving.save_pretrained of the shape of Llama-3-8B in blocks of 1x16, with random weights.

    Needs transformers and safetensors. Memory is what rank 0, which writes, peaks at above what it held
    before: on the host resident memory, on the GPU torch's count; the most of all repeats. Figures of time
    are the median, and depend on the storage.

    At full size the model takes 16 GB in bfloat16, and then 6 GB; the export is 6 GB.
    """
    model, timer = make_model(options.scale, world.device), Timer(session, world, options.repeats)
    size = sum(served.nbytes for served in zerofp4.serving.weights(model).served)
    timer.count("size", "megabytes", size / MEGABYTES, "tensors of the export")
    found, tenths = [], set()

    def show(done: int, total: int) -> None:
        if done * 10 // total not in tenths:
            tenths.add(done * 10 // total)
            session.say(f"    {done / MEGABYTES:,.0f} of {total / MEGABYTES:,.0f} MB")

    save = zerofp4.serving.save_pretrained
    with shared_folder(options.storage, size, world) as folder:
        for number in range(options.repeats):
            tenths.clear()
            found.append(once(lambda: save(model, folder / "served", progress=show), world))
            session.say(f"    export {number + 1} of {options.repeats}: {found[-1][0]:,.0f} ms")
    milliseconds, *memory = zip(*found, strict=True)
    median = torch.tensor(milliseconds, dtype=torch.float64).median().item()
    timer.count("save", "milliseconds", median, "save_pretrained, on rank 0")
    for place, peaks in zip(("host", "gpu"), memory, strict=True):
        if place == "host" or world.device.type == "cuda":
            rule = f"memory of the {place} above what was held, at its peak"
            timer.count(f"{place}_memory", "megabytes", max(peaks) / MEGABYTES, rule)


def make_model(scale: int, device: torch.device) -> nn.Module:
    """With NVFP4 weights, and without what they were made from."""
    model = causal_model(CONFIGS / "llama_3_8b.json", device, scale)
    zerofp4.convert_model(model, block=(1, 16), amax_groups=zerofp4.serving.amax_groups(model))
    for parameter in model.parameters():
        if isinstance(parameter, zerofp4.NVFP4Tensor):
            parameter.clear_high_precision_init_val()
    return model
