"""Fine-tunes a causal LM of transformers with NVFP4 weights, and exports them for serving engines.

    python examples/quantization_aware_finetune.py served
    torchrun --nproc-per-node 2 examples/quantization_aware_finetune.py served --fsdp --teacher
    python examples/quantization_aware_finetune.py served --model FOLDER --text TRAIN.txt

A model that starts from random weights is trained in bfloat16 first. The table at the end compares
validation losses; --control adds the bfloat16 model, trained for as many steps as the NVFP4 weights.
"""

import argparse
import copy
import json
import random
import sysconfig
import time
from pathlib import Path

import torch
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import zerofp4
from zerofp4.integrations import fsdp2

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LARGE = {"hidden_size": 1536, "intermediate_size": 5120, "num_hidden_layers": 18, "num_attention_heads": 12}
PRESETS = {  # sizes of a Llama; sequence length, learning rates and steps
    "tiny": (SMALL, {"sequence_length": 64, "lr": 6e-4, "pretrain_lr": 6e-3, "pretrain_steps": 200}),
    "500m": (LARGE, {"sequence_length": 1024, "lr": 3e-5, "pretrain_lr": 3e-4, "pretrain_steps": 600}),
}


def read_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="of the export; an older one in it is replaced")
    add("--preset", choices=PRESETS, default="tiny", help="a Llama of this size (default: tiny)")
    add("--model", type=Path, help="folder of a model of transformers, or only of its config.json")
    add("--text", type=Path, nargs="+", help="files (default: Python's library); the last 5%% validate")
    add("--block", choices=["1x16", "16x16"], default="1x16", help="of the weights (default: 1x16)")
    add("--four-over-six", action="store_true", help="choose the better of two scales for each block")
    add("--teacher", action="store_true", help="learn the logits of the bfloat16 model, not the text")
    add("--control", action="store_true", help="train the bfloat16 model for as many steps, too")
    add("--fsdp", action="store_true", help="fully_shard and AdamW in place of ZeroFP4Optimizer")
    add("--format", choices=["compressed-tensors", "modelopt"], default="compressed-tensors")
    add("--json", type=Path, help="file for the table, the options and the time")
    add("--batch-size", type=int, default=16, help="sequences on each rank (default: 16)")
    add("--steps", type=int, default=200, help="of fine-tuning (default: 200)")
    add("--lr", type=float, help="of fine-tuning (default: 6e-4 for tiny, else 3e-5)")
    add("--pretrain-steps", type=int, help="in bfloat16 (default: 200 for tiny, else 600)")
    add("--pretrain-lr", type=float, help="of these steps (default: 6e-3 for tiny, else 3e-4)")
    add("--sequence-length", type=int, help="in tokens (default: 64 for tiny, else 1024)")
    options = parser.parse_args()
    defaults = PRESETS[options.preset if options.model is None else "500m"][1]
    vars(options).update({k: v for k, v in defaults.items() if getattr(options, k) is None})
    for name in ("batch_size", "steps", *defaults):
        if not getattr(options, name) > 0:
            parser.error(f"argument --{name.replace('_', '-')}: must be above 0")
    for path in [*(options.text or ()), *([options.model / "config.json"] if options.model else ())]:
        if not path.is_file():
            parser.error(f"there is no file {path}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"argument --json: there is no folder {options.json.absolute().parent}")
    if options.fsdp and options.four_over_six and options.block != "1x16":
        parser.error("argument --four-over-six: with --fsdp it needs --block 1x16")
    return parser, options


def say(*what):
    if world.rank == 0:
        print(f"{time.perf_counter() - started:6.1f} s ", *what, flush=True)


def make_model():
    """In bfloat16, the same on every rank, and whether it has trained weights."""
    torch.manual_seed(0)
    if options.model is not None and any(options.model.glob("*.safetensors")):
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="bfloat16")
        return model.to(world.device), True
    with world.device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), False


