"""Every public name, used as a caller would: mypy checks it, and main() runs on the CPU in a world of one.

`assert_type` says what type a caller sees. Where a buffer may not exist the caller has to look, and so do we.
"""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import zerofp4
from zerofp4 import FourOverSix, GroupedNVFP4, MXFP8Tensor, NVFP4Tensor
from zerofp4.inspect import QuantizationReport
from zerofp4.launch import World
from zerofp4.nn import ConversionReport, FilterFn
from zerofp4.serving import Part


def tensors() -> None:
    x = torch.randn(64, 32, dtype=torch.bfloat16)
    t = zerofp4.quantize(
        x, block=(1, 16), columnwise=True, hadamard=True, scale_layouts=["compact", "swizzled"]
    )
    assert_type(t, NVFP4Tensor)
    assert_type(t.dequantize(), Tensor)
    assert_type(t.dequantize(torch.float32), Tensor)
    assert_type(t.expanded_scale(), Tensor)
    assert_type(t.swizzled_scale(columnwise=True), Tensor)
    assert t.rowwise_data is not None
    assert_type(t.rowwise_data, Tensor)
    buffers: list[Tensor] = [
        t.rowwise_scale,
        t.columnwise_data,
        t.columnwise_scale,
        t.amax,
        t.columnwise_amax,
    ]
    block: tuple[int, int] = t.block
    assert block == (1, 16) and all(buffer.numel() for buffer in buffers)
    assert isinstance(t.get_high_precision_init_val(), Tensor | None)
    assert_type(
        zerofp4.quantize(x, block=(1, 16), stochastic_rounding=True, generator=torch.Generator()), NVFP4Tensor
    )

    choice = FourOverSix(e4m3_max=256, error="mse")
    assert_type(choice.e4m3_max, int)
    assert_type(zerofp4.quantize(x, four_over_six=choice, amax=torch.ones(1)), NVFP4Tensor)
    assert_type(zerofp4.quantize(x, straight_through=True), NVFP4Tensor)
    skip = torch.zeros(1)
    weight = zerofp4.empty(
        (64, 32), dtype=torch.bfloat16, device="cpu", scale_layouts=("compact", "swizzled")
    )
    assert_type(zerofp4.quantize(x, columnwise=True, out=weight, skip=skip), NVFP4Tensor)
    assert_type(zerofp4.quantize_dequantize(x, block=(16, 16)), Tensor)

    quantizer = zerofp4.Quantizer(block=(16, 16), columnwise=True)
    assert_type(quantizer(x), NVFP4Tensor)
    assert_type(quantizer.update_(weight, x, skip=skip), NVFP4Tensor)

    m = zerofp4.quantize_mxfp8(x, rowwise=True, columnwise=True)
    assert_type(m, MXFP8Tensor)
    assert_type(m.swizzled_scale(), Tensor)
    assert_type(zerofp4.dequantize_many([weight, m], torch.float32), list[Tensor])
    swizzled = zerofp4.swizzle_scales([weight, (t.rowwise_scale, (64, 32))])
    assert_type(swizzled, list[Tensor])
    assert_type(zerofp4.unswizzle_scales([(swizzled[1], (64, 32))], block=(1, 16)), list[Tensor])


def products() -> None:
    x, w = torch.randn(64, 32), torch.randn(48, 32)
    a = zerofp4.quantize(x, block=(1, 16), columnwise=True)
    b = zerofp4.quantize(w, columnwise=True)
    assert_type(zerofp4.gemm(a, b, out_dtype=torch.bfloat16, bias=torch.zeros(48)), Tensor)
    gradient = zerofp4.quantize(torch.randn(64, 48), block=(1, 16))
    operand = zerofp4.Operand(b, columnwise=True)
    assert_type(operand.shape, tuple[int, int])
    assert_type(zerofp4.gemm(gradient, operand, backend="exact"), Tensor)


