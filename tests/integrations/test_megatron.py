"""The hook into Megatron-Core on one process: what it replaces, where it says no, and what it converts."""

from __future__ import annotations

import pickle
import sys
import types
from functools import partial

import pytest
import torch
from megatron_on_cpu import megatron_here
from megatron_wheel import installed, why_no_megatron
from torch import nn

import zerofp4
from zerofp4 import NVFP4Tensor
from zerofp4.integrations import megatron
from zerofp4.integrations.megatron import casting, hook, layout

needs_megatron = pytest.mark.skipif(why_no_megatron() is not None, reason=str(why_no_megatron()))
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore"),
]  # Megatron's import warns, and takes seconds


@pytest.fixture
def core():
    with megatron_here():
        import megatron.core

        yield megatron.core
    assert not hook.is_installed()


def replaced() -> dict[str, object]:
    """What is in the places that install() writes to, by their names."""
    return {
        f"{owner.__name__}.{name}": vars(owner)[name]
        for owner, name, _ in hook._replacements(hook._Megatron())
    }


@needs_megatron
def test_uninstall_leaves_everything_as_it_was(core):
    before = replaced()
    assert len(before) >= 15
    megatron.install()
    during = replaced()
    assert not any(during[name] is before[name] for name in before)
    megatron.install()
    assert replaced() == during
    megatron.uninstall()
    assert replaced() == before
    megatron.uninstall()


@needs_megatron
def test_tensors_are_pickled_without_megatron():
    with megatron_here():
        import megatron.core  # noqa: F401
    assert b"megatron" not in pickle.dumps(torch.zeros(1))


@needs_megatron
def test_asking_what_a_weight_is_makes_no_tensor(core):
    """Megatron does so twice a step of each weight."""
    from megatron.core import fp8_utils

    weight = nn.Parameter(zerofp4.quantize(torch.ones(16, 16)), requires_grad=False)
    other = nn.Parameter(torch.ones(2))
    with installed():
        assert fp8_utils._unwrap_parameter_data(weight) is weight
        assert not fp8_utils.is_grouped_tensor_with_quantized_storage(weight)
        assert fp8_utils._unwrap_parameter_data(other) is not other
    assert fp8_utils._unwrap_parameter_data(weight) is not weight


@needs_megatron
@pytest.mark.parametrize("version", ["0.17.1", "0.16.1", "0.20.0", "1.0.0"])
def test_a_version_that_is_not_known_is_refused_by_its_name(core, monkeypatch, version):
    before = replaced()
    monkeypatch.setattr(core, "__version__", version)
    with pytest.raises(RuntimeError, match=f"Megatron-Core {version} was found.*0.18, 0.19"):
        megatron.install()
    monkeypatch.undo()
    assert replaced() == before


@needs_megatron
def test_a_missing_function_is_named(core, monkeypatch):
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer

    monkeypatch.delattr(_ParamAndGradBuffer, "_compute_nvfp4_packed_layout")
    with pytest.raises(RuntimeError, match=r"no _ParamAndGradBuffer\._compute_nvfp4_packed_layout"):
        megatron.install()


def test_without_megatron_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ImportError, match="pip install megatron-core"):
        megatron.install()


@needs_megatron
@pytest.mark.parametrize("ranks", [1, 2, 3, 64, 128, 192, 256])
@pytest.mark.parametrize("high_bandwidth", [False, True])
def test_buckets_have_whole_bytes_on_every_rank(core, ranks, high_bandwidth):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, pad_buckets_for_high_nccl_busbw=high_bandwidth
    )
    with installed():
        model = nn.Sequential(nn.Linear(18, 34, bias=False), nn.Linear(34, 18, bias=False)).bfloat16()
        plain = DistributedOptimizer._compute_per_buffer_param_layout(
            list(model.parameters()), 600, ranks, config
        )
        megatron.convert_model(model)
        packed = DistributedOptimizer._compute_per_buffer_param_layout(
            list(model.parameters()), 600, ranks, config
        )
    assert all(end % (2 * ranks) == 0 for _, end in packed.bucket_indices)
    assert getattr(packed, "num_optimizer_shards", ranks) == ranks
    if ranks % 128:  # the padding that there was anyway will do
        assert packed.bucket_indices == plain.bucket_indices


