"""The same training by transformers' Trainer, accelerate, Lightning and accelerate's FSDP2, which go on in a
world of another size.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal
from cases.trainers import with_fsdp2
from helpers import assert_bytes_equal

import zerofp4
from distributed.optim.cases import assert_same_on_all_ranks
from distributed.run import run_ranks
from zerofp4.integrations import fsdp2
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

STEPS = 3
"""Of each leg."""


def llama(dtype=torch.bfloat16):
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **ends)).to(dtype)


def converted(plain):
    model = llama()
    zerofp4.convert_model(model)
    if plain:
        zerofp4.register_plain_state_dict(model)
    return model, ZeroFP4Optimizer(model.named_parameters(), FusedAdamW, lr=1e-2)


def loss_of(model):
    tokens = torch.arange(16)[None]
    return model(input_ids=tokens, labels=tokens).loss


# What each package does in a leg: load what the leg before has saved, if there was one, train, and save. It
# returns the masters as it begins and as it ends.


def by_trainer(world, folder, leg):
    import transformers

    class Keep(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            begun.extend(optimizer.gathered_masters())

        def on_step_end(self, args, state, control, **_):
            if control.should_save:
                optimizer.consolidate_state_dict()

    begun = []
    model, optimizer = converted(plain=True)
    options = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "lr_scheduler_type": "constant"}
    options |= {"max_steps": STEPS * (leg + 1), "save_steps": STEPS, "per_device_train_batch_size": 2}
    data = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 64
    arguments = transformers.TrainingArguments(str(folder), **options)
    given = {"train_dataset": data, "optimizers": (optimizer, None), "callbacks": [Keep()]}
    trainer = transformers.Trainer(model, arguments, **given)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS * leg}") if leg else None)
    assert int(optimizer.state_dict()["steps"]) == STEPS * (leg + 1)
    again = type(model).from_pretrained(folder / f"checkpoint-{STEPS * (leg + 1)}", dtype=torch.bfloat16)
    for name, value in model.state_dict().items():  # an ordinary model, of the values of the codes
        assert_bytes_equal(again.state_dict()[name], value, name)
    return begun, optimizer.gathered_masters()


def by_accelerate(world, folder, leg):
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    net, optimizer = converted(plain=True)
    accelerator.register_save_state_pre_hook(lambda *_: optimizer.consolidate_state_dict())
    prepared = accelerator.prepare(net, optimizer)
    return leg_of_accelerate(accelerator, folder, leg, *prepared, optimizer.gathered_masters, net.state_dict)


def leg_of_accelerate(accelerator, folder, leg, model, optimizer, masters, whole_state):
    if leg:
        accelerator.load_state(str(folder / f"{leg - 1}"))
    begun = masters()
    train(accelerator, model, optimizer)
    accelerator.save_state(str(folder / f"{leg}"))
    accelerator.save_model(model, folder / f"model-{leg}")
    check_saved_model(folder / f"model-{leg}", whole_state())
    return begun, masters()


def train(accelerator, model, optimizer):
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def check_saved_model(folder, expected):
    from safetensors.torch import load_file

    if dist.is_initialized():
        dist.barrier()
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_bytes_equal(found[name], value, name)


def by_lightning(world, folder, leg):
    import lightning

    begun = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = llama()
            zerofp4.convert_model(self.model)

        def training_step(self, batch, index):
            loss = self.model(input_ids=batch, labels=batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            self.zero = ZeroFP4Optimizer(self.named_parameters(), FusedAdamW, lr=1e-2)
            return self.zero

        def on_train_start(self):
            begun.extend(self.zero.gathered_masters())

    losses, module = [], Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"accelerator": "cpu", "devices": world.world_size, "enable_checkpointing": False, **quiet}
    strategy = "ddp" if world.world_size > 1 else "auto"
    options |= {"strategy": strategy, "max_steps": STEPS * (leg + 1), "gradient_clip_val": 1.0}
    trainer = lightning.Trainer(**options)
    data = torch.utils.data.DataLoader([torch.arange(16)] * 64, batch_size=2)
    trainer.fit(module, data, ckpt_path=folder / f"{leg - 1}.ckpt" if leg else None)
    assert losses[-1] < losses[0]
    trainer.save_checkpoint(folder / f"{leg}.ckpt")
    return begun, module.zero.gathered_masters()


def by_fsdp2(world, folder, leg):
    import accelerate

    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = with_fsdp2(accelerate.Accelerator(cpu=True), plugin)
    model = llama(torch.float32)
    fsdp2.prepare(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    fsdp2.attach(model, optimizer)

    def whole_state():
        return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}

    masters = lambda: list(whole_state().values())  # noqa: E731
    return leg_of_accelerate(accelerator, folder, leg, model, optimizer, masters, whole_state)


WAYS = {"Trainer": by_trainer, "accelerate": by_accelerate, "Lightning": by_lightning, "FSDP2": by_fsdp2}
"""FSDP2 last: what it tells accelerate holds for the rest of a process."""


def leg_of(world, folder, leg):
    """Masters as it begins and as it ends, by the names of ways."""
    found = {}
    for name, way in WAYS.items():
        own = folder / name
        own.mkdir(exist_ok=True)
        begun, ended = way(world, own, leg)
        assert_same_on_all_ranks([*begun, *ended])
        found[name] = [value.detach().clone() for value in begun], [value.detach().clone() for value in ended]
    return found


@pytest.mark.heavy
@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks train on the CPU, and there is a GPU")
def test_runs_go_on_in_worlds_of_other_sizes(tmp_path):
    """From 1 rank to 2 and back, with the masters that were saved."""
    for package in ("transformers", "accelerate", "lightning", "safetensors"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    options = {"time_limit": 240.0, "folder": tmp_path}
    legs = [run_ranks(leg_of, ranks, leg=leg, **options) for leg, ranks in enumerate((1, 2, 1))]
    for leg, (before, after) in enumerate(itertools.pairwise(legs), 1):
        for name in WAYS:
            begun, ended = after[0][name][0], before[0][name][1]
            assert_all_equal(begun, ended, f"{name}, leg {leg}, master")