def layers() -> None:
    recipe = zerofp4.nn.NVFP4Recipe(hadamard=False, four_over_six=FourOverSix())
    module = zerofp4.nn.Linear(32, 64, bias=False, primary_weights=True)
    with zerofp4.nn.autocast(recipe):
        assert_type(module.forward(torch.randn(4, 32), is_first_microbatch=True), Tensor)
        assert module.forward(zerofp4.nn.quantize_input(torch.randn(4, 32))).shape == (4, 64)
    made_by_convert_model: tuple[type[nn.Module], ...] = (zerofp4.nn.Conv1D, zerofp4.nn.Experts)
    assert all(made_by_convert_model)
    assert_type(zerofp4.nn.MXFP8Recipe().backward, str)
    block = zerofp4.nn.LayerNormMLP(32, 64, normalization="RMSNorm", activation="swiglu")
    attention = zerofp4.nn.LayerNormLinear(32, 96, eps=1e-6)
    assert attention.forward(block.forward(torch.randn(4, 32))).shape == (4, 96)
    experts = zerofp4.nn.GroupedLinear(2, 32, 64)
    assert experts.forward(torch.randn(4, 32), [1, 3]).shape == (4, 64)


def groups() -> None:
    x = torch.randn(64, 32, dtype=torch.bfloat16)
    grouped = zerofp4.quantize_grouped(x, [40, 0, 24])
    assert_type(grouped, GroupedNVFP4)
    assert_type(len(grouped), int)
    assert_type(grouped[0], NVFP4Tensor)
    assert_type(grouped.tensors(), list[NVFP4Tensor])
    assert_type(grouped.m_splits, tuple[int, ...] | None)
    grouped.check()
    assert_type(zerofp4.quantize_grouped(x, torch.tensor([40, 24])), GroupedNVFP4)


def own_step() -> None:
    weights = [zerofp4.empty((32, 32)), zerofp4.empty((16, 32))]
    masters: list[Tensor | None] = [torch.randn(1024), torch.randn(512)]
    start_offsets: list[int | None] = [0, 0]
    found_inf = torch.zeros(1)
    plan = zerofp4.CastPlan(
        weights, masters, start_offsets, amax_groups=[weights], on_nonfinite="skip", found_inf=found_inf
    )
    plan.refresh()
    plan.step()
    plan.all_gather()
    plan.post()
    plan.check()
    assert_type(plan.found_inf, Tensor)
    zerofp4.cast_master_weights_to_nvfp4(weights, masters, start_offsets, None, found_inf=found_inf)
    zerofp4.all_gather_nvfp4(weights, start_offsets, [1024, 512])
    zerofp4.post_all_gather_processing(weights)


def training() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    is_converted: FilterFn = lambda module, name: name != "2"  # noqa: E731
    report = zerofp4.convert_model(model, is_converted)
    assert_type(report, ConversionReport)
    assert_type(report.converted, list[str])
    assert_type(report.skipped, dict[str, str])
    assert_type(report.shares, dict[str, float])
    assert_type(report.share, float)
    way = zerofp4.optim.Communication(between_hosts="mxfp8", exactly=lambda name, weight: weight.dim() < 2)
    way = zerofp4.optim.Communication(transport="collective", overlap="both")
    optimizer = zerofp4.optim.ZeroFP4Optimizer(
        model.parameters(), torch.optim.AdamW, communication=way, lr=1e-3, weight_decay=0.1
    )
    optimizer = zerofp4.optim.ZeroFP4Optimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-3, masters_from=optimizer, on_nonfinite="raise"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    model(torch.randn(4, 32)).square().mean().backward()
    assert_type(optimizer.clip_grad_norm_(1.0), Tensor)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    assert_type(optimizer.found_inf, Tensor)
    assert_type(optimizer.skipped_steps, int)
    assert_type(optimizer.first_nonfinite(), str | None)
    assert_type(optimizer.describe(), dict[str, Any])
    assert_type(optimizer.check(), None)
    optimizer.refresh()
    assert_type(optimizer.consolidate_state_dict(to=0), None)
    state = optimizer.state_dict()
    assert_type(state, dict[str, Any])
    optimizer.load_state_dict(state)
    assert_type(optimizer.gathered_masters(), list[Tensor | None])
    assert_type(optimizer.gathered_bytes_per_step(), dict[str, int])
    first = zerofp4.quantization_error(model, keep_codes=True)
    assert_type(zerofp4.quantization_error(model, optimizer, previous=first), QuantizationReport)
    assert_type(first.records, list[dict[str, Any]])
    assert_type(first.codes, dict[str, Tensor])


