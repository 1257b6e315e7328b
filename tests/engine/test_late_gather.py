"""Who waits for codes that are on their way, and what is queued after what."""

import contextlib
import copy
import functools
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases.streams import Event, Stream

import zerofp4
from zerofp4.distributed import CollectiveError
from zerofp4.engine import LateGathers, late_gather
from zerofp4.storage import Gate

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
DONE = ["gather 0", "complete 0"]


class Bucket:
    """Of weights that share a gate."""

    def __init__(self, *shapes, block=(16, 16)):
        self.gate = Gate()
        values = [torch.ones(shape, dtype=torch.bfloat16) for shape in shapes or [(16, 32)]]
        self.parameters = [zerofp4.quantize(each, columnwise=True, block=block) for each in values]
        for weight in self.parameters:
            for _, side in weight.record.sides():
                side.gate, side.scale_gate = self.gate, self.gate if block[0] == 1 else None


def on_the_way(*buckets, errors=()):
    """LateGathers on the CPU of what is added for each bucket, and what is said by whoever waits."""
    said, coming = [], LateGathers(CPU)

    def wait(b):
        said.append(f"gather {b}")
        if errors and errors[b]:
            raise errors[b]

    for b, bucket in enumerate(buckets):
        gather = SimpleNamespace(wait=functools.partial(wait, b))
        coming.add(bucket, gather, functools.partial(said.append, f"complete {b}"))
    return coming, said


# On the CPU


@pytest.mark.parametrize("end", ["settle", "synchronize"])
def test_the_first_reader_completes_a_bucket(end):
    """And the end what nobody read."""
    first, second = Bucket((16, 32), (32, 32)), Bucket()
    coming, said = on_the_way(first, second, Bucket())
    assert said == []
    for _ in range(2):
        second.parameters[0].dequantize()
        assert said == ["gather 1", "complete 1"]
    first.parameters[1].rowwise_data  # noqa: B018
    first.parameters[0].columnwise_data  # noqa: B018
    assert said == ["gather 1", "complete 1", *DONE]
    for _ in range(2):
        getattr(coming, end)()
        assert said[4:] == ["gather 2", "complete 2"]


def _recipe(weight):
    layer = zerofp4.nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype)
    layer.weight = torch.nn.Parameter(weight.detach())
    with zerofp4.nn.autocast(zerofp4.nn.NVFP4Recipe(stochastic_rounding=False)):
        layer(torch.ones(16, weight.shape[1], dtype=weight.dtype)).float().sum().backward()


def _layer(weight):
    layer = torch.nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype)
    layer.weight = torch.nn.Parameter(weight.detach())
    return layer


def _loaded(weight):
    other = _layer(zerofp4.quantize(torch.zeros_like(weight), columnwise=True))
    other.load_state_dict(_layer(weight).state_dict())


def _plain_state_dict(weight):
    zerofp4.register_plain_state_dict(layer := _layer(weight))
    layer.state_dict()


READS = {
    "rowwise_data": lambda w: w.rowwise_data,
    "columnwise_data": lambda w: w.columnwise_data,
    "a buffer of the record": lambda w: w.record.buffer("columnwise_data"),
    "buffers": lambda w: list(w.record.buffers()),
    "float": torch.Tensor.float,
    "detach": lambda w: w.detach().rowwise_data,
    "data": lambda w: w.data.columnwise_data,
    "to": lambda w: w.to("cpu", copy=True),
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
    "clone": torch.clone,
    "a Parameter": lambda w: torch.nn.Parameter(w).columnwise_data,
    "a product": lambda w: torch.nn.functional.linear(torch.ones(1, w.shape[-1], dtype=w.dtype), w),
    "a recipe": _recipe,
    "an operand": lambda w: zerofp4.gemm(zerofp4.quantize(torch.ones(2, w.shape[-1], dtype=w.dtype)), w),
    "quantize into": lambda w: zerofp4.quantize(torch.zeros_like(w), columnwise=True, out=w),
    "a Quantizer": lambda w: zerofp4.Quantizer(columnwise=True).update_(w, torch.zeros_like(w)),
    "copy_": lambda w: w.detach().copy_(torch.zeros(w.shape)),
    "fill_": lambda w: w.detach().fill_(1),
    "zero_": lambda w: w.detach().zero_(),
    "share_memory_": lambda w: w.share_memory_(),
    "inside of a tensor": lambda w: w.__tensor_flatten__(),
    "dequantize_many": lambda w: zerofp4.dequantize_many([w]),
    "a load of it": _loaded,
    "a plain state dict": _plain_state_dict,
    "compiled": lambda w: torch.compile(_layer(w), backend="aot_eager")(
        torch.ones(1, w.shape[1]).to(w.dtype)
    ),
    "broadcast": lambda w: dist.broadcast(w.detach(), 0),
}


