"""Other tools' result files as a sweep directory: told by content, converted to our step table.

``import_files`` reads files and folders, asks each registered format whether a document is its own, and
writes ``steps.csv`` (STEP_COLUMNS and IMPORTED_COLUMNS, seconds and tokens a second everywhere) and a
``sweep.json`` with source ``imported``. What a file does not say stays blank: fewer conclusions, never
wrong ones. A file that no format knows is refused by name, with what was expected.
"""

from include.capacity.importers.reader import import_files

__all__ = ["import_files"]
