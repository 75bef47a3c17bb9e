"""What a bench run records: the types of its lines, how they are read and written, and what bench and report
share (statistics, words, units).

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
