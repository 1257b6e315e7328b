"""transformers' Trainer with NVFP4 weights: trains, saves, and goes on from the save in a world of any size.

    python examples/hugging_face_trainer.py
    torchrun --nproc-per-node 2 examples/hugging_face_trainer.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import zerofp4

world = zerofp4.launch.init_process_group()
told = [tempfile.mkdtemp()]
if world.world_size > 1:
    dist.broadcast_object_list(told)  # one folder for all ranks
folder = Path(told[0])
data = [{"input_ids": torch.arange(32), "labels": torch.arange(32)}] * 128


class Consolidate(transformers.TrainerCallback):
    """Trainer saves the optimizer on rank 0 alone: gather its state there before."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_save:
            self.optimizer.consolidate_state_dict()


def make_trainer(max_steps):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    # dtype= and not .to(), which would round rotary frequencies, too.
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(world.device)
    zerofp4.convert_model(model)
    zerofp4.register_plain_state_dict(model)  # safetensors holds values, not quantized tensors
    optimizer = zerofp4.optim.ZeroFP4Optimizer(model.named_parameters(), zerofp4.optim.FusedAdamW, lr=3e-3)
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=max_steps,
        save_steps=5,
        per_device_train_batch_size=4,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        use_cpu=world.device.type == "cpu",
    )
    sets = {"train_dataset": data, "eval_dataset": data[:8]}
    callbacks = [Consolidate(optimizer)]
    return transformers.Trainer(model, arguments, **sets, optimizers=(optimizer, None), callbacks=callbacks)


def train(max_steps, **options):
    trainer = make_trainer(max_steps)
    trainer.train(**options)
    return trainer.evaluate()["eval_loss"]


# A Trainer that evaluates before it trains would not put the model in DistributedDataParallel.
losses = [make_trainer(max_steps=5).evaluate()["eval_loss"], train(5)]
losses.append(train(10, resume_from_checkpoint=str(folder / "checkpoint-5")))  # as in another run
print(f"rank {world.rank} of {world.world_size}: evaluation losses {losses}")
assert losses[0] > losses[1] > losses[2]
if world.rank == 0:
    print("Trainer trained NVFP4 weights, and another run went on from its checkpoint.")
zerofp4.launch.destroy_process_group()
