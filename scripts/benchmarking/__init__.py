"""What scripts/bench.py measures and how it shows it.

workloads.py names what is measured, rules.py counts its bytes, clock.py times, session.py collects rows,
targets.py has what they should reach; tables.py and chart.py show result files, selection.py chooses what of
them. budgets.py has what limits a row by the instructions that instructions.py has ncu count, of the calls in
launches.py. An operation is a function in a file of its own below operations/, named in its __init__.py.
"""