@needs_megatron
def test_the_packed_layout_is_the_layout_halved(core):
    with installed():
        weights = [nn.Linear(18, 34, bias=False).bfloat16() for _ in range(3)]
        for weight in weights:
            megatron.convert_model(weight)
        params = [weight.weight for weight in weights]
    where = {params[2]: (0, 612, 0), params[1]: (640, 1252, 0), params[0]: (1536, 2148, 1)}
    buffer = types.SimpleNamespace(
        ddp_config=options(),
        data_parallel_world_size=3,
        param_index_map=where,
        bucket_indices=[(0, 1536), (1536, 2304)],
    )
    compute = packed_layout
    compute(buffer, [(param, "w") for param in params])
    assert buffer.nvfp4_packed_param_index_map == {
        param: (start // 2, end // 2, bucket) for param, (start, end, bucket) in where.items()
    }
    assert buffer.nvfp4_packed_bucket_indices == [(0, 768), (768, 1152)]
    assert buffer.nvfp4_packed_numel_unpadded == 626 + 306
    buffer.bucket_indices = [(0, 1536), (1536, 2307)]
    with pytest.raises(ValueError, match="element 2307 does not have whole bytes on each of 3 ranks"):
        compute(buffer, [(param, "w") for param in params])
    buffer.bucket_indices = [(0, 1536), (1536, 2304)]
    for odd, bounds in ((1537, (1537, 2149)), (2149, (1536, 2149))):
        where[params[0]] = (*bounds, 1)
        with pytest.raises(ValueError, match=f"begins or ends at element {odd} does not have whole bytes"):
            compute(buffer, [(param, "w") for param in params])


def packed_layout(buffer, named) -> None:
    layout.compute_packed_layout(buffer, None, lambda param: isinstance(param, NVFP4Tensor), named)


def options(**changed) -> types.SimpleNamespace:
    wanted = {"use_distributed_optimizer": True, "fp4_param_gather": True, "fp8_param_gather": False}
    return types.SimpleNamespace(**{**wanted, **changed})


@needs_megatron
@pytest.mark.parametrize(
    "changed", [{"use_distributed_optimizer": False}, {"fp4_param_gather": False}, {"fp8_param_gather": True}]
)
def test_options_that_would_leave_weights_stale_are_refused(core, changed):
    with installed():
        layer = nn.Linear(16, 16, bias=False).bfloat16()
        megatron.convert_model(layer)
    buffer = types.SimpleNamespace(ddp_config=options(**changed))
    compute = packed_layout
    with pytest.raises(ValueError, match=f"fc: .*{next(iter(changed))}=") as refused:
        compute(buffer, [(layer.weight, "fc")])
    assert "would cast them" in str(refused.value)
    several = types.SimpleNamespace(ddp_config=options(num_distributed_optimizer_instances=2))
    with pytest.raises(ValueError, match="several instances of the distributed optimizer"):
        compute(several, [(layer.weight, "fc")])
    layer.weight.is_managed_by_layer_wise_optimizer = True
    with pytest.raises(ValueError, match="Muon"):
        compute(types.SimpleNamespace(ddp_config=options()), [(layer.weight, "fc")])
    with pytest.raises(ValueError, match="NVFP4 and in FP8 cannot share"):
        compute(buffer, [(layer.weight, "fc"), (layer.weight.dequantize(), "other")])


@needs_megatron
@pytest.mark.parametrize("option", ["use_precision_aware_optimizer", "optimizer_cpu_offload"])
def test_masters_that_would_not_be_cast_are_refused(core, option):
    with installed():
        layer = nn.Linear(16, 16).bfloat16()
        megatron.convert_model(layer)
    made = []

    def original(self, optimizer, config, per_model_buffers):
        made.append(config)

    buffers = {0: [types.SimpleNamespace(params=[layer.bias]), types.SimpleNamespace(params=[layer.weight])]}
    layout.construct(None, original, None, types.SimpleNamespace(), per_model_buffers=buffers)
    assert len(made) == 1
    with pytest.raises(ValueError, match=option):
        layout.construct(None, original, None, types.SimpleNamespace(**{option: True}), buffers)
    layer.weight.clear_high_precision_init_val()
    with pytest.raises(ValueError, match="no initial value"):
        layout.construct(None, original, None, types.SimpleNamespace(), buffers)
    assert len(made) == 1


@needs_megatron
def test_megatron_fsdp_is_refused(core):
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    with installed():
        layer = nn.Linear(16, 16, bias=False).bfloat16()
        megatron.convert_model(layer)
        with pytest.raises(NotImplementedError, match="Megatron-FSDP cannot shard weight"):
            FullyShardedDataParallel(None, None, layer)
        from megatron.core import fp4_utils

        with pytest.raises(NotImplementedError, match="Megatron-FSDP"):
            fp4_utils.quantize_nvfp4_param_shard([layer.weight], [None], [None], None, [None])


class TheirTensor(torch.Tensor):
    """Stands for a tensor of TransformerEngine."""


@pytest.mark.parametrize("kind", [{"block": (1, 16)}, {"four_over_six": zerofp4.FourOverSix()}], ids=str)
def test_weights_whose_scales_megatron_does_not_gather_are_refused(kind):
    weight = nn.Parameter(zerofp4.empty((16, 16), **kind))
    weight.record.name = "layers.0"
    cast = partial(casting.quantize_nvfp4_param_shard, None)
    with pytest.raises(ValueError, match=r"weight 0 'layers\.0' has block .* and no scales"):
        cast([weight], [torch.randn(256)], [0], None)


def test_weights_of_others_go_where_they_went_before():
    ours = nn.Parameter(zerofp4.empty((16, 16)))
    theirs, master = torch.zeros(4).as_subclass(TheirTensor), torch.randn(256)
    calls = []
    cast = partial(casting.quantize_nvfp4_param_shard, lambda *args: calls.append(args))
    cast([theirs, ours], [None, master], [None, 0], None)
    assert calls == [([theirs], [None], [None], None, None)]
    assert ours.amax.item() > 0
    post = partial(casting.te_post_all_gather_processing, calls.append)
    post([ours, theirs])
    assert calls[1:] == [[theirs]]
    casting.te_post_all_gather_processing(None, [theirs])
    move = partial(casting.modify_nvfp4_rowwise_storage, lambda *args: calls.append(args))
    move(theirs, master)
    assert calls[2:] == [(theirs, master)]
    buffer = torch.zeros(200, dtype=torch.uint8)
    codes = ours.rowwise_data.clone()
    move(ours, buffer[64:192].view(16, 8))
    assert ours.rowwise_data.data_ptr() == buffer.data_ptr() + 64 and ours.rowwise_data.equal(codes)


@needs_megatron
def test_convert_model_says_why_it_leaves_a_parameter(core):
    layer = nn.Linear(16, 16, bias=False)
    with pytest.raises(RuntimeError, match="install"):
        megatron.convert_model(layer)
    tied = nn.Linear(16, 16).bfloat16()
    also = nn.Linear(16, 16).bfloat16()
    also.weight = tied.weight
    model = nn.ModuleDict(
        {
            "fc": nn.Linear(16, 32).bfloat16(),
            "odd": nn.Linear(15, 16).bfloat16(),
            "table": nn.Embedding(8, 16),
            "head": nn.Linear(16, 8, bias=False).bfloat16(),
            "tied": tied,
            "also": also,
        }
    )
    model["fc"].weight.tensor_model_parallel = True
    model["fc"].weight.allreduce = False
    model["head"].weight.is_embedding_or_output_parameter = True
    value = model["fc"].weight.detach().clone()
    with installed():
        report = megatron.convert_model(model)
        assert report.converted == ["fc"] and isinstance(model["fc"].weight, NVFP4Tensor)
        weight = model["fc"].weight
        assert weight.tensor_model_parallel and not weight.allreduce
        assert weight.get_high_precision_init_val().equal(value) and weight.columnwise_data is None
        reasons = {name.split(".")[0]: reason for name, reason in report.skipped.items()}
        for name, reason in (
            ("odd", "two even"),
            ("table", "Embedding"),
            ("head", "output"),
            ("tied", "shared"),
        ):
            assert reason in reasons[name]
        assert 0 < report.share < 1
        assert megatron.convert_model(model, lambda _, name: name == "head").converted == ["head"]
        late = nn.Linear(16, 16, bias=False).bfloat16()
        late.weight.main_grad = torch.zeros(16, 16)
        with pytest.raises(RuntimeError, match="DistributedDataParallel: convert it before"):
            megatron.convert_model(late)
        with pytest.raises(RuntimeError, match="meta"):
            megatron.convert_model(nn.Linear(16, 16, device="meta", dtype=torch.bfloat16))
