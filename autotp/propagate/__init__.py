"""Layouts: every value of a recorded graph gets one, or the plan is refused.

Trace ──► engine (a file of rules for each family of ops) ──► Propagation
Propagation + a rank's own trace ──► dual ──► findings ──► diagnose ──► Diagnostics
"""
