"""What ranks do that update in backward passes: by collectives, or with memory that they share."""

from types import SimpleNamespace

from cases.updates import loss_of, make_pair

from distributed.engine.overlap_cases import assert_same
from distributed.engine.peer_checks import gpu_of
from zerofp4.testing import verify_model


def on_gpu(world, **options):
    """Of ranks that share memory, with early updates and without."""
    alike = SimpleNamespace(rank=world.rank, world_size=world.world_size, device=gpu_of(world))
    models = make_pair(alike, transport="peer", **options)
    assert models[1][1].describe()["transport"] == "peer"
    whole_steps(alike, models)


def whole_steps(world, models):
    """Of real gradients: of a parameter that only some ranks use, of recomputed segments, of ranks without a
    backward pass; and checkpoints that the one takes over from the other.
    """
    for step in range(5):
        rare = (step + world.rank) % 3 > 0
        reentrant = (None, False, True)[step % 3]
        for net, optimizer in models:
            if step != 3 or world.rank:
                loss_of(net, world, step, rare=rare, reentrant=reentrant, shared=not reentrant).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, f"step {step}")
        if step == 2:
            states = [optimizer.state_dict() for _, optimizer in models]
            for (_, optimizer), state in zip(models, reversed(states), strict=True):
                optimizer.load_state_dict(state)
    for net, optimizer in models:
        verify_model(net, optimizer, process_group=optimizer.process_group())