def training_with_muon() -> None:
    model = nn.Linear(32, 64)
    beside = {"params": [model.bias], "optimizer_class": torch.optim.AdamW, "lr": 1e-3}
    optimizer = zerofp4.optim.ZeroFP4Optimizer(
        [{"params": [model.weight]}, beside], torch.optim.Muon, whole_matrices=True, lr=0.02
    )
    assert_type(optimizer.inners.all, tuple[torch.optim.Optimizer, ...])


def models_out(folder: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    zerofp4.convert_model(model)
    optimizer = zerofp4.optim.ZeroFP4Optimizer(model.named_parameters(), lr=1e-3)
    for key, master in zerofp4.master_state_dict(model, optimizer, torch.bfloat16):
        assert_type(key, str)
        assert_type(master, Tensor)
    zerofp4.save_safetensors(model, folder, optimizer, torch.float32)
    averages = zerofp4.optim.AveragedMasters(optimizer, decay=0.99)
    averages.update()
    assert_type(averages.state_dict(), dict[str, Any])
    averages.load_state_dict(averages.state_dict())
    assert_type(dict(zerofp4.master_state_dict(model, averages)), dict[str, Tensor])
    zerofp4.register_plain_state_dict(model)
    assert_type(zerofp4.unconvert_model(model, optimizer), list[str])
    assert_type(zerofp4.unconvert_model(model, values="codes"), list[str])


def served(model: nn.Module, folder: str) -> None:
    groups = zerofp4.serving.amax_groups(model, lambda module, name: name != "lm_head")
    zerofp4.convert_model(model, amax_groups=groups)
    assert_type(groups, list[list[Tensor]])
    optimizer = zerofp4.optim.ZeroFP4Optimizer(model.named_parameters(), lr=1e-3, amax_groups=groups)
    zerofp4.serving.FUSED.append(("wq", "wkv"))
    amaxes = {"model.layers.0.mlp.down_proj": 8.0}
    report = zerofp4.serving.save_pretrained(
        model, folder, optimizer, format="modelopt", input_amaxes=amaxes, progress=print
    )
    assert_type(report.ties, dict[str, int])
    served = zerofp4.serving.weights(model, dtype=torch.bfloat16)
    assert_type(served.served[0].shape, tuple[int, ...])
    assert_type(dict(served.whole()), dict[str, Tensor])
    for name, tensor, part in served:
        assert_type((name, tensor, part), tuple[str, Tensor, Part])
    loaded = zerofp4.serving.load_pretrained(model, folder, masters="codes")
    assert_type(loaded, zerofp4.serving.LoadReport)
    assert_type(loaded.amax_groups, list[list[Tensor]])
    assert_type(loaded.input_amaxes, dict[str, float] | None)


def fused_adamw() -> None:
    weight, master = zerofp4.empty((32, 32)), torch.randn(1024)
    plan = zerofp4.CastPlan([weight], [master], [0])
    optimizer = zerofp4.optim.FusedAdamW([master], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizer.offer_amaxes(plan)
    master.grad = torch.randn(1024)
    optimizer.step()
    assert_type(optimizer.amaxes_outdated(), bool)
    plan.step()
    zerofp4.optim.FusedAdamW([{"params": [master], "state": "full"}], state="compact")


def main() -> None:
    world = zerofp4.launch.init_process_group(timeout=timedelta(seconds=60))
    assert_type(world, World)
    assert_type((world.rank, world.world_size, world.local_rank), tuple[int, int, int])
    assert_type((world.device, world.backend), tuple[torch.device, str])
    for part in (tensors, products, layers, groups, own_step, training, training_with_muon, fused_adamw):
        part()
    zerofp4.launch.destroy_process_group()
    assert_type(zerofp4.build_info(), dict[str, dict[Any, Any]])
    assert_type(zerofp4.__version__, str)


if __name__ == "__main__":
    main()
