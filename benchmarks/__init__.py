"""What is measured, and the tables and pictures made of it: `python -m benchmarks --help`.

workloads.py names what is measured, rules.py counts its bytes and has the targets, session.py times and
collects rows, ranks.py times several ranks, output.py and pages.py make tables of result files, pictures.py
draws them. Result files lie in results/.

An operation on one device is a function(session, options) in weights.py, tensors.py, layers.py or host.py,
and a line of OPERATIONS in operations.py; peers.py has what others do instead. The other files are benchmarks
of ranks, functions of (session, options, world) that __main__.py lists; traffic.py has the bytes of a step.
"""
