"""The gate: does a candidate emit exactly what the target would, and was it really measured?

Calibration, token forcing, engagement proof, static diff checks, planted cheats and the self-test. Threat model:
docs/gate.md. Talks to engines over HTTP only; a candidate cannot import it.
"""
