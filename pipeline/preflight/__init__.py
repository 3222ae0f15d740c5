"""The checks of a job's nodes before the ranks of training start: what each node measures, and which nodes are bad.

Only speed.py and measure.py load torch: the supervisor of a job reads the results without it.
"""
