"""Adapters of peft on a frozen base in NVFP4: trained, then merged into ordinary weights.

    python examples/lora.py
    torchrun --nproc-per-node 2 examples/lora.py
"""

import peft
import torch
import transformers

import zerofp4

world = zerofp4.launch.init_process_group()
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
# dtype= and not .to(), which would round rotary frequencies, too.
base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(world.device)
report = zerofp4.convert_model(base)  # before the adapters, which stay as they are
model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=8))
codes = base.model.layers[0].mlp.down_proj.base_layer.weight.rowwise_data.clone()

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
print(f"rank {world.rank} of {world.world_size}: {len(report.converted)} frozen weights in NVFP4")
print(f"rank {world.rank} of {world.world_size}: loss {losses[0]:.3f}, then {losses[-1]:.3f}")
assert losses[-1] < losses[0]
assert torch.equal(base.model.layers[0].mlp.down_proj.base_layer.weight.rowwise_data, codes)

zerofp4.unconvert_model(model, values="codes")  # merging adds to ordinary weights
merged = model.merge_and_unload()
assert not any("lora" in name for name, _ in merged.named_parameters())
if world.rank == 0:
    print("Adapters were trained on frozen NVFP4 weights, which kept their codes, and were merged.")
zerofp4.launch.destroy_process_group()
