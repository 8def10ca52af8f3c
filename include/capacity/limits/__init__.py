"""What the evidence proves: bounds, states, the search for a limit, knees, limits and their claims.

``bounds`` (statistics of one rate) ── ``evidence`` (one step, judged) ── ``knees`` and ``planner``
(what to measure next) ── ``compute`` (limits.json) ── ``table`` (for people). ``identity`` names what
may be compared with what.
"""
