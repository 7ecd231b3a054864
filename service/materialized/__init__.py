"""Materialized datasets: files of elements, which replace the pipeline that computed them
(docs/materialize.md has the directory, and what is refused).

The dataset's splits are divided evenly into as many bundles as there are shards. The workers' own
code (`Pipeline.bundle`) runs each on its own iterator. Its random numbers follow from the seed and
its number, so running it again gives the same bytes in its file.

Files are written under another name, then renamed. Shards and dataset have the plan's digest or
fingerprint in their names, so two plans never mix, even in a store where both can be published at
once. A shard's name describes it completely, so the directory is its own manifest. Two attempts at
one bundle write the same name and bytes, so their order does not matter.

The Beam pipeline has no shuffle, side input or second output, so every runner can run it. Dask's,
for example, computes only the last collection, and drops finish_bundle's outputs.
"""
