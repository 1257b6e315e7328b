"""What scripts/bench.py measures and how it shows it.

workloads.py names what is measured, rules.py counts its bytes, clock.py times, session.py collects rows,
targets.py has what they should reach and budgets.py what limits them; tables.py and chart.py show result
files, selection.py chooses what of them. An operation is a function in a file of its own below operations/,
named in operations/__init__.py.
"""
