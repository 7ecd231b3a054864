"""Chaos: a cluster on this machine under random faults, and the proof that it kept its promises.

    plan ─► cluster (members, proxy) ─► trainers' records ┐
                                        the journal ───────┴► ledger ─► report, plot

plan.py says which fault hits whom when; it follows from the seed. cluster.py runs the processes
and does it to them. Trainers write down every element that they get (records.py). ledger.py,
which is pure, holds that against the journal.
"""
