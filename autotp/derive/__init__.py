"""Derive a plan from a model's graph: `"auto"`.

    traces ──► seeds ──► search (trial, repairs) ──► instances ──► naming ──► Plan ──► decide, as any plan

Names carry no meaning. Nothing here decides that something is right: the plan that comes out is proven like
one that a user wrote.
"""
