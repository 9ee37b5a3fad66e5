"""Layouts: every value of a recorded graph gets one, or the plan is refused.

Trace ──► engine (rules by op family: pointwise, shapes, contract, reductions) ──► Propagation
Propagation + a rank's own trace ──► dual ──► findings ──► diagnose ──► Diagnostics
"""
