"""Materialized datasets: files of elements, which replace the pipeline that computed them.

`materialize` runs a registered dataset bundle by bundle on any of Beam's runners.
`register_dataset(service, DIRECTORY)` registers the result: a cache that all trainers share.

**Bundles.** A bundle is a range of the dataset's splits, and becomes one file, a *shard*. The
splits are divided evenly into as many bundles as there are shards. The workers' own code
(`Pipeline.bundle`) runs each bundle on its own iterator; its random numbers follow from the seed
and its number. So running a bundle again gives the same elements, and the same bytes in its file.

**Refused datasets.** As for saves, some datasets would change if they ran in bundles: those that
are infinite or grow; those with state across elements (take, skip, scan, window,
`drop_remainder=True` …); and those that may give other elements when they run again. Batches are
allowed: each bundle's last one may be smaller, as under ShardingPolicy.DYNAMIC.

**The directory.** It has, in the order in which they are written:

    plan.json    the dataset's id, the number of bundles, and the seed
    dataset-4c1f9b0a86e2d753.pb
                 the registered dataset, with its graph or function: GetDatasetResponse,
                 serialized; its name has the dataset's fingerprint
    shard-00003-of-00128-5be0cd19-1000-52123-9ae0daaf.tfrecord
                 a bundle: its number, the number of bundles, a digest of the plan, elements,
                 bytes, and CRC-32C of the file

All of them are written under another name, then renamed. The first plan stays, and a run with
another plan is refused. Shards and dataset have the plan's digest or fingerprint in their names,
so two plans never mix, even in a store where both can be published at once. A shard's name
describes it completely, so the directory is its own manifest: it is complete with all its shards,
and a run writes only those that are missing or have the wrong size. Two attempts at one bundle
write the same name and bytes, so their order does not matter.

**The Beam pipeline** is a Create of the bundles' numbers and a ParDo, which reads the directory and
needs no dispatcher. It has no shuffle, side input or second output, so every runner can run it.
Dask's runner, for example, computes only the last collection, and drops finish_bundle's outputs.

**Elements.** An element is a TFRecord: a tf.train.Example, with a feature for each component: a
TensorProto, as tf.io.serialize_tensor makes it. It holds every dtype and shape, and TensorFlow's
own operations parse it. So the registered dataset is a plain graph, which TensorFlow's own workers
can run as well.
"""
