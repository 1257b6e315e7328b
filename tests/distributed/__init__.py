"""Tests that need several ranks. A test here is an ordinary function that runs on every rank:

    from distributed.run import on_ranks

    @on_ranks(1, 2, 3, 4)
    def test_sum(world):
        x = torch.ones(1, device=world.device)
        torch.distributed.all_reduce(x)
        assert x.item() == world.world_size

`world` is the record of zerofp4.launch.init_process_group(). All such tests of one world size, from all
modules, share one launch of the ranks. Tests that start something else use run_ranks or run_script.
"""
