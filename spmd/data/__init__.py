"""Batches: from arrays, files or iterables, or from a data set on the devices; checked, placed on
the mesh, prefetched.

To add a file format, write a `FileFormat` (`records.py`) and a function that returns `Records` of
it, and list the function here. `image_files.py` is the shortest example.
"""

from spmd.data.array_records import array_record
from spmd.data.bucketing import buckets
from spmd.data.csv_files import csv
from spmd.data.device_dataset import resident
from spmd.data.features import fixed, padded
from spmd.data.idx_files import mnist
from spmd.data.image_files import images
from spmd.data.parquet_files import parquet
from spmd.data.prompts import Prompts
from spmd.data.records import Records
from spmd.data.tar_shards import webdataset
from spmd.data.text_records import text
from spmd.data.tfrecords import tfrecord

__all__ = [
    "Prompts",
    "Records",
    "array_record",
    "buckets",
    "csv",
    "fixed",
    "images",
    "mnist",
    "padded",
    "parquet",
    "resident",
    "text",
    "tfrecord",
    "webdataset",
]
