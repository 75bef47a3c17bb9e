"""The records of a bench run: the types of their lines, reading and writing, and the statistics, words and
units that bench and report share.

Bench and report import this package, and neither imports the other.
"""

from .reading import FILES, Records, files, name_of, read, read_file
from .schema import (
    NOT_CHECKED,
    SCHEMA_VERSION,
    Case,
    Ceiling,
    End,
    Failure,
    Largest,
    Link,
    Machine,
    Matmul,
    Moe,
    Norm,
    Record,
    Result,
    Run,
    Scaling,
    Skip,
    Verification,
    Workload,
    WorkloadStep,
    json_schema,
)
from .writing import FILE_NAME, RecordsWriter

__all__ = [
    "FILES",
    "FILE_NAME",
    "NOT_CHECKED",
    "SCHEMA_VERSION",
    "Case",
    "Ceiling",
    "End",
    "Failure",
    "Largest",
    "Link",
    "Machine",
    "Matmul",
    "Moe",
    "Norm",
    "Record",
    "Records",
    "RecordsWriter",
    "Result",
    "Run",
    "Scaling",
    "Skip",
    "Verification",
    "Workload",
    "WorkloadStep",
    "files",
    "json_schema",
    "name_of",
    "read",
    "read_file",
]
