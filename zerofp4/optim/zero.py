"""ZeRO-1 over NVFP4 weights: masters and optimizer state are sharded, the weights are whole on every rank."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.distributed import OwnError
from zerofp4.optim.building import BuiltOptimizer, Choices
from zerofp4.optim.groups import with_references


class ZeroFP4Optimizer(BuiltOptimizer):
    """Any elementwise torch optimizer, or Muon, over sharded FP32 masters of NVFP4, bf16, fp16 and fp32
    parameters.

    params: parameters or groups of them, as for any torch optimizer, the same on every rank that they are
    sharded over. Group options may be edited at any time, by hand or by an LR scheduler.
    optimizer_class, defaults: the optimizer that updates the masters. It sees 1D pieces of the parameters, so
    its update of an element must not depend on other elements: Adafactor, LBFGS and SparseAdam raise
    ValueError. FusedAdamW is the fastest: it leaves the amaxes of the masters behind that their cast needs. A
    group may name another class, `{"params": ..., "optimizer_class": torch.optim.AdamW, "lr": 3e-4}`: then
    its options are its own, else that class's; it raises ValueError for one that defaults give and its class
    has, but not the group. inner is the optimizer of the masters; where there are several classes, inners.all
    are theirs, in the order in which they come first in the groups.
    whole_matrices: True gives optimizer_class whole matrices: its groups have parameters [N, K], or stacks
    [E, N, K] of E matrices, and each lies with one rank, as a 2D parameter of the optimizer. A stack stays
    together. None is what the class needs: True for torch.optim.Muon, False for others. Adafactor takes True.
    process_group: all ranks that step together; None is the default group, which
    zerofp4.launch.init_process_group() makes, or a world of one where no launcher started several ranks (else
    RuntimeError). Parameters are sharded over all of them, unless their parameter group names a part,
    {"params": experts, "process_group": expert_data_parallel}: then first ranks, means, casts, gathers and
    equal bytes are those of that part, while votes, errors, skipped steps and norms are of all. A group that
    is {"replicated_over": tensor_parallel} has the same parameters on each of these ranks, and a norm counts
    those of the first; all others count on each rank. Such a group lies in process_group as well. A group's
    process_group may be a DeviceMesh of two dimensions: gradients are averaged over the second, which masters
    are sharded over, and these means, in FP32, over the replicas in the first.
    amax_groups: lists of NVFP4 weights of params that share one amax.
    transport: how gradients and weights travel. "collective": by NCCL or gloo. "peer": the ranks share memory
    (torch's symmetric memory), so FusedAdamW reads the gradients of all ranks where they are, and copy
    engines write codes into the weights of every rank, and with overlap gradients to their owners; for GPUs
    of one host that can access each other's memory, each of another index, else ValueError. It turns
    multicast off (TORCH_SYMM_MEM_DISABLE_MULTICAST), unless that is set. "auto": peer where that can be, else
    the collective one. All give the same bytes, but for hosts.
    hosts: adds up gradients on each host first, where its ranks read each other's memory, and only these
    means travel between hosts, in FP32: 4 bytes an element of a slice from each other host, however many
    ranks a host has. A DeviceMesh of two dimensions, hosts and the ranks of each, of all ranks of
    process_group in their order. Of 2 x 2 ranks the mean is ((g0 + g1) / 2 + (g2 + g3) / 2) / 2, of which the
    last bits may differ from those of every other way. It takes transport="collective" or "auto", one process
    group for all parameters, and neither overlap with backward passes nor "sharded"; else, and where the
    ranks of a host cannot share memory, ValueError, or RuntimeError where torch finds that in trying. What
    is sent and received has memory of two buckets each, in FP32: of L ranks a host 8 / L buckets of bfloat16.
    With one host, or one rank on each, it changes nothing.
    gradient_dtype: what p.grad is, and micro-batches are added up in: torch.float32, or None for the
    parameter's dtype unless its grad_dtype says another by now. 512 micro-batches of 1.0 are 256 in bfloat16.
    gradient_wire: what each rank's gradients are rounded to before they are added up; None is the dtype that
    they have, and wider ones raise TypeError.
    overlap: "backward" has the gradients of a bucket travel as soon as a backward pass has made them all;
    None waits for step(). Buckets begin in one order, which describe() has: NVFP4 weights from the last
    parameter to the first, as backward passes make them, then the others; so pass parameters in the model's
    order. What is missing in a step travels in it, unused parameters as zeros. Run all passes before a step
    but the last in no_sync(), and let no other communication of the group come between a pass and the step:
    give the optimizer a process group of its own. "forward" lets the gather of NVFP4 weights go on while the
    next forward pass runs: step() has begun it, and whatever reads codes waits for those of its bucket, a
    product, dequantize(), state_dict() or a copy; on a GPU the stream waits, on the CPU the host. These
    gathers begin behind all else that travels in a step, in the order of the parameters. All other
    parameters, and scales and amaxes, are complete when step() returns. The next step, load_state_dict(),
    refresh() and check() wait for all. A tensor of codes that was taken out of a weight before a step, and a
    CUDA graph that was captured before, wait for nothing: call check() first. "both" is both. In a world of
    one nothing travels.
    accumulate: "local" adds up micro-batches in p.grad. With "sharded" each backward pass outside of
    no_sync() is reduced, its means added to this rank's slice in FP32, and p.grad is None afterwards; a step
    uses them up. Every rank runs as many such passes. What is in p.grad in step() is added there. It takes
    transport="collective", which "auto" then is, and it and overlap="backward" one process group for all
    parameters; else ValueError.
    bucket_mb: megabytes of gradients that travel at once, all ranks' parts together; by default a 14th of
    all, at least 256 and at most 1024. With overlap of backward passes those that they make last become
    smaller, down to an eighth, since nothing is left to hide them. The memory for what is received is twice
    as large (on the CPU with overlap or "sharded", as large as all gradients). Both keep an FP32 slice of
    gradients, 4 bytes for each element of this rank's share; "sharded" needs no memory for the gradients of a
    whole model. With overlap and transport="peer" there is none, unless gradients are clipped or FusedAdamW
    does not update, but of every bucket what the others have of this rank's share (its own too where
    gradients are rounded): in a world of W, (W - 1) / W of a model's gradients as they travel. Weights are
    gathered by the same buckets.
    masters_from: an earlier optimizer in the same group, which has been stepped for the last time: parameters
    that it trained, by identity, begin with its masters; its moments are not taken. Without it the masters of
    NVFP4 weights that an earlier optimizer trained begin with 4-bit values, which warns. Whatever an earlier
    optimizer trained and this one does, it has given up: its step() and refresh() raise RuntimeError.
    on_nonfinite: what becomes of a step for which any rank's own gradients hold a NaN or Inf. "skip_step":
    nothing changes on any rank; found_inf is 1, skipped_steps counts it, first_nonfinite() names the
    parameter. "raise": every rank raises FloatingPointError, and nothing changes.

    step() averages the gradients over the group (their values travel, and are added in FP32 in rank order),
    updates this rank's masters, casts them and all-gathers the weights in place: 4-bit codes for NVFP4
    weights. With FusedAdamW all of that is done bucket by bucket, so that one is updated while others travel;
    describe() says what a step does. A parameter that has a gradient on no rank is skipped as torch.optim
    skips it; where only some ranks have one, the others count as zeros. p.grad is never written; but in
    a world of several ranks a backward pass leaves it as a view of memory from which it travels, unless it is
    rounded on its way, and the next one writes there again: clone what is to be kept.

    The masters are the truth. They begin as rank 0's values (what get_high_precision_init_val() has, else the
    parameter's), and from then on the weights are the masters rounded or quantized, on every rank: load a
    model first, since writing into a weight makes the next step() raise. A parameter that is frozen when the
    optimizer is built gets rank 0's bytes once, and no master; unfreezing it makes the next step() raise.

    In param_groups a process group is a reference, to be called, which does not keep it alive.

    Building, step() and clip_grad_norm_() are collective. What one rank finds wrong before an update raises
    on every rank, before anything has changed. What interrupts an update makes the optimizer `broken`, until
    load_state_dict(). The page on failures says which errors these are, what is left to the group's timeout,
    and where the host waits for the device: for one small vector in each of the two calls of several ranks,
    and for nothing in a world of one with FusedAdamW.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        process_group: dist.ProcessGroup | None = None,
        amax_groups: Sequence[Sequence[torch.Tensor]] | None = None,
        transport: str = "auto",
        hosts: dist.device_mesh.DeviceMesh | None = None,
        gradient_dtype: torch.dtype | None = None,
        gradient_wire: torch.dtype | None = None,
        overlap: str | None = None,
        accumulate: str = "local",
        bucket_mb: float | None = None,
        whole_matrices: bool | None = None,
        masters_from: "ZeroFP4Optimizer | None" = None,
        on_nonfinite: str = "skip_step",
        **defaults: Any,
    ):
        choices = Choices(
            amax_groups,
            transport,
            hosts,
            gradient_dtype,
            gradient_wire,
            overlap,
            accumulate,
            bucket_mb,
            whole_matrices,
            masters_from,
            on_nonfinite,
        )
        self._build(params, optimizer_class, process_group, choices, defaults)

    def add_param_group(self, param_group: dict) -> None:
        """Only while the optimizer is being built; later the layout is fixed and this raises RuntimeError."""
        if self._built:
            raise RuntimeError(
                "add_param_group: masters and weights lie in flat buffers that were laid out when the "
                "optimizer was built; build a new optimizer for other parameters, with masters_from=this "
                "one, or have it load_state_dict() this one's state_dict(), moments and all"
            )
        super().add_param_group(with_references(param_group))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Of copy.copy, copy.deepcopy and pickle: raises TypeError."""
        raise TypeError(
            "a ZeroFP4Optimizer can be neither copied nor pickled, since its masters belong to these "
            "parameters and ranks: save its state_dict(); or copy the model, build a new optimizer and have "
            "it load_state_dict() this one's state_dict()"
        )

    def refresh(self) -> None:
        """Go on after parameters, masters or found_inf have moved (share_memory_(), .data assigned): the
        parameters get the memory of the optimizer's buffers again, with the values that it gave them last,
        and all addresses are taken anew. What was assigned meanwhile is dropped, and what was shared with
        other processes is not any more. Not collective.

        Raises, before anything has changed, ValueError for a parameter that has another shape, dtype, device
        or kind than it was built with (build a new optimizer), and RuntimeError where another
        ZeroFP4Optimizer was built over these parameters since.
        """
        with torch.no_grad():
            self._shards.refresh()

    @torch.no_grad()
    def check(self) -> None:
        """Wait for what the last step() has queued, weights that are on their way among it, and raise what
        has gone wrong there: RuntimeError where a rank kept the others from writing, where one did not come
        to a barrier of the GPUs, where a parameter, a master or a buffer has moved, or where the optimizer is
        `broken`. Not collective, and the next step() raises what this has not.

        With overlap="forward", call it before a CUDA graph is captured that reads weights, and before each of
        its replays behind a step.
        """
        self._raise_if_broken()
        self._shards.check()
        if self._peers is not None:
            OwnError(self._peers.take_error()).raise_if_any()

    def describe(self) -> dict[str, Any]:
        """How steps are taken; plain values, not collective.

        transport: "peer", "collective", or "none" in a world of one, and why_collective. hosts: their number
        and that of the ranks of each, None where sums do not tell them apart. in_buckets: whether
        each bucket is updated as soon as its gradients are here, as the ranks agreed in their last step(),
        and obstacle why not; before the first as this rank sees it. overlap, accumulate, as they were given.
        world_size, bucket_mb. buckets: in the order in which they travel, each with its kind, parameters,
        elements and bytes, and gathered_in: "step", or "forward" where readers wait for it; None in a world
        of one. bytes_sent: by this rank in a step, as gradients, amaxes and weights; with "peer" and no
        overlap of backward passes other ranks read the gradients. shared_bytes: of memory that other ranks
        can access, which torch.cuda does not count. advice: what would make it faster, or None.
        """
        obstacle = self._bucketed.find_obstacle()
        if obstacle is None and self._agreed_in_sequence:
            obstacle = "another rank has one"
        several = self._votes.world_size > 1
        shared = "collective" if self._peers is None or self._hosts is not None else "peer"
        return {
            "transport": shared if several else "none",
            "why_collective": self._why_collective,
            "hosts": None if self._hosts is None else self._hosts.shape,
            "in_buckets": obstacle is None,
            "obstacle": obstacle,
            "overlap": self._overlap,
            "accumulate": self._accumulate,
            "world_size": self._votes.world_size,
            "bucket_mb": self._reducer.bucket_mb,
            "shared_bytes": 0 if self._peers is None else self._peers.nbytes,
            **self._shards.describe(self._reducer, self.inners.all),
        }

    @property
    def found_inf(self) -> torch.Tensor:
        """float32 [1]: 1 when the last step was skipped, or left NVFP4 weights alone because of masters with
        NaN or Inf.
        """
        return self._shards.found_inf

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped because of gradients with a NaN or Inf. Waits for the device."""
        return self._nonfinite.skipped

    def first_nonfinite(self) -> str | None:
        """What messages call the first parameter whose gradient held a NaN or Inf, on any rank, when step()
        or clip_grad_norm_ last looked; None if there was none. The same on every rank; in a world of one it
        waits for the device.
        """
        return self._nonfinite.first_name
