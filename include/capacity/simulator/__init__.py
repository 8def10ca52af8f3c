"""A simulated vLLM server: the same HTTP face, a scheduler of known behaviour behind it.

``profile``  what is simulated: slots, budgets, iteration times, queue bound, noise (a YAML file)
``engine``   the scheduler itself, pure and in virtual time: same profile and arrivals, same answers
``server``   vLLM's HTTP API, SSE and metrics over that engine, on a clock that may run faster than life
``truth``    the engine driven to its true limits by brute force, kept beside the profile

Everything it serves is marked: ``/version`` says ``"simulated": true``.
"""
