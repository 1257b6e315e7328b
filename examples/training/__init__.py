"""Train a GPT on Python's standard library, byte by byte, with NVFP4, bfloat16 or float32 weights.

FP32 masters and the optimizer's state are sharded over the ranks (ZeRO-1), whatever the weights are. At the
end every weight of the live model is checked on every rank: the same bytes everywhere, and the bytes that
quantizing the whole FP32 master gives. Alone, under torchrun or under mpirun, from the repository:

    python -m examples.training --steps 200
    python -m examples.training --steps 5000 --checkpoint-every 500 --resume auto
    torchrun --standalone --nproc-per-node 2 -m examples.training --weights both --out runs/both
    mpirun -n 2 python -m examples.training
    python -m examples.training --preset 124m --micro-batches 4
    python -m examples.training --optimizer compact_adamw --overlap update

What is not NVFP4 is bfloat16. On a CPU without instructions for that, it is float32, also instead of the
bfloat16 weights of `--weights both`.
"""
