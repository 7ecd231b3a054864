"""Materialized datasets: their elements in files of a directory, in place of the pipeline.

`materialize` runs a registered dataset bundle by bundle on any of Beam's runners, and
`register_dataset(service, DIRECTORY)` registers what came of it: a cache that every trainer shares.

**Bundles.** A bundle is a range of the dataset's splits, and becomes one file, a *shard*. The
splits are divided evenly into as many bundles as shards are wanted. A bundle is run by the workers'
own code (`Pipeline.bundle`), on an iterator of its own; its random numbers follow from the seed and
its number. So a bundle that is run again gives the same elements, and its file is the same bytes:
formats write element by element, and do not depend on how these came together in blocks.

**Refused** is, as for saves, what would not be the dataset if it were run in bundles: what has no
end or grows while it is read; what counts or carries on from element to element (take, skip, scan,
window, `drop_remainder=True` …); and what may give other elements when it is run again. Batches are
an exception, of which each bundle's last one may be smaller, as under ShardingPolicy.DYNAMIC.

**The directory.** It has, in the order in which they are written:

    plan.json    which dataset this is, into how many bundles it is divided, seed and format
    dataset-4c1f9b0a86e2d753.pb
                 what is registered, graph or function included: GetDatasetResponse, serialized;
                 its name has the dataset's fingerprint
    shard-00003-of-00128-5be0cd19-1000-52123-9ae0daaf.tfrecord
                 a bundle: its number, of how many, a digest of the plan, elements, bytes, and
                 CRC-32C of the file
    index.json   the shards, their splits, elements and checksums; written last

All of them are written under another name, and renamed. The first plan stays, and who comes with
another one is refused; as shards and dataset have in their names what they are of, those of two
plans cannot mix, even in a store in which two may publish one at once. A shard's name says all that
is to be known of it, so what lies in a directory is its own manifest: a run does what is missing,
or has another size than its name says, and nothing else. What two attempts at one bundle write has
one name and the same bytes, so it does not matter which of them is first.

**The Beam pipeline** is a Create of the bundles' numbers and a ParDo, which reads the directory and
needs no dispatcher. There is no shuffle, no side input and no second output, so each runner can run
it; Dask's, for one, computes the last collection only, and drops what finish_bundle yields.

**Elements.** In TFRecord and ArrayRecord files an element is a tf.train.Example, with a feature
for each component: a TensorProto, as tf.io.serialize_tensor makes it. It holds every dtype and
shape, and TensorFlow's own operations parse it, so that the dataset that is registered is a plain
graph that TensorFlow's own workers can run as well. In Parquet files a component is a column.
"""
