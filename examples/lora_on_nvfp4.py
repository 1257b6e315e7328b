"""Adapters of peft on a published NVFP4 checkpoint: loaded as it is, trained, merged and exported again.

python examples/lora_on_nvfp4.py
torchrun --nproc-per-node 2 examples/lora_on_nvfp4.py
"""

import tempfile
from pathlib import Path

import peft
import torch
import transformers

import zerofp4

world = zerofp4.launch.init_process_group()
torch.manual_seed(0)
temporary = tempfile.TemporaryDirectory()
folders = [temporary.name]
torch.distributed.broadcast_object_list(folders)  # rank 0 writes, and all read
published, merged_folder = Path(folders[0], "published"), Path(folders[0], "merged")

# A small checkpoint, in place of one that somebody has published.
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
zerofp4.convert_model(made, block=(1, 16), amax_groups=zerofp4.serving.amax_groups(made))
zerofp4.serving.save_pretrained(made, published)


def load(folder):
    """The model of a checkpoint, made without memory, which it gets from the files."""
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with world.device:
        report = zerofp4.serving.load_pretrained(model, folder)
    return model, report


base, report = load(published)
print(report)
model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=8))
optimizer = zerofp4.optim.ZeroFP4Optimizer(
    model.named_parameters(), zerofp4.optim.FusedAdamW, lr=1e-2, weight_decay=0.0
)
tokens = torch.arange(32, device=world.device).view(2, 16)
losses = []
for _ in range(20):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0]

zerofp4.unconvert_model(model, values="codes")  # merging adds to ordinary weights
merged = model.merge_and_unload()
zerofp4.convert_model(merged, block=(1, 16), amax_groups=zerofp4.serving.amax_groups(merged))
zerofp4.serving.save_pretrained(merged, merged_folder, input_amaxes=report.input_amaxes)

again, _ = load(merged_folder)
with torch.no_grad():
    assert torch.equal(again(input_ids=tokens).logits, merged(input_ids=tokens).logits)
print(f"rank {world.rank} of {world.world_size}: loss {losses[0]:.3f}, then {losses[-1]:.3f}, exported")
torch.distributed.barrier()  # rank 0 removes the folder when it ends
if world.rank == 0:
    print("Adapters were trained on an NVFP4 checkpoint and merged, and the export has the model's logits.")
zerofp4.launch.destroy_process_group()
