"""Limits as files that gateways load: one module a format, behind a line in ``FORMATS``.

::

    policy/index.json                    what there is, and why something is not
    policy/alone/<class>/<file>          for a server that serves this class only
    policy/shared/<file>                 for a server that serves both classes, from a pair proven together
    policy/.../NO-LIMIT.txt              why a file that one would look for is not there

Only ``proven`` and ``lower_bound`` limits that we measured are exported. Limits measured alone do not add up,
so two classes of one server are exported from a pair proven together or not at all. A file that cannot be
written is missing, not empty: a gateway that loads it fails, and does not lose its limit in silence.

**Division.** A gateway counts for itself. Where ``k`` of them send to one server, each gets
``floor(limit / k)``: what all let through together is never more than what was proven. ``k`` is the number of
gateways (``gateway.replicas``), times their processes where a format counts per process. A limit smaller than
``k`` has no such file.

A format is a module with ``FILE`` (its file's name) and ``render(policy)``, which gives the file's text or
raises :class:`~include.capacity.policy.base.NotPossible`.
"""

from include.capacity.policy.export import FORMATS, INDEX, policy_files

__all__ = ["FORMATS", "INDEX", "policy_files"]
