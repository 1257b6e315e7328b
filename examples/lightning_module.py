"""A module of Lightning with NVFP4 weights, whose checkpoint another run goes on from.

    python examples/lightning_module.py
    torchrun --nproc-per-node 2 examples/lightning_module.py
"""

import tempfile

import lightning
import torch
import torch.distributed as dist
from torch import nn

import zerofp4

world = zerofp4.launch.init_process_group()
told = [tempfile.mkdtemp()]
if world.world_size > 1:
    dist.broadcast_object_list(told)  # one folder for all ranks
checkpoint = f"{told[0]}/last.ckpt"


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        zerofp4.convert_model(self.net)
        self.losses = []

    def training_step(self, batch, index):
        loss = (self.net(batch) - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):  # the process group exists by then
        return zerofp4.optim.ZeroFP4Optimizer(self.named_parameters(), zerofp4.optim.FusedAdamW, lr=3e-3)


def fit(max_steps, ckpt_path=None):
    """Lightning gathers the optimizer's state by consolidate_state_dict() before it saves."""
    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu" if world.device.type == "cpu" else "gpu",
        devices=world.world_size,
        strategy="ddp" if world.world_size > 1 else "auto",
        max_steps=max_steps,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        **quiet,
    )
    data = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, torch.utils.data.DataLoader(list(data), batch_size=8), ckpt_path=ckpt_path)
    trainer.save_checkpoint(checkpoint)
    return module.losses


first = fit(max_steps=15)
second = fit(max_steps=30, ckpt_path=checkpoint)  # as in another run, in a world of any size
print(f"rank {world.rank} of {world.world_size}: loss {first[0]:.3f}, then {second[-1]:.3f}")
assert len(second) == 15 and second[-1] < first[0]
if world.rank == 0:
    print("Lightning trained NVFP4 weights, and another run went on from its checkpoint.")
zerofp4.launch.destroy_process_group()