def read_text():
    """Tokens to train on and to validate with, of the model's tokenizer. Without one they are bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(options.text or [*library.glob("*.py"), *library.glob("[a-ru-z]*/*.py")])
    random.Random(0).shuffle(files)
    text = b"\n".join(file.read_bytes() for file in files)
    if options.model is not None and (options.model / "tokenizer_config.json").is_file():
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        tokens = torch.tensor(tokenizer(text.decode(errors="replace")).input_ids)
    else:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tokens.split([len(tokens) - len(tokens) // 20, len(tokens) // 20])


def windows(data, starts):
    return data[starts[:, None] + torch.arange(options.sequence_length + 1)].long().to(world.device)


def loss_of(model, tokens, teacher=None):
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float().flatten(0, 1)
    if teacher is None:
        return F.cross_entropy(logits, tokens[:, 1:].flatten())
    with torch.no_grad():
        wanted = teacher(input_ids=tokens[:, :-1], use_cache=False).logits.float().flatten(0, 1)
    both = logits.log_softmax(-1), wanted.log_softmax(-1)
    return F.kl_div(*both, reduction="batchmean", log_target=True)


@torch.no_grad()
def validation_loss(model):
    """Of the same 64 sequences on every rank: with fully_shard all ranks take part in a forward pass."""
    starts = torch.linspace(0, len(held_out) - options.sequence_length - 1, 64).long()
    return sum(loss_of(model, windows(held_out, part)).item() for part in starts.split(8)) / 8


def train(what, model, optimizer, steps, teacher=None):
    """Random sequences, each rank its own. The learning rate rises for 20 steps, then falls to zero."""
    generator = torch.Generator().manual_seed(1 + world.rank)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 20, 1 - s / steps))
    ends = len(text) - options.sequence_length
    clip = getattr(optimizer, "clip_grad_norm_", None)
    for step in range(1, steps + 1):
        starts = torch.randint(ends, (options.batch_size,), generator=generator)
        loss = loss_of(model, windows(text, starts), teacher)
        loss.backward()
        clip(1.0) if clip else torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(1, steps // 10) == 0:
            say(f"{what}: step {step} of {steps}, loss {loss.item():.4f}")


def zero_optimizer(model, lr, amax_groups=None):
    adamw, named = zerofp4.optim.FusedAdamW, model.named_parameters()
    return zerofp4.optim.ZeroFP4Optimizer(named, adamw, lr=lr, amax_groups=amax_groups)


def quantize(model):
    """Make its weights NVFP4, where those that engines fuse share an amax. Returns their optimizer."""
    choice = {"block": (1, 16) if options.block == "1x16" else (16, 16)}
    choice["four_over_six"] = zerofp4.FourOverSix() if options.four_over_six else None
    choice["amax_groups"] = zerofp4.serving.amax_groups(model)
    if not options.fsdp:
        say(zerofp4.convert_model(model, **choice))
        return zero_optimizer(model, options.lr, zerofp4.serving.amax_groups(model))
    model.float()  # FP32 masters
    say(fsdp2.prepare(model, **choice))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    for module in [*layers, model]:
        fully_shard(module, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)
    fsdp2.attach(model, optimizer)
    return optimizer


started = time.perf_counter()
parser, options = read_options()
text, held_out = read_text()
if options.model is not None:
    config = transformers.AutoConfig.from_pretrained(options.model)
else:
    config = transformers.LlamaConfig(**PRESETS[options.preset][0], vocab_size=256, num_key_value_heads=4)
longest = min(len(held_out) - 1, getattr(config, "max_position_embeddings", len(held_out)))
if options.sequence_length > longest:
    parser.error(f"argument --sequence-length: text and model have at most {longest} tokens")
if int(max(text.max(), held_out.max())) >= config.vocab_size:
    parser.error(f"argument --model: the text has tokens beyond its vocabulary of {config.vocab_size}")
world = zerofp4.launch.init_process_group()
model, is_trained = make_model()
numel = sum(p.numel() for p in model.parameters())
say(f"{numel:,} parameters, {len(text):,} tokens to train on, {world.world_size} ranks")

losses = {}
if not is_trained:
    losses["start"] = validation_loss(model)
    train("bfloat16", model, zero_optimizer(model, options.pretrain_lr), options.pretrain_steps)
losses["bfloat16"] = validation_loss(model)
if not is_trained and losses["bfloat16"] > losses["start"] / 2:  # rounding would show nothing
    raise SystemExit(f"validation losses {losses}: not half of the first; raise --pretrain-steps")
original = copy.deepcopy(model) if options.teacher or options.control else None

optimizer = quantize(model)
zerofp4.serving.weights(model, options.format)  # raises before the training what an export would
losses["rounded once"] = validation_loss(model)
train("NVFP4", model, optimizer, options.steps, original if options.teacher else None)
losses["fine-tuned"] = validation_loss(model)
say("export")
zero = None if options.fsdp else optimizer
report = zerofp4.serving.save_pretrained(
    model, options.folder, zero, format=options.format, dtype=torch.bfloat16
)
if options.control:
    train("control", original, zero_optimizer(original, options.lr), options.steps)
    losses["bfloat16, as long"] = validation_loss(original)

say("validation losses", *(f"\n  {name:18} {loss:.4f}" for name, loss in losses.items()))
if world.rank == 0 and options.json is not None:
    device = torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"
    result = {"device": device, "ranks": world.world_size, "parameters": numel, "losses": losses}
    told = {name: value for name, value in vars(options).items() if name not in ("folder", "json")}
    result |= {"options": told, "seconds": time.perf_counter() - started}
    options.json.write_text(json.dumps(result, indent=1, default=str) + "\n")
say(f"{options.folder} has the codes that were trained, of {report.matrices} matrices, for engines to load.")
zerofp4.launch.destroy_process_group()
