"""Chaos: runs a cluster on this machine under random faults, and checks its promises.

    plan ─► cluster (members, proxy) ─► trainers' records ┐
                                        the journal ───────┴► audit ─► report

plan.py derives the plan of faults from the seed. cluster.py runs the processes, and faults.py
injects the faults. Trainers record every element that they get (records.py).
The audits, which are pure, check those records against the journal, and with them what `forebay
audit` says of it. With hosts.py each process runs on a host of its own, and partitions
(partitions.py) are faults, too.
"""