SCALES = {
    "scales": lambda w: (w.rowwise_scale, w.columnwise_scale, w.amax),
    "expanded": lambda w: w.expanded_scale(),
    "swizzled": lambda w: zerofp4.swizzle_scales([w]),
}
ASKS = {
    "repr": repr,
    "nbytes": lambda w: w.nbytes,
    "device": lambda w: w.record.device,
    "detached": lambda w: w.detach().requires_grad_(),
    "addresses": lambda w: zerofp4.ops.Addresses({"w": w}, {}).find_moved(),
    "matrices": lambda w: w.record.matrices(),
}


@pytest.mark.parametrize("name", [*READS, *(f"{name} that travel" for name in SCALES), *SCALES, *ASKS])
def test_whoever_reads_or_writes_elements_waits(world_of_one, name):
    """And nobody else. Scales of blocks of 1x16 travel with the codes."""
    name, _, travels = name.partition(" that ")
    bucket, call = Bucket(block=(1 if travels else 16, 16)), (READS | SCALES | ASKS)[name]
    call(bucket.parameters[0])  # what is kept from an earlier call must wait as well
    _, said = on_the_way(bucket)
    call(bucket.parameters[0])
    assert said == (DONE if name in READS or travels else [])


def test_matrices_of_a_stack_wait_with_it():
    bucket = Bucket((2, 16, 32))
    (stack,) = bucket.parameters
    for weight in (*stack.unbind(), stack[1]):
        _, said = on_the_way(bucket)
        weight.dequantize()
        assert said == DONE


def test_a_gather_that_fails_is_raised_once():
    """To who reads, or else when all settle; who reads behind that is told nothing."""
    gone = CollectiveError("gathering weights failed")
    buckets = [Bucket() for _ in range(4)]
    coming, said = on_the_way(*buckets, errors=(gone, None, gone, gone))
    for call in (buckets[0].parameters[0].dequantize, coming.settle):
        with pytest.raises(CollectiveError):
            call()
        call()
    for bucket in buckets:
        bucket.parameters[0].dequantize()
    assert said == ["gather 0", "gather 1", "complete 1", "gather 2"]


# On a GPU


@pytest.fixture
def gpu(monkeypatch):
    """The stack of streams, the last of which is the current one, and whether it is being captured."""
    state = SimpleNamespace(on=[Stream(1)], capturing=False)

    @contextlib.contextmanager
    def within(stream):
        state.on.append(stream)
        try:
            yield
        finally:
            state.on.pop()

    current = lambda _: state.on[-1]  # noqa: E731
    new = lambda *_, **__: Stream(99)  # noqa: E731
    cuda = SimpleNamespace(Stream=new, Event=Event, stream=within, current_stream=current)
    monkeypatch.setattr(late_gather, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(late_gather, "current_stream", lambda _: state.on[-1].cuda_stream)
    monkeypatch.setattr(late_gather, "is_capturing", lambda _: state.capturing)
    monkeypatch.setattr(Event, "arrived", False)
    monkeypatch.setattr(Event, "asked", 0)
    return state


def add(gpu, coming, bucket):
    """What is done at the gather's end, and then by the stream that completes."""

    def queue(name):
        return lambda: gpu.on[-1].done.add(name)

    coming.add(bucket, SimpleNamespace(wait=queue("gathered")), queue("completed"))


def read(bucket):
    return bucket.parameters[0].rowwise_data


ALL = {"gathered", "completed"}


def test_the_allocator_is_told_of_the_memory_that_it_gave(gpu, monkeypatch):
    """Codes have storages of their own over a flat buffer, which torch's allocator does not know."""
    bucket, told = Bucket(), []
    (weight,) = bucket.parameters
    weights, scales = weight.rowwise_data.view(-1).clone(), torch.zeros(8)
    bucket.gathered = [weights, scales]
    weight.rowwise_data = torch.from_dlpack(weights.view(16, 16))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, _: told.append(id(tensor)))
    LateGathers(GPU).watch(bucket)
    expected = weights, scales, weight.columnwise_data, weight.columnwise_scale
    assert set(map(id, expected)) <= set(told)


@pytest.mark.parametrize("arrived", [False, True])
def test_a_gpu_waits_in_the_stream_that_reads(gpu, arrived):
    """Unless all is there."""
    bucket, coming = Bucket(), LateGathers(GPU)
    add(gpu, coming, bucket)
    assert gpu.on[0].done == set()  # what computes goes on
    Event.arrived = arrived
    for _ in range(2):  # the second time the stream waits already
        read(bucket)
        assert gpu.on[0].done == (set() if arrived else ALL) and Event.asked == 1
    gpu.on[0] = other = Stream(2)
    read(bucket)
    assert arrived or other.done == ALL  # and so does every other one that reads


def test_a_capture_is_told_what_to_do(gpu):
    bucket, coming = Bucket(), LateGathers(GPU)
    add(gpu, coming, bucket)
    gpu.capturing = True
    with pytest.raises(RuntimeError, match=r"call check\(\) of the optimizer before the capture"):
        read(bucket)
    gpu.capturing = False
    coming.synchronize()
    gpu.capturing = True
    read(bucket)
    assert Event.arrived
