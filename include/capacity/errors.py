"""Every error this package raises on purpose.

::

    CapacityError
    ├── ConfigError          the fleet file, a parameter or the command line is wrong      exit 2
    ├── DataError            a file or table cannot be read as what it should be           exit 2
    ├── ServerError          a model server could not be started, reached or kept alive    exit 3
    │   └── ServerDied       its process ended while it was needed
    ├── MeasurementError     a step could not be measured as specified                     exit 3
    │   ├── RequestRefused   the server calls our requests wrong (400, 401, 404, ...)
    │   └── LoadStopped      the server must not be loaded (any more): kill switch, ceiling, others on it
    ├── NoLimit              the data were read and judged, and carry no limit             exit 3
    └── PublishError         the object store refused or lost something                    exit 3
        ├── WriteConflict    somebody else changed the object since it was read
        └── StoreAway        it cannot be reached, or fails by itself: worth trying again

Messages name the file or object, the key, the value found and what was expected.
"""


class CapacityError(Exception):
    """Base of all errors raised on purpose; ``exit_status`` is the command line's."""

    exit_status = 3


class ConfigError(CapacityError):
    """The fleet file, a parameter or the command line is wrong."""

    exit_status = 2


class DataError(CapacityError):
    """A file or table cannot be read as what it should be."""

    exit_status = 2


class ServerError(CapacityError):
    """A model server could not be started, reached or kept alive."""


class ServerDied(ServerError):
    """The server's process ended while it was needed."""


class MeasurementError(CapacityError):
    """A step could not be measured as specified."""


class RequestRefused(MeasurementError):
    """The server calls our requests wrong (400, 401, 404, ...): a matter of configuration."""


class LoadStopped(MeasurementError):
    """The server must not be loaded (any more): kill switch, ceiling, others are using it."""


class NoLimit(CapacityError):
    """The data were read and judged, and carry no limit."""


class PublishError(CapacityError):
    """The object store refused or lost something."""


class WriteConflict(PublishError):
    """Somebody else changed the object since it was read; nothing was written."""


class StoreAway(PublishError):
    """The object store cannot be reached, or fails by itself: worth trying again."""
