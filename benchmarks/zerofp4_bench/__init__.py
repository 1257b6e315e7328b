"""What scripts/bench.py measures and how it shows it. Result files lie beside this folder, in results/.

workloads.py names what is measured, rules.py counts its bytes and has the targets, session.py times and
collects rows, output.py shows result files.

An operation on one device is a function(session, options) in weights.py, tensors.py, layers.py or host.py,
and a line of OPERATIONS in operations.py; peers.py has what others do in its place. What several ranks do
together is in step.py, fsdp2.py, megatron.py and checkpoints.py, and a step of one rank by its state in
states.py; ranks.py times it, and traffic.py has the bytes of a step. scripts/ is on the path too: phases.py
there reads the phases of a step from a trace, fidelity.py runs train.py, and large.py trains models of
transformers.
"""
